"""Photos in, scores and heat maps out: what the web page and its HTTP endpoint say of photos."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mldec.checkpoint.classes import can_make
from mldec.data.images import read_image
from mldec.errors import ConfigError, DataError, visible
from mldec.explain import Explainer
from mldec.inference.classes import class_names, read_classes
from mldec.inference.engine import Engine, TorchEngine
from mldec.inference.scoring import DEFAULT_THRESHOLD, decided
from mldec.runtime import out_of_memory

MAX_PHOTOS = 16  # per request
MAX_PIXELS = 50_000_000  # of a photo: the largest of today's telephones, but for special modes
BATCH_SIZE = 4  # photos in the network at a time
PICTURE = 400  # longer side of the kept picture in pixels
CLASS_LISTS = 8  # lists of typed classes whose word vectors are kept
MAX_CLASSES = 1000  # typed into the page
HEAT_BYTES = 2**17  # of a photo's heat maps, 32 of them, in the estimate of what is kept
NAME_LENGTH = 100  # letters of a photo's name that are kept


@dataclass(frozen=True)
class Photo:
    """An uploaded file: its name, which may be anything, and its bytes."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Answer:
    """What is known of a photo.

    Attributes:
        name: of its file, without folders and control characters.
        fault: why it has no scores; None if it has.
        scores: float32 [K], in [0, 1].
        seen: the part that the model saw: left, top, right, bottom, in pixels of the upright photo.
        picture: that part, `PICTURE` pixels on its longer side at most.
        pixels: the input of the model, uint8 [3, S, S]; None if it is not needed again.
        heat: the maps that were made, float32 [h, w], by class.
    """

    name: str
    fault: str | None = None
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    seen: tuple[float, float, float, float] = (0, 0, 0, 0)
    picture: Image.Image | None = None
    pixels: Tensor | None = None
    heat: dict[int, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Answers:
    """The answers to some photos, and the engine with the classes that they are about."""

    engine: Engine
    photos: tuple[Answer, ...]

    @property
    def size(self) -> int:
        """Bytes in memory, with an allowance for heat maps that are made later."""
        total = 0
        for photo in self.photos:
            total += HEAT_BYTES + photo.scores.nbytes
            if photo.picture is not None:
                total += 3 * photo.picture.width * photo.picture.height
            if photo.pixels is not None:
                total += photo.pixels.nbytes
        return total


class Answerer:
    """Answer for photos, one request at a time.

    Attributes:
        engine: with the classes that it starts with.
        explains: heat maps can be made.

    Args:
        engine: that scores.
        vectors: where the word vectors of other classes of a zero-shot model come from, see
            `read_classes`.
    """

    def __init__(self, engine: Engine, vectors: str | None = None) -> None:
        self.engine = engine
        self.explains = isinstance(engine, TorchEngine)
        self._vectors = vectors
        self._lock = threading.Lock()
        self._engines: OrderedDict[tuple[str, ...], Engine] = OrderedDict()
        self._explainer: tuple[Engine, Explainer] | None = None

    @property
    def takes_classes(self) -> bool:
        """Other classes can be named."""
        has_source = self._vectors is not None or can_make(self.engine.classes)
        return self.engine.zero_shot and has_source

    def answer(self, photos: Sequence[Photo], classes: str = "") -> Answers:
        """Score photos.

        Args:
            photos: `MAX_PHOTOS` at most.
            classes: names with commas between, for a zero-shot model; empty for its own.

        Returns:
            The answers in the order of the photos; one that is no image has a `fault`.

        Raises:
            UserError: if there are too many photos, or the classes cannot be scored.
        """
        if not photos:
            raise DataError("no photo: pass at least one")
        if len(photos) > MAX_PHOTOS:
            raise DataError(f"{len(photos)} photos: pass at most {MAX_PHOTOS} at a time")

        with self._lock:
            engine = self._engine_of(classes)
            read = [self._read(photo) for photo in photos]
            return self._scored(engine, read)

    def again(self, answers: Answers, classes: str) -> Answers:
        """Score the photos of an earlier answer for other classes; see `answer`."""
        with self._lock:
            engine = self._engine_of(classes)
            return self._scored(engine, [replace(photo, heat={}) for photo in answers.photos])

    def heat(self, answers: Answers, index: int, classes: Sequence[int]) -> list[np.ndarray]:
        """Return where the model looked in a photo for some classes, float32 [h, w] each.

        Args:
            answers: of `answer`, which keeps the maps.
            index: of the photo.
            classes: their indices.

        Raises:
            ConfigError: if no heat maps can be made of this model.
            OutOfMemoryError: if they need too much memory.
        """
        photo = answers.photos[index]
        with self._lock:
            absent = [number for number in classes if number not in photo.heat]
            if absent:
                photo.heat.update(zip(absent, self._maps(answers, photo, absent), strict=True))
        return [photo.heat[number] for number in classes]

    def method(self, answers: Answers) -> str:
        """Return how the heat maps are made, a phrase for users."""
        with self._lock:
            return self._explainer_of(answers.engine).method

    def _engine_of(self, classes: str) -> Engine:
        """Return the engine for classes that a user names; see `answer`."""
        if not classes.strip():
            if not self.engine.classes.names:
                raise ConfigError("this model has no classes of its own: type some")
            return self.engine
        if not self.engine.zero_shot:
            raise ConfigError("this model knows its own classes only: it is no zero-shot model")
        if not self.takes_classes:
            raise ConfigError(
                "other classes need word vectors: start mldec.demo with --vectors FILE"
            )

        names = class_names(classes)
        if len(names) > MAX_CLASSES:
            raise ConfigError(f"{len(names):,} classes: name at most {MAX_CLASSES:,}")
        if names not in self._engines:
            # What strangers type is not written to this machine.
            named = read_classes(classes, self._vectors, self.engine.classes, keep=False)
            self._engines[names] = self.engine.for_classes(named)
        self._engines.move_to_end(names)
        while len(self._engines) > CLASS_LISTS:
            self._engines.popitem(last=False)
        return self._engines[names]

    def _read(self, photo: Photo) -> Answer:
        """Decode a photo into a picture and the input of the model, or say what is wrong."""
        # The name of a stranger's file is a text, never a path of this machine.
        name = PurePosixPath(visible(photo.name.replace("\\", "/"))).name[-NAME_LENGTH:] or "photo"
        try:
            image = read_image(name, photo.content, max_pixels=MAX_PIXELS)
        except DataError as error:
            return Answer(name, str(error).removeprefix(f"{name}: "))
        try:
            pixels = self.engine.transform(image)
        except DataError as error:
            return Answer(name, str(error))

        seen: tuple[float, float, float, float] = (0, 0, *image.size)
        if isinstance(self.engine, TorchEngine):
            seen = self.engine.loaded.transform.visible_part(image.size)
        picture = image.crop(seen)
        picture.thumbnail((PICTURE, PICTURE), Image.Resampling.LANCZOS)
        return Answer(name, seen=seen, picture=picture, pixels=pixels)

    def _scored(self, engine: Engine, photos: Sequence[Answer]) -> Answers:
        """Return the photos with scores of an engine's classes."""
        readable = [photo.pixels for photo in photos if photo.pixels is not None]
        scores: list[Tensor] = []
        for start in range(0, len(readable), BATCH_SIZE):
            scores += engine.answer(readable[start : start + BATCH_SIZE]).scores

        remaining = iter(scores)
        keeps = self.explains or self.takes_classes
        answers = []
        for photo in photos:
            if photo.pixels is None:
                answers.append(photo)
                continue
            # A clone, because a row would keep the scores of the whole batch in memory.
            row = next(remaining).clone()
            if not torch.isfinite(row).all():
                answers.append(Answer(photo.name, "its scores are not finite"))
                continue
            answers.append(replace(photo, scores=row, pixels=photo.pixels if keeps else None))
        return Answers(engine, tuple(answers))

    def _maps(self, answers: Answers, photo: Answer, classes: list[int]) -> list[np.ndarray]:
        explainer = self._explainer_of(answers.engine)
        assert photo.pixels is not None
        assert isinstance(answers.engine, TorchEngine)

        with out_of_memory.explained(lambda: "out of memory: a heat map needs more than a score"):
            model_input = photo.pixels[None].to(answers.engine.device)
            [heat] = explainer.maps(model_input, [classes])
        return [map.numpy() for map in heat]

    def _explainer_of(self, engine: Engine) -> Explainer:
        """Return what makes the heat maps; that of the last engine is kept."""
        if not isinstance(engine, TorchEngine):
            raise ConfigError(
                "an exported file has no heat maps: start mldec.demo with its checkpoint"
            )
        if self._explainer is None or self._explainer[0] is not engine:
            loaded = engine.loaded
            with out_of_memory.explained(lambda: "out of memory: a heat map needs more"):
                explainer = Explainer(loaded.model, engine.image_size, loaded.classes.queries)
            self._explainer = engine, explainer
        return self._explainer[1]


@dataclass(frozen=True)
class Named:
    """A class of a photo.

    Attributes:
        index: of the class.
        name: likewise.
        score: in [0, 1].
        threshold: the lowest score of a present class; None if an image has one label.
        present: the decision.
    """

    index: int
    name: str
    score: float
    threshold: float | None
    present: bool


def stored_or(engine: Engine, threshold: float | None) -> Tensor | None:
    """Return the thresholds float32 [K] of decisions.

    Args:
        engine: that scored.
        threshold: one for all classes; None for those of the engine, `DEFAULT_THRESHOLD` if it has
            none.

    Returns:
        None if an image has one label: its most probable class is present.

    Raises:
        ConfigError: if the threshold is out of range.
    """
    if engine.classes.exclusive:
        return None
    if threshold is None and engine.thresholds is not None:
        return torch.tensor(engine.thresholds)

    if threshold is None:
        threshold = DEFAULT_THRESHOLD
    if not 0 <= threshold <= 1:
        raise ConfigError(f"threshold: {threshold} is not a number from 0 to 1")
    return torch.full((len(engine.classes),), threshold)


def ranked(engine: Engine, scores: Tensor, thresholds: Tensor | None) -> list[Named]:
    """Return all classes of a photo, highest score first; of equal scores the lower index.

    Args:
        engine: that scored.
        scores: float32 [K].
        thresholds: see `stored_or`.
    """
    present = decided(scores[None], thresholds)[0].tolist()
    values, order = scores.sort(descending=True, stable=True)
    lowest = [None] * len(present) if thresholds is None else thresholds.tolist()
    return [
        Named(index, engine.classes.names[index], score, lowest[index], present[index])
        for index, score in zip(order.tolist(), values.tolist(), strict=True)
    ]
