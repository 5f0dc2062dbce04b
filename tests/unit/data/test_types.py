"""Stored images, splits, sampling of rare classes, and fingerprints."""

import io
import math
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import pixels
from PIL import Image

from mldec.data.digits import SceneSettings, digits
from mldec.data.fingerprint import check_same, fingerprint
from mldec.data.labels import from_dense, from_entries
from mldec.data.loader import labels_of
from mldec.data.sampling import Sampling, class_aware_factors, draw_images, repeat_factors
from mldec.data.table import Table, encode_paths
from mldec.data.transforms import EvalTransform
from mldec.data.types import (
    Classes,
    Split,
    StoredImages,
    fixed_sample,
    in_folder,
    picture,
)
from mldec.errors import CheckpointError, DataError

NAMES = ("cat", "dog", "cow")
DENSE = np.array([[1, 0, -1], [0, 0, 0], [0, 1, 1], [1, 1, 1]], np.int8)
SMALL = EvalTransform(image_size=8)


class InMemory:
    """Storage of images as bytes."""

    def __init__(self, contents):
        self.contents = contents

    def name(self, index):
        return f"image {index}"

    def content(self, index):
        return self.contents[index]


class Generated:
    """Images that are not stored."""

    def __len__(self):
        return len(DENSE)

    def load(self, index, rng):
        return torch.full((3, 8, 8), index, dtype=torch.uint8), torch.from_numpy(DENSE[index])

    def name(self, index):
        return f"number {index}"


def png(seed):
    file = io.BytesIO()
    Image.fromarray(pixels(8, 8, 3, seed=seed)).save(file, "png")
    return file.getvalue()


def stored(transform=SMALL):
    storage = InMemory([png(seed) for seed in range(4)])
    return StoredImages(storage, from_dense(DENSE), NAMES, transform)


def test_split_has_another_transform_and_its_stored_pictures():
    split = Split(stored(EvalTransform(image_size=4)), Classes(NAMES))
    viewed = split.viewed(EvalTransform(image_size=16))
    assert fixed_sample(viewed.dataset, 1)[0].shape == (3, 16, 16)
    assert fixed_sample(split.dataset, 1)[0].shape == (3, 4, 4)
    assert np.array_equal(np.asarray(picture(split.dataset, 2)), pixels(8, 8, 3, seed=2))

    generated = Split(Generated(), Classes(NAMES))
    assert generated.viewed(SMALL) is generated
    assert np.unique(np.asarray(picture(generated.dataset, 2))) == 2


def test_labels_are_read_from_table_or_from_images():
    dataset = stored(lambda image: pytest.fail("the image was read"))
    assert labels_of(Split(dataset, Classes(NAMES))) is dataset.labels
    assert np.array_equal(labels_of(Split(Generated(), Classes(NAMES))).dense(), DENSE)

    # Labels of newly generated scenes depend only on the seed of the run.
    data = digits(SceneSettings(train_images=40, val_images=2))
    state = random.getstate()
    first = labels_of(data.train, 1).dense()
    assert random.getstate() == state
    random.seed(6)
    assert np.array_equal(labels_of(data.train, 1).dense(), first)
    assert not np.array_equal(labels_of(data.train, 2).dense(), first)


# Image files


FILES = ["a/1.png", "a/2.png", "b/1.png", "3.png", os.fsdecode(b"caf\xe9.png")]


@pytest.fixture
def files(tmp_path):
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(os.fsencode(file))
    labels = from_dense(np.zeros((5, 1), np.int8))
    return in_folder(Table(encode_paths(FILES), labels, ("x",)), tmp_path).storage


def test_files_have_names_and_contents(files, tmp_path):
    assert [files.name(index) for index in range(5)] == [str(tmp_path / file) for file in FILES]
    assert files.content(4) == b"caf\xe9.png"
    assert files.files.dtype.kind == "S"
    assert pickle.loads(pickle.dumps(files)).content(2) == files.content(2)
    subset = files.select(np.array([3, 0]))
    assert [subset.name(index) for index in range(2)] == [files.name(3), files.name(0)]


def test_absent_files_are_found_with_one_listing_per_folder(files, tmp_path, monkeypatch):
    assert not files.absent().any()
    (tmp_path / "a" / "2.png").unlink()
    (tmp_path / "3.png").rename(tmp_path / "3.PNG")  # names are case-sensitive
    (tmp_path / "b" / "1.png").rename(tmp_path / "a" / "3.png")
    assert files.absent().tolist() == [False, True, True, True, False]

    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    files.select(np.tile(np.arange(5), 20_000)).absent()
    assert sorted(listed) == [tmp_path, tmp_path / "a", tmp_path / "b"]
    (tmp_path / "b").rmdir()
    assert files.absent().tolist() == [False, True, True, True, False]


# Repeat-factor sampling


def rare(images=200):
    """Return labels of classes from rare to common. The last class is never positive."""
    rng = np.random.default_rng(0)
    labels = (rng.random((images, 5)) < [0.01, 0.03, 0.2, 0.6, 0.0]).astype(np.int8)
    labels[rng.random((images, 5)) < 0.1] = -1
    return labels


@pytest.mark.parametrize("default", [0, -1])
@pytest.mark.parametrize("threshold", [0.001, 0.1, 1.0])
def test_repeat_factors_equal_a_loop(threshold, default):
    labels = rare()
    shares = [sum(row[k] == 1 for row in labels) / len(labels) for k in range(5)]
    expected = []
    for row in labels:
        of_classes = [max(1, math.sqrt(threshold / shares[k])) for k in range(5) if row[k] == 1]
        expected.append(max(of_classes, default=1.0))
    factors = repeat_factors(from_dense(labels, default=default), threshold)
    np.testing.assert_allclose(factors, expected, rtol=1e-12)


def epoch(factors, seed):
    images, appearances = draw_images(factors, torch.Generator().manual_seed(seed))
    return images.numpy(), appearances.numpy()


def test_image_appears_as_often_as_its_factor():
    factors = repeat_factors(from_dense(rare()), 0.1)
    factors[:3] = 0  # as in class-aware sampling for images without a class
    length = len(epoch(factors, 0)[0])
    assert factors.sum() <= length < factors.sum() + 1

    # The sum is rounded up, so the factors grow by less than 1 in total.
    scaled = factors * length / factors.sum()
    counts = []
    for seed in range(400):
        images, _ = epoch(factors, seed)
        assert len(images) == length
        counts.append(np.bincount(images, minlength=len(factors)))
        assert (counts[-1] >= np.floor(scaled)).all()
        assert (counts[-1] <= np.ceil(scaled)).all()

    # The standard deviation of a count is at most 1/2, of the mean of 400 at most 1/40.
    np.testing.assert_allclose(np.mean(counts, axis=0), scaled, atol=5 / 40)


def test_epoch_is_shuffled_and_counts_appearances():
    factors = np.array([1.0, 3.0, 1.5, 1.0, 2.5])
    images, appearances = epoch(factors, 0)
    for index in range(5):
        own = appearances[images == index]
        assert sorted(own.tolist()) == list(range(len(own)))
    assert len({tuple(epoch(factors, seed)[0]) for seed in range(20)}) > 15
    assert np.array_equal(epoch(factors, 0), (images, appearances))

    images, appearances = epoch(np.ones(1000), 0)
    assert sorted(images.tolist()) == list(range(1000))
    assert not appearances.any()


def test_sampling_settings_are_used():
    labels = from_dense(rare())
    assert Sampling().factors(lambda: pytest.fail("the labels were read")) is None
    for threshold, used in ((None, 0.001), (0.1, 0.1)):
        sampling = Sampling(sampler="repeat_factor", repeat_threshold=threshold)
        assert np.array_equal(sampling.factors(lambda: labels), repeat_factors(labels, used))
    sampling = Sampling(sampler="class_aware")
    assert np.array_equal(sampling.factors(lambda: labels), class_aware_factors(labels))


# Class-aware sampling


def test_class_aware_factors_are_expected_numbers_of_draws():
    # Draw a class, then one of its images. The last class has no image.
    labels = rare()
    by_class = [np.flatnonzero(labels[:, k] == 1) for k in range(4)]
    expected = np.zeros(len(labels))
    for images in by_class:
        for image in images:
            expected[image] += len(labels) / 4 / len(images)
    for default in (0, -1):
        factors = class_aware_factors(from_dense(labels, default=default))
        np.testing.assert_allclose(factors, expected, rtol=1e-9)


@pytest.mark.parametrize("counts", [(1, 5, 60, 134), (1, 1, 3, 3_000), (7, 7, 7, 7)])
def test_each_class_is_drawn_equally_often(counts):
    # One label per image, so that an image tells its class.
    classes = np.repeat(np.arange(4), counts)
    labels = from_dense(np.eye(4, dtype=np.int8)[classes])
    drawn = np.zeros(4)
    for seed in range(50):
        images, _ = epoch(class_aware_factors(labels), seed)
        assert len(images) == sum(counts)
        drawn += np.bincount(classes[images], minlength=4)

        # The images of a class are drawn equally often too.
        for k in range(4):
            of_class = np.bincount(images, minlength=len(classes))[classes == k]
            assert of_class.max() - of_class.min() <= 1
    np.testing.assert_allclose(drawn / drawn.sum(), 1 / 4, rtol=0.02)


def test_class_aware_sampling_needs_positives():
    with pytest.raises(DataError, match=r"data\.sampler"):
        class_aware_factors(from_dense(np.zeros((5, 2), np.int8), default=-1))


# Fingerprints


POSITIVES = [[0, 2], [], [1]]
PATHS = ["a.png", "b/a.png", "b/c.png"]


def table(paths=PATHS, positives=POSITIVES, names=NAMES, *, folder="/data", default=0, part=None):
    """Return the fingerprint of the first `part` images."""
    entries = [of if isinstance(of, dict) else dict.fromkeys(of, 1) for of in positives]
    labels = from_entries(entries, num_classes=len(names), default=default)
    images = in_folder(Table(encode_paths(paths), labels, names), Path(folder))
    return fingerprint(Split(images.select(np.arange(len(paths))[:part]), Classes(names)))


def test_fingerprint_depends_only_on_table():
    longer = table([*PATHS, "a/longer/path.png"], [*POSITIVES, [0]], part=3)
    assert table() == table(folder="/other/root") == longer
    assert table(positives=[[2, 0], [], [1]]) == table()
    assert table(positives=[{0: 1, 1: 0, 2: 1}, {1: 0}, [1]]) == table()  # lists the default

    generated = fingerprint(Split(Generated(), Classes(NAMES)))
    assert (generated.images, generated.files, generated.labels) == (4, "", "")
    assert generated.classes == table().classes


@pytest.mark.parametrize(
    "changed",
    [
        table(PATHS[:2], POSITIVES[:2]),
        table(["a.png", "b/a.png", "b/d.png"]),
        table(positives=[[0, 1], [], [1]]),
        table(positives=[[0, 2], [1], []]),
        table(default=-1),
        table(names=("cat", "cow", "dog")),
    ],
)
def test_changed_data_raises_or_warns(changed):
    path = Path("last.pt")
    for split in ("training", "validation"):
        with pytest.raises(CheckpointError, match=f"^last.pt .*{split}.*data.changed=allow"):
            check_same(table(), changed, path, allow=False, split=split)
        assert split in check_same(table(), changed, path, allow=True, split=split)
    assert check_same(changed, changed, path, allow=False) is None
    assert "last.pt" in check_same(None, changed, path, allow=False)


def test_large_table_is_hashed_in_chunks(monkeypatch):
    rng = np.random.default_rng(0)
    paths = [f"{number}.png" for number in range(1000)]
    positives = [rng.permutation(3)[: rng.integers(4)].tolist() for _ in paths]
    whole = table(paths, positives)
    monkeypatch.setattr("mldec.data.fingerprint.ROWS", 64)
    chunks = table(paths, positives)
    assert (whole.images, whole.files) == (chunks.images, chunks.files)
    positives[900] = [] if positives[900] else [1]
    assert table(paths, positives).labels != chunks.labels
