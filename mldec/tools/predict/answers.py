"""From images to rows: decode, score, choose, draw."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mldec.data.loader import end_workers
from mldec.data.types import Classes
from mldec.errors import ConfigError, Stopped, printable, visible
from mldec.evaluators.multi_label import on_device, top_k
from mldec.files.atomic import named, replacing
from mldec.runtime.devices import PinnedCopies, prefetch_one, processors
from mldec.runtime.signals import DataTimeout, StopRequest
from mldec.tools.predict.decode import Decoded, Decoder, Item, decoded, read_item
from mldec.tools.predict.engine import Engine, TorchEngine
from mldec.tools.predict.heat_maps import Font, draw, file_name

# What a row holds of an image: the classes with the highest scores, the scores of all classes, or
# the names of the classes that are present.
Content = Literal["top", "scores", "decisions"]


@dataclass(slots=True)
class Prediction:
    """A class in the answer for an image."""

    index: int
    name: str
    score: float  # from 0 to 1
    threshold: float | None = None  # the lowest score of its class, where each class has one

    def entry(self) -> dict[str, Any]:
        """Return the prediction as it stands in JSON."""
        own = {} if self.threshold is None else {"threshold": self.threshold}
        return {"name": self.name, "score": self.score, **own}


@dataclass(frozen=True)
class Row:
    """The answer for an image: its predictions or all scores, or an error.

    Iterating over a row yields its pairs of a class name and a score.
    """

    image: str  # path of the image, or "image 3" for the fourth one of a list without paths
    # Highest score first; empty after an error, and beside all scores if no picture shows them.
    predictions: Sequence[Prediction] = ()
    # float32 [K], in [0, 1]; None after an error
    scores: Tensor | None = field(default=None, repr=False)
    # float32 [C], if they are wanted; None after an error
    features: Tensor | None = field(default=None, repr=False)
    error: str | None = None  # why there is no answer, in one line
    picture: str | None = None  # path of the picture with heat maps, if it is wanted
    path: str | None = None  # of the file of the image; None if it is part of another file
    may_pass: bool = False  # whether another try may succeed after the error

    def __len__(self) -> int:
        return len(self.predictions)

    def __getitem__(self, index: int) -> tuple[str, float]:
        prediction = self.predictions[index]
        return prediction.name, prediction.score

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which classes are in the answer for an image."""

    classes: Classes  # that were scored
    content: Content = "top"  # of a row; decisions are not limited in number
    top: int = 10  # number of classes at most
    threshold: float = 0.0  # lowest score of every class
    stored: Sequence[float] | None = None  # a threshold per class [K] instead; None without

    def lowest(self) -> Tensor:
        """Return the lowest scores of classes in an answer: float64 [K], or [1] for all."""
        values = [self.threshold] if self.stored is None else [*self.stored]
        return torch.tensor(values, dtype=torch.float64)

    def marked(self, scores: Tensor, lowest: Tensor) -> Tensor:
        """Mark the classes in the answers by their scores: float32 [B, K] -> bool [B, K].

        Of equal scores the lower class comes first. `lowest` is that of the rule, on the device of
        the scores, for which nothing here waits.
        """
        most = self.top if self.content == "top" else scores.shape[1]
        # An image with one label has the class of the highest score, whatever the score is.
        if self.content == "decisions" and self.classes.exclusive:
            most = 1

        reached = scores >= lowest
        if most < scores.shape[1]:
            reached &= top_k(scores.where(reached, -1.0), most)
        return reached

    def predictions(self, scores: Tensor, marked: Tensor) -> list[Prediction]:
        """Return the marked classes of an image [K] in main memory, the highest score first."""
        indices = np.flatnonzero(marked.numpy())
        values = scores.numpy()[indices]
        order = np.argsort(-values, kind="stable")

        predictions = []
        for index, score in zip(indices[order].tolist(), values[order].tolist(), strict=True):
            threshold = None if self.stored is None else self.stored[index]
            predictions.append(Prediction(index, self.classes.names[index], score, threshold))
        return predictions

    def chosen(self, scores: Tensor) -> list[Prediction]:
        """Return the classes in the answer by their scores [K] in main memory."""
        [marked] = self.marked(scores[None], self.lowest())
        return self.predictions(scores, marked)


def chosen_rule(
    engine: Engine, *, content: Content, top: int | None = None, threshold: float | None = None
) -> Rule:
    """Return the rule that the options of a command line stand for; None if one is not given."""
    classes, stored = engine.classes, engine.thresholds
    has_none = threshold is None and stored is None
    if content == "decisions" and has_none and not classes.exclusive:
        raise ConfigError(
            "--content decisions: the checkpoint has no thresholds; pass --threshold, or "
            "calibrate it with mldec calibrate"
        )

    # A threshold of the command line stands for all those of the checkpoint.
    lowest = {"stored": stored} if threshold is None else {"threshold": threshold}
    return Rule(classes=classes, content=content, top=10 if top is None else top, **lowest)


def entries(rule: Rule, row: Row) -> dict[str, Any]:
    """Return the entries of a row in JSON."""
    entries: dict[str, Any] = named(row.image)
    if row.error is not None:
        return {**entries, "error": printable(row.error)}

    if rule.content == "decisions":
        entries["classes"] = [item.name for item in row.predictions]
    elif rule.content == "scores":
        assert row.scores is not None
        entries["scores"] = dict(zip(rule.classes.names, row.scores.tolist(), strict=True))
    else:
        entries["predictions"] = [item.entry() for item in row.predictions]
    return entries if row.picture is None else {**entries, "picture": row.picture}


class Pictures:
    """Draw images and where the model looked, a file per image."""

    def __init__(self, engine: TorchEngine, folder: Path, letters: Sequence[Font]) -> None:
        self._engine, self._folder, self._letters = engine, folder, letters
        # A network without heat maps is refused before the first image.
        self._method = engine.explainer.method

    def add(self, item: Item, predictions: Sequence[Prediction]) -> Path:
        """Write the picture of an image and its classes, and return its path."""
        name, image = Path(item.name), read_item(item)
        transform = self._engine.loaded.transform
        indices = [one.index for one in predictions]
        [heat] = self._engine.heat_maps(transform(image)[None], [indices])

        # The maps cover what the model saw. Where it squeezed the image into a square, drawing
        # them over the image in its own proportions undoes that.
        seen = image.crop(transform.visible_part(image.size))
        texts = [(one.name, f"{one.score:.3f}") for one in predictions]
        findings = list(zip(texts, heat.numpy(), strict=True))
        target = self._folder / file_name(name)
        with replacing(target) as file:
            sheet = draw(seen, name.name, findings, self._method, self._letters)
            sheet.save(file, "JPEG", quality=92, subsampling=0)
        return target


BATCH_SIZE, BATCH_SIZE_GPU = 16, 64  # images at a time by default

# A draft keeps this many pixels per pixel of the network's input, along each side. With 1, pixels
# change twice as much, because the resize that follows has little left to average.
DRAFT = 2


class Predictor:
    """The way from the items of an input to their rows."""

    def __init__(
        self,
        engine: Engine,
        rule: Rule,
        *,
        batch_size: int | None = None,
        workers: int | None = None,
        draft: bool = False,
        features: bool = False,
        pictures: Pictures | None = None,
    ) -> None:
        self._engine, self._rule = engine, rule
        self._features, self._pictures = features, pictures
        self._on_gpu = engine.device.type == "cuda"
        self.batch_size = batch_size or (BATCH_SIZE_GPU if self._on_gpu else BATCH_SIZE)
        if workers is None:
            workers = processors() if self._on_gpu or processors() > 1 else 0
        self._workers = workers
        smallest = DRAFT * engine.shorter_side if draft else None
        self._decoder = Decoder(engine.transform, smallest, engine.decoder)
        self._lowest = rule.lowest()

    def rows(self, items: Iterator[Item], stop: StopRequest, *, then: str = "") -> Iterator[Row]:
        """Yield the row of each item, in their order."""
        amounts = {"batch_size": self.batch_size, "workers": self._workers}
        batches = decoded(items, self._decoder, **amounts, pin=self._on_gpu)
        answered = 0
        try:
            # The device works on the next batch while the rows of this one are written.
            for batch, copies in prefetch_one(self._answered(batches, stop)):
                yield from self._batch_rows(batch, copies)
                answered += len(batch.items)
        except DataTimeout:
            end_workers()
            raise Stopped(
                f"stopped by {stop.name} after {counted(answered)}{then}", stop.status
            ) from None

    def _answered(
        self, batches: Iterator[Decoded], stop: StopRequest
    ) -> Iterator[tuple[Decoded, PinnedCopies | None]]:
        """Score batches until the end or a request to stop, without waiting for the scores."""
        for batch in stop.bounded(batches):
            if stop:
                raise DataTimeout
            yield batch, self._scored(batch) if len(batch.images) else None

    def _scored(self, batch: Decoded) -> PinnedCopies:
        """Begin to score a batch, and to bring what its rows need to main memory."""
        answers = self._engine.answer(batch.images, features=self._features)
        scores = answers.scores
        lowest = on_device(self._lowest, scores.device)  # waits in the first batch only
        assert isinstance(lowest, Tensor)
        self._lowest = lowest
        marked, is_finite = self._rule.marked(scores, self._lowest), scores.sum(1).isfinite()
        features = scores[:, :0] if answers.features is None else answers.features
        return PinnedCopies(scores, marked, is_finite, features)

    def _batch_rows(self, batch: Decoded, copies: PinnedCopies | None) -> Iterator[Row]:
        """Yield the rows of a batch."""
        # The answers belong to the readable images, in their order.
        answers = iter(zip(*copies.wait(), strict=True) if copies else ())
        for index, item in enumerate(batch.items):
            if index in batch.faults:
                fault = batch.faults[index]
                yield Row(item.name, error=fault.text, may_pass=fault.may_pass)
                continue
            scores, marked, is_finite, features = next(answers)
            if not is_finite:
                why = "its scores are not finite; look at the weights of the checkpoint"
                yield Row(item.name, error=f"{visible(item.name)}: {why}")
                continue

            # Objects for all classes cost more than everything else: only where they are seen.
            predictions: list[Prediction] = []
            if self._rule.content != "scores" or self._pictures is not None:
                predictions = self._rule.predictions(scores, marked)
            picture = None
            if self._pictures is not None:
                picture = str(self._pictures.add(item, predictions))
            own = features if self._features else None
            path = item.path if item.is_file else None
            yield Row(item.name, predictions, scores, own, picture=picture, path=path)


def counted(images: int) -> str:
    """Return a number of images in words."""
    return f"{images:,} image" if images == 1 else f"{images:,} images"
