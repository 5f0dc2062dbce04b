"""What the types of a dataset promise, on images that are kept in memory."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pictures import pixels
from PIL import Image
from torch import Tensor

from mldec.data.loader import eval_loader, unwrap
from mldec.data.randomness import SampleRandom
from mldec.data.table import from_dense
from mldec.data.transforms import EvalTransform, Picture
from mldec.data.types import (
    Classes,
    DataModule,
    LabelledImages,
    Split,
    StoredImages,
    fixed_sample,
    picture,
)
from mldec.errors import ConfigError, DataError

NAMES = ("cat", "dog", "cow")
DENSE = np.array([[1, 0, -1], [0, 0, 0], [0, 1, 1], [1, 1, 1]], np.int8)


class InMemory:
    """A storage of images as bytes; as a list, it takes negative indices."""

    def __init__(self, contents: list[bytes]) -> None:
        self.contents = contents

    def __len__(self) -> int:
        return len(self.contents)

    def name(self, index: int) -> str:
        return f"image {index}"

    def content(self, index: int) -> bytes:
        return self.contents[index]

    def select(self, images: np.ndarray) -> "InMemory":
        indices = np.arange(len(self))[images]
        return InMemory([self.contents[index] for index in indices])


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(8, 8, 3, seed=seed)).save(file, "png")
    return file.getvalue()


class Generated:
    """Images that are stored nowhere."""

    def __len__(self) -> int:
        return 4

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        image = torch.full((3, 8, 8), index, dtype=torch.uint8)
        return image, torch.zeros(3, dtype=torch.int8)

    def name(self, index: int) -> str:
        return f"number {index}"


class Drawn:
    """A transform that shows the random number that it is given."""

    decoder = "pillow"

    def __call__(self, image: Picture, rng: SampleRandom) -> Tensor:
        return torch.tensor(rng.random())


@pytest.fixture
def images() -> LabelledImages:
    storage: Any = InMemory([png(seed) for seed in range(4)])
    return LabelledImages(storage, from_dense(DENSE), NAMES)


def test_an_item_is_the_image_and_its_target(images: LabelledImages) -> None:
    dataset = StoredImages(images, EvalTransform(image_size=8))
    assert len(dataset) == len(images) == 4
    for index in range(4):
        image, target = fixed_sample(dataset, index)
        assert np.array_equal(image.permute(1, 2, 0).numpy(), pixels(8, 8, 3, seed=index))
        assert target.dtype == torch.int8
        assert target.tolist() == DENSE[index].tolist()
        assert dataset.name(index) == f"image {index}"


def test_a_picture_is_the_stored_image_or_else_the_input(images: LabelledImages) -> None:
    small = StoredImages(images, EvalTransform(image_size=4))
    assert np.array_equal(np.asarray(picture(small, 2)), pixels(8, 8, 3, seed=2))

    seen = np.asarray(picture(Generated(), 2))
    assert np.array_equal(seen, Generated().load(2, SampleRandom(0))[0].permute(1, 2, 0).numpy())


def test_a_split_is_viewed_through_another_transform(images: LabelledImages) -> None:
    split = Split(StoredImages(images, EvalTransform(image_size=4)), Classes(NAMES))
    viewed = split.viewed(EvalTransform(image_size=16))
    assert fixed_sample(viewed.dataset, 1)[0].shape == (3, 16, 16)
    assert fixed_sample(viewed.dataset, 1)[1].tolist() == DENSE[1].tolist()
    assert fixed_sample(split.dataset, 1)[0].shape == (3, 4, 4)

    generated = Split(Generated(), Classes(NAMES))
    assert generated.viewed(EvalTransform(image_size=16)) is generated


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_out_of_range_is_refused_whatever_the_storage_takes(
    images: LabelledImages, index: int
) -> None:
    dataset = StoredImages(images, lambda image, rng: pytest.fail("it was read"))
    with pytest.raises(IndexError):
        dataset.load(index, SampleRandom(0))


def test_a_fixed_sample_is_the_one_of_an_evaluation(images: LabelledImages) -> None:
    drawn = StoredImages(images, Drawn())
    split = Split(drawn, Classes(NAMES))
    data = module(lambda name: split)
    loader = eval_loader(data, batch_size=4, workers=0, pin=False)
    (batch,) = unwrap(loader)
    assert batch.images.tolist() == [fixed_sample(drawn, index)[0].item() for index in range(4)]
    assert len(set(batch.images.tolist())) == 4


def test_an_image_that_cannot_be_read_is_named() -> None:
    storage: Any = InMemory([b"no image"])
    images = LabelledImages(storage, from_dense(DENSE[:1]), NAMES)
    with pytest.raises(DataError, match=r"^image 0: "):
        fixed_sample(StoredImages(images, EvalTransform(image_size=8)), 0)


@pytest.mark.parametrize("chosen", [np.array([2, 0]), np.array([True, False, True, False])])
def test_images_are_selected_with_their_labels(images: LabelledImages, chosen: np.ndarray) -> None:
    part = images.select(chosen)
    assert np.array_equal(part.labels.dense(), DENSE[chosen])
    expected = [images.storage.content(index) for index in np.arange(4)[chosen]]
    assert [part.storage.content(index) for index in range(2)] == expected
    assert part.classes == NAMES


def test_classes_are_selected_in_their_order(images: LabelledImages) -> None:
    part = images.select_classes([2, 0])
    assert part.classes == ("cow", "cat")
    assert np.array_equal(part.labels.dense(), DENSE[:, [2, 0]])
    assert part.storage is images.storage


@pytest.mark.parametrize("names", [("a", "a"), ("a", ""), ("a", "b" * 10_000)])
def test_names_that_a_checkpoint_cannot_hold_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r"^the names of the classes: .*; rename them in the data$"):
        Classes(names)
    assert len(Classes(NAMES)) == 3


def module(load: Callable[[str], Split], **options: Any) -> DataModule:
    return DataModule(
        load_train=lambda: load("train"),
        load_val=lambda: load("val"),
        make_evaluator=lambda classes: ("evaluator", classes),  # type: ignore[arg-type, return-value]
        transform=EvalTransform(image_size=8),
        **options,
    )


def test_a_split_is_read_when_it_is_used_and_once(images: LabelledImages) -> None:
    read = []

    def load(name: str) -> Split:
        read.append(name)
        return Split(StoredImages(images, EvalTransform(image_size=8)), Classes((name,)))

    data = module(load)
    assert read == []
    assert data.val is data.val
    assert data.evaluator() == ("evaluator", Classes(("val",)))
    assert read == ["val"], "an evaluation does not need the training files"
    assert data.train.classes.names == ("train",)
    assert read == ["val", "train"]


@pytest.mark.parametrize("policy", ["ignore", "", "STOP"])
def test_what_to_do_with_bad_images_is_known(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"^data.bad_images '{policy}' is not known: choose stop"):
        module(lambda name: pytest.fail("it was read"), bad_images=policy)
    assert module(lambda name: pytest.fail("it was read")).bad_images == "stop"
