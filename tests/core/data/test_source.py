"""How a source becomes a data module: where the images, their labels and the settings meet."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import made

from mldec.data.cache import TableCache
from mldec.data.readers.coco import coco
from mldec.data.readers.folders import folders
from mldec.data.settings import FileSettings, Source, View, assemble
from mldec.data.table import encode_paths, from_dense
from mldec.data.tasks import MultiLabel, SingleLabel
from mldec.data.transforms import EvalTransform
from mldec.data.types import ImageFiles, LabelledImages, fixed_sample
from mldec.errors import ConfigError, DataError

NAMES = ("cat", "dog", "eel")
LABELS = np.eye(3, dtype=np.int8)
PLAIN = View(image_size=8, augment="none", cutout=0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for number in range(3):
            Image.new("RGB", (9, 6), (40 * number, 0, 0)).save(tmp_path / split / f"{number}.png")
    return tmp_path


def source(
    root: Path, *, classes: dict[str, tuple[str, ...]] | None = None, **changed: Any
) -> Source:
    """Three images of one class each in both splits."""

    def load(split: str, cache: TableCache) -> LabelledImages:
        files = encode_paths([f"{number}.png" for number in range(3)])
        storage = ImageFiles(root / split, files, "see there")
        names = (classes or {}).get(split, NAMES)
        return LabelledImages(storage, from_dense(LABELS[:, : len(names)]), names)

    whole = Source(
        load=load, train="train", val="val", task=MultiLabel(), where=root, see="see there"
    )
    return replace(whole, **changed)


def fault(split: str, *arguments: Any) -> str:
    data = assemble(*arguments)
    with pytest.raises(DataError) as caught:
        getattr(data, split)
    message = str(caught.value)
    assert message.endswith("; see there")
    assert "\n" not in message
    return message


def test_both_splits_have_images_targets_and_a_transform(root: Path) -> None:
    data = assemble(source(root), View(image_size=8, cutout=1.0, augment="none"), FileSettings())
    assert data.transform == EvalTransform(image_size=8)
    for name, split in (("train", data.train), ("val", data.val)):
        assert split.classes.names == NAMES
        assert split.dataset.name(2) == str(root / name / "2.png")
        image, target = fixed_sample(split.dataset, 2)
        assert target.tolist() == [0, 0, 1]
        assert (image.shape, image.dtype) == ((3, 8, 8), torch.uint8)
    assert fixed_sample(data.val.dataset, 2)[0][0].unique().tolist() == [80]
    # The cutout covers all.
    assert fixed_sample(data.train.dataset, 2)[0][0].unique().tolist() != [80]


def test_a_split_is_loaded_once_and_when_it_is_used(root: Path) -> None:
    asked = []
    whole = source(root)

    def load(split: str, cache: TableCache) -> LabelledImages:
        asked.append(split)
        return whole.load(split, cache)

    data = assemble(replace(whole, load=load), PLAIN, FileSettings())
    assert asked == []
    data.evaluator()
    assert asked == ["val"]  # an evaluation needs no training files
    _ = data.train, data.train, data.val
    assert asked == ["val", "train"]


def test_training_labels_may_be_loaded_in_another_way(root: Path) -> None:
    whole = source(root)

    def load_train(split: str, cache: TableCache) -> LabelledImages:
        images = whole.load(split, cache)
        return replace(images, labels=images.labels.recode({1: -1}))

    data = assemble(replace(whole, load_train=load_train), PLAIN, FileSettings())
    assert fixed_sample(data.train.dataset, 0)[1].tolist() == [-1, 0, 0]
    assert fixed_sample(data.val.dataset, 0)[1].tolist() == [1, 0, 0]


def test_the_cache_is_that_of_the_settings(root: Path) -> None:
    caches = []
    whole = source(root)

    def load(split: str, cache: TableCache) -> LabelledImages:
        caches.append((cache.folder, cache.see))
        return whole.load(split, cache)

    data = assemble(replace(whole, load=load), PLAIN, FileSettings(cache_dir="/somewhere"))
    _ = data.train
    assert set(caches) == {("/somewhere", "see there")}


# Classes


def test_both_splits_need_the_same_classes(root: Path) -> None:
    more = source(root, classes={"train": ("cat", "dog")})
    message = fault("train", more, PLAIN, FileSettings())
    assert message.startswith(f"{root}: the classes of train (2) and val (3) differ")
    assert "'eel' is in one only" in message

    swapped = source(root, classes={"train": ("dog", "cat", "eel")})
    assert "their order differs" in fault("train", swapped, PLAIN, FileSettings())


def test_an_evaluator_that_does_not_fit_is_refused_with_the_split(root: Path) -> None:
    data = assemble(source(root, task=SingleLabel(top_k=5)), PLAIN, FileSettings())
    with pytest.raises(ConfigError, match=r"data\.top_k 5 needs as many classes; there are 3"):
        _ = data.val
    with pytest.raises(ConfigError, match=r"data\.top_k 5"):
        _ = assemble(source(root, task=SingleLabel(top_k=5)), PLAIN, FileSettings()).train
    assert assemble(source(root, task=SingleLabel(top_k=3)), PLAIN, FileSettings()).val


# Absent images


def test_absent_images_stop_are_left_out_or_are_not_looked_for(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "val" / "1.png").unlink()
    message = fault("val", source(root), PLAIN, FileSettings())
    gone = root / "val" / "1.png"
    assert message.startswith(f"{root}: 1 of 3 listed images are absent, the first is {gone}")

    data = assemble(source(root), PLAIN, FileSettings(absent="skip"))
    assert [fixed_sample(data.val.dataset, index)[1].tolist() for index in range(2)] == [
        [1, 0, 0],
        [0, 0, 1],
    ]
    assert len(data.train.dataset) == 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages == [f"{root}: 1 of 3 listed images are absent and left out"]

    data = assemble(source(root), PLAIN, FileSettings(absent="unchecked"))
    assert len(data.val.dataset) == 3
    with pytest.raises(DataError, match=r"1\.png: no such file"):
        fixed_sample(data.val.dataset, 1)


def test_without_any_image_there_is_nothing_to_skip_to(root: Path) -> None:
    for path in (root / "val").iterdir():
        path.unlink()
    message = fault("val", source(root), PLAIN, FileSettings(absent="skip"))
    assert "3 of 3 listed images are absent" in message


def test_a_split_without_an_image(root: Path) -> None:
    whole = source(root)

    def load(split: str, cache: TableCache) -> LabelledImages:
        return whole.load(split, cache).select(np.zeros(3, bool))

    message = fault("val", replace(whole, load=load), PLAIN, FileSettings(absent="unchecked"))
    assert message == f"{root}: val has no image; see there"


# Settings


def test_unknown_choices_are_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.absent 'ignore' is not known: choose stop, skip"):
        FileSettings(absent="ignore")
    with pytest.raises(ConfigError, match=r"data\.bad_images 'ignore' is not known: choose stop"):
        assemble(source(root), PLAIN, FileSettings(bad_images="ignore"))
    assert assemble(source(root), PLAIN, FileSettings(bad_images="skip")).bad_images == "skip"


@pytest.mark.parametrize("reader", [coco, folders])
@pytest.mark.parametrize("settings", [{"cutout": 2.0}, {"absent": "ignore"}, {"image_size": -1}])
def test_settings_are_checked_before_the_folder(reader: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        made(reader, root="/nowhere", **settings)
    with pytest.raises(DataError, match="/nowhere is not a folder"):
        made(reader, root="/nowhere")
