"""Photos on the page that are not from a request: examples and training photos.

They are chosen when the server starts. A request cannot name a path.
"""

import math
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from mldec.data.images import READ, read_image
from mldec.data.photos import SkippedFiles, files_below
from mldec.errors import ConfigError, DataError
from mldec.evaluation.left_out import read_training_images
from mldec.files.text import read_bytes
from mldec.tools.pages import data_url
from mldec.tools.predict.engine import Engine, TorchEngine

MAX_EXAMPLES = 6
SIDE = 160  # longer side of a thumbnail in pixels


class Example(NamedTuple):
    """A photo that visitors can try."""

    name: str
    content: bytes  # of the file
    thumbnail: str  # a data URL


def read_examples(folder: str) -> list[Example]:
    """Read up to six photos, evenly spaced in the list of photos below a folder."""
    found = files_below(folder, SkippedFiles())
    paths = [path for path in map(Path, found) if path.suffix.lower() in READ]
    if not paths:
        raise ConfigError(f"--examples {folder}: it has no photos; pass another folder")
    # Neighbors are often of the same class or series.
    chosen = paths[:: math.ceil(len(paths) / MAX_EXAMPLES)]
    return [Example(path.name, read_bytes(path), thumbnail(path)) for path in chosen]


def thumbnail(path: Path) -> str:
    """Return a small version of a photo as a data URL."""
    image = read_image(path, draft=SIDE)
    image.thumbnail((SIDE, SIDE))
    return data_url(image)


class TrainingPhoto(BaseModel):
    """A training photo that raises the score of a class."""

    image: str  # path relative to data.root of the training
    contribution: float  # to the logit
    picture: str | None = None  # a data URL


class TrainingPhotos:
    """The training photos of the model of an engine, with their files below a folder."""

    def __init__(self, engine: Engine, folder: str) -> None:
        images = read_training_images(engine.loaded) if isinstance(engine, TorchEngine) else None
        if images is None:
            raise ConfigError(
                f"--training-photos: the features of the training photos of {engine.path} are not "
                f"stored; pass the folder of a run with head=ridge and at most 5,000 photos"
            )
        self.images = images

        # Names with ".." and links could lead to other files.
        root = Path(folder).resolve()
        self._paths: dict[str, Path] = {}
        for name in images.names:
            path = (root / name).resolve()
            if path.is_relative_to(root) and path.is_file():
                self._paths[name] = path
        if not self._paths:
            fault = f"none of the training photos is in it, such as {images.names[0]}"
            raise ConfigError(
                f"--training-photos {folder}: {fault}; pass data.root of the training"
            )

    def show(self, name: str, contribution: float) -> TrainingPhoto:
        """Return a training photo with its thumbnail, if its file still exists."""
        photo = TrainingPhoto(image=name, contribution=contribution)
        if name in self._paths:
            # The error would name a folder of the server.
            with suppress(DataError):
                photo.picture = thumbnail(self._paths[name])
        return photo
