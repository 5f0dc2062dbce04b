"""How a source, the settings and a task become a data module."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import made
from trees import tree

from mldec import build
from mldec.config.compose import option, options
from mldec.data.labels import from_dense
from mldec.data.readers.coco import coco
from mldec.data.sampling import SampleRandom, Sampling
from mldec.data.settings import FileSettings, Observed, Source, View, assemble
from mldec.data.splits import fold_numbers
from mldec.data.table import Table, encode_paths
from mldec.data.tasks import MultiLabel, PartialLabels, SingleLabel, ZeroShot
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.data.types import Classes, StoredImages, fixed_sample, in_folder
from mldec.errors import ConfigError, DataError

NAMES = ("cat", "dog", "eel")
SPLITS = {"train": 20, "val": 3}
PLAIN = View(image_size=8, augment="none", cutout=0)
FILES = FileSettings()
SKIP, UNCHECKED = FileSettings(absent="skip"), FileSettings(absent="unchecked")


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
    """Twenty training and three validation images; image i shows class i % 3."""

    def load(split, cache_dir):
        assert cache_dir in ("/somewhere", None)
        files = encode_paths([f"{number}.png" for number in range(SPLITS[split])])
        labels = from_dense(np.eye(3, dtype=np.int8)[np.arange(len(files)) % 3])
        return in_folder(Table(files, labels, NAMES), root / split, "see there")

    return Source(
        load=load, train="train", val="val", task=MultiLabel(), where=root, see="see there"
    )


def changed(source, change, **settings):
    """Return the source with a change of the images of each split: (split, images) -> images."""
    return replace(
        source, load=lambda split, folder: change(split, source.load(split, folder)), **settings
    )


def fault(data, split="val"):
    with pytest.raises(DataError) as caught:
        getattr(data, split)
    message = str(caught.value)
    assert message.endswith("; see there")
    assert "\n" not in message
    return message


def target(split, index):
    return fixed_sample(split.dataset, index)[1].tolist()


def names(split):
    return [Path(split.dataset.name(index)).name for index in range(len(split.dataset))]


def test_skip_empty_is_the_default_of_own_data_only():
    chosen = set()
    for name in options("data"):
        part = build.resolve("data", option("data", name))
        if part.arguments.get("skip_empty"):
            chosen.add(name)
    assert chosen == {"csv", "yolo", "coco_json"}


@pytest.mark.parametrize("name", ["csv_table", "yolo", "coco"])
def test_skip_empty_is_the_first_metric_and_the_left_out_classes_are_counted(
    name, tmp_path, caplog
):
    reader = tree(name, tmp_path)
    with caplog.at_level(logging.INFO, "mldec"):
        data = reader(skip_empty=True)
        evaluator = data.evaluator()
    target = data.val.dataset.labels.dense()
    evaluator.update(torch.zeros(target.shape), torch.from_numpy(target))
    assert next(iter(evaluator.compute())) == "mAP_skip_empty"
    empty = int((target.sum(0) == 0).sum())
    assert empty > 0
    assert f"mAP_skip_empty leaves out {empty} of {target.shape[1]} classes" in caplog.text


def test_both_splits_have_images_targets_and_a_transform(source, root):
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
    # The cutout covers all.
    assert fixed_sample(data.train.dataset, 2)[0][0].unique().tolist() != [20]


def test_a_split_is_loaded_once_and_when_it_is_used(source):
    asked = []
    data = assemble(
        changed(source, lambda split, images: asked.append(split) or images), PLAIN, FILES
    )
    assert asked == []
    data.evaluator()
    assert asked == ["val"]  # an evaluation needs no training files
    _ = data.train, data.train, data.val
    assert asked == ["val", "train"]


def test_both_splits_need_the_same_classes(source, root):
    def select(columns):
        def of_training(split, images):
            return images.select_classes(columns) if split == "train" else images

        return assemble(changed(source, of_training), PLAIN, FILES)

    message = fault(select([0, 1]), "train")
    assert message.startswith(f"{root}: the classes of train (2) and val (3) differ")
    assert "'eel' is in one only" in message
    assert "their order differs" in fault(select([1, 0, 2]), "train")


def test_absent_images_stop_are_left_out_or_are_not_looked_for(source, root, caplog):
    gone = root / "val" / "1.png"
    gone.unlink()
    message = fault(assemble(source, PLAIN, FILES))
    assert message.startswith(f"{root}: 1 of 3 listed images are absent, the first is {gone}")

    data = assemble(source, PLAIN, SKIP)
    assert [target(data.val, index) for index in range(2)] == [[1, 0, 0], [0, 0, 1]]
    assert len(data.train.dataset) == 20
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages == [f"{root}: 1 of 3 listed images are absent and left out"]

    data = assemble(source, PLAIN, UNCHECKED)
    assert len(data.val.dataset) == 3
    with pytest.raises(DataError, match=r"1\.png cannot be read"):
        fixed_sample(data.val.dataset, 1)


# Folds


def test_a_fold_is_the_validation_split_and_the_others_are_trained_on(source):
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


def test_a_fold_without_an_image_is_refused(source):
    taken = fold_numbers(encode_paths([f"{number}.png" for number in range(20)]), 500)
    empty = min(set(range(1, 501)) - set(taken.tolist()))
    data = assemble(source, PLAIN, FILES, Sampling(fold=f"{empty}/500"))
    assert f"data.fold={empty}/500 leaves no image to validate, of 20" in fault(data)

    one = changed(source, lambda split, images: images.select(np.array([0])))
    fold = f"{fold_numbers(encode_paths(['0.png']), 2)[0]}/2"
    data = assemble(one, PLAIN, FILES, Sampling(fold=fold))
    assert f"data.fold={fold} leaves no image to train, of 1" in fault(data, "train")


def several(split, images):
    return replace(images, labels=from_dense(np.tile([[1, 1, 0]], (len(images), 1))))


@pytest.mark.parametrize(("unobserved", "value"), [("negative", 0), ("unknown", -1)])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(fold="1/2")])
def test_only_training_has_missing_labels(source, unobserved, value, sampling, caplog):
    observed = Observed(single_positive=3, unobserved=unobserved)
    caplog.set_level(logging.INFO, "mldec")
    data = assemble(changed(source, several), PLAIN, FILES, sampling, observed)
    found = {tuple(target(data.train, index)) for index in range(len(data.train.dataset))}
    assert found == {(1, value, value), (value, 1, value)}
    assert target(data.val, 0) == [1, 1, 0]
    counts = "20 of 40 positives are observed, all other labels count as"
    assert f"train: {counts} {unobserved}" in caplog.text


def test_a_share_and_a_list_of_positives(source, tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("".join(f"{number}.png,0\n" for number in range(20)))
    for observed, count in ((Observed(observed=0.6), 24), (Observed(observed_list=str(path)), 20)):
        data = assemble(changed(source, several), PLAIN, FILES, observed=observed)
        assert data.train.dataset.labels.counts().sum() == count


def test_missing_labels_are_for_several_labels_per_image(source):
    task = ZeroShot(lambda names: ([0, 1], [2]), lambda names: None, "all", "here")
    for other in (SingleLabel(), task):
        with pytest.raises(ConfigError, match=r"^data\.observed is for data with several labels"):
            assemble(replace(source, task=other), PLAIN, FILES, observed=Observed(observed=0.5))
    assemble(replace(source, task=PartialLabels()), PLAIN, FILES, observed=Observed(observed=0.5))


def test_zero_shot_data_has_no_folds(source):
    task = ZeroShot(lambda names: ([0, 1], [2]), lambda names: None, "all", "there")
    with pytest.raises(ConfigError, match=r"data\.fold: zero-shot data has no folds"):
        assemble(replace(source, task=task), PLAIN, FILES, Sampling(fold="1/2"))


# The settings of images and files


def test_the_settings_of_a_view_reach_its_transforms():
    assert View().eval() == EvalTransform(image_size=448)
    train = TrainTransform(View())
    assert (train.cutout, train.flip, train.erase) == (0.5, False, None)
    settings = {"augment": "none", "cutout": 0.25, "flip": True, "crop": 0.5, "erase": 1.0}
    train = TrainTransform(View(image_size=16, interpolation="random", resize="tensor", **settings))
    assert (train.cutout, train.flip, len(train.resizes)) == (0.25, True, 2)
    random_crop = train.resizes[0].keywords["random_crop"]
    assert (train.resize, random_crop.scale) == ("tensor", (0.5, 1.0))
    assert train(Image.new("RGB", (20, 30)), SampleRandom(0)).shape == (3, 16, 16)


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
def test_evaluation_has_settings_of_its_own(settings, expected):
    assert View(image_size=32, **settings).eval() == EvalTransform(**{"image_size": 32, **expected})


@pytest.mark.parametrize(
    "settings",
    [{"cutout": 2.0}, {"absent": "ignore"}, {"image_size": -1}, {"test_size": 0}, {"fold": "3/2"}],
)
def test_wrong_settings_are_refused_before_the_folder(settings):
    (value,) = settings.values()
    with pytest.raises(ConfigError, match=str(value)):
        made(coco, root="/nowhere", **settings)
    with pytest.raises(DataError, match="/nowhere is not a folder"):
        made(coco, root="/nowhere")


# Tasks


THREE = Classes(NAMES)
LOGITS = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])  # sigmoid 0.73
TARGETS = torch.eye(3, dtype=torch.int8)


def metrics(task, logits=LOGITS):
    evaluator = task.evaluator(THREE)
    evaluator.update(logits, TARGETS)
    return evaluator.compute()


def test_settings_of_a_task_are_used_or_refused_at_once():
    for kind in (MultiLabel, PartialLabels):
        assert [metrics(kind(threshold))["OR"] for threshold in (0.7, 0.75)] == [100, 0]
        for threshold in (0.0, 1.0, 1.5):
            with pytest.raises(ConfigError, match=f"threshold.*{threshold}"):
                kind(threshold)

    assert "top2" in metrics(SingleLabel(top_k=2))
    assert "top5" not in metrics(SingleLabel())  # of three classes
    for top_k in (1, -1):
        with pytest.raises(ConfigError, match=f"top_k.*{top_k}"):
            SingleLabel(top_k)
