"""Files from strangers: each ends in one line, and nothing in any of them is run."""

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from support import made
from torch import nn

import mldec
from mldec import build, checkpoint
from mldec.checkpoint import zoo
from mldec.data.readers.coco import coco
from mldec.data.readers.openimages_miil import openimages_miil
from mldec.data.transforms import read_image
from mldec.data.zero_shot.vectors import read_vectors
from mldec.errors import CheckpointError, ConfigError, DataError, UserError, printable
from mldec.files.archive import refuse_bomb
from mldec.files.torch_files import read_torch
from mldec.inference.inputs import Inputs

ROOT = Path(mldec.__file__).parents[1]


class Corpus:
    """A folder of hostile files, and what would show that one of them was run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trace = folder / "files", folder / "trace"
        self.imported = set(sys.modules)
        self.folder.mkdir()
        (folder / "kept").touch()
        (folder / "hubconf.py").write_text(f"def model(): open({str(self.trace)!r}, 'w')")
        self.trace.with_suffix(".py").write_text(f"open({str(self.trace)!r}, 'w')")
        self.trace.with_suffix(".pkl").write_bytes(
            hostile.pickled(hostile.Calls("os", "system", f"touch {self.trace}"))
        )
        hostile.pickles(self.folder, self.trace)
        hostile.changed(self.folder)
        hostile.broken(self.folder)
        hostile.data_files(self.folder)
        (self.folder / "good.pt").rename(folder / "good.pt")
        self.good = folder / "good.pt"
        self.files = sorted(self.folder.iterdir())

    def untouched(self) -> bool:
        """Tell whether nothing of what the files would do has happened."""
        imported = {"antigravity", "webbrowser"} & sys.modules.keys() - self.imported
        kept = (self.trace.parent / "kept").exists()
        return (
            kept and not self.trace.exists() and hostile.VARIABLE not in os.environ and not imported
        )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def model(corpus: Corpus) -> nn.Module:
    return checkpoint.load_model(corpus.good).model


def one_line(call: Callable[[], object], error: type[UserError], path: Path) -> str:
    """Return the message that a call must end in."""
    with pytest.raises(UserError) as caught:
        call()
    assert isinstance(caught.value, error), path
    message = str(caught.value)
    assert path.name in message, message
    assert len(message.splitlines()) == 1, message
    assert len(message) < 1500, message[:1500]
    return message


def test_the_good_file_passes_every_door(corpus: Corpus, model: nn.Module) -> None:
    assert checkpoint.load(corpus.good).step == 4
    assert "all" not in checkpoint.initialise(model, corpus.good)


def test_no_file_passes_the_doors_and_none_is_run(corpus: Corpus, model: nn.Module) -> None:
    names = {path.name for path in corpus.files}
    assert len(names) >= 50
    assert sum(name.startswith("zip-") for name in names) >= 40
    for path in corpus.files:
        if "-data_that_" in path.stem:  # of which predict builds nothing
            saved = checkpoint.load_model(path).config
            with pytest.raises(ConfigError, match=r"^data\._target_ .* is refused"):
                build.check(saved, ["data"])
        else:
            one_line(lambda: checkpoint.load_model(path), CheckpointError, path)  # noqa: B023
        # These two do not use the config, so that a file that is sound otherwise may pass them.
        for door in (lambda: checkpoint.load(path), lambda: checkpoint.initialise(model, path)):  # noqa: B023
            with suppress(CheckpointError):
                door()
        assert corpus.untouched(), path
    before = [tensor.clone() for tensor in model.state_dict().values()]
    assert all(map(torch.equal, before, model.state_dict().values()))


def test_pickle_itself_runs_what_the_corpus_holds(tmp_path: Path) -> None:
    import pickle

    for opcode in ("reduce", "stack_global", "inst", "obj"):
        trace = tmp_path / opcode
        pickle.loads(hostile.pickled({"model": hostile.calls(trace)["os.system"]}, opcode=opcode))
        assert trace.exists(), f"the trap is no trap in {opcode}"


@pytest.mark.parametrize("words", ["predict", "demo --port 0", "evaluate", "benchmark predict"])
def test_no_command_opens_a_pt2_file(words: str, corpus: Corpus, cli: Callable[..., Any]) -> None:
    path = corpus.folder / "program.pt2"
    images = [path] if "predict" in words else []
    status, out, err = cli(*words.split(), path, *images)
    assert (status, out) == (1, "")
    assert err == (
        f"mldec: {path}: no command opens a .pt2 file, because loading one can run code that it "
        f"holds; pass the checkpoint, or to predict, demo and benchmark an .onnx file of it\n"
    )
    assert corpus.untouched()


def test_torch_itself_runs_what_a_pt2_file_holds(tmp_path: Path) -> None:
    trace, path = tmp_path / "trace", tmp_path / "x.pt2"
    hostile.write_program(path, hostile.calls(trace)["os.system"])
    with suppress(RuntimeError):
        torch.export.load(path)
    assert trace.exists(), "the trap is no trap"


def test_no_file_passes_the_doors_of_word_vectors_and_names(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text(
        "image_id,class_list,class_list_neg,split\na.jpg,['/m/0a'],[],val\n"
    )
    (tmp_path / "a.jpg").touch()
    given = tmp_path / "mid_to_classes.pth"
    names = ["one", "two", "three"]

    def read_names() -> None:
        data = made(openimages_miil, root=str(tmp_path), cache_dir=str(tmp_path / "cache"))
        assert data.val.classes.names in (("Ball",), ("/m/0a",))

    refused = 0
    for path in corpus.files:
        given.unlink(missing_ok=True)
        given.symlink_to(path)
        for door, file in (
            (lambda: read_vectors(path, names, order=names), path),  # noqa: B023
            (read_names, given),
        ):
            fault = None
            try:
                door()
            except DataError as error:
                fault = str(error)
            if fault is None:
                assert path.name.startswith(("data-", "archive-")), path
                continue
            assert file.name in fault
            assert len(fault.splitlines()) == 1, fault
            refused += 1
        assert corpus.untouched(), path
    assert refused > 2 * len(corpus.files) - 12


@pytest.mark.parametrize("name", hostile.archives())
def test_an_archive_that_two_readers_read_differently_is_not_unpacked(
    corpus: Corpus, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = corpus.folder / f"archive-{name}.pt"
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was unpacked"))
    one_line(lambda: read_torch(path), CheckpointError, path)


def test_the_archive_of_two_directories_is_one_for_zipfile(corpus: Corpus) -> None:
    with zipfile.ZipFile(corpus.folder / "archive-two-directories.pt") as archive:
        members = archive.infolist()
    assert sum(member.file_size for member in members) == 2, "the trap is no trap"
    assert all(member.compress_type == zipfile.ZIP_STORED for member in members)


@pytest.mark.parametrize(
    ("file", "unpacked"), [("deflated.pt", None), ("bomb.pt", 2**26), ("liar.pt", 2**26)]
)
def test_a_bomb_is_refused_before_it_is_unpacked(
    corpus: Corpus, file: str, unpacked: int | None
) -> None:
    with pytest.raises(
        CheckpointError, match=f"{file} is refused: its [0-9,]+ bytes unpack to"
    ) as caught:
        refuse_bomb(corpus.folder / file)
    if unpacked:
        size = int(re.search(r"unpack to ([\d,]+)", str(caught.value))[1].replace(",", ""))
        assert unpacked <= size < unpacked + 1000
        assert (corpus.folder / file).stat().st_size < unpacked / 500


def test_a_checkpoint_and_a_legacy_file_are_no_bombs(corpus: Corpus, tmp_path: Path) -> None:
    refuse_bomb(corpus.good)
    torch.save({"a": torch.zeros(10)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refuse_bomb(tmp_path / "old.pt")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("head__os_system_", "head._target_ 'os.system' is refused"),
        ("environment", "holds an interpolation"),
        ("hub_name", "no such network"),
        ("huge_network", "cannot be built"),
        ("endless_config", "its 'config' is nested too deep"),
        ("names_that_steer", "'classes' is missing or not different class names"),
        ("huge_image", "image_size: 1000000000 is above 4,096 pixels a side"),
        ("shadowed_keys", "does not fit the model"),
        ("sparse", "its 'model' holds a tensor that is not dense"),
        ("meta", "its 'model' holds a tensor that is not dense"),
        ("expanded", "its 'model' holds tensors that claim more"),
        ("epoch_below_0", "'epoch' is missing or not a whole number"),
        ("a_set", "its 'metrics' holds a set"),
    ],
)
def test_the_message_names_the_part(corpus: Corpus, name: str, message: str) -> None:
    (path,) = (path for path in corpus.files if re.fullmatch(rf"ours-\d+-{name}\.pt", path.name))
    assert message in one_line(lambda: checkpoint.load_model(path), CheckpointError, path)


def test_a_message_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b]0;b\x07\n c\ud800") == "a?]0;b? c?"
    assert printable("Stra\u00dfe \u65e5") == "Stra\u00dfe \u65e5"


COMMANDS = {
    "zip-os.system.pth": "mldec.predict {file} {image}",
    "memory.pt": "mldec.train +experiment=digits device=cpu init={file}",
    "tar.pth": "mldec.train +experiment=digits device=cpu resume={file} name=other",
}


@pytest.mark.slow
def test_real_processes_end_in_one_line(corpus: Corpus, tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    hostile.Image.new("RGB", (8, 8)).save(image)
    running = {}
    for file, command in COMMANDS.items():
        words = command.format(file=corpus.folder / file, image=image).split()
        running[file] = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    for file, process in running.items():
        _, err = process.communicate(timeout=300)
        assert process.returncode == 1, err
        assert "Traceback" not in err
        assert [line.startswith("mldec: ") for line in err.splitlines()].count(True) == 1, err
        assert file in err
    assert corpus.untouched()


@pytest.mark.parametrize(
    "file", ["bomb.pt", "deep.pt", "legacy-2.pth", "zip-builtins.eval.pth", "constants.pth"]
)
@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_commands_end_in_one_line(
    corpus: Corpus, cli: Callable[..., Any], command: str, file: str
) -> None:
    words = [corpus.good.with_name("kept")] if command == "predict" else []
    outcome = cli(command, corpus.folder / file, *words)
    assert outcome.status == 1
    assert outcome.err.startswith("mldec: ")
    assert outcome.err.count("\n") == 1
    assert file in outcome.err


def test_images_are_images_or_one_line(tmp_path: Path) -> None:
    folder, trace = tmp_path / "images", tmp_path / "trace"
    folder.mkdir()
    hostile.images(folder, trace)
    files = sorted(folder.iterdir())
    assert len(files) >= 12
    for path in files:
        one_line(lambda: read_image(path), DataError, path)  # noqa: B023
    assert not trace.exists()
    assert str(folder / "postscript.eps") not in {item.path for item in Inputs([str(folder)])}


@pytest.mark.parametrize("name", hostile.ANNOTATIONS)
def test_annotations_end_in_one_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / "annotations" / "instances_val2014.json"
    file.parent.mkdir()
    file.write_text(hostile.ANNOTATIONS[name])
    (tmp_path / "val2014").mkdir()
    data = made(coco, root=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    one_line(lambda: data.val, DataError, tmp_path)


def test_yaml_tags_run_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (tmp_path / "head").mkdir()
    running = []
    for name, text in hostile.YAML.items():
        (tmp_path / "head" / f"{name}.yaml").write_text(text.format(trace=trace))
        words = [
            "mldec.train",
            "+experiment=digits",
            f"--config-dir={tmp_path}",
            f"head={name}",
            "device=cpu",
        ]
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
            )
        )
    for process in running:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 1, err
    assert not trace.exists()


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "tresnet_l_coco_448/..", "", "\x00", "a" * 9999]
)
def test_a_zoo_name_is_no_path(name: str) -> None:
    with pytest.raises(CheckpointError, match="no released file"):
        zoo.fetch(name)
    with pytest.raises(CheckpointError, match="no released file"):
        checkpoint.load_model(f"zoo:{name}")


def test_the_floors_of_versions_are_those_that_security_md_explains() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    security = (ROOT / "SECURITY.md").read_text()
    for package, floor in (("torch", "2.11"), ("hydra-core", "1.3.8")):
        assert f'"{package}>={floor}' in project
        assert f"`{package} >= {floor}`" in security
