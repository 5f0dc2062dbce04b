"""Torch data sets in memory, and labels that are numbers."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from mldec.data.columns import Rules
from mldec.data.readers import dataset
from mldec.data.readers.hugging_face import is_dataset, is_single_label
from mldec.data.sampling import SampleRandom
from mldec.data.splits import HoldOut
from mldec.data.transforms import EvalTransform
from mldec.errors import ConfigError, DataError

ABC = ["a", "b", "c"]
# Three targets of each form, their labels and the given classes.
ROWS = [[0, 1, 0], [1, 0, 1], [0, 0, 0]]
TARGETS = {
    "indices": ([1, np.int64(0), torch.tensor(2)], [[0, 1, 0], [1, 0, 0], [0, 0, 1]], ABC),
    "lists": ([[1], torch.tensor([0, 2]), []], ROWS, ABC),
    "vectors": ([np.array(row) for row in ROWS], ROWS, ABC),
    "floats": ([torch.tensor(row).float() for row in ROWS], ROWS, ABC),
    "booleans": ([[value == 1 for value in row] for row in ROWS], ROWS, ABC),
    "unknown": ([[1, 0, -1], [0, 0, 0], [-1, 1, 1]], [[1, 0, -1], [0, 0, 0], [-1, 1, 1]], ABC),
    "names": (["b", ["a", "c"], ()], ROWS, ABC),
    "a name": (["b, x; y", "a", "b, x; y"], [[0, 1], [1, 0], [0, 1]], None),
    "numbers as names": ([7, 10, 7], [[0, 1], [1, 0], [0, 1]], None),
}


class Pairs(Dataset):
    def __init__(self, targets, images=None):
        self.targets = targets
        self.images = images or list(range(len(targets)))

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, row):
        image = self.images[row]
        if isinstance(image, int):
            image = torch.full((3, 4, 6), image, dtype=torch.uint8)
        return image, self.targets[row]


ALL = HoldOut(val_fraction=0)


def load(data, part="train", division=ALL, **arguments):
    return dataset(in_memory=data, division=division, **arguments).load(part, None)


@pytest.mark.parametrize(("targets", "labels", "classes"), TARGETS.values(), ids=TARGETS)
def test_targets_of_a_torch_data_set(targets, labels, classes):
    images = load({"train": Pairs(targets), "val": Pairs(targets[:1])}, classes=classes)
    assert images.labels.dense().tolist() == labels
    if classes:
        assert images.classes == tuple(classes)


def test_pixels_of_all_kinds_of_images_are_kept(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(array).save(path)
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    kinds = [array, tensor, Image.fromarray(array), Image.open(path), path, path.read_bytes()]
    images = load({"train": Pairs(["x"] * len(kinds), kinds)})
    images = replace(images, transform=EvalTransform(image_size=9))
    expected = images.transform(Image.fromarray(array))
    for index in range(len(kinds)):
        image, _ = images.load(index, SampleRandom(0))
        assert image.equal(expected), index


def test_held_out_images_do_not_depend_on_their_order():
    order = np.random.default_rng(0).permutation(40)
    targets = np.arange(40) % 3
    hold_out = partial(load, classes=ABC, division=HoldOut(val_fraction=0.3))
    held_out = []
    for rows in (np.arange(40), order):
        data = Pairs(targets[rows], rows.tolist())
        parts = [hold_out(data, part) for part in ("train", "val")]
        numbers = [[int(rows[row]) for row in images.storage.numbers] for images in parts]
        assert sorted(numbers[0] + numbers[1]) == list(range(40))
        held_out.append(set(numbers[1]))
    assert held_out[0] == held_out[1]
    assert 10 <= len(held_out[0]) <= 14


def test_unused_splits_are_not_read():
    class Broken(Pairs):
        def __getitem__(self, row):
            raise AssertionError

    data = {"Train": Pairs(["a", "b"]), "validation": Pairs(["a"]), "test": Broken(["?"])}
    source = dataset(in_memory=data)
    assert [len(source.load(part, None)) for part in ("train", "val")] == [2, 1]
    assert source.load("val", None).name(0) == "validation[0]"
    with pytest.raises(DataError, match=r"data\.val=test"):
        load({"train": Pairs(["a"]), "test": Pairs(["a"])}, "val")
    with pytest.raises(DataError, match="extra"):
        load({"extra": Pairs(["a"])})


def test_keys_are_those_of_the_content():
    class Counted(Pairs):
        reads = 0

        def __getitem__(self, row):
            Counted.reads += 1
            return super().__getitem__(row)

    images = load({"train": Counted(["a", "b", "a"], [5, 6, 5])})
    chosen = images.select(np.array([2, 1]))
    Counted.reads = 0
    keys = images.storage.keys
    assert np.array_equal(keys[0], keys[2])
    assert not np.array_equal(keys[0], keys[1])
    assert np.array_equal(chosen.storage.keys, keys[[2, 1]])
    assert Counted.reads == 3  # the keys of subsets are not computed again
    assert chosen.name(0) == "train[2]"


def test_single_labels_are_detected():
    rules = Rules()
    assert is_single_label(Pairs([1, 2]), rules)
    assert is_single_label({"val": Pairs([torch.tensor(1)])}, rules)
    for target in ("a", [1], [0, 1], torch.tensor([0.0, 1.0]), True, 0.5):
        assert not is_single_label(Pairs([target]), rules), target
    with pytest.raises(DataError, match="split train, row 1"):
        load({"train": Pairs([0, [0, 1]])}, classes=["a", "b"], exclusive=True)


class Stream(IterableDataset):
    def __iter__(self):
        yield from Pairs(["a"])


class Triples(Pairs):
    def __getitem__(self, row):
        return 1, 2, 3


@pytest.mark.parametrize(
    ("data", "arguments", "words"),
    [
        (Pairs([]), {}, "no rows"),
        (Stream(), {}, "Stream"),
        (Triples(["a"]), {}, r"data\[0\]"),
        (Pairs([3]), {"classes": ABC}, r"\[3\].*3 classes"),
        (Pairs([[0.3, 0.7, 0]]), {"classes": ABC}, r"0\.3"),
        (Pairs([[0, 1]] * 3), {"classes": ABC}, r"data\.classes"),
        (Pairs([[0, 1]] * 3), {}, r"data\.classes"),
        (Pairs([{"a": 1}]), {}, "row 0"),
    ],
)
def test_unsupported_data_sets_end_in_a_short_message(data, arguments, words):
    with pytest.raises(DataError, match=words) as error:
        dataset(in_memory=data, **arguments)
    assert len(str(error.value)) < 200


def test_images_of_other_types_name_their_row():
    images = load({"train": Pairs(["a"], [torch.rand(3, 4, 4)])})
    with pytest.raises(DataError, match=r"train\[0\].*uint8"):
        images.storage.content(0)


def test_a_data_set_without_a_name_must_be_passed_in_python():
    with pytest.raises(ConfigError, match=r"data\.name.*data="):
        dataset()
    assert not any(map(is_dataset, ([], {}, {"a": 1}, [("a.png", "a")], "a", None)))
