"""A data set that was packed into tar shards by scripts/pack_shards.py."""

from dataclasses import replace
from pathlib import Path

import torch

from mldec.data.base import LabelledImages
from mldec.data.cache import TableCache
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder
from mldec.data.storage.tar_shards import load_shards, read_index
from mldec.data.task import MultiLabel, PartialLabels, SingleLabel, Task

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
        DataError: A file under `root` is missing or broken; see `Source.load`.
        ValueError: An argument is out of range.
    """
    several, one = MultiLabel(threshold), SingleLabel(top_k)
    folder = check_folder(root, "packed shards", _SEE)

    def load(split: str, cache: TableCache) -> LabelledImages:
        return load_shards(folder / split)

    task = _packed_task(folder / val, several, one)
    return Source(load=load, train=train, val=val, task=task, where=folder, see=_SEE)


def _packed_task(folder: Path, several: MultiLabel, one: SingleLabel) -> Task:
    """Return the task of a packed split, as its index states it."""
    index = read_index(folder / "index.npz")
    queries = torch.from_numpy(index.queries).float()
    vectors = (lambda names: (queries, None)) if index.queries.size else None

    # If labels that are not listed are -1, the data set is partially annotated.
    if index.exclusive:
        return replace(one, vectors=vectors)
    if index.rest == -1:
        return PartialLabels(threshold=several.threshold, vectors=vectors)
    return replace(several, vectors=vectors)
