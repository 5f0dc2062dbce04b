"""Rows of images: decoding, scoring, selection of classes and pictures."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mldec.data.loader import end_workers
from mldec.data.types import Classes
from mldec.errors import OptionError, Stopped, printable
from mldec.evaluation.run import as_limits, decided
from mldec.evaluators.multi_label import on_device, top_k
from mldec.files.atomic import named, replacing
from mldec.runtime.devices import PinnedCopies, loader_processes, prefetch_one
from mldec.runtime.signals import DataTimeout, StopRequest
from mldec.tools.heat_maps import Font, draw, file_name
from mldec.tools.predict.decode import Decoded, Decoder, Item, decoded, read_item
from mldec.tools.predict.engine import Engine, TorchEngine
from mldec.tools.predict.options import Content

TOP = 10  # number of predicted classes of a model without thresholds


@dataclass(slots=True)
class Prediction:
    """A predicted class of an image."""

    index: int
    name: str
    score: float  # in [0, 1]
    threshold: float | None = None  # of the class, if each class has its own


@dataclass(frozen=True)
class Row:
    """The result of an image: predictions and scores, or an error.

    Iterating over a row yields pairs of a class name and a score.
    """

    image: str  # path of the image, or "image 3" for the fourth photo without a path
    # Highest score first. Empty after an error, and for content "scores" without pictures.
    predictions: Sequence[Prediction] = ()
    scores: Tensor | None = field(default=None, repr=False)  # float32 [K], in [0, 1]
    features: Tensor | None = field(default=None, repr=False)  # float32 [C], if requested
    error: str | None = None  # one line
    retry: bool = False  # whether another attempt may succeed after the error
    picture: str | None = None  # path of the picture with heat maps, if requested
    path: str | None = None  # of the image file; None if the image is part of another file

    def to_dict(self) -> dict[str, Any]:
        """Return the image, and its predictions or error, as in `mldec predict --jsonl`."""
        result: dict[str, Any] = named(self.image)
        if self.error is not None:
            result["error"] = printable(self.error)
            return result

        result["predictions"] = []
        for item in self.predictions:
            prediction = {"name": item.name, "score": item.score}
            if item.threshold is not None:
                prediction["threshold"] = item.threshold
            result["predictions"].append(prediction)
        if self.picture is not None:
            result["picture"] = self.picture
        return result

    def __repr__(self) -> str:
        text = ", ".join(f"{name} {score:.3f}" for name, score in self)
        return f"Row({self.image}: {self.error or text or 'nothing'})"

    def __len__(self) -> int:
        return len(self.predictions)

    def __getitem__(self, index: int) -> tuple[str, float]:
        prediction = self.predictions[index]
        return prediction.name, prediction.score

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for prediction in self.predictions:
            yield prediction.name, prediction.score


class Rows(list[Row]):
    """The rows of several photos, for classes with these names."""

    def __init__(self, rows: Iterable[Row], names: Sequence[str]) -> None:
        super().__init__(rows)
        self.names = names

    def scores(self) -> np.ndarray:
        """Return the scores of all classes, float32 [N, K]; NaN for an unreadable photo."""
        scores = np.full((len(self), len(self.names)), np.nan, np.float32)
        for values, row in zip(scores, self, strict=True):
            if row.scores is not None:
                values[:] = row.scores.numpy()
        return scores

    def to_frame(self) -> Any:
        """Return a DataFrame with one row per photo.

        The columns are image (its path), error (None if there is none), predictions (a list of
        names, highest score first), and the score of each class, in the order of the classes.
        """
        from pandas import DataFrame, concat

        facts = []
        for row in self:
            facts.append((row.image, row.error, [name for name, _ in row]))
        left = DataFrame(facts, columns=["image", "error", "predictions"])
        return concat([left, DataFrame(self.scores(), columns=list(self.names))], axis=1)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Selects the predicted classes of images by their scores.

    With thresholds, an image has exactly the classes whose scores reach them, possibly none.
    Without thresholds, and for single-label models, the classes are only ranked. A ranking lists
    the `TOP` highest scores unless `top` is given.
    """

    classes: Classes  # K classes
    content: Content = "top"
    top: int | None = None  # maximum number of classes, for content "top"
    threshold: float | None = None  # minimum score of each class
    stored: Sequence[float] | None = None  # K thresholds, which replace `threshold`
    image_prefix: str = ""  # text before the paths of images, see `formats.label_studio`

    @property
    def has_thresholds(self) -> bool:
        """Whether thresholds select the classes."""
        return self.threshold is not None or self.stored is not None

    def min_scores(self) -> Tensor:
        """Return the minimum scores, float32 [K], or [1] if they are equal."""
        return as_limits([self.threshold or 0.0] if self.stored is None else self.stored)

    def selected(self, scores: Tensor, min_scores: Tensor) -> Tensor:
        """Return a mask of the selected classes, bool [B, K], from scores float32 [B, K].

        The lower class index wins ties. `min_scores` must be on the device of the scores. There is
        no synchronization with the device.
        """
        maximum = scores.shape[1]
        if self.content == "top" and self.top is not None:
            maximum = self.top
        elif self.content == "top" and (self.classes.exclusive or not self.has_thresholds):
            maximum = TOP
        elif self.content == "decisions" and self.classes.exclusive:
            maximum = 1

        reached = decided(scores, min_scores)
        if maximum < scores.shape[1]:
            reached &= top_k(scores.where(reached, -1.0), maximum)
        return reached

    def predictions(self, scores: Tensor, selected: Tensor) -> list[Prediction]:
        """Return the selected classes of an image, highest score first, from CPU tensors [K]."""
        indices = np.flatnonzero(selected.numpy())
        values = scores.numpy()[indices]
        order = np.argsort(-values, kind="stable")

        predictions = []
        for index, score in zip(indices[order].tolist(), values[order].tolist(), strict=True):
            threshold = None if self.stored is None else self.stored[index]
            predictions.append(Prediction(index, self.classes.names[index], score, threshold))
        return predictions

    def chosen(self, scores: Tensor) -> list[Prediction]:
        """Return the predicted classes of an image by its scores, a CPU tensor [K]."""
        [selected] = self.selected(scores[None], self.min_scores())
        return self.predictions(scores, selected)


def chosen_rule(
    engine: Engine, *, content: Content, top: int | None = None, threshold: float | None = None
) -> Rule:
    """Return the rule of the options of the same names, which are None if they are not given."""
    stored = engine.thresholds if threshold is None else None
    rule = Rule(
        classes=engine.classes, content=content, top=top, threshold=threshold, stored=stored
    )
    if content == "decisions" and not rule.has_thresholds and not engine.classes.exclusive:
        remedy = "pass a threshold, or calibrate it with mldec calibrate"
        raise OptionError("content", f"decisions: the checkpoint has no thresholds; {remedy}")
    return rule


def entries(rule: Rule, row: Row) -> dict[str, Any]:
    """Return the JSON object of a row."""
    if row.error is not None or rule.content == "top":
        return row.to_dict()

    result: dict[str, Any] = named(row.image)
    if rule.content == "decisions":
        result["classes"] = [item.name for item in row.predictions]
    else:
        assert row.scores is not None
        result["scores"] = dict(zip(rule.classes.names, row.scores.tolist(), strict=True))
    if row.picture is not None:
        result["picture"] = row.picture
    return result


class Pictures:
    """Writes a picture of each image with heat maps to a folder, see `draw`."""

    def __init__(self, engine: TorchEngine, folder: Path, fonts: Sequence[Font]) -> None:
        self._engine = engine
        self._folder = folder
        self._fonts = fonts
        self._method = engine.explainer.method

    def add(self, item: Item, predictions: Sequence[Prediction]) -> Path:
        """Write the picture of an image and its classes, and return its path."""
        image = read_item(item)
        transform = self._engine.loaded.transform
        indices = [prediction.index for prediction in predictions]
        [heat] = self._engine.heat_maps(transform(image)[None], [indices])

        # The maps cover the visible part of the image, which the transform may have distorted.
        seen = image.crop(transform.visible_part(image.size))
        findings = []
        for prediction, values in zip(predictions, heat.numpy(), strict=True):
            findings.append(((prediction.name, f"{prediction.score:.3f}"), values))
        name = Path(item.name)
        target = self._folder / file_name(name)
        with replacing(target) as file:
            sheet = draw(seen, name.name, findings, self._method, self._fonts)
            sheet.save(file, "JPEG", quality=92, subsampling=0)
        return target


# Default batch sizes on a CPU and on a GPU.
BATCH_SIZE = 16
BATCH_SIZE_GPU = 64

# Minimum shorter side of images decoded with --draft, relative to the resized images. A value of 1
# would double the differences of the pixels.
DRAFT = 2


class Predictor:
    """Decodes and scores items. Its arguments are options of the command."""

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
        self._engine = engine
        self._rule = rule
        self._features = features
        self._pictures = pictures
        self._on_gpu = engine.device.type == "cuda"
        self._min_scores = rule.min_scores()

        self.batch_size = batch_size or (BATCH_SIZE_GPU if self._on_gpu else BATCH_SIZE)
        if workers is None:
            workers = loader_processes(engine.device.type)
            if workers == 1 and not self._on_gpu:
                workers = 0  # decode in this process
        self._workers = workers
        min_side = DRAFT * engine.shorter_side if draft else engine.min_side
        self._decoder = Decoder(engine.transform, min_side, engine.decoder)

    def rows(self, items: Iterator[Item], stop: StopRequest, *, hint: str = "") -> Iterator[Row]:
        """Yield the row of each item, in order. A stop request raises Stopped after a batch."""
        sizes = {"batch_size": self.batch_size, "workers": self._workers}
        batches = decoded(items, self._decoder, **sizes, pin=self._on_gpu)
        count = 0
        try:
            # The device scores the next batch while the rows of this batch are written.
            for batch, copies in prefetch_one(self._scored(batches, stop)):
                yield from self._batch_rows(batch, copies)
                count += len(batch.items)
        except DataTimeout:
            end_workers()
            message = f"stopped by {stop.name} after {counted(count)}{hint}"
            raise Stopped(message, stop.status) from None

    def _scored(
        self, batches: Iterator[Decoded], stop: StopRequest
    ) -> Iterator[tuple[Decoded, PinnedCopies | None]]:
        size = 0  # of the first batch; smaller ones are padded
        for batch in stop.bounded(batches):
            if stop:
                raise DataTimeout
            if not len(batch.images):
                yield batch, None
                continue

            size = max(size, len(batch.items))
            answers = self._engine.answer(batch.images, features=self._features, size=size)
            scores = answers.scores
            min_scores = on_device(self._min_scores, scores.device)  # copied once
            assert isinstance(min_scores, Tensor)
            self._min_scores = min_scores
            selected = self._rule.selected(scores, min_scores)
            is_finite = scores.sum(1).isfinite()
            # `PinnedCopies` takes tensors only.
            features = scores[:, :0] if answers.features is None else answers.features
            yield batch, PinnedCopies(scores, selected, is_finite, features)

    def _batch_rows(self, batch: Decoded, copies: PinnedCopies | None) -> Iterator[Row]:
        # Images with a fault have no results.
        results = iter(zip(*copies.wait(), strict=True) if copies else ())
        for index, item in enumerate(batch.items):
            if index in batch.faults:
                fault = batch.faults[index]
                yield Row(item.name, error=fault.message, retry=fault.retry)
                continue

            scores, selected, is_finite, features = next(results)
            if not is_finite:
                error = f"{item.name}: its scores are not finite; check the checkpoint's weights"
                yield Row(item.name, error=error)
                continue

            # Skip the slow creation of thousands of objects if they are not used.
            predictions: list[Prediction] = []
            if self._rule.content != "scores" or self._pictures is not None:
                predictions = self._rule.predictions(scores, selected)
            picture = None
            if self._pictures is not None:
                picture = str(self._pictures.add(item, predictions))
            pooled = features if self._features else None
            path = item.path if item.is_file else None
            yield Row(item.name, predictions, scores, pooled, picture=picture, path=path)


def counted(images: int) -> str:
    """Format a number of images."""
    return f"{images:,} image" if images == 1 else f"{images:,} images"
