import os
import pickle
import struct
import warnings
from io import BytesIO
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from support import made

from mldec.data.readers.cars_cifar import cifar100
from mldec.data.transforms import EvalTransform
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError, DataError

NAMES = ["apple", "aquarium_fish", "baby"]
LABELS = {"train": [2, 0, 1, 1], "test": [1, 2]}


class Python2(pickle._Pickler):
    """Write as Python 2 did for the files from Toronto: byte strings, and 0 and 1 as flags."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_text(self, value):
        data = value.encode("latin1") if isinstance(value, str) else value
        self.write(b"T" + struct.pack("<i", len(data)) + data)
        self.memoize(value)

    def save_flag(self, value):
        self.save_long(int(value))

    dispatch[str] = dispatch[bytes] = save_text
    dispatch[bool] = save_flag


def python2(content):
    stream = BytesIO()
    Python2(stream, 2).dump(content)
    return stream.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def content(split):
    labels = LABELS[split]
    pixels = np.random.default_rng(len(labels)).integers(
        0, 256, (len(labels), 3072), dtype=np.uint8
    )
    return {
        "data": pixels,
        "fine_labels": labels,
        "coarse_labels": [0] * len(labels),
        "batch_label": split,
    }


def write(folder, name, data, form=python2):
    (folder / name).write_bytes(form(data))


@pytest.fixture(
    params=[python2, lambda data: pickle.dumps(data, protocol=3)], ids=["python2", "python3"]
)
def root(tmp_path, request):
    folder = tmp_path / "cifar100" / "cifar-100-python"
    folder.mkdir(parents=True)
    for split in LABELS:
        write(folder, split, content(split), request.param)
    write(folder, "meta", {"fine_label_names": NAMES, "coarse_label_names": ["all"]}, request.param)
    return tmp_path / "cifar100"


def build(root, **arguments):
    data = made(cifar100, root=str(root), image_size=48, **arguments)
    assert data.train.classes == data.val.classes
    return data


def test_pictures_and_labels(root):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = build(root)
    assert data.val.classes.names == tuple(NAMES)
    assert data.val.classes.exclusive
    for split, part in (("train", data.train), ("test", data.val)):
        assert part.dataset.labels.dense().argmax(1).tolist() == LABELS[split]
        assert len(part.dataset) == len(LABELS[split])
    image, target = fixed_sample(data.val.dataset, 1)
    assert target.tolist() == [0, 0, 1]
    red, green, blue = content("test")["data"][1].reshape(3, 32, 32)
    picture = Image.fromarray(np.dstack([red, green, blue]))
    assert torch.equal(image, EvalTransform(image_size=48, interpolation="bicubic")(picture))
    assert data.val.dataset.name(1) == f"picture 1 of {root / 'cifar-100-python' / 'test'}"
    again = pickle.loads(pickle.dumps(data.val.dataset))
    assert fixed_sample(again, 1)[1].tolist() == [0, 0, 1]


def test_the_inner_folder_is_taken_too(root):
    assert len(build(root / "cifar-100-python").train.dataset) == 4


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_hostile_pickle_does_nothing(root, tmp_path):
    """Trap 19."""
    hostile = pickle.dumps({"data": Hostile(tmp_path / "done"), "fine_labels": [1]})
    pickle.loads(hostile)
    assert (tmp_path / "done").is_dir()  # it does what it says where nobody looks
    (tmp_path / "done").rmdir()
    for name in ("train", "meta"):
        (root / "cifar-100-python" / name).write_bytes(hostile)
        with pytest.raises(DataError, match=r"is refused or damaged \(it names (posix|nt)\.mkdir"):
            build(root)
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize(
    "name", ["builtins eval", "numpy load", "numpy.core.multiarray fromfile", "os system"]
)
def test_only_what_arrays_need_may_be_named(root, name):
    module, function = name.split()
    (root / "cifar-100-python" / "test").write_bytes(f"c{module}\n{function}\n.".encode())
    with pytest.raises(DataError, match="which no array needs"):
        _ = build(root)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"data": np.zeros((2, 3071), np.uint8)}, "not uint8 of 3072 values"),
        ({"data": np.zeros((2, 3072), np.float32)}, "not uint8"),
        ({"data": [1, 2]}, "not uint8"),
        ({"fine_labels": [1]}, "not one label per picture"),
        ({"fine_labels": [1, 3]}, "the label 3 is not below 3"),
        ({"fine_labels": [1, "x"]}, "the label 'x'"),
    ],
)
def test_wrong_content(root, change, expected):
    write(
        root / "cifar-100-python",
        "test",
        {**content("test"), **change},
        pickle.dumps if "x" in expected else python2,
    )
    with pytest.raises(DataError, match=expected) as caught:
        build(root)
    assert "see DATASETS.md, section CIFAR-100" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_and_missing_files(root):
    folder = root / "cifar-100-python"
    whole = (folder / "test").read_bytes()
    for data in (b"", whole[: len(whole) // 2], b"<html>", pickle.dumps([1, 2])):
        (folder / "test").write_bytes(data)
        with pytest.raises(DataError, match=r"test is (refused or damaged|not a CIFAR-100 file)"):
            build(root)
    write(folder, "meta", {"label_names": NAMES})
    with pytest.raises(DataError, match="no list of 'fine_label_names'"):
        build(root)
    (folder / "meta").unlink()
    with pytest.raises(DataError, match="meta cannot be read"):
        build(root)


def test_top_k_above_the_number_of_classes(root):
    with pytest.raises(ConfigError, match="there are 3"):
        build(root, top_k=5)
