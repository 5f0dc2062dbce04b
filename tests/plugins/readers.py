"""Helpers for the tests of readers: build the data of a small tree, and read it back."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support import made

from mldec.data.readers import docs_of
from mldec.data.sampling import SampleRandom
from mldec.data.source import Source
from mldec.data.types import DataModule, ImageDataset, Split, fixed_sample
from mldec.errors import DataError


@dataclass(frozen=True)
class Reader:
    """A reader and the root of the small tree that it reads."""

    function: Callable[..., Source]
    root: Path

    def __call__(self, **arguments: Any) -> DataModule:
        """Build the data with these arguments and read both splits."""
        cache = str(self.root.parent / "cache")
        settings = {"root": str(self.root), "image_size": 16, "cache_dir": cache, **arguments}
        data = made(self.function, **settings)

        # Zero-shot data has other classes in training.
        train = data.train.classes
        assert train.word_vectors is not None or train == data.val.classes
        return data

    def fault(self, **arguments: Any) -> str:
        """Return the error message: one line with one documentation hint."""
        with pytest.raises(DataError) as caught:
            self(**arguments)
        message = str(caught.value)
        assert "\n" not in message
        assert message.count("; see ") == 1
        assert message.endswith((docs_of(self.function), "section Word vectors"))
        return message


def write_picture(path: Path, red: int = 0) -> None:
    """Write a small image of one color and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 6), (red, 100, 200)).save(path)


def names(split: Split) -> list[str]:
    """Return the file names of the images."""
    return [Path(split.dataset.name(index)).name for index in range(len(split.dataset))]


def targets(split: Split) -> list[list[int]]:
    """Return the target of each image."""
    return [fixed_sample(split.dataset, index)[1].tolist() for index in range(len(split.dataset))]


def by_name(*splits: Split) -> dict[str, list[int]]:
    """Return the target of each image of some splits by its file name."""
    found = {}
    for split in splits:
        found.update(zip(names(split), targets(split), strict=True))
    return found


def versions(dataset: ImageDataset, index: int = 0) -> set[bytes]:
    """Return the different pixels of an image that is loaded with eight seeds."""
    loaded = [dataset.load(index, SampleRandom(seed))[0] for seed in range(8)]
    return {image.numpy().tobytes() for image in loaded}


def labels(split: Split) -> list[int]:
    """Return the label of each single-label image."""
    return [row.index(1) for row in targets(split)]
