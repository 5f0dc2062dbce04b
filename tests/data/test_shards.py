"""Reading shards: what is refused, and what travels in an index. That images equal the files: test_pack_shards.py."""

import hashlib
import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import one_line

from mldec.data.shards import shards
from mldec.errors import ConfigError, DataError

Cli = Callable[..., tuple[int, str, str]]
DENSE = np.array([[1, -1, 0], [0, 1, -1], [-1, -1, -1], [1, 1, 1]], np.int8)


def picture(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), (value, 50, 100)).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, members: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.type = len(content) if kind == tarfile.REGTYPE else 0, kind
            member.linkname = "/etc/passwd" if kind != tarfile.REGTYPE else ""
            tar.addfile(member, io.BytesIO(content))


def arrays(folder: Path) -> dict[str, Any]:
    """An index of the tar files in a folder, made with the tar reader of Python."""
    tars = sorted(folder.glob("*.tar"))
    members = []
    for path in tars:
        with tarfile.open(path) as tar:
            members.append([member for member in tar if not member.name.endswith("json")])
    said = DENSE != -1
    return {
        "shards": np.array([path.name for path in tars]),
        "sha256": np.array([hashlib.sha256(path.read_bytes()).hexdigest() for path in tars]),
        "bytes": np.array([path.stat().st_size for path in tars]),
        "first": np.cumsum([0, *map(len, members)]),
        "offsets": np.array([member.offset_data for part in members for member in part]),
        "sizes": np.array([member.size for part in members for member in part]),
        "starts": np.cumsum([0, *said.sum(1)]),
        "label_classes": np.nonzero(said)[1].astype(np.int32),
        "values": DENSE[said],
        "rest": -1,
        "classes": np.array(["a", "b", "c"]),
        "exclusive": False,
        "queries": np.arange(6, dtype=np.float32).reshape(3, 2),
        "format": 1,
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two splits of four images in two shards."""
    for split, base in (("train", 0), ("val", 100)):
        folder = tmp_path / "packed" / split
        folder.mkdir(parents=True)
        for number in range(2):
            pair = range(2 * number, 2 * number + 2)
            members = {f"{index:09}.png": picture(base + index) for index in pair}
            write_tar(folder / f"shard-{number:06}.tar", {**members, f"{pair[0]:09}.json": b"{}"})
        np.savez(folder / "index.npz", **arrays(folder))
    return tmp_path / "packed"


def change(root: Path, **changed: Any) -> None:
    np.savez(root / "val" / "index.npz", **{**arrays(root / "val"), **changed})


def test_images_targets_and_classes(root: Path) -> None:
    data = shards(root=str(root), image_size=6, augment="none", cutout=0)
    for split, base in ((data.train, 0), (data.val, 100)):
        assert split.classes.names == ("a", "b", "c")
        assert split.classes.queries is not None
        assert split.classes.queries.tolist() == [[0, 1], [2, 3], [4, 5]]
        assert len(split.dataset) == 4
        for index in range(4):
            image, target = split.dataset[index]
            assert image[:, 0, 0].tolist() == [base + index, 50, 100]
            assert target.tolist() == DENSE[index].tolist()
        with pytest.raises(IndexError):
            split.dataset[4]
        with pytest.raises(IndexError):
            split.dataset[-1]
    assert data.val.dataset.name(2) == f"{root / 'val' / 'shard-000001.tar'}, image 000000002"
    again = pickle.loads(pickle.dumps(data.val.dataset))  # as a worker gets it where there is no fork
    assert torch.equal(again[3][0], data.val.dataset[3][0])


@pytest.mark.parametrize(
    ("changed", "metric"),
    [
        ({"rest": 0}, "mAP"),
        ({}, "mAP_partial"),
        ({"exclusive": True, "rest": 0}, "top1"),
    ],
)
def test_the_evaluator_is_that_of_the_labels(root: Path, changed: dict[str, Any], metric: str) -> None:
    change(root, **changed)
    evaluator = shards(root=str(root)).evaluator()
    evaluator.update(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.tensor([[1, 0], [0, 1]]))
    assert next(iter(evaluator.compute())) == metric


def test_settings_reach_the_evaluator_and_the_transforms(root: Path) -> None:
    change(root, rest=0)
    evaluator = shards(root=str(root), threshold=0.75).evaluator()
    evaluator.update(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.tensor([[1, 0], [0, 1]]))  # probability 0.73
    assert evaluator.compute()["OR"] == 0
    change(root, rest=0, exclusive=True)
    evaluator = shards(root=str(root), top_k=2).evaluator()
    evaluator.update(torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[1, 0, 0]]))
    assert evaluator.compute()["top2"] == 100
    data = shards(root=str(root), image_size=6, interpolation="random", test_crop=0.9, erase=1.0)
    assert (data.transform.interpolation, data.transform.crop) == ("bicubic", 0.9)
    for wrong in ({"threshold": 2.0}, {"top_k": 1}, {"test_crop": 2.0}, {"erase": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", ".")):
            shards(root=str(root), **wrong)


def test_a_bad_image_is_named(root: Path) -> None:
    folder = root / "val"
    write_tar(folder / "shard-000001.tar", {"000000002.png": b"nothing", "000000003.png": picture(3)})
    change(root)
    dataset = shards(root=str(root)).val.dataset
    with pytest.raises(DataError, match=r"shard-000001.tar, image 000000002: not an image"):
        dataset[2]
    assert dataset[3][1].tolist() == [1, 1, 1]


def test_a_shard_that_is_cut_absent_or_a_link(root: Path) -> None:
    shard = root / "val" / "shard-000001.tar"
    whole = shard.read_bytes()
    data = shards(root=str(root))
    dataset = data.val.dataset
    shard.write_bytes(whole[:600])
    with pytest.raises(DataError, match="is cut short; pack it again"):  # while a run goes on
        dataset[3]
    with pytest.raises(DataError, match=r"has 600 bytes instead of"):  # at the start of another
        _ = shards(root=str(root)).val
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-000001.tar is absent"):
        _ = shards(root=str(root)).val
    (root / "elsewhere").write_bytes(whole)
    shard.symlink_to(root / "elsewhere")
    with pytest.raises(DataError, match=r"shard-000001.tar is a link"):
        _ = shards(root=str(root)).val
    with pytest.raises(DataError, match="cannot be read"):
        dataset[3]


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../train/shard-000001.tar", "sub/shard-000001.tar", "shard-1.tar", ""]
)
def test_an_index_names_nothing_but_shards(root: Path, name: str) -> None:
    change(root, shards=np.array(["shard-000000.tar", name]))
    with pytest.raises(DataError, match="is not the name of a shard"):
        _ = shards(root=str(root)).val


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"offsets": np.array([512, 0, 512, 99_999])}, "an image lies outside its shard"),
        ({"offsets": np.array([-1, 0, 512, 512])}, "an image lies outside its shard"),
        ({"sizes": np.array([1, 1, 1, 2**40])}, "an image lies outside its shard"),
        ({"sizes": np.array([1, 1, 1])}, "its arrays do not fit each other"),
        ({"first": np.array([0, 2, 5])}, "its shards do not add up"),
        ({"first": np.array([0, 4, 4])}, "its shards do not add up"),
        ({"label_classes": np.full(8, 3, np.int32)}, "its labels do not fit|out of range"),
        ({"starts": np.array([0, 2, 1, 4, 7])}, "its labels do not fit its images"),
        ({"format": 2}, "is of format 2, not 1"),
    ],
)
def test_an_index_that_cannot_be_is_refused(root: Path, changed: dict[str, Any], message: str) -> None:
    change(root, **changed)
    with pytest.raises(DataError, match=message) as caught:
        _ = shards(root=str(root)).val
    assert "\n" not in str(caught.value)


def test_an_index_that_is_absent_or_none(root: Path) -> None:
    index = root / "val" / "index.npz"
    whole = index.read_bytes()
    for content, message in (
        (whole[: len(whole) // 2], "cannot be read"),
        (b"", "cannot be read"),
        (pickle.dumps({"offsets": 1}), "cannot be read"),
    ):
        index.write_bytes(content)
        with pytest.raises(DataError, match=message):
            _ = shards(root=str(root)).val
    np.savez(index, classes=np.array(["a"]))
    with pytest.raises(DataError, match="is no index of shards"):
        _ = shards(root=str(root)).val
    np.savez(index, **{**arrays(root / "val"), "classes": np.array([object()])})
    with pytest.raises(DataError, match="cannot be read"):
        _ = shards(root=str(root)).val
    index.unlink()
    with pytest.raises(DataError, match="the split is not packed, or not to its end"):
        _ = shards(root=str(root)).val
    with pytest.raises(DataError, match="is not a folder"):
        shards(root=str(root / "nowhere"))


def check(cli: Cli, root: Path) -> tuple[int, str, str]:
    return cli("check_data", "data=shards", f"data.root={root}", "train.workers=0")


def test_the_check_holds_every_byte_to_the_index(cli: Cli, root: Path) -> None:
    status, _, err = check(cli, root)
    assert status == 0, err
    shard = root / "val" / "shard-000001.tar"
    content = bytearray(shard.read_bytes())
    content[-1] = 1  # behind the end of the archive, where no image and no tar reader looks
    shard.write_bytes(content)
    status, _, err = check(cli, root)
    assert status == 1
    one_line(err, f"{shard} is damaged: its sha256 is not that of the index")


@pytest.mark.parametrize(
    ("member", "kind"),
    [
        ("/etc/cron.d/000000002.png", tarfile.REGTYPE),
        ("../../000000002.png", tarfile.REGTYPE),
        ("000000002.png", tarfile.SYMTYPE),
        ("000000002.png", tarfile.LNKTYPE),
    ],
)
def test_the_check_refuses_a_hostile_tar(cli: Cli, root: Path, member: str, kind: bytes) -> None:
    shard = root / "val" / "shard-000001.tar"
    index = arrays(root / "val")
    write_tar(shard, {member: picture(1), "000000003.png": picture(2)}, kind)
    index["bytes"][1] = shard.stat().st_size
    index["offsets"][2:], index["sizes"][2:] = 512, 1
    index["sha256"][1] = hashlib.sha256(shard.read_bytes()).hexdigest()
    np.savez(root / "val" / "index.npz", **index)
    status, _, err = check(cli, root)
    assert status == 1
    one_line(err, f"{shard} is refused: its member", "is no plain file of an image")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"classes": np.array(["a", "b\x1b", "c"])}, r"the name 'b.x1b' of class 1 has the control character U\+001B"),
        ({"classes": np.array(["a", "b", "a"])}, "the classes 0 and 2 are both called 'a'"),
        ({"classes": np.array([1, 2, 3])}, "its classes are of another type"),
        ({"shards": np.array("shard-000000.tar")}, "its shards are of another type"),
        ({"offsets": np.array([0.5, 1, 2, 3])}, "its offsets are of another type"),
        ({"sizes": np.array([[1, 1, 1, 1]])}, "its sizes are of another type"),
        ({"format": np.array([1, 1])}, "its format are of another type"),
        ({"format": "one"}, "its format are of another type"),
        ({"rest": 5}, "the value of the other labels is unknown"),
        ({"rest": 0.5}, "its rest are of another type"),
        ({"values": np.full(7, 9, np.int8)}, "a label has an unknown value|do not fit"),
        ({"queries": np.zeros((2, 4), np.float32)}, "its word vectors are not one for each class"),
        ({"queries": np.full((3, 2), np.nan, np.float32)}, "its word vectors are not one for each class"),
        ({"queries": np.zeros(3, "U1")}, "its queries are of another type"),
    ],
)
def test_an_index_of_odd_arrays_is_refused(root: Path, changed: dict[str, Any], message: str) -> None:
    change(root, **changed)
    with pytest.raises(DataError, match=message) as caught:
        _ = shards(root=str(root)).val
    assert "\n" not in str(caught.value)


def test_an_index_that_is_a_fifo(root: Path) -> None:
    (root / "val" / "index.npz").unlink()
    os.mkfifo(root / "val" / "index.npz")
    with pytest.raises(DataError, match="a FIFO, not a regular file"):
        _ = shards(root=str(root)).val
