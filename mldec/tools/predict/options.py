"""Options of predictions: of `mldec.load` and `Tagger`, and of the command."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mldec.evaluation.options import ModelOptions, fraction, option, positive, whole

# Content of a row: predicted classes with their scores, the scores of all classes, or the names of
# the classes whose scores reach their thresholds.
Content = Literal["top", "scores", "decisions"]


@dataclass(frozen=True, kw_only=True)
class ScoringOptions(ModelOptions):
    """A model and its predicted classes: the keywords of `mldec.load` and `Tagger`."""

    top: int | None = option(positive)  # maximum number of classes, see `Rule`
    threshold: float | None = option(fraction)  # minimum score
    batch_size: int | None = option(positive)
    workers: int | None = option(whole)  # decoding processes


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ScoringOptions):
    """The options of the command, see `mldec predict --help`."""

    # Input images, see `Inputs`.
    images: Sequence[str] = ()
    list: str | None = None
    column: str | None = None
    root: str | None = None
    shard: tuple[int, int] = (0, 1)
    draft: bool = False

    # Rows, see `Rule`.
    content: Content = "top"

    # Result files, see `formats`.
    jsonl: str | None = None
    json: str | None = None
    csv: str | None = None
    label_studio: str | None = None
    image_prefix: str = ""
    cvat: str | None = None
    parquet: str | None = None
    features: str | None = None
    overwrite: bool = False
    pictures: str | None = None  # folder
    font: str | None = None  # of the pictures

    # Keywords of photos, see `xmp`.
    suggest: bool = False
    xmp: bool = False
    xmp_parent: str | None = None
    xmp_undo: bool = False
    sort: str | None = None  # folder of links to the photos, see `sort_photo`
    copy: bool = False  # copies instead of links
