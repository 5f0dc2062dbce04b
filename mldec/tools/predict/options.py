"""Options of predictions: of `mldec.load` and `Tagger`, and of the command."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mldec.evaluation.options import ModelOptions, flag, fraction, option, positive, whole

# Content of a row: predicted classes with their scores, the scores of all classes, or the names of
# the classes whose scores reach their thresholds.
Content = Literal["top", "scores", "decisions"]


def shard(text: str) -> tuple[int, int]:
    """Parse I/N with 0 <= I < N."""
    number, _, total = text.partition("/")
    if number == "auto":
        raise argparse.ArgumentTypeError(f"{text} was removed; run one process for each I/{total}")
    if not (number.isdecimal() and total.isdecimal() and int(number) < int(total)):
        raise argparse.ArgumentTypeError(f"{text} is not I/N with 0 <= I < N, such as 0/4")
    return int(number), int(total)


@dataclass(frozen=True, kw_only=True)
class ScoringOptions(ModelOptions):
    """A model and its predicted classes: the keywords of `mldec.load` and `Tagger`."""

    top: int | None = option("maximum number of classes; without thresholds: 10", positive)
    threshold: float | None = option(
        "minimum score, 0 to 1; default: the thresholds of the checkpoint, if any. Scores "
        "of models trained with ASL are not probabilities unless they are calibrated",
        fraction,
    )
    batch_size: int | None = option("default 16, on a GPU 64", positive)
    workers: int | None = option("decoding processes (default: one per CPU)", whole, metavar="N")


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ScoringOptions):
    """The options of the command."""

    # Input images, see `Inputs`.
    images: Sequence[str] = ()
    list: str | None = option(
        "text file with one path per line (- for standard input), or a .csv or .parquet file "
        "with a column of them; .parquet also with image files as bytes",
        metavar="FILE",
    )
    column: str | None = option("column of --list (default: image, path or bytes)", metavar="NAME")
    root: str | None = option(
        "folder of relative paths in --list (default: current)", metavar="FOLDER"
    )
    draft: bool = flag("decode large JPEG files smaller: faster, less exact")
    shard: tuple[int, int] = option(
        "predict only every N-th image, beginning with number I, from 0",
        tuple,
        (0, 1),
        type=shard,
        metavar="I/N",
    )
    content: Literal["top", "scores", "decisions"] = option(
        "the predicted classes with their scores (default), all scores, or only the names of "
        "the predicted classes",
        default="top",
        choices=get_args(Content),
    )

    # Result files, see `formats`.
    jsonl: str | None = option("JSON Lines; - for standard output", metavar="FILE")
    json: str | None = option("JSON list of the same rows, or -", metavar="FILE")
    csv: str | None = option("CSV table, or -", metavar="FILE")
    label_studio: str | None = option("tasks with predictions, to import; or -", metavar="FILE")
    image_prefix: str = option(
        "text before the paths in --label-studio, such as /data/local-files/?d=",
        default="",
        metavar="TEXT",
    )
    cvat: str | None = option("tags as CVAT for images 1.1, to upload; or -", metavar="FILE")
    parquet: str | None = option("Parquet table; needs pyarrow", metavar="FILE")
    features: str | None = option(
        "mean of the backbone's tokens: .npy, float32 [N, C]", metavar="FILE"
    )
    overwrite: bool = flag("replace existing result files and start again")
    pictures: str | None = option("write a JPEG file with heat maps per image", metavar="FOLDER")
    font: str | None = option("font of --pictures, a .ttf or .otf file", metavar="FILE")

    # Keywords of photos, see `xmp`.
    suggest: bool = flag("leave out classes that are keywords of the photo")
    xmp: bool = flag("add classes that are not keywords of the photo to its sidecar, photo.jpg.xmp")
    xmp_parent: str | None = option(
        "parent of the keywords of --xmp, such as Suggested", metavar="NAME"
    )
    xmp_undo: bool = flag("remove all keywords that --xmp has added; needs no checkpoint")
    sort: str | None = option(
        "add links to the photos to a folder per predicted class", metavar="FOLDER"
    )
    copy: bool = flag("copies instead of links in the folders of --sort")
