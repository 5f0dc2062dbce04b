"""Conversion of a source and the shared settings to a data module."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from readers import names
from support import made

from mldec import build
from mldec.config.compose import option, options
from mldec.data.labels import from_dense
from mldec.data.observed import Observed, fixed_per_class, random_drop
from mldec.data.readers.coco_json import coco
from mldec.data.sampling import SHUFFLED, Sampling
from mldec.data.source import FileSettings, Source, View, assemble
from mldec.data.splits import fold_numbers
from mldec.data.table import Table, encode_paths
from mldec.data.tasks import ZeroShot, multi_label, partial_labels, single_label
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, StoredImages, fixed_sample, in_folder
from mldec.errors import ConfigError, DataError

NAMES = ("cat", "dog", "eel")
SPLITS = {"train": 20, "val": 3}
PLAIN = View(image_size=8, augment="none", cutout=0)
FILES = FileSettings()
ZERO_SHOT = ZeroShot(lambda names: ([0, 1], [2]), lambda names: None, "all", "here")


@pytest.fixture
def root(tmp_path):
    for split, count in SPLITS.items():
        (tmp_path / split).mkdir()
        for number in range(count):
            image = Image.new("RGB", (9, 6), (10 * number, 0, 0))
            image.save(tmp_path / split / f"{number}.png")
    return tmp_path


@pytest.fixture
def source(root):
    """Return a source of 20 training and 3 validation images. Image i has class i % 3."""

    def load(split, cache_dir):
        assert cache_dir in ("/somewhere", None)
        files = encode_paths([f"{number}.png" for number in range(SPLITS[split])])
        labels = from_dense(np.eye(3, dtype=np.int8)[np.arange(len(files)) % 3])
        return in_folder(Table(files, labels, NAMES), root / split)

    return Source(load=load, where=root, evaluator=multi_label())


def changed(source, change):
    """Return the source with a change of the images: (split, images) -> images."""
    return replace(source, load=lambda split, cache: change(split, source.load(split, cache)))


def fault(data, split="val"):
    with pytest.raises(DataError) as caught:
        getattr(data, split)
    return str(caught.value)


def target(split, index):
    return fixed_sample(split.dataset, index)[1].tolist()


def test_skip_empty_is_default_of_own_data():
    chosen = set()
    for name in options("data"):
        part = build.resolve("data", option("data", name))
        if part.arguments.get("skip_empty"):
            chosen.add(name)
    own = {"csv", "hf", "yolo", "coco_json", "keywords"}
    assert chosen == own | {"label_studio", "cvat", "fiftyone"}


def test_splits_have_images_targets_and_transforms(source, root):
    settings = FileSettings(cache_dir="/somewhere", bad_images="skip")
    data = assemble(source, View(image_size=8, cutout=1.0, augment="none"), settings)
    assert (data.transform, data.bad_images) == (EvalTransform(image_size=8), "skip")
    for name, split in (("train", data.train), ("val", data.val)):
        assert split.classes.names == NAMES
        assert split.dataset.name(2) == str(root / name / "2.png")
        image, labels = fixed_sample(split.dataset, 2)
        assert labels.tolist() == [0, 0, 1]
        assert (image.shape, image.dtype) == ((3, 8, 8), torch.uint8)
    assert fixed_sample(data.val.dataset, 2)[0][0].unique().tolist() == [20]
    # The cutout covers the whole image.
    assert fixed_sample(data.train.dataset, 2)[0][0].unique().tolist() != [20]


def test_classes_of_training_images_get_the_order_of_validation(source):
    def select(split, images):
        return images.select_classes([2, 0, 1]) if split == "train" else images

    data = assemble(changed(source, select), PLAIN, FILES)
    expected = assemble(source, PLAIN, FILES)
    assert data.train.classes == data.val.classes == expected.train.classes
    for index in range(3):
        target = fixed_sample(data.train.dataset, index)[1]
        assert torch.equal(target, fixed_sample(expected.train.dataset, index)[1])


def test_splits_need_same_classes_and_hint_is_appended_once(source, root):
    def select(split, images):
        return images.select_classes([0, 1]) if split == "train" else images

    data = assemble(changed(source, select), PLAIN, FILES, docs="DATASETS.md, section X")
    message = fault(data, "train")
    assert message.startswith(str(root))
    assert message.endswith("; see DATASETS.md, section X")
    assert message.count("see ") == 1


def test_absent_images_raise_are_skipped_or_not_checked(source, root):
    missing = root / "val" / "1.png"
    missing.unlink()
    assert str(missing) in fault(assemble(source, PLAIN, FILES))

    data = assemble(source, PLAIN, FileSettings(absent="skip"))
    assert [target(data.val, index) for index in range(2)] == [[1, 0, 0], [0, 0, 1]]
    assert len(data.train.dataset) == 20

    data = assemble(source, PLAIN, FileSettings(absent="unchecked"))
    assert len(data.val.dataset) == 3


# Folds


def test_fold_is_validation_split_and_others_are_training_split(source):
    validated = []
    for number in (1, 2, 3):
        data = assemble(source, PLAIN, FILES, Sampling(fold=f"{number}/3"))
        train, val = names(data.train), names(data.val)
        assert sorted(train + val) == sorted(f"{number}.png" for number in range(20))
        for index, name in enumerate(val):
            assert target(data.val, index).index(1) == int(name.removesuffix(".png")) % 3
        validated += val
    assert sorted(validated) == sorted(train + val)
    assert isinstance(data.val.dataset, StoredImages)
    assert data.val.dataset.transform == data.transform


def test_fold_needs_an_image(source):
    numbers = fold_numbers(encode_paths([f"{number}.png" for number in range(20)]), 500)
    empty = min(set(range(1, 501)) - set(numbers.tolist()))
    data = assemble(source, PLAIN, FILES, Sampling(fold=f"{empty}/500"))
    assert f"data.fold={empty}/500" in fault(data)

    one = changed(source, lambda split, images: images.select(np.array([0])))
    fold = f"{fold_numbers(encode_paths(['0.png']), 2)[0]}/2"
    assert f"data.fold={fold}" in fault(assemble(one, PLAIN, FILES, Sampling(fold=fold)), "train")


# Missing labels


def two_labels(split, images):
    return replace(images, labels=from_dense(np.tile([[1, 1, 0]], (len(images), 1))))


@pytest.mark.parametrize(("unobserved", "value"), [("negative", 0), ("unknown", -1)])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(fold="1/2")])
def test_only_training_has_missing_labels(source, unobserved, value, sampling):
    observed = Observed(single_positive=3, unobserved=unobserved)
    data = assemble(changed(source, two_labels), PLAIN, FILES, sampling, observed)
    found = {tuple(target(data.train, index)) for index in range(len(data.train.dataset))}
    assert found == {(1, value, value), (value, 1, value)}
    assert target(data.val, 0) == [1, 1, 0]


def test_observed_positives_are_a_share_or_a_list(source, tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("".join(f"{number}.png,0\n" for number in range(20)))
    for observed, count in ((Observed(observed=0.6), 24), (Observed(observed_list=str(path)), 20)):
        data = assemble(changed(source, two_labels), PLAIN, FILES, observed=observed)
        assert data.train.dataset.labels.counts().sum() == count


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (Observed(drop_labels=0.4, labels_seed=3), lambda labels: random_drop(labels, 0.4, 3)),
        (Observed(keep_per_class=5), lambda labels: fixed_per_class(labels, 5, 0)),
    ],
)
def test_dropped_labels_are_unknown_in_training_only(source, observed, expected, monkeypatch):
    labeled = changed(source, two_labels)
    whole = assemble(labeled, PLAIN, FILES).train.dataset.labels
    data = assemble(labeled, PLAIN, FILES, observed=observed)
    found = data.train.dataset.labels.dense()
    assert np.array_equal(found, expected(whole).dense())
    assert 0 < (found == -1).sum() < found.size
    assert target(data.val, 0) == [1, 1, 0]

    monkeypatch.setattr("mldec.data.observed.MAX_CELLS", found.size - 1)
    with pytest.raises(ConfigError, match=f"data.{observed.given[0]}"):
        _ = assemble(labeled, PLAIN, FILES, observed=observed).train


# The settings of images and files


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"test_size": 48}, {"image_size": 48}),
        ({"test_crop": 0.875}, {"crop": 0.875}),
        ({"interpolation": "bicubic"}, {"interpolation": "bicubic"}),
        ({"interpolation": "random"}, {"interpolation": "bicubic"}),
        ({"interpolation": "random", "test_interpolation": "bilinear"}, {}),
        ({"test_interpolation": "bicubic"}, {"interpolation": "bicubic"}),
        ({"resize": "tensor"}, {"resize": "tensor"}),
    ],
)
def test_evaluation_has_separate_settings(settings, expected):
    assert View(image_size=32, **settings).eval() == EvalTransform(**{"image_size": 32, **expected})


# Evaluators

LOGITS = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])  # sigmoid 0.73
TARGETS = torch.eye(3, dtype=torch.int8)


def metrics(make):
    evaluator = make(Classes(NAMES))
    evaluator.update(LOGITS, TARGETS)
    return evaluator.compute()


def test_evaluator_settings_are_used():
    for make in (multi_label, partial_labels):
        assert [metrics(make(threshold))["OR"] for threshold in (0.7, 0.75)] == [100, 0]
    assert "top2" in metrics(single_label(top_k=2))
    assert "top5" not in metrics(single_label())  # there are three classes


ONE_LABEL = {"exclusive": True}
UNSEEN_CLASSES = {"zero_shot": ZERO_SHOT}


def assemble_task(task, *settings):
    """Assemble a source of another task, which is not loaded."""
    source = Source(load=None, where=Path("/nowhere"), evaluator=multi_label())
    assemble(replace(source, **task), PLAIN, FILES, *settings)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: multi_label(0.0), "threshold"),
        (lambda: single_label(-1), "top_k"),
        # Settings are validated before the folder.
        (lambda: made(coco, root="/nowhere", cutout=2.0), "cutout"),
        (lambda: made(coco, root="/nowhere", fold="3/2"), "data.fold"),
        (lambda: assemble_task(ONE_LABEL, SHUFFLED, Observed(observed=0.5)), "data.observed"),
        (
            lambda: assemble_task(UNSEEN_CLASSES, SHUFFLED, Observed(single_positive=0)),
            "data.single_positive",
        ),
        (lambda: assemble_task(UNSEEN_CLASSES, Sampling(fold="1/2")), "data.fold"),
    ],
)
def test_faulty_setting_is_named(call, name):
    with pytest.raises(ConfigError, match=name):
        call()
