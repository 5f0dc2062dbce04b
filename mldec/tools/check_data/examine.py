"""Count the images and labels of a dataset, and find errors in it."""

import hashlib
import io
import textwrap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import normalize

from mldec import build
from mldec.config.schema import Config, Mix
from mldec.data.images import FORMATS, read_image
from mldec.data.labels import Labels
from mldec.data.loader import Batch, labels_of, stack
from mldec.data.mixing import Mixing
from mldec.data.readers.tar_shards import TarShards
from mldec.data.similar import perceptual_hashes, similar_pairs
from mldec.data.splits import connect
from mldec.data.types import (
    Classes,
    DataModule,
    ImageDataset,
    Split,
    StoredImages,
    fixed_sample,
    same_images,
)
from mldec.errors import DataError, log, say, visible
from mldec.names import format_list
from mldec.runtime.console import progress_bar
from mldec.tools.pages import NAME_LENGTH, SMALL, new_figure, save, set_title, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK = 256  # images per update of the progress bar
MAX_PRINTED = 10  # cases of an error that are printed
SAMPLES = 12  # images in a sample sheet
SAMPLES_PER_ROW = 6
SIMILAR = 4_000  # images of both splits that are compared to find near-duplicates
RUN = 50  # images with neighboring paths in this sample
SERIES = 3  # least number of near-duplicates that are a series
MAX_NAMED_BARS = 120  # bars with legible names and counts


# Properties of image files that are lost in the input of the model.
PROPERTIES = {
    "transparent": "have transparent pixels, whose hidden colors the model sees",
    "deep": "have more than 8 bits per channel",
    "pages": "have several pages or frames, and the first is read",
}


@dataclass
class ImageCheck:
    """Hashes and errors of n image files of a split."""

    indices: np.ndarray  # indices of the images, [n]
    hashes: np.ndarray  # hashes of the files, uint64 [n]
    errors: dict[int, str]  # message of each undecodable image, by its index
    properties: dict[str, list[str]]  # images with each property of `PROPERTIES`


def check(
    data: DataModule, option: str, config: Config, *, decode: int | None, folder: str | None
) -> tuple[dict[str, Any], dict[str, ImageCheck]]:
    """Check both splits of a dataset, and print a summary.

    `decode` is the number of images per split to read, or None for all images. Returns the content
    of `--json`, and the images of each split with valid labels.
    """
    report: dict[str, Any] = {"data": option, "faults": []}
    labels: dict[str, Labels] = {}
    images: dict[str, ImageCheck] = {}
    splits = {"train": data.train}
    # Without held-out images, the validation images are the training images.
    if config.data.get("val_fraction") != 0 or not same_images(data.train, data.val):
        splits["val"] = data.val
    for part, split in splits.items():
        storage = getattr(split.dataset, "storage", None)
        if isinstance(storage, TarShards):
            storage.verify(partial(progress_bar, desc="sha256"))

        labels[part] = labels_of(split)
        # The ReaL labels of ImageNet have several labels per image.
        several = part == "val" and bool(config.data.get("real_labels"))
        fault = label_fault(split, labels[part], several=several)
        if fault:
            report["faults"].append(f"{part}: {fault}")
            say(report["faults"][-1])
            continue

        report[part] = split_statistics(split, labels[part])
        _print_statistics(part, report[part])
        count = len(split.dataset) if decode is None else decode
        workers = config.train.loader_workers("cpu")
        images[part] = _read_images(split.dataset, count, workers, f"read {part}")
        copies, listed_twice = _find_duplicates(split.dataset, labels[part], images[part])
        errors = list(images[part].errors.values())
        cases = {
            "cannot_be_decoded": (f"images of {part} cannot be decoded", errors),
            "listed_twice": (f"images of {part} are listed twice", listed_twice),
            "copies": (f"images of {part} are copies", copies),
        }
        for key, (name, phrases) in cases.items():
            report[part][key] = phrases
            report["faults"] += _print_cases(name, phrases)
        report[part] |= images[part].properties
        for key, names in images[part].properties.items():
            say(f"  {len(names):,} images of {part} {PROPERTIES[key]}: {format_list(names)}")

    if len(images) == len(splits) and folder:
        _write_charts(Path(folder), data, labels, config.mix)
    if len(images) == 2:
        report["nearest_seen"] = nearest_classes(data.train.classes, data.val.classes)
        for unseen, nearest in report["nearest_seen"].items():
            cosines = ", ".join(f"{seen} {cosine:.2f}" for seen, cosine in nearest)
            say(f"  unseen {unseen}: nearest {cosines}")

        train = images["train"]
        val = images["val"]
        _, in_train, in_val = np.intersect1d(train.hashes, val.hashes, return_indices=True)
        report["in_both_splits"] = []
        for index, val_index in zip(train.indices[in_train], val.indices[in_val], strict=True):
            name = data.train.dataset.name(int(index))
            val_name = data.val.dataset.name(int(val_index))
            where = "listed in both" if name == val_name else f"also {val_name}"
            report["in_both_splits"].append(f"{name} is {where}")
        report["faults"] += _print_cases("images are in train and in val", report["in_both_splits"])
    return report, images


def label_fault(split: Split, labels: Labels, *, several: bool = False) -> str | None:
    """Describe the invalid labels of a split. `several` permits several labels per image."""
    wrong = (labels.classes < 0) | (labels.classes >= labels.num_classes)
    wrong |= ~np.isin(labels.values, (-1, 0, 1))
    if wrong.any():
        # Find the image of the first wrong entry of the sparse labels.
        first = int(np.searchsorted(labels.starts, wrong.argmax(), "right")) - 1
        return f"{wrong.sum():,} labels out of range, the first of {split.dataset.name(first)}"

    images = np.flatnonzero(labels.counts_per_image() != 1)
    if split.classes.exclusive and not several and len(images):
        name = split.dataset.name(int(images[0]))
        return f"{len(images):,} images without exactly one label, the first is {name}"
    return None


def split_statistics(split: Split, labels: Labels) -> dict[str, Any]:
    """Return the statistics of a split, with the keys of the JSON report."""
    counts = labels.counts()
    per_image = labels.counts_per_image()
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
        "classes_without_positive": list(compress(names, counts == 0)),
        "images_of_class": dict(zip(names, counts.tolist(), strict=True)),
    }


def _print_statistics(part: str, statistics: dict[str, Any]) -> None:
    per_class = "  images per class  {min:,} to {max:,}, median {median:,.0f}"
    per_image = "  labels per image  {min} to {max}, mean {mean:.2f}"
    say(
        f"{part}: {statistics['images']:,} images, {statistics['classes']:,} classes",
        per_class.format(**statistics["images_per_class"]),
        per_image.format(**statistics["labels_per_image"]),
        f"  without labels    {statistics['images_without_label']:,} images",
    )
    empty = statistics["classes_without_positive"]
    if statistics["negatives_stated"]:
        say(f"  known negatives   {statistics['negatives_stated']:,} labels")
    if empty:
        say(f"  without positives {len(empty):,} classes: {format_list(empty)}")


def _print_cases(name: str, cases: list[str]) -> list[str]:
    """Print the first cases of a kind of error; return its summary, or an empty list."""
    if not cases:
        return []

    summary = f"{len(cases):,} {name}"
    say(f"  {summary}:")
    for case in cases[:MAX_PRINTED]:
        say(f"    {case}")
    if len(cases) > MAX_PRINTED:
        say(f"    and {len(cases) - MAX_PRINTED:,} more (all with --json)")
    return [summary]


def _read_images(dataset: ImageDataset, count: int, workers: int, title: str) -> ImageCheck:
    """Read images that are evenly spread over a dataset, in several threads."""
    places = np.linspace(0, len(dataset) - 1, min(count, len(dataset)))
    indices = np.unique(places.round().astype(np.int64))
    hashes = np.zeros(len(indices), np.uint64)
    errors = {}
    properties: dict[str, list[str]] = {}

    # Threads are sufficient, because Pillow releases the GIL. Images are read in blocks, because
    # the queue of a large dataset would need too much memory.
    bar = progress_bar(total=len(indices), desc=title)
    with ThreadPoolExecutor(max(1, workers)) as threads, bar:
        for start in range(0, len(indices), BLOCK):
            block = indices[start : start + BLOCK].tolist()
            results = threads.map(partial(_read_image_file, dataset), block)
            for position, (file_hash, error, found) in enumerate(results, start):
                hashes[position] = file_hash
                if error is not None:
                    errors[int(indices[position])] = error
                for key, detail in found.items():
                    name = dataset.name(int(indices[position]))
                    properties.setdefault(key, []).append(name + detail)
            bar.update(len(block))
    return ImageCheck(indices, hashes, errors, properties)


def _read_image_file(dataset: ImageDataset, index: int) -> tuple[int, str | None, dict[str, str]]:
    """Read and decode an image. Returns hash, error message or None, and `_properties`."""
    content = b""
    error = None
    properties: dict[str, str] = {}
    try:
        if isinstance(dataset, StoredImages):
            content = dataset.storage.content(index)
            read_image(dataset.name(index), content)
            properties = _properties(content)
        else:
            # A generated image has no file, so hash its pixels.
            content = fixed_sample(dataset, index)[0].numpy().tobytes()
    except DataError as fault:
        error = str(fault)
        # Unreadable files are not copies of each other.
        content = content or f"unreadable {index}".encode()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little"), error, properties


def _properties(content: bytes) -> dict[str, str]:
    """Return the `PROPERTIES` of a readable image file, with a detail for each."""
    found = {}
    # Only the first page was decoded. The others may be damaged.
    with suppress(Exception), Image.open(io.BytesIO(content), formats=FORMATS) as image:
        if image.mode.startswith(("I", "F")):
            values = np.asarray(image)
            found["deep"] = f" ({values.min():,} to {values.max():,})"
        if image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255:
            found["transparent"] = ""
        # Phones store a preview as the second picture of a JPEG file (MPO).
        pages = getattr(image, "n_frames", 1)
        if pages > 1 and image.format != "MPO":
            found["pages"] = f" ({pages:,})"
    return found


def _find_duplicates(
    dataset: ImageDataset, labels: Labels, images: ImageCheck
) -> tuple[list[str], list[str]]:
    """Return one phrase per copy of another file, and one per file that is listed twice."""
    _, first, inverse = np.unique(images.hashes, return_index=True, return_inverse=True)
    originals = images.indices[first[inverse.ravel()]]

    copies = []
    listed_twice = []
    for index, original_index in zip(images.indices.tolist(), originals.tolist(), strict=True):
        if index == original_index:
            continue
        name = dataset.name(index)
        original = dataset.name(original_index)
        is_same = torch.equal(labels.row(index), labels.row(original_index))
        which = "the same" if is_same else "different"
        if name != original:
            copies.append(f"{name} is a copy of {original}, with {which} labels")
        else:
            listed_twice.append(f"{name} is listed twice, with {which} labels")
    return copies, listed_twice


def near_duplicates(
    data: DataModule, cache_dir: str | None, report: dict[str, Any], count: int | None
) -> np.ndarray | None:
    """Add near-duplicates among `count` images (None: all) to the report, and warn about them.

    Returns the hashes of these images, of train and then of val, or None if no images are compared,
    because they are generated or `count` is 0.
    """
    train = data.train.dataset
    val = data.val.dataset
    if count == 0 or not isinstance(train, StoredImages) or not isinstance(val, StoredImages):
        return None

    if same_images(data.train, data.val):
        val = val.select(np.arange(0))

    # Near-duplicates mostly have neighboring paths, so a sample consists of runs of these.
    start = time.monotonic()
    total = len(train) + len(val)
    chosen = np.arange(total)
    sample = ""
    if count is not None and count < total:
        keys = [images.storage.keys for images in (train, val)]
        order = chosen
        if keys[0].dtype.kind == "S":
            order = np.argsort(np.concatenate(keys), kind="stable")
        run = np.arange(min(RUN, count))
        sample = f" in runs of {len(run)} neighbors (--similar: all)"
        starts = np.linspace(0, total - len(run), count // len(run)).round().astype(np.int64)
        chosen = np.unique(order[starts[:, None] + run])
    parts = [train.select(chosen[chosen < len(train)])]
    parts.append(val.select(chosen[chosen >= len(train)] - len(train)))
    hashes = np.concatenate([perceptual_hashes(part, cache_dir) for part in parts])
    rows, columns = similar_pairs(hashes, hashes)
    say(
        f"near-duplicates: compared {len(chosen):,} of {total:,} images{sample} in "
        f"{time.monotonic() - start:.1f} s"
    )

    # One phrase per validation image, with its first similar training image.
    num_train = len(parts[0])
    is_between = (rows < num_train) & (columns >= num_train)
    similar, first = np.unique(columns[is_between], return_index=True)
    phrases = []
    for column, row in zip(similar.tolist(), rows[is_between][first].tolist(), strict=True):
        name = parts[1].name(column - num_train)
        phrases.append(f"{name} is similar to {parts[0].name(row)}")
    advice = "add a column group (--write FILE does), or set data.group_pattern"
    for summary in _print_cases("images of val are similar to images of train", phrases):
        log.warning(f"{summary}, which makes the metrics optimistic; {advice}")

    groups = connect(np.arange(len(hashes)), np.stack([rows, columns]))
    sizes = np.bincount(groups)
    in_series = int(sizes[sizes >= SERIES].sum())
    if data.train.groups is None and 5 * in_series >= len(hashes):
        series = f"{in_series:,} of {len(hashes):,} images look like {(sizes >= SERIES).sum():,}"
        log.warning(f"{series} series without a group; {advice}")
    report |= {"compared": len(hashes), "similar": phrases, "in_series": in_series}
    return hashes


def nearest_classes(train: Classes, val: Classes, k: int = 3) -> dict[str, list[tuple[str, float]]]:
    """Return the k training classes with the highest cosine similarity to each unseen class."""
    if val.word_vectors is None:
        return {}
    import pandas as pd

    names = np.asarray(val.names)
    is_seen = np.isin(names, train.names)
    vectors = normalize(val.word_vectors.float(), dim=1)
    similarity = vectors[~is_seen] @ vectors[is_seen].T  # [unseen, seen]
    table = pd.DataFrame(similarity.double().numpy(), names[~is_seen], names[is_seen])
    return {str(name): list(row.nlargest(k).items()) for name, row in table.iterrows()}


def _write_charts(folder: Path, data: DataModule, labels: Mapping[str, Labels], mix: Mix) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mixing = build.mixing(mix, data.train.classes) if mix.enabled else None
    batches = {
        "": _sample_batch(data.train.viewed(data.transform)),
        "as in training": _sample_batch(data.train, mixing),
    }
    save(sample_sheet(batches, data.train.classes.names), folder / "samples.png")

    for part, split in (("train", data.train), ("val", data.val)):
        if part not in labels:
            continue
        title = f"{part}: images per class (log scale)"
        chart = bar_chart(labels[part].counts(), split.classes.names, title)
        save(chart, folder / f"{part}_classes.png")


def _sample_batch(split: Split, mixing: Mixing | None = None) -> Batch:
    """Load `SAMPLES` images, evenly spread over a split, as a training batch."""
    indices = np.linspace(0, len(split.dataset) - 1, SAMPLES).round().astype(int)
    samples = []
    for index in indices.tolist():
        try:
            image, target = fixed_sample(split.dataset, index)
        except DataError:
            continue  # reported as an undecodable image
        samples.append((image, target, (0, index, 0)))
    return stack(samples, mixing=mixing)


def sample_sheet(batches: Mapping[str, Batch], classes: Sequence[str]) -> "Figure":
    """Draw images by the caption of their batch. The caption "" shows their class names instead."""
    rows = len(batches) * SAMPLES // SAMPLES_PER_ROW
    figure = new_figure(width=2 * SAMPLES_PER_ROW, height=2.4 * rows)
    grid = figure.subplots(rows, SAMPLES_PER_ROW).reshape(len(batches), SAMPLES)
    for axes in grid.flatten():
        axes.axis("off")

    for (caption, batch), row in zip(batches.items(), grid, strict=True):
        for image, target, axes in zip(batch.images, batch.targets, row, strict=False):
            names = ", ".join(compress(classes, target == 1))
            text = caption or visible(names or "(none)")
            lines = textwrap.wrap(text, NAME_LENGTH)[:3]
            axes.imshow(image.permute(1, 2, 0).numpy())
            axes.set_title("\n".join(lines), fontsize=SMALL, loc="left", parse_math=False)
    return figure


def bar_chart(counts: np.ndarray, names: Sequence[str], title: str) -> "Figure":
    """Draw counts [K] on a logarithmic axis, largest first."""
    order = np.argsort(-counts, kind="stable")
    has_names = len(counts) <= MAX_NAMED_BARS
    figure = new_figure(width=8, height=1.2 + 0.16 * len(counts) if has_names else 6)
    axes = figure.subplots()
    if has_names:
        bars = axes.barh(np.arange(len(counts)), counts[order])
        axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=SMALL)
        labels = [shorten(names[index]) for index in order]
        axes.set_yticks(range(len(names)), labels=labels, fontsize=SMALL, parse_math=False)
    else:
        edges = np.arange(len(counts) + 1)
        axes.stairs(counts[order], edges, orientation="horizontal", fill=True)
        axes.set_ylabel("classes, the most frequent first")

    # The axis is linear below 1, because counts may be 0. The margin is for the numbers.
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, 3 * max(1, counts.max(initial=0)))
    axes.margins(y=0)
    axes.invert_yaxis()
    set_title(axes, title)
    return figure
