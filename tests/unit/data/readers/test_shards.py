"""Reading a packed data set; that its images equal the files is tested with the script."""

import pickle

import numpy as np
import pytest
import torch
from packed import DENSE, FIRST_GREY, change_index, index_arrays, picture, write_packed
from readers import targets
from support import made, one_line

from mldec.data.readers import shards
from mldec.data.readers.shards import load_shards
from mldec.data.types import fixed_sample
from mldec.errors import DataError

LOGITS = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0]])  # probability 0.73 if true
TRUTH = torch.tensor([[1, 0, 0], [0, 1, 0]])


@pytest.fixture
def root(tmp_path):
    write_packed(tmp_path / "packed")
    return tmp_path / "packed"


def test_images_targets_and_classes(root):
    data = made(shards, root=str(root), image_size=6, augment="none", cutout=0)
    for name, split in (("train", data.train), ("val", data.val)):
        assert split.classes.names == ("a", "b", "c")
        assert split.classes.word_vectors.tolist() == [[0, 1], [2, 3], [4, 5]]
        assert targets(split) == DENSE.tolist()
        for index in range(4):
            image, _ = fixed_sample(split.dataset, index)
            assert image[:, 0, 0].tolist() == [FIRST_GREY[name] + index, 50, 100]
    assert data.val.dataset.name(2) == f"{root / 'val' / 'shard-000001.tar'}, image 000000002"
    again = pickle.loads(pickle.dumps(data.val.dataset))  # as for a spawned worker
    assert torch.equal(fixed_sample(again, 3)[0], fixed_sample(data.val.dataset, 3)[0])


@pytest.mark.parametrize(
    ("wanted", "numbers"), [([3, 0], [3, 0]), ([True, False, False, True], [0, 3])]
)
def test_some_of_the_images_keep_their_content_name_and_label(root, wanted, numbers):
    some = load_shards(root / "val").select(np.array(wanted))
    contents = [some.storage.content(index) for index in range(2)]
    assert contents == [picture(100 + number) for number in numbers]
    assert some.labels.dense().tolist() == DENSE[numbers].tolist()
    last = some.select(np.array([numbers.index(3)])).storage
    assert last.content(0) == picture(103)
    assert last.name(0) == f"{root / 'val' / 'shard-000001.tar'}, image 000000003"


@pytest.mark.parametrize(
    ("changed", "metric"),
    [({"rest": 0}, "mAP"), ({}, "mAP_partial"), ({"exclusive": True, "rest": 0}, "top1")],
)
def test_the_evaluator_is_that_of_the_labels(root, changed, metric):
    change_index(root, **changed)
    evaluator = made(shards, root=str(root)).evaluator()
    evaluator.update(LOGITS, TRUTH)
    assert next(iter(evaluator.compute())) == metric


# Faults


def test_a_folder_or_a_split_that_is_absent(root):
    with pytest.raises(DataError, match="is not a folder"):
        made(shards, root=str(root / "nowhere"))
    with pytest.raises(DataError, match=r"test/index\.npz cannot be used \(No such file"):
        made(shards, root=str(root), val="test")
    (root / "train" / "index.npz").unlink()
    data = made(shards, root=str(root))
    assert len(data.val.dataset) == 4  # an evaluation needs no training files
    with pytest.raises(DataError, match=r"train/index\.npz cannot be used"):
        _ = data.train


def test_a_damaged_index(root):
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
        with pytest.raises(DataError, match=r"index\.npz cannot be used .*pack the split again"):
            load_shards(root / "val")


def test_a_shard_that_is_cut_absent_or_damaged(root):
    shard = root / "val" / "shard-000001.tar"
    whole = shard.read_bytes()
    storage = load_shards(root / "val").storage
    seen = []
    storage.verify(lambda numbers: seen.extend(numbers) or numbers)
    assert seen == [0, 1]

    shard.write_bytes(whole[:-1] + b"\1")  # where no image and no tar reader looks
    with pytest.raises(DataError, match=r"shard-000001\.tar is damaged: its sha256 is not"):
        storage.verify()
    shard.write_bytes(whole[:600])
    with pytest.raises(DataError, match="has 600 bytes instead of"):
        load_shards(root / "val")
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-000001.tar cannot be read"):
        load_shards(root / "val")


def test_the_command_compares_every_byte_with_the_index(cli, root):
    arguments = ("check_data", "data=shards", f"data.root={root}", "train.workers=0")
    status, _, err = cli(*arguments)
    assert status == 0, err
    shard = root / "val" / "shard-000001.tar"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    status, _, err = cli(*arguments)
    assert status == 1
    one_line(err, f"{shard} is damaged: its sha256 is not that of the index")
