"""The command: what it writes, says and refuses."""

import re
import resource
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import hostile
import pytest
import torch
from browser import opened as in_browser
from networks import save_calibrated
from pictures import picture
from PIL import Image
from selenium.webdriver.support.wait import WebDriverWait
from support import one_line

from mldec import export as exporting
from mldec.checkpoint import load_model
from mldec.data.images import load_image
from mldec.data.transforms import to_tensor
from mldec.files.torch_files import sha256_of
from mldec.predict.engine import Metadata, parse, scores

Cli = Callable[..., Any]
WASM = ("mjs", "wasm")  # endings of the two files of the engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exporting") / "best.pt"
    torch.save(hostile.good(), path)
    return path


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_calibrated(tmp_path_factory.mktemp("exporting") / "calibrated.pt")


def opened(path: Path) -> tuple[torch.nn.Module, Metadata]:
    """Open a .pt2 file as docs/export.md says."""
    extra = {"mldec.json": ""}
    program = torch.export.load(path, extra_files=extra)
    return program.module(), parse(extra["mldec.json"], path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder per class of the checkpoint, with two photos each."""
    for seed, name in enumerate(("zero", "one", "two")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(2):
            image = picture(80 + seed, 70, 2 * seed + number)
            image.save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def test_a_file_answers_as_its_checkpoint_on_real_images(
    cli: Cli, calibrated: Path, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.pt2"
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
def zero_shot(tmp_path: Path) -> Path:
    """A checkpoint that knows its classes by their word vectors."""
    words = [word for word in hostile.WORDS if not word.startswith("head.")]
    path = tmp_path / "words.pt"
    state = hostile.good([*words, "head=gap_words", "head.word_dim=5"], torch.randn(3, 5))
    torch.save(state, path)
    return path


def test_a_zero_shot_file_asks_for_word_vectors(cli: Cli, zero_shot: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.pt2"
    status, printed, err = cli("export", zero_shot, out)
    assert (status, err) == (0, "")
    lines = printed.splitlines()
    assert "fp32, as many classes as word vectors; images" in lines[0]
    assert lines[2].startswith("4 generated images, 3 made-up classes: largest difference")
    assert lines[3].startswith("4 generated images: largest difference")

    (answer, about), loaded = opened(out), load_model(zero_shot)
    assert (about.word_dim, about.classes) == (5, list(hostile.NAMES))
    assert loaded.classes.queries is not None
    images = torch.stack([to_tensor(picture(64, 64, seed)) for seed in range(3)])
    answers, _ = answer(images, loaded.classes.queries[[2, 0]])
    torch.testing.assert_close(answers, scores(loaded, images)[:, [2, 0]])


def test_a_zero_shot_file_may_have_its_classes_inside(
    cli: Cli, zero_shot: Path, tmp_path: Path
) -> None:
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


@pytest.fixture
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if the network is traced: a wrong option is refused before."""

    def refused(*_: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(exporting, "traced", refused)


WRONG: list[tuple[list[str], str]] = [
    (["x.pth"], "x.pth: the name of an exported file ends in .onnx (ONNX) or .pt2"),
    (["nowhere/x.onnx"], "cannot write nowhere/x.onnx: there is no folder nowhere"),
    (["x.pt2", "--precision", "int8"], "--precision int8: x.pt2 cannot have it"),
    (["x.pt2", "--vectors", "f.txt"], "--vectors f.txt has no effect without --classes"),
    (
        ["x.pt2", "--classes", "a,b", "--vectors", "f.txt"],
        "--classes: the checkpoint knows its own",
    ),
]


@pytest.mark.usefixtures("no_export")
@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_options_are_one_line(
    cli: Cli,
    checkpoint: Path,
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = cli("export", checkpoint, *words)
    assert (status, out) == (1, "")
    one_line(err, message)


@pytest.mark.usefixtures("no_export")
def test_images_that_torch_resized_are_not_resized_inside(cli: Cli, tmp_path: Path) -> None:
    state = hostile.good()
    state["transform"]["resize"] = "tensor"
    torch.save(state, tmp_path / "best.pt")
    status, _, err = cli("export", tmp_path / "best.pt", tmp_path / "x.onnx", "--any-size")
    assert status == 1
    one_line(err, "--any-size resizes as Pillow does")


@pytest.mark.usefixtures("no_export")
def test_a_missing_extra_names_the_pip_command(
    cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, err = cli("export", checkpoint, tmp_path / "x.onnx")
    assert status == 1
    one_line(err, "run pip install 'mldec[export]'")


def exported(monkeypatch: pytest.MonkeyPatch, content: bytes = b"") -> None:
    """Replace the content of the file."""
    monkeypatch.setattr(exporting, "to_bytes", lambda *_: content)


def test_a_full_disk_leaves_the_old_file(
    cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(monkeypatch, bytes(100_000))
    out = tmp_path / "x.pt2"
    out.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        status, _, err = cli("export", checkpoint, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert status == 1
    one_line(err, f"cannot write {out}: ", "free space")
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt2"]
    assert out.read_text() == "old"


def test_a_file_that_disagrees_is_not_written(
    cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(monkeypatch)

    class Disagrees:
        """A file whose probabilities are all 0.5."""

        def __init__(self, content: bytes, metadata: Metadata) -> None:
            self.metadata = metadata

        def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            answers = torch.full((len(inputs[0]), 3), 0.5)
            return answers, answers > 1

    monkeypatch.setattr(exporting, "TorchFile", Disagrees)
    status, out, err = cli("export", checkpoint, tmp_path / "x.pt2")
    assert (status, out) == (1, "")
    one_line(err, "x.pt2 is not written: its probabilities differ", "the limit is 0.0001")
    assert list(tmp_path.iterdir()) == []


def test_decisions_are_at_the_thresholds_that_are_there(checkpoint: Path, calibrated: Path) -> None:
    def chosen(path: Path, threshold: float | None = None) -> tuple[list[float] | None, str]:
        args: Any = type("Args", (), {"threshold": threshold})
        return exporting.chosen_thresholds(load_model(path, weights="raw"), args)

    assert chosen(checkpoint)[0] == [0.5]
    assert "at 0.5, the default: the checkpoint has no thresholds" in chosen(checkpoint)[1]
    assert chosen(calibrated)[0] == pytest.approx([0.2, 0.4, 0.6])
    assert chosen(calibrated, 0.7) == ([0.7], "at 0.7, of --threshold")

    loaded = load_model(checkpoint, weights="raw")
    loaded.config.data["threshold"] = 0.75
    args: Any = type("Args", (), {"threshold": None})
    values, origin = exporting.chosen_thresholds(loaded, args)
    assert values == [0.75]
    assert origin.startswith("at 0.75, data.threshold of the run: ")


def test_images_of_the_training_calibrate_eight_bits(checkpoint: Path) -> None:
    loaded = load_model(checkpoint)
    loaded.config.data["train_images"] = 300
    images = list(exporting.training_images(loaded))
    assert exporting.CALIBRATION_IMAGES <= len(images) < 2 * exporting.CALIBRATION_IMAGES
    assert images[0].size == (64, 64)


def test_absent_training_images_are_one_line(checkpoint: Path, tmp_path: Path) -> None:
    loaded = load_model(checkpoint)
    loaded.config.data.clear()
    loaded.config.data.update(
        {
            "_target_": "mldec.data.readers.folders",
            "root": str(tmp_path / "gone"),
        }
    )
    with pytest.raises(ValueError, match=r"--precision int8 is calibrated .* pass --verify FOLDER"):
        list(exporting.training_images(loaded))


# The examples of docs/export.md


def answers_of(checkpoint: Path, image: Path) -> list[str]:
    """Return the lines that the examples print: name, probability, and whether it is present."""
    loaded = load_model(checkpoint)
    row = scores(loaded, load_image(image, loaded.transform)[None])[0].tolist()
    return [
        f"{name} {score:.3f}{' present' if score >= 0.5 else ''}"
        for name, score in zip(loaded.classes.names, row, strict=True)
    ]


def example(language: str) -> str:
    """Return the code of a language in the page."""
    text = (Path(__file__).parents[3] / "docs" / "export.md").read_text()
    [code] = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return code


def test_the_python_of_the_page_runs(
    cli: Cli,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    picture(90, 70).save("photo.png")
    status, printed, err = cli("export", checkpoint, "digits.onnx")
    assert (status, err) == (0, "")
    assert printed.startswith("digits.onnx: ")

    exec(compile(example("python"), "docs/export.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == answers_of(checkpoint, Path("photo.png"))


class Quiet(SimpleHTTPRequestHandler):
    """A web server that says nothing."""

    def log_message(self, *_: object) -> None:
        """Drop the line of a request."""


@pytest.mark.slow
def test_the_javascript_of_the_page_runs_in_a_browser(
    cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    monkeypatch.chdir(tmp_path)
    subprocess.run(["npm", "pack", "onnxruntime-web@1.30.0"], check=True, capture_output=True)
    with tarfile.open("onnxruntime-web-1.30.0.tgz") as archive:
        for name in ("ort.wasm.min.js", *(f"ort-wasm-simd-threaded.{end}" for end in WASM)):
            member = archive.extractfile(f"package/dist/{name}")
            assert member is not None
            Path(name).write_bytes(member.read())

    picture(90, 70).save("photo.png")
    Path("index.html").write_text(example("html"))
    assert cli("export", checkpoint, "digits.onnx", "--any-size").status == 0
    assert cli("evaluate", checkpoint, "--write-classes", "classes.txt").status == 0

    handler = partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            with in_browser(Path("classes.txt"), width=800) as browser:
                browser.get(f"http://127.0.0.1:{server.server_port}/index.html")
                wait = WebDriverWait(browser, 60)
                wait.until(lambda page: page.find_element("id", "answer").text)
                lines = browser.find_element("id", "answer").text.splitlines()
                log = [entry["message"] for entry in browser.get_log("browser")]
        finally:
            server.shutdown()
    assert lines == answers_of(checkpoint, Path("photo.png"))
    assert not [line for line in log if "favicon" not in line]
