"""Reading a packed data set.

That its images equal the files: test_pack_shards.py; what is refused: test_tar_shards.py.
"""

import hashlib
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed import DENSE, FIRST_GREY, change_index, index_arrays, picture, write_packed, write_tar
from support import made, one_line

from mldec.data.randomness import SampleRandom
from mldec.data.readers.shards import shards
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError, DataError

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_packed(tmp_path / "packed")
    return tmp_path / "packed"


def test_images_targets_and_classes(root: Path) -> None:
    data = made(shards, root=str(root), image_size=6, augment="none", cutout=0)
    for name, split in (("train", data.train), ("val", data.val)):
        assert split.classes.names == ("a", "b", "c")
        assert split.classes.queries is not None
        assert split.classes.queries.tolist() == [[0, 1], [2, 3], [4, 5]]
        assert len(split.dataset) == 4
        for index in range(4):
            image, target = fixed_sample(split.dataset, index)
            assert image[:, 0, 0].tolist() == [FIRST_GREY[name] + index, 50, 100]
            assert target.tolist() == DENSE[index].tolist()
        for index in (4, -1):
            with pytest.raises(IndexError):
                split.dataset.load(index, SampleRandom(0))
    assert data.val.dataset.name(2) == f"{root / 'val' / 'shard-000001.tar'}, image 000000002"
    again = pickle.loads(pickle.dumps(data.val.dataset))  # as for a spawned worker
    assert torch.equal(fixed_sample(again, 3)[0], fixed_sample(data.val.dataset, 3)[0])


@pytest.mark.parametrize(
    ("changed", "metric"),
    [
        ({"rest": 0}, "mAP"),
        ({}, "mAP_partial"),
        ({"exclusive": True, "rest": 0}, "top1"),
    ],
)
def test_the_evaluator_is_that_of_the_labels(
    root: Path, changed: dict[str, Any], metric: str
) -> None:
    change_index(root, **changed)
    evaluator = made(shards, root=str(root)).evaluator()
    logits = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0]])
    evaluator.update(logits, torch.tensor([[1, 0, 0], [0, 1, 0]]))
    assert next(iter(evaluator.compute())) == metric


def test_settings_reach_the_evaluator_and_the_transforms(root: Path) -> None:
    change_index(root, rest=0)
    evaluator = made(shards, root=str(root), threshold=0.75).evaluator()
    logits = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0]])  # probability 0.73 if true
    evaluator.update(logits, torch.tensor([[1, 0, 0], [0, 1, 0]]))
    assert evaluator.compute()["OR"] == 0
    change_index(root, rest=0, exclusive=True)
    evaluator = made(shards, root=str(root), top_k=2).evaluator()
    evaluator.update(torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[1, 0, 0]]))
    assert evaluator.compute()["top2"] == 100
    data = made(
        shards, root=str(root), image_size=6, interpolation="random", test_crop=0.9, erase=1.0
    )
    assert (data.transform.interpolation, data.transform.crop) == ("bicubic", 0.9)
    for wrong in ({"threshold": 2.0}, {"top_k": 1}, {"test_crop": 2.0}, {"erase": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", ".")):
            made(shards, root=str(root), **wrong)


def test_a_bad_image_is_named(root: Path) -> None:
    members = {"000000002.png": b"nothing", "000000003.png": picture(3)}
    write_tar(root / "val" / "shard-000001.tar", members)
    change_index(root)
    dataset = made(shards, root=str(root)).val.dataset
    with pytest.raises(DataError, match=r"shard-000001\.tar, image 000000002: not an image"):
        fixed_sample(dataset, 2)
    assert fixed_sample(dataset, 3)[1].tolist() == [1, 1, 1]


def test_a_folder_or_a_split_that_is_absent(root: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        made(shards, root=str(root / "nowhere"))
    with pytest.raises(DataError, match="the split is not packed, or not to its end"):
        made(shards, root=str(root), val="test")
    (root / "train" / "index.npz").unlink()
    data = made(shards, root=str(root))
    assert len(data.val.dataset) == 4  # an evaluation needs no training files
    with pytest.raises(DataError, match="the split is not packed, or not to its end"):
        _ = data.train


# The command that holds the shards to the index


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
    index = index_arrays(root / "val")
    write_tar(shard, {member: picture(1), "000000003.png": picture(2)}, kind)
    index["bytes"][1] = shard.stat().st_size
    index["offsets"][2:], index["sizes"][2:] = 512, 1
    index["sha256"][1] = hashlib.sha256(shard.read_bytes()).hexdigest()
    np.savez(root / "val" / "index.npz", **index)
    status, _, err = check(cli, root)
    assert status == 1
    one_line(err, f"{shard} is refused: its member", "is no plain file of an image")
