"""Count what a dataset holds and find what is wrong with it: the work of `mldec check-data`."""

import hashlib
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import normalize
from tqdm import tqdm

from mldec import build
from mldec.config.schema import Config, Mix
from mldec.data.images import read_image
from mldec.data.labels import Labels
from mldec.data.loader import Batch, labels_of, stack
from mldec.data.mixing import Mixing
from mldec.data.readers.shards import TarShards
from mldec.data.types import Classes, DataModule, ImageDataset, Split, StoredImages, fixed_sample
from mldec.errors import DataError, say, visible
from mldec.names import format_list
from mldec.tools.pages import NAME_LENGTH, SMALL, new_figure, save, set_title, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK = 256  # images that the threads read before the progress bar moves
MAX_PRINTED = 10  # cases of a fault that are printed
SAMPLES = 12  # images on the sample sheet
SAMPLES_PER_ROW = 6
NAMED_BARS = 120  # with more bars than this, names and counts would not be legible

# Images of train and val, and classes, by the name of the data option. Source: the datasets' own
# pages, and the counts that the readers of published code arrive at; where two counts are in use,
# DATASETS.md says what makes the difference.
OFFICIAL = {
    "coco": ({82_081, 82_783, 117_266, 118_287}, {40_137, 40_504, 4_952, 5_000}, {80}),
    "coco_zsl": (set(), set(), {48, 65}),
    "voc2007": ({5_011}, {4_952}, {20}),
    "voc2012": ({5_717, 11_540}, {5_823}, {20}),
    "openimages_miil": ({9_011_219}, {125_436}, {9_605}),
    "openimages": ({9_011_219}, {41_620, 125_436}, {9_605}),
    "nuswide81": ({119_103, 161_789}, {50_720, 107_859}, {81}),
    "nuswide_zsl": (set(), set(), {925, 1_006}),
    "nuswide_official": ({161_789}, {107_859}, {925, 1_006}),
    "imagenet": ({1_281_167}, {50_000}, {1_000}),
    "cars": ({8_144}, {8_041}, {196}),
    "cifar100": ({50_000}, {10_000}, {100}),
    "vg500": ({82_904}, {10_000}, {500}),
}


@dataclass
class ImageCheck:
    """Result of reading the image files of a split."""

    indices: np.ndarray  # [n]: of the images that were read
    hashes: np.ndarray  # [n] uint64: of the files' bytes
    errors: list[str]  # one message per image that cannot be decoded


def read_image_file(dataset: ImageDataset, index: int) -> tuple[int, str]:
    """Read, hash and decode an image: return the hash, and why it cannot be decoded, or ""."""
    content, error = b"", ""
    try:
        if isinstance(dataset, StoredImages):
            content = dataset.storage.content(index)
            read_image(dataset.name(index), content)
        else:
            # A generated image has no file: hash its pixels.
            content = fixed_sample(dataset, index)[0].numpy().tobytes()
    except DataError as fault:
        # Unreadable files must not count as copies of each other.
        content, error = content or f"unreadable {index}".encode(), str(fault)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"), error


def read_images(dataset: ImageDataset, count: int, workers: int, title: str) -> ImageCheck:
    """Read images evenly spread over a dataset, in several threads; the title is of the bar."""
    count = min(count, len(dataset))
    places = np.linspace(0, len(dataset) - 1, count)
    indices = np.unique(places.round().astype(np.int64))

    # Threads help: Pillow decodes without the interpreter's lock. Block by block, because millions
    # of images that wait for their turn take memory.
    hashes, errors = np.zeros(len(indices), np.uint64), []
    bar = tqdm(total=len(indices), desc=title, leave=False, disable=None)
    with ThreadPoolExecutor(max(1, workers)) as threads, bar:
        for start in range(0, len(indices), BLOCK):
            block = indices[start : start + BLOCK].tolist()
            read = threads.map(partial(read_image_file, dataset), block)
            for position, (number, error) in enumerate(read, start):
                hashes[position] = number
                errors += [error] if error else []
            bar.update(len(block))
    return ImageCheck(indices, hashes, errors)


def repetition_faults(
    dataset: ImageDataset, labels: Labels, images: ImageCheck
) -> tuple[list[str], list[str]]:
    """Return one phrase per file that is a copy of another one, and one per file listed twice."""
    _, first, inverse = np.unique(images.hashes, return_index=True, return_inverse=True)
    originals = images.indices[first[inverse.ravel()]]

    copies, listed_twice = [], []
    for index, original_index in zip(images.indices.tolist(), originals.tolist(), strict=True):
        if index == original_index:
            continue
        name, original = dataset.name(index), dataset.name(original_index)
        if name != original:
            copies.append(f"{name} is a copy of {original}")
        else:
            is_same = torch.equal(labels.row(index), labels.row(original_index))
            kind = "the same" if is_same else "different"
            listed_twice.append(f"{name} is listed twice, with {kind} labels")
    return copies, listed_twice


def images_in_both(data: DataModule, train: ImageCheck, val: ImageCheck) -> list[str]:
    """Return one phrase per image that is in both splits."""
    _, in_train, in_val = np.intersect1d(train.hashes, val.hashes, return_indices=True)
    phrases = []
    for index, other in zip(train.indices[in_train], val.indices[in_val], strict=True):
        name = data.train.dataset.name(int(index))
        other_name = data.val.dataset.name(int(other))
        where = "listed in both" if name == other_name else f"also {other_name}"
        phrases.append(f"{name} is {where}")
    return phrases


def split_statistics(split: Split, labels: Labels) -> dict[str, Any]:
    """Return the counts of a split as plain values, under the keys of the JSON report."""
    counts, per_image = labels.counts(), labels.counts_per_image()
    names = split.classes.names
    return {
        "images": len(split.dataset),
        "classes": len(names),
        "positives": int(counts.sum()),
        "negatives_stated": int(labels.counts(0).sum()),
        "images_per_class": {
            "min": int(counts.min()),
            "median": float(np.median(counts)),
            "max": int(counts.max()),
        },
        "labels_per_image": {
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
    """Return one phrase per kind of impossible labels in a split.

    With `several` an image may have more than one label although the classes are exclusive, as
    ImageNet's ReaL labels have.
    """
    wrong = (labels.classes < 0) | (labels.classes >= labels.num_classes)
    wrong |= ~np.isin(labels.values, (-1, 0, 1))
    if wrong.any():
        # The image whose entries of the sparse labels include the first wrong one.
        first = int(np.searchsorted(labels.starts, wrong.argmax(), "right")) - 1
        return [f"{wrong.sum():,} labels out of range, the first of {split.dataset.name(first)}"]

    others = np.flatnonzero(labels.counts_per_image() != 1)
    if split.classes.exclusive and not several and len(others):
        name = split.dataset.name(int(others[0]))
        return [f"{len(others):,} images without exactly one label, the first is {name}"]
    return []


def compared(number: int, published: set[int]) -> str:
    """Return a count as text, with the published counts beside it where they are known."""
    if number in published:
        return f"{number:,} (as published)"
    if not published:
        return f"{number:,}"
    alternatives = " or ".join(f"{count:,}" for count in sorted(published))
    return f"{number:,} (published: {alternatives})"


def print_statistics(
    part: str, statistics: dict[str, Any], images: set[int], classes: set[int]
) -> None:
    """Print the counts of a split, beside the published numbers of images and of classes."""
    say(
        f"{part}: {compared(statistics['images'], images)} images, "
        f"{compared(statistics['classes'], classes)} classes"
    )
    frequency, per_image = statistics["images_per_class"], statistics["labels_per_image"]
    empty_images = statistics["images_without_label"]
    say(
        "  images per class  {min:,} to {max:,}, median {median:,.0f}".format(**frequency),
        "  labels per image  {min} to {max}, mean {mean:.2f}; ".format(**per_image)
        + f"{empty_images:,} images without one",
    )

    negatives, empty = statistics["negatives_stated"], statistics["classes_without_positive"]
    if negatives:
        say(f"  negatives stated  {negatives:,} beside {statistics['positives']:,} positives")
    if empty:
        say(f"  without positives {len(empty):,} classes: {format_list(empty)}")


def write_charts(folder: Path, data: DataModule, labels: Mapping[str, Labels], mix: Mix) -> None:
    """Write a sheet of training samples, and the class frequencies of each split."""
    folder.mkdir(parents=True, exist_ok=True)
    mixing = build.mixing(mix, data.train.classes) if mix.enabled else None
    batches = {
        "": sample_batch(data.train.viewed(data.transform)),
        "as in training": sample_batch(data.train, mixing),
    }
    save(sample_sheet(batches, data.train.classes.names), folder / "samples.png")

    for part, split in (("train", data.train), ("val", data.val)):
        title = f"{part}: images per class (log scale)"
        chart = bar_chart(labels[part].counts(), split.classes.names, title)
        save(chart, folder / f"{part}_classes.png")


def sample_batch(split: Split, mixing: Mixing | None = None) -> Batch:
    """Load `SAMPLES` images, evenly spread over a split, as a batch of training."""
    indices = np.linspace(0, len(split.dataset) - 1, SAMPLES).round().astype(int)
    samples = []
    for index in indices.tolist():
        try:
            image, target = fixed_sample(split.dataset, index)
        except DataError:
            continue  # it is reported among the faults
        samples.append((image, target, (0, index, 0)))

    return stack(samples, mixing=mixing)


def sample_sheet(batches: Mapping[str, Batch], classes: Sequence[str]) -> "Figure":
    """Draw the images of each batch.

    Above an image stands the caption of its batch, or the names of its classes if that is empty.
    """
    rows = len(batches) * SAMPLES // SAMPLES_PER_ROW
    figure = new_figure(width=2 * SAMPLES_PER_ROW, height=2.4 * rows)
    grid = figure.subplots(rows, SAMPLES_PER_ROW).reshape(len(batches), SAMPLES)
    for axes in grid.flatten():
        axes.axis("off")

    for (caption_of_batch, batch), row in zip(batches.items(), grid, strict=True):
        for image, target, axes in zip(batch.images, batch.targets, row, strict=False):
            names = [classes[k] for k in (target == 1).nonzero().flatten().tolist()]
            text = caption_of_batch or visible(", ".join(names) or "(none)")
            caption = textwrap.wrap(text, NAME_LENGTH)[:3]
            axes.imshow(image.permute(1, 2, 0).numpy())
            axes.set_title("\n".join(caption), fontsize=SMALL, loc="left", parse_math=False)
    return figure


def bar_chart(counts: np.ndarray, names: Sequence[str], title: str) -> "Figure":
    """Draw counts [K] on a logarithmic axis that begins at 0, the largest count on top.

    Up to `NAMED_BARS` bars are labelled with their names and counts.
    """
    order = np.argsort(-counts, kind="stable")
    is_named = len(counts) <= NAMED_BARS
    figure = new_figure(width=8, height=1.2 + 0.16 * len(counts) if is_named else 6)
    axes = figure.subplots()

    if is_named:
        bars = axes.barh(np.arange(len(counts)), counts[order])
        numbers = [f"{int(count):,}" for count in counts[order]]
        axes.bar_label(bars, labels=numbers, padding=2, fontsize=SMALL)

        # Names are the user's: a dollar sign in them does not begin a formula.
        labels = [shorten(names[index]) for index in order]
        axes.set_yticks(range(len(names)), labels=labels, fontsize=SMALL, parse_math=False)
    else:
        edges = np.arange(len(counts) + 1)
        axes.stairs(counts[order], edges, orientation="horizontal", fill=True)
        axes.set_ylabel("classes, the most frequent first")

    # Linear below 1: a class without images has a place; the room is for the counts.
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, 3 * max(1, counts.max(initial=0)))
    axes.margins(y=0)
    axes.invert_yaxis()
    set_title(axes, title)
    return figure


def check(
    data: DataModule, option: str, config: Config, *, decode: int | None, folder: str | None
) -> dict[str, Any]:
    """Check both splits of a dataset and print what they hold.

    The published counts are known by the name of the data option. `decode` is the number of images
    per split to read, None for all; charts are written to a folder, if any. The report has plain
    values; its key "faults" has one phrase per kind of fault.
    """
    report: dict[str, Any] = {"data": option}
    faults: list[str] = []
    *published_images, published_classes = OFFICIAL.get(option, (set(), set(), set()))

    # 1. The labels of each split; impossible ones cannot be counted.
    splits = {"train": data.train, "val": data.val}
    labels: dict[str, Labels] = {}
    images: dict[str, ImageCheck] = {}
    for (part, split), published in zip(splits.items(), published_images, strict=True):
        storage = getattr(split.dataset, "storage", None)
        if isinstance(storage, TarShards):
            storage.verify(lambda items: tqdm(items, desc="sha256", leave=False, disable=None))

        labels[part] = labels_of(split)
        several = part == "val" and bool(config.data.get("real_labels"))
        impossible = label_faults(split, labels[part], several=several)
        if impossible:
            faults += [f"{part}: {fault}" for fault in impossible]
            say(faults[-1])
            continue

        statistics = split_statistics(split, labels[part])
        print_statistics(part, statistics, published, published_classes)

        # 2. Its images.
        count = len(split.dataset) if decode is None else decode
        workers = config.train.loader_workers
        images[part] = read_images(split.dataset, count, workers, f"read {part}")
        copies, listed_twice = repetition_faults(split.dataset, labels[part], images[part])
        report[part] = statistics | {
            "cannot_be_decoded": images[part].errors,
            "listed_twice": listed_twice,
            "copies": copies,
        }
        faults += print_cases(f"images of {part} cannot be decoded", images[part].errors)
        faults += print_cases(f"images of {part} are listed twice", listed_twice)
        faults += print_cases(f"images of {part} are copies", copies)

    # 3. Both splits together.
    if len(images) == 2:
        report["nearest_seen"] = neighbours(data.train.classes, data.val.classes)
        for unseen, nearest in report["nearest_seen"].items():
            cosines = ", ".join(f"{seen} {cosine:.2f}" for seen, cosine in nearest)
            say(f"  unseen {unseen}: nearest {cosines}")

        report["in_both_splits"] = images_in_both(data, images["train"], images["val"])
        faults += print_cases("images are in train and in val", report["in_both_splits"])
        if folder:
            write_charts(Path(folder), data, labels, config.mix)

    report["faults"] = faults
    return report


def print_cases(fault: str, cases: list[str]) -> list[str]:
    """Print the first cases of a kind of fault; return the phrase for the summary, if any."""
    if not cases:
        return []

    summary = f"{len(cases):,} {fault}"
    say(f"  {summary}:", *(f"    {case}" for case in cases[:MAX_PRINTED]))
    if len(cases) > MAX_PRINTED:
        say(f"    and {len(cases) - MAX_PRINTED:,} more (all with --json)")
    return [summary]


def neighbours(train: Classes, val: Classes, k: int = 3) -> dict[str, list[tuple[str, float]]]:
    """Return the k seen classes nearest to each unseen class, to be inspected before training.

    The seen classes are those of training, the unseen ones the others of validation. An unseen
    class is mapped to the names of seen classes and the cosines of their vectors, nearest first.
    """
    if val.word_vectors is None:
        return {}

    train_names = set(train.names)
    seen = [index for index, name in enumerate(val.names) if name in train_names]
    unseen = [index for index, name in enumerate(val.names) if name not in train_names]

    vectors = normalize(val.word_vectors.float(), dim=1)
    similarity = vectors[unseen] @ vectors[seen].T  # [unseen, seen]
    cosines, columns = similarity.topk(min(k, len(seen)), dim=1)

    nearest = {}
    for row, index in enumerate(unseen):
        names = [val.names[seen[column]] for column in columns[row].tolist()]
        nearest[val.names[index]] = list(zip(names, cosines[row].tolist(), strict=True))
    return nearest
