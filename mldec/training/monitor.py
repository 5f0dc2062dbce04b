"""Sample images and precision-recall curves of evaluations, and the TensorBoard writer."""

import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from mldec.config.schema import Config
from mldec.data.loader import Batch
from mldec.data.types import DataModule
from mldec.errors import writing
from mldec.evaluation.output import Results
from mldec.evaluators.constant import ConstantScores
from mldec.runtime import distributed

log = logging.getLogger("mldec")

THRESHOLDS = 101  # of a precision-recall curve: 0, 0.01, ... 1

COLUMNS = 4  # images per row of the picture
SIDE = 224  # pixels, the longer side of an image
MARGIN = 12
LINE_HEIGHT = 15
MAX_LINES = 6  # below an image
KEY = (
    "right: labeled and predicted; missed: labeled only; wrong: predicted only; "
    "unknown: predicted, not annotated"
)


class Curve(NamedTuple):
    """Counts, precision and recall at the thresholds 0, 1 / (T - 1), ... 1: float64 [T] each."""

    true_positives: np.ndarray
    false_positives: np.ndarray
    true_negatives: np.ndarray
    false_negatives: np.ndarray
    precision: np.ndarray  # 0 without a prediction
    recall: np.ndarray  # 0 without a positive


@dataclass(frozen=True)
class Details:
    """Scalars, curves and images of a step, by tag."""

    scalars: dict[str, float] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    images: dict[str, Image.Image] = field(default_factory=dict)


class Observer:
    """Collect the details of one evaluation, batch by batch.

    The sample images depend on the seed of the run, and are the same in each evaluation. With
    `train.cache_features` no image is read, and none is shown.
    """

    def __init__(self, data: DataModule, config: Config) -> None:
        self.classes = data.val.classes
        self.log = config.log

        # A separate generator leaves the random numbers of training unchanged.
        generator = torch.Generator().manual_seed(config.seed)
        order = torch.randperm(len(data.val.dataset), generator=generator)
        self.chosen = order[: self.log.images].tolist()
        self.shown: dict[int, tuple[Image.Image, list[str]]] = {}

        # A class is predicted above the threshold in the data settings. For exclusive classes, the
        # highest class is predicted.
        evaluator = data.evaluator()
        self.logit_threshold: float | Tensor = 0.0
        if evaluator.logit_threshold is not None:
            self.logit_threshold = evaluator.logit_threshold

        # Number of labels [K, label 0 or 1, T] per class and highest threshold that is reached.
        self.scores = torch.zeros(len(self.classes), 2, THRESHOLDS, dtype=torch.int64)
        self.constant = ConstantScores(len(self.classes))

    def __call__(self, batch: Batch, logits: Tensor) -> None:
        """Add a batch of this rank and its logits float32 [b, K]; see `evaluate_all`."""
        # The evaluation raises an error for non-finite logits.
        logits = logits.nan_to_num()
        for row, index in enumerate(batch.indices.tolist()):
            if index in self.chosen and batch.images.dtype is torch.uint8:
                image = Image.fromarray(batch.images[row].permute(1, 2, 0).numpy())
                lines = self._verdicts(batch.targets[row].cpu(), logits[row].cpu())
                self.shown[index] = ImageOps.contain(image, (SIDE, SIDE)), lines

        self.constant.update(logits, batch.targets)

        # Count annotated labels per class, label and highest threshold that is reached.
        labels = batch.targets.to(logits.device)
        steps = (self._probabilities(logits) * (THRESHOLDS - 1)).floor().long()
        classes = torch.arange(labels.shape[1], device=labels.device)
        codes = (2 * classes + (labels > 0)) * THRESHOLDS + steps
        counts = codes[labels >= 0].bincount(minlength=self.scores.numel())
        self.scores = self.scores.to(counts.device) + counts.view_as(self.scores)

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities of the classes: [..., K] in [0, 1]."""
        if self.classes.exclusive:
            return logits.softmax(-1)
        return logits.sigmoid()

    def constant_classes(self) -> list[str]:
        """Return the names of classes with constant scores on the images of all ranks."""
        indices = self.constant.classes()
        if self.classes.exclusive:
            return []
        return [self.classes.names[index] for index in indices]

    def details(self, results: Results) -> Details | None:
        """Combine the details of all ranks. Returns None on all ranks but the main one."""
        scores = distributed.total(self.scores.cpu()).double().numpy()
        shown: dict[int, tuple[Image.Image, list[str]]] = {}
        for of_process in distributed.gather(self.shown):
            shown |= of_process
        if not distributed.is_main():
            return None

        details = Details()
        per_class = [_curve(counts) for counts in scores]
        micro = _curve(scores.sum(0))
        details.curves["val_pr/micro"] = micro

        # Mean over the classes with positives.
        counted = [curve for curve in per_class if curve.recall[0] > 0]
        if counted:
            precision = np.mean([curve.precision for curve in counted], axis=0)
            recall = np.mean([curve.recall for curve in counted], axis=0)
            details.curves["val_pr/macro"] = micro._replace(precision=precision, recall=recall)

        # The most frequent classes, with the first metric of the evaluator (AP or accuracy).
        name, column = next(iter(results.per_class.items()))
        positives = scores[:, 1].sum(1)
        for index in np.argsort(-positives, kind="stable")[: self.log.classes].tolist():
            if positives[index]:
                class_name = self.classes.names[index]
                details.curves[f"val_pr_class/{class_name}"] = per_class[index]
                details.scalars[f"val_{name}/{class_name}"] = column[index]

        examples = [shown[index] for index in self.chosen if index in shown]
        if examples:
            details.images["val_images"] = draw(examples)
        return details

    def _verdicts(self, labels: Tensor, logits: Tensor) -> list[str]:
        """Compare labels [K] of an image with its predictions: one line per relevant class."""
        probabilities = self._probabilities(logits)
        predicted = logits > self.logit_threshold
        if self.classes.exclusive:
            predicted = probabilities == probabilities.max()

        # Labeled classes come first, because there may be many wrong predictions.
        is_labeled = labels > 0
        relevant = (predicted | is_labeled).nonzero()[:, 0]
        order = relevant[(probabilities + 2 * is_labeled)[relevant].argsort(descending=True)]

        verdicts = []
        for index in order.tolist():
            if is_labeled[index]:
                verdict = "right" if predicted[index] else "missed"
            else:
                verdict = "wrong" if labels[index] == 0 else "unknown"
            verdicts.append(f"{verdict} {self.classes.names[index]} {probabilities[index]:.2f}")
        return verdicts or ["no labels, no predictions"]


def _curve(counts: np.ndarray) -> Curve:
    """Compute a curve from counts [2, T] per label and highest threshold that is reached."""
    # A score that reaches a threshold reaches all lower ones.
    false_positives, true_positives = counts[:, ::-1].cumsum(1)[:, ::-1]
    positives = true_positives[0]
    return Curve(
        true_positives=true_positives,
        false_positives=false_positives,
        true_negatives=false_positives[0] - false_positives,
        false_negatives=positives - true_positives,
        precision=true_positives / np.maximum(1, true_positives + false_positives),
        recall=true_positives / max(1, positives),
    )


def draw(examples: Sequence[tuple[Image.Image, Sequence[str]]]) -> Image.Image:
    """Draw images of at most `SIDE` pixels in a grid, with up to `MAX_LINES` lines below each."""
    rows = -(-len(examples) // COLUMNS)
    width = SIDE + MARGIN
    height = SIDE + (MAX_LINES + 1) * LINE_HEIGHT + MARGIN
    header = LINE_HEIGHT + MARGIN

    size = COLUMNS * width + MARGIN, rows * height + header + MARGIN
    sheet = Image.new("RGB", size, "white")
    canvas = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(12)
    canvas.text((MARGIN, MARGIN), KEY, fill="black", font=font)

    for number, (image, verdicts) in enumerate(examples):
        row, column = divmod(number, COLUMNS)
        left = MARGIN + column * width
        top = header + MARGIN + row * height
        sheet.paste(image, (left, top + SIDE - image.height))

        lines = [line[:36] for line in verdicts[:MAX_LINES]]
        if len(verdicts) > MAX_LINES:
            lines.append(f"and {len(verdicts) - MAX_LINES} more")
        for line, text in enumerate(lines):
            canvas.text((left, top + SIDE + 4 + line * LINE_HEIGHT), text, fill="black", font=font)
    return sheet


class TensorBoard:
    """Write the TensorBoard event files of a run.

    Each start adds a file. Events of earlier files from `purge_step` on are discarded. Unlike
    `SummaryWriter`, which writes in a thread, errors such as a full disk are raised in `add`.
    """

    def __init__(self, folder: Path, *, purge_step: int) -> None:
        # Slow to import.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self.folder = folder
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._event: Any = Event
        self._record_writer: Any = RecordWriter
        self._summary: Any = summary

        start = SessionLog(status=SessionLog.START)
        self._append(
            [Event(file_version="brain.Event:2"), Event(step=purge_step, session_log=start)]
        )

    def add(self, step: int, details: Details) -> None:
        """Write the details of a step; they are on the disk afterwards."""
        summaries = []
        for tag, value in details.scalars.items():
            summaries.append(self._summary.scalar(tag, value))
        for tag, curve in details.curves.items():
            summaries.append(self._summary.pr_curve_raw(tag, *curve, THRESHOLDS))
        for tag, image in details.images.items():
            summaries.append(self._summary.image(tag, np.array(image), dataformats="HWC"))
        self._append([self._event(step=step, summary=summary) for summary in summaries])

    def _append(self, events: list[Any]) -> None:
        with writing(self.folder, of_run=True):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                records = self._record_writer(file)
                for event in events:
                    event.wall_time = time.time()
                    records.write(event.SerializeToString())

    def close(self) -> None:
        """Do nothing; the file is closed after each step."""
