"""What a dataset holds and what is wrong with it: the work of `mldec.check_data`."""

import argparse
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from mldec.check_data.charts import bars, grid, heat_map
from mldec.check_data.published import OFFICIAL
from mldec.data.base import DataModule, ImageDataset, Split, StoredImages
from mldec.data.digits.scenes import Scenes
from mldec.data.labels import Labels, from_dense
from mldec.data.loader import seeded, start_worker, unwrap
from mldec.data.readers.coco import PRESENT
from mldec.data.transforms import read_image
from mldec.data.zero_shot.task import neighbours
from mldec.errors import DataError, say
from mldec.runtime.console import on_terminal

BATCH = 16  # images that a process reads at a time
NAMED = 10  # examples of a fault that are printed
SAMPLES = 24  # in the picture grid
PLOTTED = 80  # classes in the co-occurrence plot


@dataclass
class Examined:
    """What the image files of a split turned out to be."""

    indices: np.ndarray  # [n]: of the images that were read
    hashes: np.ndarray  # [n] uint64: of the files' bytes
    bad: list[str]  # what is wrong with each image that cannot be decoded


class Probe(Dataset[Any]):
    """Read, hash and decode images without augmenting them."""

    def __init__(self, dataset: ImageDataset, indices: np.ndarray) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> tuple[int, str]:
        """Return the 64-bit hash of an image's bytes, and what is wrong with it, if anything."""
        index = int(self.indices[place])
        content = b""
        try:
            if isinstance(self.dataset, StoredImages):
                content = self.dataset.storage.content(index)
                read_image(self.dataset.name(index), content)
            else:  # made while it is needed
                content = self.dataset[index][0].numpy().tobytes()
        except DataError as error:
            # What cannot be read at all is no duplicate of anything.
            return _hash(content or f"unreadable {index}".encode()), str(error)
        return _hash(content), ""


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def examine(dataset: ImageDataset, count: int, workers: int, title: str) -> Examined:
    """Read `count` images, evenly spread over a dataset, in several processes."""
    indices = np.unique(
        np.linspace(0, len(dataset) - 1, min(count, len(dataset))).round().astype(np.int64)
    )
    hashes: list[int] = []
    bad: list[str] = []
    loader: Any = DataLoader(
        Probe(dataset, indices),
        BATCH,
        num_workers=workers
        if len(indices) > BATCH
        else 0,  # for one batch they take longer to start than to work
        collate_fn=list,
        worker_init_fn=start_worker,
    )
    with tqdm(total=len(indices), desc=title, leave=False, disable=not on_terminal()) as bar:
        batch: Any  # a list of what Probe gives
        for batch in unwrap(loader):
            hashes += [hash for hash, _ in batch]
            bad += [error for _, error in batch if error]
            bar.update(len(batch))
    return Examined(indices, np.array(hashes, np.uint64), bad)


def labels_of(split: Split) -> Labels:
    """Return the labels of a split; of data that is not kept in a table they are drawn one by one."""
    dataset = split.dataset
    if isinstance(dataset, StoredImages):
        return dataset.labels
    if isinstance(dataset, Scenes):
        return from_dense(
            np.stack([dataset.target(index).numpy() for index in range(len(dataset))])
        )
    return from_dense(np.stack([dataset[index][1].numpy() for index in range(len(dataset))]))


def facts(split: Split, labels: Labels) -> dict[str, Any]:
    """Return the counts of a split as plain values."""
    counts, per_image = labels.counts(), labels.counts_per_image()
    names = split.classes.names
    return {
        "images": len(split.dataset),
        "classes": len(names),
        "positives": int(counts.sum()),
        "negatives_stated": int(labels.counts(0).sum()),
        "images_a_class": {
            "min": int(counts.min()),
            "median": float(np.median(counts)),
            "max": int(counts.max()),
        },
        "labels_an_image": {
            "min": int(per_image.min()),
            "mean": float(per_image.mean()),
            "max": int(per_image.max()),
        },
        "images_without_label": int((per_image == 0).sum()),
        "classes_without_positive": [
            name for name, count in zip(names, counts, strict=True) if not count
        ],
    }


def label_faults(split: Split, labels: Labels, *, several: bool = False) -> list[str]:
    """Return what is impossible about the labels of a split; `several` are right for ImageNet's ReaL labels."""
    found = []
    if labels.num_classes != len(split.classes.names) or len(labels) != len(split.dataset):
        found.append(f"labels are of {len(labels):,} images and {labels.num_classes} classes")
    wrong = (
        (labels.classes < 0)
        | (labels.classes >= labels.num_classes)
        | ~np.isin(labels.values, (-1, 0, 1))
    )
    if wrong.any():
        first = int(np.searchsorted(labels.starts, np.flatnonzero(wrong)[0], "right")) - 1
        found.append(
            f"{wrong.sum():,} labels out of range, the first of {split.dataset.name(first)}"
        )
    elif (
        split.classes.exclusive
        and not several
        and (many := np.flatnonzero(labels.counts_per_image() != 1)).size
    ):
        found.append(
            f"{len(many):,} images without exactly one label, the first is {split.dataset.name(int(many[0]))}"
        )
    return found


def twins(examined: Examined) -> list[tuple[int, int]]:
    """Return the pairs of indices of images with equal bytes within a split: each copy with the first of its kind."""
    _, first, inverse = np.unique(examined.hashes, return_index=True, return_inverse=True)
    original = first[inverse.ravel()]
    copies = np.flatnonzero(original != np.arange(len(original)))
    return [(int(examined.indices[copy]), int(examined.indices[original[copy]])) for copy in copies]


def twin_faults(
    dataset: ImageDataset, labels: Labels, examined: Examined
) -> tuple[list[str], list[str]]:
    """Return a phrase for each file that is a copy of another one, and for each that is listed twice."""
    copies, listed = [], []
    for index, first in twins(examined):
        name, original = dataset.name(index), dataset.name(first)
        if name == original:
            same = torch.equal(labels.row(index), labels.row(first))
            listed.append(
                f"{name} is listed twice, with {'the same' if same else 'different'} labels"
            )
        else:
            copies.append(f"{name} is a copy of {original}")
    return copies, listed


def shared(data: DataModule, train: Examined, val: Examined) -> list[tuple[str, str]]:
    """Return the pairs of names of images that are in both splits."""
    _, ours, theirs = np.intersect1d(train.hashes, val.hashes, return_indices=True)
    pairs = zip(train.indices[ours], val.indices[theirs], strict=True)
    return [
        (data.train.dataset.name(int(one)), data.val.dataset.name(int(other)))
        for one, other in pairs
    ]


def compared(number: int, official: Iterable[int] | None) -> str:
    """Return a count with the official one beside it, where that is known."""
    known = sorted(official or ())
    if not known:
        return f"{number:,}"
    verdict = (
        "as published"
        if number in known
        else f"published: {' or '.join(f'{one:,}' for one in known)}"
    )
    return f"{number:,} ({verdict})"


def show(
    name: str, found: dict[str, Any], images: set[int] | None, classes: set[int] | None
) -> None:
    """Print the facts of a split."""
    frequency, per_image = found["images_a_class"], found["labels_an_image"]
    say(
        f"{name}: {compared(found['images'], images)} images, {compared(found['classes'], classes)} classes"
    )
    say(
        f"  images a class    {frequency['min']:,} to {frequency['max']:,}, median {frequency['median']:,.0f}"
    )
    say(
        f"  labels an image   {per_image['min']} to {per_image['max']}, mean {per_image['mean']:.2f}; "
        f"{found['images_without_label']:,} images without one"
    )
    if found["negatives_stated"]:
        say(
            f"  negatives stated  {found['negatives_stated']:,} beside {found['positives']:,} positives"
        )
    if found["classes_without_positive"]:
        empty = found["classes_without_positive"]
        say(f"  without positives {len(empty):,} classes: {_some(empty)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def pictures(folder: Path, data: DataModule, labels: dict[str, Labels]) -> None:
    """Write the grid of augmented training samples, and the two plots of each split."""
    folder.mkdir(parents=True, exist_ok=True)
    images, captions, names = [], [], data.train.classes.names
    with seeded(0):
        for index in (
            np.linspace(0, len(data.train.dataset) - 1, SAMPLES).round().astype(int).tolist()
        ):
            try:
                image, target = data.train.dataset[index]
            except DataError:
                continue  # it is among the faults
            images.append(image.permute(1, 2, 0).numpy())
            captions.append(
                ", ".join(names[place] for place in (target == 1).nonzero().flatten().tolist())
                or "(none)"
            )
    grid(images, captions).save(folder / "samples.png")
    for part, split in (("train", data.train), ("val", data.val)):
        counts = labels[part].counts()
        bars(counts, split.classes.names, f"{part}: images a class (log scale)").save(
            folder / f"{part}_classes.png"
        )
        most = np.sort(np.argsort(-counts, kind="stable")[:PLOTTED])
        together = co_occurrence(labels[part], most)
        title = f"{part}: share of the row's images that show the column's class too"
        heat_map(together, [split.classes.names[place] for place in most], title).save(
            folder / f"{part}_pairs.png"
        )


def co_occurrence(labels: Labels, classes: np.ndarray) -> np.ndarray:
    """Return [k, k]: the fraction of the images with one class that have the other; the order is that of `classes`."""
    pairs = np.zeros((len(classes), len(classes)))
    for start in range(0, len(labels), 65_536):  # a dense piece at a time
        piece = labels.select(np.arange(start, min(start + 65_536, len(labels))))
        present = np.zeros((len(piece), len(classes)), np.float32)
        kept = (piece.values == 1) & np.isin(piece.classes, classes)
        images = np.repeat(np.arange(len(piece)), np.diff(piece.starts))[kept]
        present[images, np.searchsorted(classes, piece.classes[kept])] = 1
        pairs += present.T @ present
    return pairs / np.maximum(np.diag(pairs)[:, None], 1)


def check(
    data: DataModule, option: str, words: argparse.Namespace, settings: dict[str, Any], workers: int
) -> tuple[dict[str, Any], list[str]]:
    """Examine both splits and print what they hold; return the report and a phrase for each kind of fault."""
    report: dict[str, Any] = {"data": option}
    faults, labels, examined = [], {}, {}
    *images, classes = OFFICIAL.get(option, (None, None, None))
    for part, split, official in zip(("train", "val"), (data.train, data.val), images, strict=True):
        if isinstance(split.dataset, StoredImages):
            split.dataset.storage.verify(
                lambda items: tqdm(items, desc="sha256", leave=False, disable=not on_terminal())
            )
        labels[part] = labels_of(split)
        if settings.get("sizes"):  # of the objects of a class: present, whichever they are
            labels[part] = labels[part].recode(PRESENT)
        impossible = label_faults(
            split, labels[part], several=part == "val" and bool(settings.get("real_labels"))
        )
        for fault in impossible:
            say(f"{part}: {fault}")
        faults += [f"{part}: {fault}" for fault in impossible]
        if impossible:
            continue
        report[part] = facts(split, labels[part])
        show(part, report[part], official, classes)
        count = len(split.dataset) if words.decode is None else words.decode
        examined[part] = examine(split.dataset, count, workers, f"read {part}")
        _note(
            report[part],
            faults,
            f"images of {part} cannot be decoded",
            "cannot_be_decoded",
            examined[part].bad,
        )
        copies, listed = twin_faults(split.dataset, labels[part], examined[part])
        _note(report[part], faults, f"images of {part} are listed twice", "listed_twice", listed)
        _note(report[part], faults, f"images of {part} are copies", "copies", copies)
    if len(examined) == 2:
        report["nearest_seen"] = neighbours(data.train.classes, data.val.classes)
        for name, near in report["nearest_seen"].items():
            say(
                f"  unseen {name}: nearest "
                + ", ".join(f"{other} {cosine:.2f}" for other, cosine in near)
            )
        pairs = shared(data, examined["train"], examined["val"])
        both = [
            f"{one} is listed in both" if one == other else f"{one} is also {other}"
            for one, other in pairs
        ]
        _note(report, faults, "images are in train and in val", "in_both_splits", both)
        if words.out:
            pictures(Path(words.out), data, labels)
    return {**report, "faults": faults}, faults


def _note(report: dict[str, Any], faults: list[str], what: str, key: str, found: list[str]) -> None:
    """Print and report the cases of one fault."""
    report[key] = found
    if found:
        faults.append(f"{len(found):,} {what}")
        say(f"  {len(found):,} {what}:")
        for line in found[:NAMED]:
            say(f"    {line}")
        if len(found) > NAMED:
            say(f"    and {len(found) - NAMED:,} more (all with --json)")
