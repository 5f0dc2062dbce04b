"""Small files in the layout of RAM; logits of the official code are in tests/parity."""

import hashlib
import logging
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
    """A file of RAM++ with its two lists beside it; tests must not change it."""
    folder = tmp_path_factory.mktemp("ram")
    for name, content in LISTS.items():
        (folder / name).write_bytes(content)
    return ram_files.write(folder / "ram_plus.pth", len(TAGS))


def converted(path, **options):
    """Return a file as a checkpoint, without its model."""
    state = torch.load(path, weights_only=True)
    return released.convert(state, path, **{"image_size": None, "names": None, **options})


def test_names_and_thresholds_are_those_of_the_lists_beside_the_file(file, tmp_path):
    loaded = load_model(file)
    assert loaded.classes == Classes(TAGS)
    calibration = loaded.calibration
    assert (calibration.file, calibration.images) == (TAG_THRESHOLDS, 0)
    assert calibration.thresholds == pytest.approx((0.65, 0.8, 0.5, 1))
    assert to_store(loaded).calibration == calibration

    # Lists of the caller's own come first.
    names, thresholds = tmp_path / "names.txt", tmp_path / "thresholds.csv"
    names.write_text("狗\n客厅 \n狗\n树")
    thresholds.write_text("threshold,class\n0.25,狗 (2)\n")
    loaded = load_model(file, class_names=names, thresholds=thresholds)
    assert loaded.classes.names == ("狗 (0)", "客厅 ", "狗 (2)", "树")
    assert loaded.calibration.thresholds == pytest.approx((0.65, 0.8, 0.25, 1))


def test_lists_of_another_length_are_not_those_of_the_file(file, tmp_path, caplog):
    for name in LISTS:
        (tmp_path / name).write_text("0.5\n" * 3)
    (tmp_path / "own.pth").symlink_to(file)
    checkpoint = converted(tmp_path / "own.pth")
    assert checkpoint.classes.names == ("class 0", "class 1", "class 2", "class 3")
    assert checkpoint.calibration is None
    assert "own.pth names no classes: they are numbered" in caplog.text


def test_a_large_file_is_mapped(file, monkeypatch):
    calls = []
    read = torch.load

    def noted(source, **options):
        calls.append(options["mmap"])
        return read(source, **options)

    monkeypatch.setattr(torch, "load", noted)
    images = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8)
    logits = []
    for limit in (torch_files.MAPPED, 2**20):
        monkeypatch.setattr(torch_files, "MAPPED", limit)
        with torch.no_grad():
            logits.append(load_model(file).model(images))
    assert calls == [False, True]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("change", "options", "fault"),
    [
        ({}, {"image_size": 384}, "--image-size 384: its Swin is for 224 pixels; leave it out"),
        ({"label_embed": None}, {}, "it misses head.label_embed: it is incomplete"),
        ({"visual_encoder.layers.2.blocks.5": None}, {}, "holds a Swin of blocks (2, 2, 5, 2)"),
        ({}, {"class_names": "a\nb"}, "it has 4 classes, the file names 2"),
        (
            {"label_embed": torch.zeros(44, 16), "logit_scale": torch.tensor(1.0)},
            {},
            "it has 44 rows of descriptions, which are not 51 per tag: pass the names",
        ),
        ({"own": torch.zeros(1)}, {}, "1 tensor is unexpected (head.own)"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, change, options, fault):
    content = ram_files.state(len(TAGS))
    for name, tensor in change.items():
        if tensor is None:
            content = {key: value for key, value in content.items() if not key.startswith(name)}
        else:
            content[name] = tensor
    torch.save({"model": content}, tmp_path / "ram.pth")
    if "class_names" in options:
        (tmp_path / "names.txt").write_text(options["class_names"])
        options = {"class_names": tmp_path / "names.txt"}
    with pytest.raises(UserError) as caught:
        load_model(tmp_path / "ram.pth", **options)
    assert fault in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'ram.pth'} ")
    assert "\n" not in str(caught.value)


def test_other_counts_of_descriptions_and_older_names_are_read(tmp_path):
    content = ram_files.state(4, 11) | {"logit_scale": torch.tensor(1.0)}
    older = {key.replace("tagging_head.", "vision_multi."): t for key, t in content.items()}
    torch.save({"model": older}, tmp_path / "ram.pth")
    checkpoint = converted(tmp_path / "ram.pth", names=TAGS)
    assert checkpoint.config["head"]["descriptions"] == 11
    # What fine-tuning may have changed is not replaced by where it started.
    older["reweight_scale"] = torch.tensor(2.0)
    torch.save({"model": older}, tmp_path / "ram.pth")
    checkpoint = converted(tmp_path / "ram.pth", names=TAGS)
    assert checkpoint.model["head.reweight_scale"] == 2


# Thresholds of a file


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("t.txt", "0.5\n0.5", "it has 2 lines for 4 classes; see docs/running.md"),
        ("t.txt", "0.5\nhalf\n1\n1", "row 2: 'half' is no number from 0 to 1"),
        ("t.txt", "0.5\n1.01\n1\n1", "row 2: '1.01' is no number from 0 to 1"),
        ("t.txt", "nan\n1\n1\n1", "row 1: 'nan' is no number from 0 to 1"),
        ("t.csv", "name,value\ndog,1", "its first row is 'name,value', without the columns"),
        ("t.csv", "class,threshold\ndgo,1", "'dgo' is not in the list of 4 classes; did you mean"),
        ("t.csv", "class,threshold\ndog\n", "row 2: '' is no number"),
        ("t.csv", "class,threshold\ndog,1", "3 of 4 classes have no threshold, the first is"),
    ],
)
def test_a_bad_file_of_thresholds_is_one_line(tmp_path, name, text, fault):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        with_thresholds(path, Classes(TAGS), "raw")
    assert str(caught.value).startswith(f"--thresholds {path}")
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["exclusive", "queries"])
def test_a_model_without_thresholds_per_class_takes_none(tmp_path, kind):
    options = {"exclusive": True} if kind == "exclusive" else {"queries": torch.ones(4, 3)}
    with pytest.raises(UserError, match="has no effect"):
        with_thresholds(tmp_path / "t.txt", Classes(TAGS, **options), "raw")


def test_a_score_at_its_threshold_is_not_above_it(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("0\n0.65\n0.65\n1\n")
    limits = torch.tensor(with_thresholds(path, Classes(TAGS), "raw").thresholds)
    level = torch.tensor([0, 0.65, torch.nextafter(torch.tensor(0.65), torch.tensor(1.0)), 1])
    assert (level >= limits).tolist() == [False, False, True, False]


def test_thresholds_of_a_file_keep_calibrated_scores(tmp_path):
    (tmp_path / "all.txt").write_text("0.25\n" * 4)
    (tmp_path / "one.csv").write_text("class,threshold\ntree,0.125\n")
    given = with_thresholds(tmp_path / "all.txt", Classes(TAGS), "raw")
    fitted = replace(given, slopes=(2.0,), images=20, objective="f1", file=None)
    mixed = with_thresholds(tmp_path / "one.csv", Classes(TAGS), "raw", fitted)
    assert mixed.thresholds == pytest.approx((0.25, 0.25, 0.25, 0.125))
    assert (mixed.slopes, mixed.images, mixed.reason) == ((2.0,), 20, "from one.csv")


# zoo:


@pytest.fixture
def zoo(hub, tmp_path, monkeypatch, file):
    """A hub with a file of weights, and an address with the two lists."""
    released = RELEASED["ram_plus_swin_l_384"]
    content = file.read_bytes()
    hub.repositories[released.repository] = fake_hub.Repository()
    hub.repositories[released.repository].commit({released.file: content})
    lists = "authors/lists"
    hub.repositories[lists] = fake_hub.Repository()
    hub.repositories[lists].commit(LISTS)
    hashes = {name: hashlib.sha256(text).hexdigest() for name, text in LISTS.items()}
    monkeypatch.setattr(sources, "TAG_LISTS", hashes)
    monkeypatch.setattr(sources, "_RAM_LISTS", f"{hub.address}/{lists}/resolve/main/")
    sha256 = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(RELEASED, "ram_plus_swin_l_384", released._replace(sha256=sha256))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return hub


def test_the_weights_are_fetched_from_the_hub_with_the_lists_beside_them(zoo):
    loaded = load_model("zoo:ram_plus_swin_l_384")
    assert loaded.classes.names == TAGS
    assert loaded.calibration.file == TAG_THRESHOLDS
    assert loaded.path.parent.name == "zoo"
    assert known_hashes(loaded.path) == [RELEASED["ram_plus_swin_l_384"].sha256]

    # Once: the second time nothing is asked.
    zoo.asked.clear()
    assert local("zoo:ram_plus_swin_l_384") == loaded.path
    assert zoo.asked == []
    # A file that is not the published one is damaged.
    with loaded.path.open("r+b") as opened:
        opened.write(b"x")
    with pytest.raises(CheckpointError, match="is damaged: its sha256 is not the one in"):
        load_model("zoo:ram_plus_swin_l_384")


def test_an_interrupted_download_goes_on(zoo, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    chunk = huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE
    zoo.cut = 2 * chunk + 1
    with pytest.raises(CheckpointError, match="as /path/to/ram_plus_swin_large"):
        local("zoo:ram_plus_swin_l_384")
    zoo.cut, zoo.ranges[:] = None, []
    path = local("zoo:ram_plus_swin_l_384")
    assert zoo.ranges == [f"bytes={2 * chunk}-"]
    assert known_hashes(path) == [torch_files.sha256_of(path)]

    # The process was killed after the last byte, or the part is of another file.
    for content in (path.read_bytes(), b"x" * 100):
        path.rename(path.with_name(path.name + ".part"))
        path.with_name(path.name + ".part").write_bytes(content)
        if content == b"x" * 100:
            with pytest.raises(CheckpointError, match="not the published one"):
                local("zoo:ram_plus_swin_l_384")
        assert local("zoo:ram_plus_swin_l_384") == path


def test_lists_that_cannot_be_had_are_a_warning(zoo, monkeypatch, caplog):
    monkeypatch.setitem(sources.TAG_LISTS, TAG_LIST, "0" * 64)
    monkeypatch.setattr(sources, "TAG_LISTS", sources.TAG_LISTS | {"none.txt": "0" * 64})
    with caplog.at_level(logging.WARNING, "mldec"):
        local("zoo:ram_plus_swin_l_384")
    assert "not the published one" in caplog.text
    assert "none.txt (" in caplog.text
    assert "or pass --class-names FILE and --thresholds FILE" in caplog.text
