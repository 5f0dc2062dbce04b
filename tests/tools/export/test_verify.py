"""The comparison of an exported file with its checkpoint."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from networks import CALIBRATION, CLASSES, metadata, noise
from pictures import picture
from torch import Tensor

from mldec.checkpoint import Loaded
from mldec.data.types import Classes
from mldec.errors import CheckpointError, DataError
from mldec.export import (
    BATCH,
    Comparison,
    Program,
    TorchFile,
    check,
    compare,
    generated,
    stored,
    traced,
)
from mldec.predict.engine import Metadata, scores


class Opened:
    """An exported file that answers as its checkpoint does, but for a mistake."""

    def __init__(
        self,
        loaded: Loaded,
        about: Metadata,
        mistake: Callable[[Tensor], Tensor] = lambda scores: scores,
    ) -> None:
        self.metadata = about
        self.program = Program(loaded, about.thresholds, any_size=about.resizes)
        self.mistake = mistake
        self.batches: list[int] = []

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        self.batches.append(len(inputs[0]))
        scores, decisions = self.program(*inputs)
        return self.mistake(scores), decisions


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return networks.loaded("groups", calibration=CALIBRATION)


def test_a_pt2_file_is_run_from_the_bytes_of_this_process(loaded: Loaded) -> None:
    buffer, program = io.BytesIO(), Program(loaded, [0.5])
    torch.export.save(traced(program, loaded, "x.pt"), buffer)
    opened = TorchFile(buffer.getvalue(), metadata())
    for images in (noise(1), noise(4)):
        with torch.no_grad():
            expected = program(images)
        assert all(map(torch.equal, opened(images), expected))
    with pytest.raises(CheckpointError, match=r"the \.pt2 file fails in torch: "):
        opened(noise(1).float())


def test_equal_answers_are_equal(loaded: Loaded) -> None:
    opened = Opened(loaded, metadata())
    pictures = [(picture(50, 40, seed), None) for seed in range(BATCH + 3)]
    comparison = compare(opened, loaded, pictures, "x")
    assert comparison == Comparison(BATCH + 3, comparison.largest, 1.0, None)
    assert comparison.largest < 1e-6
    assert opened.batches == [1, BATCH, 2]
    assert comparison.text().endswith("equal decisions 100.00 %")
    check(comparison, opened, "x.onnx")


def test_the_resize_inside_is_compared_with_pillows(loaded: Loaded) -> None:
    opened = Opened(loaded, metadata(resizes=True))
    comparison = compare(opened, loaded, generated(32, any_size=True), "x")
    assert comparison.largest < 2e-2
    # Images of one size only make a batch.
    assert opened.batches == [1, 3, 2, 2]
    check(comparison, opened, "x.onnx")


def test_a_wrong_answer_is_found_and_refused(loaded: Loaded) -> None:
    def shifted(scores: Tensor) -> Tensor:
        return scores + 2e-4 * torch.eye(CLASSES)[3]

    for resizes in (False, True):
        opened = Opened(loaded, metadata(resizes=resizes), shifted)
        comparison = compare(opened, loaded, generated(32, any_size=False), "x")
        assert comparison.largest == pytest.approx(2e-4, rel=0.01)
        if resizes:
            check(comparison, opened, "x.onnx")
        else:
            with pytest.raises(CheckpointError, match=r"x\.onnx is not written: .* up to 2\.0e-"):
                check(comparison, opened, "x.onnx")


def test_decisions_are_counted(loaded: Loaded) -> None:
    other = replace(loaded, calibration=None)
    opened = Opened(other, metadata(thresholds=[0.5]))
    comparison = compare(opened, loaded, generated(32, any_size=False), "x")
    images = torch.stack([loaded.transform(image) for image, _ in generated(32, any_size=False)])
    equal = (scores(other, images) >= 0.5) == (scores(loaded, images) >= 0.5)
    assert 0 < comparison.equal < 1
    assert comparison.equal == pytest.approx(equal.float().mean().item())


@pytest.mark.parametrize(
    ("mistake", "part"),
    [
        (lambda scores: scores[:, :-1], r"answers \[1, 6\] probabilities"),
        (lambda scores: scores * torch.nan, "not finite"),
    ],
)
def test_answers_of_another_form_are_refused(loaded: Loaded, mistake: Any, part: str) -> None:
    with pytest.raises(CheckpointError, match=part):
        compare(Opened(loaded, metadata(), mistake), loaded, generated(32, any_size=False), "x")


@pytest.mark.parametrize(
    ("precision", "mean_ap", "part"),
    [
        ("fp16", (80.0, 80.2), "half precision changes the mAP from 80.200 to 80.000"),
        ("fp16", (80.0, 80.05), None),
        ("fp16", None, None),
        ("int8", (70.0, 80.0), None),
    ],
)
def test_half_precision_is_judged_by_its_map(
    loaded: Loaded, precision: str, mean_ap: tuple[float, float] | None, part: str | None
) -> None:
    opened = Opened(loaded, metadata(precision=precision))
    comparison = Comparison(9, 0.3, 0.9, mean_ap)
    if part is None:
        check(comparison, opened, "x")
    else:
        with pytest.raises(CheckpointError, match=part):
            check(comparison, opened, "x")


def write(folder: Path, *names: str) -> Path:
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(40, 30, seed).save(path)
    return folder


def targets(folder: Path, loaded: Loaded) -> list[list[int] | None]:
    return [None if row is None else row.tolist() for _, row in stored(str(folder), loaded)]


@pytest.fixture
def few(loaded: Loaded) -> Loaded:
    """A model of three classes."""
    return replace(loaded, classes=Classes(("cat", "dog", "hen")))


def test_a_folder_per_class_is_labelled(few: Loaded, tmp_path: Path) -> None:
    folder = write(tmp_path / "photos", "dog/a.png", "cat/b.png", "cat/c.png")
    assert targets(folder, few) == [[1, 0, 0], [1, 0, 0], [0, 1, 0]]


def test_a_csv_file_is_labelled(few: Loaded, tmp_path: Path) -> None:
    write(tmp_path, "a.png", "b.png", "c.png")
    rows = "path,labels,split\na.png,cat;hen,val\nb.png,dog,train\nc.png,,val\n"
    (tmp_path / "data.csv").write_text(rows)
    assert targets(tmp_path, few) == [[1, 0, 1], [0, 0, 0]]


def test_other_folders_have_no_labels_and_unreadable_images_are_named(
    few: Loaded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "dog/a.png", "other/b.png")
    (tmp_path / "other" / "c.png").write_bytes(b"no image")
    assert targets(tmp_path, few) == [None, None]
    assert "c.png: not an image" in capsys.readouterr().err


def test_no_folder_and_no_image_are_one_line(loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such folder"):
        list(stored(str(tmp_path / "nowhere"), loaded))
    with pytest.raises(DataError, match="the folder holds no image"):
        list(stored(str(tmp_path), loaded))
    with pytest.raises(DataError, match="photos: no image can be read"):
        compare(Opened(loaded, metadata()), loaded, [], "photos")


def test_the_map_of_both_is_told(loaded: Loaded) -> None:
    eye = torch.eye(CLASSES, dtype=torch.int8)
    pictures = [(picture(50, 40, seed), eye[seed % 3]) for seed in range(9)]
    opened = Opened(loaded, metadata(), lambda scores: 1 - scores)
    comparison = compare(opened, loaded, pictures, "x")
    assert comparison.mean_ap is not None
    assert comparison.mean_ap[0] != comparison.mean_ap[1]
    # One of three images shows each of the three classes.
    assert all(20 < value <= 100 for value in comparison.mean_ap)
    assert ", mAP " in comparison.text()
