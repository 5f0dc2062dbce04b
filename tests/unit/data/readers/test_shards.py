"""Packed datasets. The script test compares their images with the files."""

import pickle

import numpy as np
import pytest
import torch
from packed import DENSE, FIRST_GRAY, change_index, index_arrays, picture, write_packed
from readers import Reader, targets
from support import made, one_line

from mldec.data.readers import shards
from mldec.data.readers.tar_shards import load_shards
from mldec.data.types import fixed_sample

LOGITS = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0]])
TRUTH = torch.tensor([[1, 0, 0], [0, 1, 0]])


@pytest.fixture
def root(tmp_path):
    write_packed(tmp_path / "packed")
    return tmp_path / "packed"


def test_shards_have_images_targets_and_classes(root):
    data = made(shards, root=str(root), image_size=6, augment="none", cutout=0)
    for name, split in (("train", data.train), ("val", data.val)):
        assert split.classes.names == ("a", "b", "c")
        assert split.classes.word_vectors.tolist() == [[0, 1], [2, 3], [4, 5]]
        assert targets(split) == DENSE.tolist()
        for index in range(4):
            image, _ = fixed_sample(split.dataset, index)
            assert image[:, 0, 0].tolist() == [FIRST_GRAY[name] + index, 50, 100]
    assert data.val.dataset.name(2) == f"{root / 'val' / 'shard-000001.tar'}, image 000000002"
    again = pickle.loads(pickle.dumps(data.val.dataset))
    assert torch.equal(fixed_sample(again, 3)[0], fixed_sample(data.val.dataset, 3)[0])


@pytest.mark.parametrize(
    ("images", "numbers"), [([3, 0], [3, 0]), ([True, False, False, True], [0, 3])]
)
def test_subset_keeps_content_name_and_label(root, images, numbers):
    subset = load_shards(root / "val").select(np.array(images))
    contents = [subset.storage.content(index) for index in range(2)]
    assert contents == [picture(100 + number) for number in numbers]
    assert subset.labels.dense().tolist() == DENSE[numbers].tolist()
    last = subset.select(np.array([numbers.index(3)])).storage
    assert last.content(0) == picture(103)
    assert last.name(0) == f"{root / 'val' / 'shard-000001.tar'}, image 000000003"


@pytest.mark.parametrize(
    ("changed", "metric"),
    [({"rest": 0}, "mAP"), ({}, "mAP_partial"), ({"exclusive": True, "rest": 0}, "top1")],
)
def test_labels_determine_metric(root, changed, metric):
    change_index(root, **changed)
    evaluator = made(shards, root=str(root)).evaluator()
    evaluator.update(LOGITS, TRUTH)
    assert next(iter(evaluator.compute())) == metric


def test_absent_folder_or_split_is_named(root):
    build = Reader(shards, root)
    assert "nowhere" in build.fault(root=str(root / "nowhere"))
    assert "test/index.npz" in build.fault(val="test")
    (root / "train" / "index.npz").unlink()
    assert len(made(shards, root=str(root)).val.dataset) == 4  # needs no training files
    assert "train/index.npz" in build.fault()


def test_damaged_index_is_named(root):
    index = root / "val" / "index.npz"
    objects = {**index_arrays(root / "val"), "classes": np.array([object()])}
    for write in (
        lambda: index.write_bytes(index.read_bytes()[:500]),
        lambda: index.write_bytes(pickle.dumps({"offsets": 1})),
        lambda: np.savez(index, classes=np.array(["a"])),
        lambda: np.savez(index, **objects),
        lambda: change_index(root, format=2),
    ):
        write()
        assert str(index) in Reader(shards, root).fault()


def test_damaged_shard_is_named(cli, root):
    shard = root / "val" / "shard-000001.tar"
    whole = shard.read_bytes()
    verified = []
    load_shards(root / "val").storage.verify(lambda numbers: verified.extend(numbers) or numbers)
    assert verified == [0, 1]
    arguments = ("check_data", "data=shards", f"data.root={root}", "train.workers=0")
    assert cli(*arguments)[0] == 0

    # Only the hash detects a change after the last image.
    shard.write_bytes(whole[:-1] + b"\1")
    assert len(load_shards(root / "val")) == 4
    status, _, err = cli(*arguments)
    assert status == 1
    one_line(err, str(shard))

    for content in (whole[:600], None):
        shard.write_bytes(content) if content else shard.unlink()
        assert str(shard) in Reader(shards, root).fault()
