"""The command: what it writes, says and refuses."""

import re
from pathlib import Path

import hostile
import pytest
import torch
from networks import metadata, save_calibrated
from pictures import picture
from PIL import Image
from support import one_line

from mldec.checkpoint import load_model
from mldec.data.images import load_image
from mldec.data.transforms import to_tensor
from mldec.errors import ConfigError
from mldec.evaluation.run import scores
from mldec.files.torch_files import sha256_of
from mldec.tools import export as exporting
from mldec.tools.predict.engine import parse


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("exporting") / "best.pt"
    torch.save(hostile.good(), path)
    return path


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    return save_calibrated(tmp_path_factory.mktemp("exporting") / "calibrated.pt")


def opened(path):
    """Open a .pt2 file as docs/export.md says."""
    extra = {"mldec.json": ""}
    program = torch.export.load(path, extra_files=extra)
    return program.module(), parse(extra["mldec.json"], path)


def test_a_file_answers_as_its_checkpoint_on_real_images(cli, calibrated, tmp_path):
    photos, out = tmp_path / "photos", tmp_path / "x.pt2"
    for seed, name in enumerate(("zero", "one", "two")):
        (photos / name).mkdir(parents=True)
        for number in range(2):
            picture(80 + seed, 70, 2 * seed + number).save(photos / name / f"{number}.png")

    words = ["--weights", "raw", "--any-size", "--verify", photos]
    status, printed, err = cli("export", calibrated, out, *words)
    assert (status, err) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "x.pt2"]
    # The first line is the reader's, about the images.
    lines = printed.splitlines()[1:]
    assert lines[0].startswith(f"{out}: ")
    assert "fp32, 3 classes; images uint8 [batch, 3, height, width]" in lines[0]
    assert lines[1] == "decisions: at the thresholds of the checkpoint for f1"
    assert lines[2].startswith("8 generated images: largest difference of probabilities ")
    assert lines[3].startswith(f"6 images of {photos}: largest difference")
    assert ", mAP " in lines[3]

    answer, about = opened(out)
    loaded = load_model(calibrated, weights="raw")
    assert about.classes == list(hostile.NAMES)
    assert about.thresholds == pytest.approx([0.2, 0.4, 0.6])
    assert about.checkpoint == {
        "file": "calibrated.pt",
        "sha256": sha256_of(calibrated),
        "weights": "raw",
    }
    assert (about.image_size, about.resizes, about.calibrated) == (64, True, True)

    path = photos / "one" / "0.png"
    image = to_tensor(picture(64, 64))
    torch.testing.assert_close(answer(image[None])[0], scores(loaded, image[None]))
    small = load_image(path, loaded.transform)[None]
    answers, decisions = answer(to_tensor(Image.open(path))[None])
    torch.testing.assert_close(answers, scores(loaded, small), atol=2e-2, rtol=0)
    assert torch.equal(decisions, answers >= torch.tensor([0.2, 0.4, 0.6]))


@pytest.fixture
def zero_shot(tmp_path):
    """A checkpoint that knows its classes by their word vectors."""
    words = [word for word in hostile.WORDS if not word.startswith("head.")]
    path = tmp_path / "words.pt"
    state = hostile.good([*words, "head=gap_words", "head.word_dim=5"], torch.randn(3, 5))
    torch.save(state, path)
    return path


def test_a_zero_shot_file_asks_for_word_vectors(cli, zero_shot, tmp_path):
    out = tmp_path / "x.pt2"
    status, printed, err = cli("export", zero_shot, out)
    assert (status, err) == (0, "")
    lines = printed.splitlines()
    assert "fp32, as many classes as word vectors; images" in lines[0]
    assert lines[2].startswith("4 generated images, 3 made-up classes: largest difference")
    assert lines[3].startswith("4 generated images: largest difference")

    (answer, about), loaded = opened(out), load_model(zero_shot)
    assert (about.word_dim, about.classes) == (5, list(hostile.NAMES))
    images = torch.stack([to_tensor(picture(64, 64, seed)) for seed in range(3)])
    answers, _ = answer(images, loaded.classes.word_vectors[[2, 0]])
    torch.testing.assert_close(answers, scores(loaded, images)[:, [2, 0]])


def test_a_zero_shot_file_may_have_its_classes_inside(cli, zero_shot, tmp_path):
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("zebra 1 0 0 0 0\numbrella 0 1 0 1 0\n")
    out = tmp_path / "x.pt2"
    words = ["--classes", "umbrella,zebra", "--vectors", vectors, "--threshold", "0.3"]
    status, printed, err = cli("export", zero_shot, out, *words)
    assert (status, err) == (0, "")
    assert "fp32, 2 classes; images" in printed
    assert "decisions: at 0.3, of --threshold" in printed
    answer, about = opened(out)
    assert (about.word_dim, about.classes) == (None, ["umbrella", "zebra"])
    answers, decisions = answer(to_tensor(picture(64, 64))[None])
    assert answers.shape == (1, 2)
    assert torch.equal(decisions, answers >= 0.3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x.pth"], "x.pth: the name of an exported file ends in .onnx (ONNX) or .pt2"),
        (["x.pt2", "--precision", "int8"], "--precision int8: x.pt2 cannot have it"),
        (["x.pt2", "--classes", "a,b", "--vectors", "f.txt"], "--classes: the checkpoint knows"),
        (["x.onnx", "--any-size"], "--any-size resizes as Pillow does"),
        (["x.onnx"], "run pip install -e '.[export]'"),
    ],
)
def test_wrong_options_are_one_line(cli, words, message, here, monkeypatch):
    monkeypatch.setattr(exporting, "traced", lambda *_: pytest.fail("traced"))
    if words == ["x.onnx"]:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    state = hostile.good()
    state["transform"]["resize"] = "tensor"
    torch.save(state, "best.pt")
    status, out, err = cli("export", "best.pt", *words)
    assert (status, out) == (1, "")
    one_line(err, message)


def test_a_file_that_disagrees_is_not_written(cli, checkpoint, tmp_path, monkeypatch):
    def disagrees(answer, images):
        answers = torch.full((len(images), 3), 0.5)
        return answers, answers > 1

    monkeypatch.setattr(torch.fx.GraphModule, "__call__", disagrees)
    (tmp_path / "x.pt2").write_text("old")
    status, out, err = cli("export", checkpoint, tmp_path / "x.pt2")
    assert (status, out) == (1, "")
    one_line(err, "x.pt2 is not written: its probabilities differ", "the limit is 0.0001")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_decisions_are_at_the_thresholds_that_are_there(checkpoint, calibrated):
    def chosen(path, threshold=None, of_run=None):
        loaded = load_model(path, weights="raw")
        loaded.config.data["threshold"] = of_run
        args = type("Args", (), {"threshold": threshold})
        return exporting.chosen_thresholds(loaded, args)

    values, origin = chosen(checkpoint)
    assert values == [0.5]
    assert origin.startswith("at 0.5, the default: the checkpoint has no thresholds")
    assert chosen(calibrated)[0] == pytest.approx([0.2, 0.4, 0.6])
    assert chosen(calibrated, 0.7) == ([0.7], "at 0.7, of --threshold")
    values, origin = chosen(checkpoint, of_run=0.75)
    assert values == [0.75]
    assert origin.startswith("at 0.75, data.threshold of the run: ")


def test_images_of_the_training_calibrate_eight_bits(checkpoint, tmp_path):
    loaded = load_model(checkpoint)
    loaded.config.data["train_images"] = 300
    inputs = list(exporting.calibration_inputs(loaded, metadata(), None))
    assert len(inputs) == exporting.CALIBRATION_IMAGES
    assert inputs[0][0].shape == (1, 3, 64, 64)

    loaded.config.data.clear()
    target = "mldec.data.readers.folders.folders"
    loaded.config.data.update({"_target_": target, "root": str(tmp_path / "gone")})
    with pytest.raises(
        ConfigError, match=r"--precision int8 is calibrated .* pass --verify FOLDER"
    ):
        list(exporting.calibration_inputs(loaded, metadata(), None))


def test_the_python_of_the_page_runs(cli, checkpoint, here, capsys):
    picture(90, 70).save("photo.png")
    status, printed, err = cli("export", checkpoint, "digits.onnx")
    assert (status, err) == (0, "")
    assert printed.startswith("digits.onnx: ")

    text = (Path(__file__).parents[3] / "docs" / "export.md").read_text()
    [example] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(example, "docs/export.md", "exec"), {})
    loaded = load_model(checkpoint)
    row = scores(loaded, load_image(Path("photo.png"), loaded.transform)[None])[0].tolist()
    assert capsys.readouterr().out.splitlines() == [
        f"{name} {score:.3f}{' present' if score >= 0.5 else ''}"
        for name, score in zip(loaded.classes.names, row, strict=True)
    ]
