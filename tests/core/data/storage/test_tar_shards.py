"""Images in tar shards, and the index of them, which is not trusted."""

import hashlib
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed import DENSE, change_index, index_arrays, picture, write_packed, write_tar

from mldec.data.readers.shards import load_shards
from mldec.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_packed(tmp_path / "packed")
    return tmp_path / "packed"


def test_images_and_labels(root: Path) -> None:
    images = load_shards(root / "val")
    assert images.classes == ("a", "b", "c")
    assert images.labels.dense().tolist() == DENSE.tolist()
    contents = [images.storage.content(index) for index in range(4)]
    assert contents == [picture(100 + index) for index in range(4)]
    assert not images.storage.absent().any()


@pytest.mark.parametrize(
    ("wanted", "numbers"), [([3, 0], [3, 0]), ([True, False, False, True], [0, 3])]
)
def test_some_of_the_images_keep_their_content_name_and_label(
    root: Path, wanted: list[Any], numbers: list[int]
) -> None:
    some = load_shards(root / "val").select(np.array(wanted))

    contents = [some.storage.content(index) for index in range(2)]
    assert contents == [picture(100 + number) for number in numbers]
    assert some.labels.dense().tolist() == DENSE[numbers].tolist()

    last = some.select(np.array([numbers.index(3)])).storage
    assert last.content(0) == picture(103)
    assert last.name(0) == f"{root / 'val' / 'shard-000001.tar'}, image 000000003"


def test_the_shards_are_held_to_their_checksums(root: Path) -> None:
    storage = load_shards(root / "val").storage
    seen = []

    def progress(numbers):
        seen.extend(numbers)
        return numbers

    storage.verify(progress)
    assert seen == [0, 1]
    shard = root / "val" / "shard-000001.tar"
    content = bytearray(shard.read_bytes())
    content[-1] = 1  # behind the end of the archive, where no image and no tar reader looks
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"shard-000001\.tar is damaged: its sha256 is not"):
        storage.verify()


@pytest.mark.parametrize(
    ("member", "kind"),
    [
        ("/etc/cron.d/000000002.png", tarfile.REGTYPE),
        ("../../000000002.png", tarfile.REGTYPE),
        ("000000002.png", tarfile.SYMTYPE),
        ("000000002.png", tarfile.LNKTYPE),
    ],
)
def test_a_hostile_tar_is_refused_whatever_its_checksum(
    root: Path, member: str, kind: bytes
) -> None:
    shard = root / "val" / "shard-000001.tar"
    index = index_arrays(root / "val")
    write_tar(shard, {member: picture(1), "000000003.png": picture(2)}, kind)
    index["bytes"][1] = shard.stat().st_size
    index["offsets"][2:], index["sizes"][2:] = 512, 1
    index["sha256"][1] = hashlib.sha256(shard.read_bytes()).hexdigest()
    np.savez(root / "val" / "index.npz", **index)
    with pytest.raises(DataError, match=r"is refused: its member .* is no plain file of an image"):
        load_shards(root / "val").storage.verify()


def test_a_shard_that_is_cut_absent_or_a_link(root: Path) -> None:
    shard = root / "val" / "shard-000001.tar"
    whole = shard.read_bytes()
    storage = load_shards(root / "val").storage
    shard.write_bytes(whole[:600])
    with pytest.raises(DataError, match="is cut short; pack it again"):  # while a run goes on
        storage.content(3)
    with pytest.raises(DataError, match="has 600 bytes instead of"):  # at the start of another
        load_shards(root / "val")
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-000001.tar is absent"):
        load_shards(root / "val")
    (root / "elsewhere").write_bytes(whole)
    shard.symlink_to(root / "elsewhere")
    with pytest.raises(DataError, match=r"shard-000001.tar is a link"):
        load_shards(root / "val")
    with pytest.raises(DataError, match="cannot be read"):
        storage.content(3)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../train/shard-000001.tar", "sub/shard-000001.tar", "shard-1.tar", ""]
)
def test_an_index_names_nothing_but_shards(root: Path, name: str) -> None:
    change_index(root, shards=np.array(["shard-000000.tar", name]))
    with pytest.raises(DataError, match="is not the name of a shard"):
        load_shards(root / "val")


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
def test_an_index_that_cannot_be_is_refused(
    root: Path, changed: dict[str, Any], message: str
) -> None:
    change_index(root, **changed)
    with pytest.raises(DataError, match=message) as caught:
        load_shards(root / "val")
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
            load_shards(root / "val")
    np.savez(index, classes=np.array(["a"]))
    with pytest.raises(DataError, match="is no index of shards"):
        load_shards(root / "val")
    np.savez(index, **{**index_arrays(root / "val"), "classes": np.array([object()])})
    with pytest.raises(DataError, match="cannot be read"):
        load_shards(root / "val")
    index.unlink()
    with pytest.raises(DataError, match="the split is not packed, or not to its end"):
        load_shards(root / "val")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"classes": np.array(["a", "b\x1b", "c"])},
            r"the name 'b.x1b' of class 1 has the control character U\+001B",
        ),
        ({"classes": np.array(["a", "b", "a"])}, "the classes 0 and 2 are both called 'a'"),
        ({"classes": np.array([1, 2, 3])}, "its classes are of another type"),
        ({"shards": np.array("shard-000000.tar")}, "its shards are of another type"),
        ({"offsets": np.array([0.5, 1, 2, 3])}, "its offsets are of another type"),
        ({"sizes": np.array([[1, 1, 1, 1]])}, "its sizes are of another type"),
        ({"format": np.array([1, 1])}, "its format are of another type"),
        ({"format": "one"}, "its format are of another type"),
        ({"rest": 5}, "the default of its labels is unknown"),
        ({"rest": 0.5}, "its rest are of another type"),
        ({"values": np.full(7, 9, np.int8)}, "a label has an unknown value|do not fit"),
        ({"queries": np.zeros((2, 4), np.float32)}, "its word vectors are not one for each class"),
        (
            {"queries": np.full((3, 2), np.nan, np.float32)},
            "its word vectors are not one for each class",
        ),
        ({"queries": np.zeros(3, "U1")}, "its queries are of another type"),
    ],
)
def test_an_index_of_odd_arrays_is_refused(
    root: Path, changed: dict[str, Any], message: str
) -> None:
    change_index(root, **changed)
    with pytest.raises(DataError, match=message) as caught:
        load_shards(root / "val")
    assert "\n" not in str(caught.value)
