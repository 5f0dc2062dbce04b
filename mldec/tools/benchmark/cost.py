"""Count the work per image, and compare it with tables 1 and 2 and figures 5 and 6 of the paper.

The GFLOPs of the paper are multiply-accumulates: one product and one sum together count as one.
"""

import argparse
from typing import Any, NamedTuple

import torch
from torch import nn

from mldec import build
from mldec.config.compose import compose
from mldec.data.types import Classes
from mldec.model import count_parameters, multiply_accumulates

TOLERANCE = 0.1  # GMAC: the tables round to 0.1, figure 5 is read off a plot
UNEXPLAINED = (
    "The paper's figure for the transformer decoder with 9,600 queries differs from the derived "
    "one, and no formula is known that meets it: the same terms meet every other row."
)


class Row(NamedTuple):
    """A model of the paper and its cost according to the paper."""

    where: str  # table or figure
    backbone: str  # with the option file of its name, in lower case
    head: str  # likewise
    classes: int
    queries: int | None  # None for GAP
    image_size: int  # side in pixels; the paper does not name it, but its figures fit no other
    paper_gmac: float  # the paper's GFLOPs


# In the paper's order.
ROWS = (
    Row("table 1", "TResNet-M", "GAP", 80, None, 448, 23.0),
    Row("table 1", "TResNet-M", "Transformer-Decoder", 80, 80, 448, 24.1),
    Row("table 1", "TResNet-M", "ML-Decoder", 80, 20, 448, 23.6),
    Row("table 1", "TResNet-M", "ML-Decoder", 80, 80, 448, 23.9),
    Row("table 2", "TResNet-M", "GAP", 9600, None, 224, 5.8),
    Row("table 2", "TResNet-M", "Transformer-Decoder", 9600, 9600, 224, 178.6),
    Row("table 2", "TResNet-M", "ML-Decoder", 9600, 100, 224, 6.3),
    Row("table 2", "TResNet-M", "ML-Decoder", 9600, 200, 224, 6.7),
    Row("table 2", "TResNet-M", "ML-Decoder", 9600, 400, 224, 7.6),
    Row("figure 5", "TResNet-S", "GAP", 80, None, 448, 18.6),
    Row("figure 5", "TResNet-S", "ML-Decoder", 80, 80, 448, 19.5),
    Row("figure 5", "TResNet-M", "GAP", 80, None, 448, 22.9),
    Row("figure 5", "TResNet-M", "ML-Decoder", 80, 80, 448, 23.9),
    Row("figure 5", "TResNet-L", "GAP", 80, None, 448, 35.3),
    Row("figure 5", "TResNet-L", "ML-Decoder", 80, 80, 448, 36.2),
)


class Point(NamedTuple):
    """A model of figure 6 and its coordinates there.

    It is trained on ImageNet with 1,000 classes at 224 pixels; ML-Decoder has 100 queries.
    """

    backbone: str
    head: str  # the name of the head option
    paper_images_per_second: int  # read off the plot, within 30; the paper does not name its GPU
    paper_top1: float  # likewise, within 0.05


POINTS = (
    Point("ResNet-18", "gap", 9040, 70.2),
    Point("ResNet-18", "ml_decoder", 7040, 74.9),
    Point("ResNet-34", "gap", 5570, 75.4),
    Point("ResNet-34", "ml_decoder", 4670, 77.7),
    Point("ResNet-50", "gap", 2620, 79.7),
    Point("ResNet-50", "ml_decoder", 2520, 80.4),
)


def built(row: Row | Point) -> nn.Module:
    """Build a model from the option files, on the meta device, which takes no memory."""
    if isinstance(row, Point):
        num_classes = 1000
        backbone = row.backbone.lower().replace("-", "")
        settings = ["+experiment=imagenet_resnet50_a2", f"backbone={backbone}_scratch"]
        settings.append(f"head={row.head}")
    else:
        num_classes = row.classes
        backbone, head = (name.lower().replace("-", "_") for name in (row.backbone, row.head))
        settings = ["+experiment=coco_tresnet_m", f"backbone={backbone}", f"head={head}"]
        if head == "ml_decoder":
            settings.append(f"head.num_groups={row.queries}")

    parts = build.check(compose(settings), build.MODEL_PARTS)
    classes = Classes(tuple(f"class {i}" for i in range(num_classes)))
    with torch.device("meta"):
        return build.model(parts, classes, pretrained=False)


def cost(args: argparse.Namespace | None = None) -> dict[str, Any]:
    """Count multiply-accumulates and parameters of the models of the tables and figures."""
    rows, figure_6 = [], []
    for row in ROWS:
        model = built(row)
        gmac = multiply_accumulates(model, row.image_size) / 1e9
        trainable, total = count_parameters(model)
        counted = {
            "gmac": gmac,
            "difference": gmac - row.paper_gmac,
            "explained": row.queries != 9600,
            "trainable_parameters": trainable,
            "parameters": total,
        }
        rows.append(row._asdict() | counted)

    for point in POINTS:
        model = built(point)
        gmac, trainable = multiply_accumulates(model, 224) / 1e9, count_parameters(model)[0]
        figure_6.append(point._asdict() | {"gmac": gmac, "trainable_parameters": trainable})
    about = {"tolerance_gmac": TOLERANCE, "note": UNEXPLAINED}
    return {"rows": rows, "figure_6": figure_6, **about}


def table(figures: dict[str, Any]) -> str:
    """Return the figures of `cost` as text; with frozen queries in all parameters."""
    # 1. Tables 1 and 2 and figure 5.
    lines = [
        "  where     backbone   head                 classes queries  size    GMAC  paper  differ"
        "  M trained   M all"
    ]
    for row in figures["rows"]:
        lines.append(
            f"  {row['where']:<9} {row['backbone']:<10} {row['head']:<20} {row['classes']:>7} "
            f"{row['queries'] or '-':>7} {row['image_size']:>5} {row['gmac']:>7.2f} "
            f"{row['paper_gmac']:>6.1f} {row['difference']:>+7.2f} "
            f"{row['trainable_parameters'] / 1e6:>10.2f} {row['parameters'] / 1e6:>7.2f}"
            + ("" if row["explained"] else " *")
        )
    lines.append(f"  * {figures['note']}")

    # 2. Figure 6, which has no GMAC of the paper to compare with.
    lines.append("  figure 6: ImageNet at 224 pixels, beside the axes of the paper's plot")
    lines.append("  backbone   head          GMAC  M trained  images/s  top-1")
    for row in figures["figure_6"]:
        lines.append(
            f"  {row['backbone']:<10} {row['head']:<10} {row['gmac']:>7.2f} "
            f"{row['trainable_parameters'] / 1e6:>10.2f} {row['paper_images_per_second']:>9} "
            f"{row['paper_top1']:>6}"
        )
    return "\n".join(lines)
