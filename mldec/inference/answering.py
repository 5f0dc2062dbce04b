"""The way from images to their rows: decode, score, choose, draw."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mldec.data.workers import end_workers
from mldec.errors import Stopped, visible
from mldec.inference.decoding import Decoded, Decoder, decoded
from mldec.inference.engine import Engine
from mldec.inference.inputs import Item
from mldec.inference.pictures import Pictures
from mldec.inference.rows import Row, Rule
from mldec.runtime.devices import processors
from mldec.runtime.signals import NothingCame, StopRequest

BATCH_SIZE, BATCH_SIZE_GPU = 16, 64  # images at a time by default

# A draft keeps this many pixels per pixel of the network's input, along each side. With 1, pixels
# change twice as much, because the resize that follows has little left to average.
DRAFT = 2


class Answering:
    """The way from the items of an input to their rows.

    Args:
        engine: that scores.
        rule: which classes are in a row.
        device: that computes.
        batch_size: images at a time; None for `BATCH_SIZE` or `BATCH_SIZE_GPU`.
        workers: processes that decode; None for one per processor, and for none where the model has
            a single one: two processes would only take turns on it.
        draft: let the decoder shrink JPEG files, see `read_image`.
        features: pool features too.
        pictures: that are drawn; None for none.
    """

    def __init__(
        self,
        engine: Engine,
        rule: Rule,
        device: torch.device,
        *,
        batch_size: int | None = None,
        workers: int | None = None,
        draft: bool = False,
        features: bool = False,
        pictures: Pictures | None = None,
    ) -> None:
        self._engine = engine
        self._rule = rule
        self._on_gpu = device.type == "cuda"
        self._batch_size = batch_size or (BATCH_SIZE_GPU if self._on_gpu else BATCH_SIZE)
        self._workers = _default_workers(self._on_gpu) if workers is None else workers
        smallest = DRAFT * engine.shorter_side if draft else None
        self._decoder = Decoder(engine.transform, smallest, engine.decoder)
        self._features = features
        self._pictures = pictures

    def rows(self, items: Iterator[Item], stop: StopRequest, *, then: str = "") -> Iterator[Row]:
        """Yield the row of each item, in their order.

        Args:
            items: a stream of images.
            stop: turns true when the work should end, before the next batch.
            then: how to go on after that, for the message.

        Raises:
            Stopped: after a request to stop.
            OutOfMemoryError: if a batch is too large.
            UserError: if the input cannot be read any further, or a picture not be written.
        """
        batches = decoded(
            items,
            self._decoder,
            batch_size=self._batch_size,
            workers=self._workers,
            pin=self._on_gpu,
        )

        answered = 0
        try:
            for batch in stop.bounded(batches):
                if stop:
                    break
                yield from self._batch_rows(batch)
                answered += len(batch.items)
            else:
                return
        except NothingCame:
            # A worker hangs, on a dead disk for example.
            pass

        end_workers()
        raise Stopped(f"stopped by {stop.name} after {counted(answered)}{then}", stop.status)

    def _batch_rows(self, batch: Decoded) -> Iterator[Row]:
        """Yield the rows of a batch."""
        scores: list[Tensor] = []
        features: list[Tensor | None] = []
        if len(batch.images):
            answers = self._engine.answer(batch.images, features=self._features)
            scores = [*answers.scores]
            features = [None] * len(scores) if answers.features is None else [*answers.features]

        # The answers belong to the readable images, in their order.
        remaining = zip(scores, features, strict=True)
        for index, item in enumerate(batch.items):
            if index in batch.faults:
                yield Row(item.name, error=batch.faults[index])
            else:
                yield self._row(item, *next(remaining))

    def _row(self, item: Item, scores: Tensor, features: Tensor | None) -> Row:
        """Return the row of an image that was scored."""
        if not torch.isfinite(scores).all():
            return Row(
                item.name,
                error=f"{visible(item.name)}: its scores are not finite; "
                f"look at the weights of the checkpoint",
            )

        predictions = self._rule.chosen(scores)
        picture = None
        if self._pictures is not None:
            picture = str(self._pictures.add(item, predictions))
        return Row(item.name, predictions, scores, features, picture=picture)


def _default_workers(on_gpu: bool) -> int:
    """Return the number of processes that decode."""
    count = processors()
    return count if on_gpu or count > 1 else 0


def counted(images: int) -> str:
    """Return a number of images in words."""
    return f"{images:,} image" if images == 1 else f"{images:,} images"
