"""A data set that was packed into tar shards by scripts/pack_shards.py."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mldec.data.base import Classes, LabelledImages
from mldec.data.cache import TableCache
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder
from mldec.data.storage.tar_shards import load_shards, read_index
from mldec.data.task import MultiLabel, PartialLabels, SingleLabel, Task
from mldec.evaluators import Evaluator

_SEE = "see DATASETS.md, section Tar shards"


def shards(
    *,
    root: str,
    train: str = "train",
    val: str = "val",
    threshold: float = 0.5,
    top_k: int | None = None,
) -> Source:
    """Return a data set that was packed into shards, with its original targets and classes.

    The labels of `val` decide the metric: top-1 if each image has exactly one label, `mAP_partial`
    if labels that are not listed are not annotated, else mAP.

    Args:
        root: folder with {split}/index.npz and {split}/shard-000000.tar, ...
        train: split to learn from.
        val: split to evaluate on.
        threshold: with several labels per image, the probability from which on a class counts as
            predicted.
        top_k: with one label per image, see `SingleLabelEvaluator`.

    Raises:
        DataError: A file under `root` is missing or broken; the shards of a split are checked when
            the split is first used.
        ValueError: An argument is out of range.
    """
    several, one = MultiLabel(threshold), SingleLabel(top_k)
    folder = check_folder(root, "packed shards", _SEE)

    def load(split: str, cache: TableCache) -> LabelledImages:
        return load_shards(folder / split)

    task = _packed_task(folder / val, several, one)
    return Source(load=load, train=train, val=val, task=task, where=folder, see=_SEE)


@dataclass(frozen=True)
class PackedTask:
    """A task whose classes may have word vectors; see `mldec.data.task.Task`."""

    task: Task
    queries: Tensor | None  # word vectors of the classes, float32 [K, D]

    def training(self, images: LabelledImages) -> tuple[LabelledImages, Classes]:
        """See `Task`."""
        images, classes = self.task.training(images)
        return images, replace(classes, queries=self.queries)

    def validation(self, images: LabelledImages) -> tuple[LabelledImages, Classes]:
        """See `Task`."""
        return self.training(images)

    def evaluator(self, classes: Classes) -> Evaluator:
        """See `Task`."""
        return self.task.evaluator(classes)


def _packed_task(folder: Path, several: MultiLabel, one: SingleLabel) -> PackedTask:
    """Return the task of a packed split, as its index states it."""
    index = read_index(folder / "index.npz")
    queries = torch.from_numpy(index.queries).float() if index.queries.size else None

    if index.exclusive:
        return PackedTask(one, queries)

    # If labels that are not listed are -1, the data set is partially annotated.
    task = PartialLabels(several.threshold) if index.rest == -1 else several
    return PackedTask(task, queries)
