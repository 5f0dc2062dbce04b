"""Draw the head as in figure 2 of the paper: `python scripts/draw_head.py docs/ml_decoder.svg`.

Needs matplotlib (`pip install -e ".[plot]"`).
"""

import argparse
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK = "#222222"
TOKENS = "#4c78a8"
QUERIES = "#f58518"
LAYERS = "#eeeeee"
LOGITS = "#54a24b"


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str) -> None:
    """Draw a rounded box with a text in its middle."""
    shape = FancyBboxPatch(
        (x, y),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.12",
        facecolor=LAYERS,
        edgecolor=INK,
    )
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=INK)


def cells(
    axes: Axes, x: float, y: float, columns: int, rows: int, colour: str, size: float = 0.3
) -> None:
    """Draw a grid of small squares from its lower left corner."""
    for column in range(columns):
        for row in range(rows):
            corner = (x + column * size, y + row * size)
            axes.add_patch(
                Rectangle(corner, size, size, facecolor=colour, edgecolor="white", linewidth=1)
            )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=INK))


def draw() -> pyplot.Figure:
    """Return the picture, 10 x 4 inches."""
    figure, axes = pyplot.subplots(figsize=(10, 4))
    axes.set(xlim=(0, 15), ylim=(0, 6))
    axes.set_aspect("equal")
    axes.axis("off")

    # Upper row: the image becomes tokens of the width of the decoder.
    box(axes, 0.2, 3.6, 1.7, 1.2, "backbone")
    arrow(axes, (1.9, 4.2), (2.6, 4.2))
    cells(axes, 2.7, 3.6, 4, 4, TOKENS)
    axes.text(3.3, 5.05, "tokens [B, N, C]", ha="center", color=INK)
    arrow(axes, (3.95, 4.2), (4.6, 4.2))
    box(axes, 4.6, 3.6, 1.7, 1.2, "linear,\nReLU")
    arrow(axes, (6.3, 4.2), (7.1, 4.2))

    # Lower row: the queries, which skip self-attention.
    cells(axes, 2.7, 1.0, 1, 5, QUERIES)
    axes.text(
        3.3,
        0.5,
        "G group queries [G, D]: fixed,\nor made of word vectors",
        ha="center",
        va="center",
        color=INK,
    )
    arrow(axes, (3.05, 1.75), (7.4, 1.75))
    arrow(axes, (7.9, 2.3), (7.9, 3.0))
    box(axes, 7.4, 1.2, 1.0, 1.1, "add,\nnorm")

    # Both meet in the decoder layer.
    box(axes, 7.1, 3.0, 2.2, 1.9, "cross-attention,\nthen\nfeed-forward")
    axes.text(8.2, 5.05, "no self-attention", ha="center", color=INK)
    arrow(axes, (9.3, 4.0), (10.0, 4.0))

    # To the right: the logits of the classes of each group.
    cells(axes, 10.1, 3.25, 1, 5, QUERIES)
    axes.text(10.25, 5.05, "[B, G, D]", ha="center", color=INK)
    arrow(axes, (10.45, 4.0), (11.0, 4.0))
    box(axes, 11.0, 3.2, 1.9, 1.6, "group fully-\nconnected\npooling")
    arrow(axes, (12.9, 4.0), (13.5, 4.0))
    cells(axes, 13.6, 2.5, 1, 10, LOGITS)
    axes.text(13.75, 5.75, "logits [B, K]", ha="center", color=INK)
    axes.text(
        11.95, 2.45, "each query answers\nfor K / G classes", ha="center", va="center", color=INK
    )
    return figure


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="such as docs/ml_decoder.svg or head.png")
    args = parser.parse_args()

    # Text stays text, and nothing in the file depends on when it was drawn.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "mldec", "font.family": "sans-serif"}
    )
    metadata = {"Date": None} if args.file.suffix == ".svg" else None
    draw().savefig(args.file, bbox_inches="tight", metadata=metadata)


if __name__ == "__main__":
    main()
