"""The export command and the comparison of a file with its checkpoint."""

import re
from dataclasses import replace
from pathlib import Path

import hostile
import networks
import pytest
import torch
from networks import CALIBRATION, CLASSES, metadata, save_calibrated
from pictures import picture
from support import one_line

from mldec.checkpoint import load_model
from mldec.data.images import load_image, read_image
from mldec.data.transforms import to_tensor
from mldec.data.types import Classes
from mldec.errors import CheckpointError, DataError
from mldec.evaluation.run import scores
from mldec.files.torch_files import sha256_of
from mldec.tools import export as exporting
from mldec.tools.export import MAX_BATCH, Program, compare, read_folder
from mldec.tools.exported import OnnxFile

GENERATED = exporting.generate_images(32, any_size=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("exporting") / "best.pt"
    torch.save(hostile.good(), path)
    return path


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    return save_calibrated(tmp_path_factory.mktemp("exporting") / "calibrated.pt")


@pytest.fixture(scope="module")
def loaded():
    return networks.loaded("groups", calibration=CALIBRATION)


def write_photos(folder, *names):
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(80 + seed, 70, seed).save(path)
    return folder


def test_any_size_file_equals_checkpoint(cli, calibrated, tmp_path):
    names = ["zero/0.png", "one/0.png", "two/0.png", "one/1.png"]
    photos = write_photos(tmp_path / "photos", *names)
    out = tmp_path / "x.onnx"
    words = ["--weights", "raw", "--any-size", "--verify", photos]
    status, printed, err = cli("export", calibrated, out, *words)
    assert (status, err) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "x.onnx"]
    lines = printed.splitlines()[-4:]
    assert lines[0].startswith(f"{out}: ")
    assert lines[2].startswith("11 generated images: ")
    assert lines[3].startswith(f"4 images of {photos}: ")
    assert ", mAP " in lines[3]

    exported = OnnxFile(out)
    loaded = load_model(calibrated, weights="raw")
    about = exported.metadata
    assert about.classes == list(hostile.NAMES)
    assert about.thresholds == pytest.approx([0.2, 0.4, 0.6])
    origin = {"file": "calibrated.pt", "sha256": sha256_of(calibrated), "weights": "raw"}
    assert about.checkpoint == origin
    assert (about.image_size, about.resizes, about.calibrated) == (64, True, True)

    image = to_tensor(picture(64, 64))
    torch.testing.assert_close(exported(image[None])[0], scores(loaded, image[None]))
    path = photos / "one" / "0.png"
    small = load_image(path, loaded.transform)[None]
    found, decisions = exported(to_tensor(read_image("", path.read_bytes()))[None])
    torch.testing.assert_close(found, scores(loaded, small), atol=2e-2, rtol=0)
    assert torch.equal(decisions, found >= torch.tensor([0.2, 0.4, 0.6]))


def test_zero_shot_file_takes_word_vectors_or_contains_classes(cli, tmp_path):
    words = [word for word in hostile.WORDS if not word.startswith("head.")]
    path = tmp_path / "words.pt"
    torch.save(hostile.good([*words, "head=gap_words", "head.word_dim=5"], torch.randn(3, 5)), path)
    out = tmp_path / "x.onnx"
    cli.out("export", path, out)
    exported = OnnxFile(out)
    loaded = load_model(path)
    assert (exported.metadata.word_dim, exported.metadata.classes) == (5, list(hostile.NAMES))
    images = torch.stack([to_tensor(picture(64, 64, seed)) for seed in range(3)])
    found, _ = exported(images, loaded.classes.word_vectors[[2, 0]])
    torch.testing.assert_close(found, scores(loaded, images)[:, [2, 0]])

    vectors = tmp_path / "vectors.txt"
    vectors.write_text("zebra 1 0 0 0 0\numbrella 0 1 0 1 0\n")
    words = ["--classes", "umbrella,zebra", "--vectors", vectors, "--threshold", "0.3"]
    cli.out("export", path, out, *words)
    exported = OnnxFile(out)
    assert (exported.metadata.word_dim, exported.metadata.classes) == (None, ["umbrella", "zebra"])
    found, decisions = exported(images)
    assert found.shape == (3, 2)
    assert torch.equal(decisions, found >= 0.3)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["x.pt2"], "x.pt2"),
        (["x.onnx", "--precision", "int8"], "--precision int8"),
        (["x.onnx", "--any-size"], "--any-size"),
    ],
)
def test_invalid_options_are_errors(cli, words, name, here, monkeypatch):
    monkeypatch.setattr(exporting, "to_onnx", lambda *_: pytest.fail("exported"))
    state = hostile.good()
    state["transform"]["resize"] = "tensor"
    torch.save(state, "best.pt")
    one_line(cli.fault("export", "best.pt", *words), name)


def test_file_that_differs_is_not_written(cli, checkpoint, tmp_path, monkeypatch):
    def different(exported, images):
        probabilities = torch.full((len(images), 3), 0.5)
        return probabilities, probabilities > 1

    monkeypatch.setattr(OnnxFile, "__call__", different)
    (tmp_path / "x.onnx").write_text("old")
    one_line(cli.fault("export", checkpoint, tmp_path / "x.onnx"), "generated images")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_thresholds_come_from_option_calibration_run_or_default(checkpoint, calibrated):
    def chosen(path, threshold=None, of_run=None):
        loaded = load_model(path, weights="raw")
        loaded.config.data["threshold"] = of_run
        return exporting.chosen_thresholds(loaded, threshold)[0]

    assert chosen(checkpoint) == [0.5]
    assert chosen(checkpoint, of_run=0.75) == [0.75]
    assert chosen(calibrated, of_run=0.75) == pytest.approx([0.2, 0.4, 0.6])
    assert chosen(calibrated, 0.7) == [0.7]


def test_python_example_of_docs_runs(cli, checkpoint, here, capsys):
    picture(90, 70).save("photo.png")
    cli.out("export", checkpoint, "digits.onnx")
    text = (Path(__file__).parents[3] / "docs" / "export.md").read_text()
    [example] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(example, "docs/export.md", "exec"), {})
    loaded = load_model(checkpoint)
    row = scores(loaded, load_image(Path("photo.png"), loaded.transform)[None])[0].tolist()
    assert capsys.readouterr().out.splitlines() == [
        f"{name} {score:.3f}{' present' if score >= 0.5 else ''}"
        for name, score in zip(loaded.classes.names, row, strict=True)
    ]


def compared(loaded, pictures=GENERATED, mistake=lambda scores: scores, **about):
    """Return the result of `compare` and the batch sizes."""
    described = metadata(**about)
    program = Program(loaded, described.thresholds, any_size=described.resizes)
    batches = []

    def run(images):
        batches.append(len(images))
        probabilities, decisions = program(images)
        return mistake(probabilities), decisions

    return compare(run, described, loaded, pictures, "photos"), batches


def difference_of(summary):
    return float(re.search(r"probabilities ([\d.e+-]+),", summary)[1])


def test_comparison_of_equal_outputs(loaded):
    pictures = [(picture(50, 40, seed), None) for seed in range(MAX_BATCH + 3)]
    summary, batches = compared(loaded, pictures)
    assert summary.startswith(f"{MAX_BATCH + 3} photos: ")
    assert summary.endswith("equal decisions 100.00 %")
    assert difference_of(summary) < 1e-6
    assert batches == [MAX_BATCH, 3]

    # A batch of a file that resizes has images of one size.
    pictures = exporting.generate_images(32, any_size=True)
    summary, batches = compared(loaded, pictures, resizes=True)
    assert difference_of(summary) < 2e-2
    assert batches == [MAX_BATCH, 1, 1, 1]


def labeled(count=9):
    """Return images with one label each, of three classes in turn."""
    eye = torch.eye(CLASSES, dtype=torch.int8)
    return [(picture(50, 40, seed), eye[seed % 3]) for seed in range(count)]


def shifted(scores):
    return scores + 2e-4 * torch.eye(CLASSES)[3]


@pytest.mark.parametrize(
    ("pictures", "mistake", "precision", "error", "name"),
    [
        (GENERATED, shifted, "fp32", CheckpointError, "photos"),
        (GENERATED, lambda scores: scores * torch.nan, "int8", CheckpointError, "photos"),
        (labeled(), lambda scores: 1 - scores, "fp16", CheckpointError, "--precision fp16"),
        ([], shifted, "fp32", DataError, "photos"),
    ],
)
def test_differences_above_limit_raise_error(loaded, pictures, mistake, precision, error, name):
    with pytest.raises(error, match=name):
        compared(loaded, pictures, mistake, precision=precision)


def targets(folder, loaded):
    few = replace(loaded, classes=Classes(("cat", "dog", "hen")))
    return [None if row is None else row.tolist() for _, row in read_folder(str(folder), few)]


def test_folder_has_labels_of_csv_or_class_folders_or_none(loaded, tmp_path, capsys):
    folder = write_photos(tmp_path / "folders", "dog/a.png", "cat/b.png", "cat/c.png")
    assert targets(folder, loaded) == [[1, 0, 0], [1, 0, 0], [0, 1, 0]]

    folder = write_photos(tmp_path / "csv", "a.png", "b.png", "c.png")
    rows = "path,labels,split\na.png,cat;hen,val\nb.png,dog,train\nc.png,,val\n"
    (folder / "data.csv").write_text(rows)
    assert targets(folder, loaded) == [[1, 0, 1], [0, 0, 0]]

    folder = write_photos(tmp_path / "other", "dog/a.png", "other/b.png")
    (folder / "other" / "c.png").write_bytes(b"no image")
    assert targets(folder, loaded) == [None, None]
    assert "c.png" in capsys.readouterr().err
