"""The comparison of an exported file with its checkpoint."""

from dataclasses import replace

import networks
import pytest
import torch
from networks import CALIBRATION, CLASSES, metadata
from pictures import picture

from mldec.data.types import Classes
from mldec.errors import CheckpointError, DataError
from mldec.evaluation.run import scores
from mldec.tools.export import BATCH, Comparison, Program, check, compare, generated, stored

GENERATED = generated(32, any_size=False)


@pytest.fixture(scope="module")
def loaded():
    return networks.loaded("groups", calibration=CALIBRATION)


def compared(
    loaded,
    pictures=GENERATED,
    mistake=lambda scores: scores,
    **about,
):
    """Compare with a file that answers likewise, but for a mistake; return its batches too."""
    batches = []
    described = metadata(**about)
    program = Program(loaded, described.thresholds, any_size=described.resizes)

    def answer(images):
        batches.append(len(images))
        scores, decisions = program(images)
        return mistake(scores), decisions

    return compare(answer, described, loaded, pictures, "photos"), batches


def test_equal_answers_are_equal(loaded):
    pictures = [(picture(50, 40, seed), None) for seed in range(BATCH + 3)]
    comparison, batches = compared(loaded, pictures)
    assert comparison == (BATCH + 3, comparison.largest, 1.0, None)
    assert comparison.largest < 1e-6
    assert batches == [1, BATCH, 2]
    assert check(comparison, metadata(), "x.onnx").endswith("equal decisions 100.00 %")

    # Images of one size only make a batch.
    comparison, batches = compared(loaded, generated(32, any_size=True), resizes=True)
    assert comparison.largest < 2e-2
    assert batches == [1, 3, 2, 2]


def test_a_wrong_answer_is_found_and_refused(loaded):
    comparison, _ = compared(loaded, mistake=lambda scores: scores + 2e-4 * torch.eye(CLASSES)[3])
    assert comparison.largest == pytest.approx(2e-4, rel=0.01)
    with pytest.raises(CheckpointError, match=r"x\.onnx is not written: .* up to 2\.0e-"):
        check(comparison, metadata(), "x.onnx")
    check(comparison, metadata(resizes=True), "x.onnx")


def test_decisions_are_counted(loaded):
    other = replace(loaded, calibration=None)
    program = Program(other, [0.5])
    comparison = compare(program, metadata(thresholds=[0.5]), loaded, GENERATED, "x")
    images = torch.stack([loaded.transform(image) for image, _ in GENERATED])
    equal = (scores(other, images) >= 0.5) == (scores(loaded, images) >= 0.5)
    assert 0 < comparison.equal < 1
    assert comparison.equal == pytest.approx(equal.float().mean().item())


@pytest.mark.parametrize(
    ("mistake", "part"),
    [
        (lambda scores: scores[:, :-1], r"answers \[1, 6\] probabilities"),
        (lambda scores: scores * torch.nan, "not finite"),
        (lambda scores: scores @ scores, "the exported file cannot be used"),
    ],
)
def test_answers_of_another_form_are_refused(loaded, mistake, part):
    with pytest.raises(CheckpointError, match=part):
        compared(loaded, mistake=mistake)


@pytest.mark.parametrize(
    ("precision", "mean_ap", "part"),
    [
        ("fp16", (80.0, 80.2), "half precision changes the mAP from 80.200 to 80.000"),
        ("fp16", (80.0, 80.05), None),
        ("int8", (70.0, 80.0), None),
    ],
)
def test_half_precision_is_judged_by_its_map(precision, mean_ap, part):
    comparison = Comparison(9, 0.3, 0.9, mean_ap)
    if part is None:
        check(comparison, metadata(precision=precision), "x")
    else:
        with pytest.raises(CheckpointError, match=part):
            check(comparison, metadata(precision=precision), "x")


def test_the_map_of_both_is_told(loaded):
    eye = torch.eye(CLASSES, dtype=torch.int8)
    pictures = [(picture(50, 40, seed), eye[seed % 3]) for seed in range(9)]
    comparison, _ = compared(loaded, pictures, lambda scores: 1 - scores, precision="int8")
    assert comparison.mean_ap is not None
    assert comparison.mean_ap[0] != comparison.mean_ap[1]
    # One of three images shows each of the three classes.
    assert all(20 < value <= 100 for value in comparison.mean_ap)
    assert ", mAP " in check(comparison, metadata(precision="int8"), "x")


# The images of --verify


def write(folder, *names):
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(40, 30, seed).save(path)
    return folder


def targets(folder, loaded):
    few = replace(loaded, classes=Classes(("cat", "dog", "hen")))
    return [None if row is None else row.tolist() for _, row in stored(str(folder), few)]


def test_a_folder_per_class_is_labelled(loaded, tmp_path):
    folder = write(tmp_path / "photos", "dog/a.png", "cat/b.png", "cat/c.png")
    assert targets(folder, loaded) == [[1, 0, 0], [1, 0, 0], [0, 1, 0]]


def test_a_csv_file_is_labelled(loaded, tmp_path):
    write(tmp_path, "a.png", "b.png", "c.png")
    rows = "path,labels,split\na.png,cat;hen,val\nb.png,dog,train\nc.png,,val\n"
    (tmp_path / "data.csv").write_text(rows)
    assert targets(tmp_path, loaded) == [[1, 0, 1], [0, 0, 0]]


def test_other_folders_have_no_labels_and_unreadable_images_are_named(loaded, tmp_path, capsys):
    write(tmp_path, "dog/a.png", "other/b.png")
    (tmp_path / "other" / "c.png").write_bytes(b"no image")
    assert targets(tmp_path, loaded) == [None, None]
    assert "c.png: not an image" in capsys.readouterr().err


def test_no_folder_and_no_image_are_one_line(loaded, tmp_path):
    with pytest.raises(DataError, match="nowhere: no such folder"):
        targets(tmp_path / "nowhere", loaded)
    with pytest.raises(DataError, match="photos: no image can be read"):
        compared(loaded, [])
