"""Pictures of an evaluation: example images with predictions, and precision-recall curves."""

import textwrap
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from mldec.data.loader import Batch
from mldec.data.types import Split, picture
from mldec.errors import DataError
from mldec.evaluation.output import Results
from mldec.evaluators.average_precision import columns_of
from mldec.runtime import distributed

WEAKEST = 10  # number of classes with a precision-recall curve
TOP = 3  # number of predicted classes per image

# Layout of the grid, in pixels.
SIDE = 160  # longer side of an image
LINE = 14  # height of a line of text
COLUMNS = 4  # images per row
COLORS = {1: "darkgreen", 0: "firebrick", -1: "dimgray"}  # of a predicted class, by its label


# Labels, bool [n], and scores, float32 [n] in [0, 1], of the annotated images of a class.
Curve = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Example:
    """Labels and logits of a validation image."""

    index: int  # in the dataset
    labels: Tensor  # int8 [K]: 1, 0 or -1 (not annotated)
    logits: list[Tensor]  # float32 [K] of each model


class ExampleImages:
    """Collects the logits of a few validation images during an evaluation.

    The `count` images are spaced evenly, because images are often sorted by class.
    """

    def __init__(self, split: Split, count: int) -> None:
        images = len(split.dataset)
        self.split = split
        self.indices = torch.from_numpy(np.linspace(0, images - 1, min(count, images)).astype(int))
        self.examples: list[Example] = []

    def update(self, batch: Batch, logits: list[Tensor]) -> None:
        """Add a batch and the logits float32 [b, K] of each model."""
        for row in torch.isin(batch.indices, self.indices).nonzero().flatten().tolist():
            # Copy the rows, because a view would keep the whole batch.
            own = [each[row].to("cpu", copy=True) for each in logits]
            self.examples.append(Example(int(batch.indices[row]), batch.targets[row].clone(), own))

    def gather(self) -> None:
        """Collect the examples of all ranks, in the order of the dataset."""
        everything = [each for part in distributed.gather(self.examples) for each in part]
        self.examples = sorted(everything, key=lambda each: each.index)

    def draw(self, model: int) -> tuple[np.ndarray, str]:
        """Draw the images with their labels and the `TOP` predictions of the model of this index.

        Returns the grid, uint8 [H, W, 3], and a text with a line per image, which starts with its
        name.
        """
        classes = self.split.classes
        height = SIDE + LINE * (1 + TOP)
        rows = -(-len(self.examples) // COLUMNS)
        grid = Image.new("RGB", (COLUMNS * SIDE, rows * height), "white")
        font = ImageFont.load_default(11)
        text = []

        for number, example in enumerate(self.examples):
            logits = example.logits[model]
            scores = logits.softmax(0) if classes.exclusive else logits.sigmoid()
            columns = (example.labels == 1).nonzero().flatten().tolist()
            present = [classes.names[column] for column in columns]
            lines = [", ".join(present) or "no label"]
            colors = ["black"]
            for column in logits.argsort(descending=True, stable=True)[:TOP].tolist():
                lines.append(f"{scores[column]:.2f} {classes.names[column]}")
                colors.append(COLORS[int(example.labels[column])])
            name = self.split.dataset.name(example.index)
            text.append(f"{name}: {lines[0]}; predictions {', '.join(lines[1:])}")

            tile = Image.new("RGB", (SIDE, height), "white")
            # The file may have been removed after its features were cached.
            with suppress(DataError):
                photo = picture(self.split.dataset, example.index, draft=SIDE)
                tile.paste(ImageOps.contain(photo, (SIDE, SIDE)))
            pen = ImageDraw.Draw(tile)
            for position, (line, color) in enumerate(zip(lines, colors, strict=True)):
                pen.text((2, SIDE + LINE * position), line, color, font)
            row, column = divmod(number, COLUMNS)
            grid.paste(tile, (column * SIDE, row * height))
        return np.asarray(grid), "\n".join(text)


def weakest_curves(results: Results, names: tuple[str, ...]) -> dict[str, Curve]:
    """Return the curves of the classes with the lowest AP, by name; {} for single-label data.

    With several ranks, all ranks must call it.
    """
    if results.predictions is None:
        return {}
    ap = np.array(results.per_class["AP"])
    # NaN, the AP of a class without positives, is last.
    weakest = ap.argsort(kind="stable")[: min(WEAKEST, np.isfinite(ap).sum())]

    # The blocks hold the images of this rank and all classes.
    logits, targets = results.predictions.blocks()
    own = [torch.from_numpy(columns_of(blocks, weakest)) for blocks in (logits, targets)]
    parts = distributed.gather(own)
    labels = torch.cat([part[1] for part in parts], dim=1).numpy()
    scores = torch.cat([part[0] for part in parts], dim=1).sigmoid().numpy()

    curves = {}
    for row, index in enumerate(weakest):
        annotated = labels[row] >= 0
        curves[names[index]] = (labels[row][annotated] == 1, scores[row][annotated])
    return curves


def write_pictures(
    board: Any, step: int, curves: dict[str, Curve], examples: ExampleImages, model: int
) -> None:
    """Add the curves, and the images with the predictions of a model, to a SummaryWriter."""
    for name, curve in curves.items():
        board.add_pr_curve(f"weakest classes/{name}", *curve, step)
    if examples.examples:
        grid, text = examples.draw(model)
        board.add_image("validation images", grid, step, dataformats="HWC")
        board.add_text("validation images", textwrap.indent(text, "    "), step)
