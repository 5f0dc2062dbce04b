"""Small files in the layout of RAM; logits of the official code are in tests/parity."""

import hashlib
import random
from dataclasses import replace

import fake_hub
import huggingface_hub
import pytest
import ram_files
import torch

from mldec.checkpoint import load_model, released, sources
from mldec.checkpoint.loading import to_store
from mldec.checkpoint.sources import RELEASED, TAG_LIST, TAG_THRESHOLDS, local
from mldec.checkpoint.thresholds import with_thresholds
from mldec.data.types import Classes
from mldec.errors import CheckpointError, UserError
from mldec.files import torch_files
from mldec.files.torch_files import known_hashes

TAGS = ("dog", "living room", "3D", "tree")
LISTS = {TAG_LIST: "\n".join(TAGS).encode(), TAG_THRESHOLDS: b"0.65\n0.8\n0.5\n1\n"}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file of RAM++ in a folder with its two lists; tests must not change it."""
    folder = tmp_path_factory.mktemp("ram")
    for name, content in LISTS.items():
        (folder / name).write_bytes(content)
    return ram_files.write(folder / "ram_plus.pth", len(TAGS))


def converted(path, **options):
    """Return the checkpoint of a file without its model."""
    state = torch.load(path, weights_only=True)
    return released.convert(state, path, **{"image_size": None, "names": None, **options})


def test_names_and_thresholds_are_read_from_lists(file, tmp_path):
    loaded = load_model(file)
    assert loaded.classes == Classes(TAGS)
    calibration = loaded.calibration
    assert (calibration.file, calibration.images) == (TAG_THRESHOLDS, 0)
    assert calibration.thresholds == pytest.approx((0.65, 0.8, 0.5, 1))
    assert to_store(loaded).calibration == calibration

    # Files of the user have precedence.
    names = tmp_path / "names.txt"
    names.write_text("狗\n客厅 \n狗\n树")
    thresholds = tmp_path / "thresholds.csv"
    thresholds.write_text("threshold,class\n0.25,狗 (2)\n")
    loaded = load_model(file, class_names=names, thresholds=thresholds)
    assert loaded.classes.names == ("狗 (0)", "客厅 ", "狗 (2)", "树")
    assert loaded.calibration.thresholds == pytest.approx((0.65, 0.8, 0.25, 1))


def test_lists_of_another_length_are_ignored(file, tmp_path):
    for name in LISTS:
        (tmp_path / name).write_text("0.5\n" * 3)
    (tmp_path / "own.pth").symlink_to(file)
    checkpoint = converted(tmp_path / "own.pth")
    assert checkpoint.classes.names == ("class 0", "class 1", "class 2", "class 3")
    assert checkpoint.calibration is None


PLUS = {"label_embed": torch.zeros(44, 16), "logit_scale": torch.tensor(1.0)}


@pytest.mark.parametrize(
    ("change", "options", "name"),
    [
        ({}, {"image_size": 384}, "--image-size 384"),
        (PLUS, {}, "--class-names"),
        ({"own": torch.zeros(1)}, {}, "head.own"),
    ],
)
def test_unusable_file_raises_an_error(here, change, options, name):
    torch.save({"model": ram_files.state(len(TAGS)) | change}, "ram.pth")
    with pytest.raises(UserError, match=rf"^ram\.pth .*{name}"):
        load_model("ram.pth", **options)


def test_other_counts_of_descriptions_and_older_names_are_read(tmp_path):
    content = ram_files.state(4, 11) | {"logit_scale": torch.tensor(1.0)}
    older = {key.replace("tagging_head.", "vision_multi."): t for key, t in content.items()}
    torch.save({"model": older}, tmp_path / "ram.pth")
    checkpoint = converted(tmp_path / "ram.pth", names=TAGS)
    assert checkpoint.config["head"]["descriptions"] == 11
    # A fine-tuned scale is not replaced by the initial value.
    older["reweight_scale"] = torch.tensor(2.0)
    torch.save({"model": older}, tmp_path / "ram.pth")
    checkpoint = converted(tmp_path / "ram.pth", names=TAGS)
    assert checkpoint.model["head.reweight_scale"] == 2


@pytest.mark.parametrize(
    ("file", "text", "classes", "name"),
    [
        ("t.txt", "0.5\n0.5", {}, "2 lines"),
        ("t.txt", "0.5\nhalf\n1\n1", {}, "'half'"),
        ("t.txt", "nan\n1\n1\n1", {}, "'nan'"),
        ("t.csv", "name,value\ndog,1", {}, "'name,value'"),
        ("t.csv", "class,threshold\ndgo,1", {}, "'dgo'"),
        ("t.csv", "class,threshold\ndog,1", {}, "living room"),
        ("t.txt", "1\n" * 4, {"exclusive": True}, "no effect"),
    ],
)
def test_invalid_thresholds_name_the_file(tmp_path, file, text, classes, name):
    path = tmp_path / file
    path.write_text(text)
    with pytest.raises(UserError, match=f"^--thresholds {path}.*{name}"):
        with_thresholds(path, Classes(TAGS, **classes), "raw")


def test_thresholds_of_a_file_are_exclusive_and_keep_the_calibration(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("0\n0.65\n0.65\n1\n")
    limits = torch.tensor(with_thresholds(path, Classes(TAGS), "raw").thresholds)
    level = torch.tensor([0, 0.65, torch.nextafter(torch.tensor(0.65), torch.tensor(1.0)), 1])
    assert (level >= limits).tolist() == [False, False, True, False]

    path.write_text("0.25\n" * 4)
    # A spreadsheet in German.
    (tmp_path / "one.csv").write_text("sep=;\nThreshold;Class\n0,125;tree\n")
    given = with_thresholds(path, Classes(TAGS), "raw")
    fitted = replace(given, slopes=(2.0,), images=20, objective="f1", file=None)
    fitted = replace(fitted, metrics={"OF1": 60.0})
    mixed = with_thresholds(tmp_path / "one.csv", Classes(TAGS), "raw", fitted)
    assert mixed.thresholds == pytest.approx((0.25, 0.25, 0.25, 0.125))
    assert (mixed.slopes, mixed.images, mixed.reason) == ((2.0,), 20, "from one.csv")
    assert mixed.metrics == {}, "they are for other thresholds"


NAME = "ram_plus_swin_l_384"


@pytest.fixture
def zoo(hub, tmp_path, monkeypatch, content):
    """A hub with a file of weights and the two lists."""
    entry = RELEASED[NAME]
    lists = "authors/lists"
    for repository, files in ((entry.repository, {entry.file: content}), (lists, LISTS)):
        hub.repositories[repository] = fake_hub.Repository()
        hub.repositories[repository].commit(files)
    hashes = {name: hashlib.sha256(text).hexdigest() for name, text in LISTS.items()}
    monkeypatch.setattr(sources, "TAG_LISTS", hashes)
    monkeypatch.setattr(sources, "_RAM_LISTS", f"{hub.address}/{lists}/resolve/main/")
    sha256 = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(RELEASED, NAME, entry._replace(sha256=sha256))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return hub


@pytest.fixture
def content():
    """Bytes of a file of weights, in which no test reads tensors."""
    return random.Random(0).randbytes(300_000)


def test_weights_and_lists_are_downloaded_once(zoo):
    path = local(f"zoo:{NAME}")
    assert path.parent.name == "zoo"
    assert known_hashes(path) == [RELEASED[NAME].sha256]
    for name, text in LISTS.items():
        assert path.with_name(name).read_bytes() == text

    zoo.asked.clear()
    assert local(f"zoo:{NAME}") == path
    assert zoo.asked == []


def test_interrupted_download_is_resumed(zoo, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    chunk = 100_000
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", chunk)
    zoo.cut = 2 * chunk + 1
    with pytest.raises(CheckpointError, match=RELEASED[NAME].file):
        local(f"zoo:{NAME}")
    zoo.cut = None
    zoo.ranges.clear()
    path = local(f"zoo:{NAME}")
    assert zoo.ranges == [f"bytes={2 * chunk}-"]
    assert known_hashes(path) == [torch_files.sha256_of(path)]

    # A complete part is renamed, and the part of another file is removed.
    part = path.with_name(path.name + ".part")
    path.rename(part)
    assert local(f"zoo:{NAME}") == path
    path.unlink()
    part.write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match=RELEASED[NAME].file):
        local(f"zoo:{NAME}")
    assert local(f"zoo:{NAME}") == path
