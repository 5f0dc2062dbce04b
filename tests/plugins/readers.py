"""What the tests of readers share: building the data of a small tree, and reading it back."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support import made

from mldec.data.sampling import SampleRandom
from mldec.data.settings import Source
from mldec.data.types import DataModule, ImageDataset, Split, fixed_sample
from mldec.errors import DataError


@dataclass(frozen=True)
class Reader:
    """A reader, and the small tree that it reads.

    Args:
        function: the reader.
        root: folder of the tree; the cache is beside it.
        section: the one of DATASETS.md that messages point to.
    """

    function: Callable[..., Source]
    root: Path
    section: str

    def __call__(self, **arguments: Any) -> DataModule:
        """Build the data with these arguments, and read both splits."""
        cache = str(self.root.parent / "cache")
        settings = {"root": str(self.root), "image_size": 16, "cache_dir": cache, **arguments}
        data = made(self.function, **settings)

        # Zero-shot data has other classes in training.
        train, val = data.train.classes, data.val.classes
        assert train.word_vectors is not None or train == val
        return data

    def fault(self, **arguments: Any) -> str:
        """Return the message of the error that the data ends with: one line, with the section."""
        with pytest.raises(DataError) as caught:
            self(**arguments)
        message = str(caught.value)
        assert "\n" not in message
        assert len(message) < 600
        assert f"see DATASETS.md, section {self.section}" in message
        return message


def write_picture(path: Path, red: int = 0) -> None:
    """Write a small image of one colour, and the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 6), (red, 100, 200)).save(path)


def names(split: Split) -> list[str]:
    """Return the file names of the images."""
    return [Path(split.dataset.name(index)).name for index in range(len(split.dataset))]


def targets(split: Split) -> list[list[int]]:
    """Return the target of each image."""
    return [fixed_sample(split.dataset, index)[1].tolist() for index in range(len(split.dataset))]


def versions(dataset: ImageDataset, index: int = 0) -> set[bytes]:
    """Return the different pixels of an image that is loaded with eight seeds."""
    loaded = [dataset.load(index, SampleRandom(seed))[0] for seed in range(8)]
    return {image.numpy().tobytes() for image in loaded}


def labels(split: Split) -> list[int]:
    """Return the one label of each image."""
    return [row.index(1) for row in targets(split)]
