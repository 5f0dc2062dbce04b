#!/usr/bin/env python
"""Pack the image files of a dataset into tar shards for `data=shards data.root=OUT`.

    python scripts/pack_shards.py OUT data=coco data.root=/data/coco [--short-side 512]

For each split it writes OUT/{train,val}/shard-000000.tar, ... in the layout of WebDataset
(000000000.jpg and 000000000.json with {"labels": [...], "negatives": [...]}), and index.npz with
labels, classes, the offset of each image and the sha256 of each shard. Images are copied unchanged,
unless --short-side makes large ones smaller.

The script can be killed and restarted with the same arguments: complete shards are kept.
"""

import argparse
import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch.utils.data import Dataset
from tqdm import tqdm

from mldec import build
from mldec.cli import positive
from mldec.data.images import read_image
from mldec.data.labels import Labels
from mldec.data.loader import Loader
from mldec.data.readers.tar_shards import FORMAT
from mldec.data.types import Classes, StoredImages
from mldec.errors import ConfigError, DataError, one_line, writing
from mldec.files.atomic import replacing

QUALITY = 95  # JPEG quality of resized images


@dataclass(frozen=True)
class Packing:
    """Options of the shards."""

    images_per_shard: int
    short_side: int | None  # maximum in pixels; None packs the files unchanged
    keep_bad: bool  # also pack unreadable images, which readers then skip
    workers: int  # number of processes that read images


class Contents(Dataset[Any]):
    """The bytes and the file suffix of the images with indices in [first, last)."""

    def __init__(self, images: StoredImages, first: int, last: int, packing: Packing) -> None:
        self.storage = images.storage
        self.first = first
        self.last = last
        self.packing = packing

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, offset: int) -> tuple[bytes, str] | str:
        """Return an image, or an error message for the main process."""
        # The suffix is for people and other tools. Our reader detects the format from the content.
        index = self.first + offset
        name = self.storage.name(index)
        suffix = Path(name).suffix.lower() if Path(name).suffix[1:].isalnum() else ".jpg"
        try:
            content = self.storage.content(index)
        except DataError as error:
            return str(error)

        if self.packing.short_side is None:
            return content, suffix
        try:
            return smaller(name, content, self.packing.short_side) or (content, suffix)
        except DataError as error:
            return (content, suffix) if self.packing.keep_bad else str(error)


def smaller(name: str, content: bytes, short_side: int) -> tuple[bytes, str] | None:
    """Return a JPEG file with this short side in pixels, or None if the image is not larger."""
    image = read_image(name, content)
    factor = short_side / min(image.size)
    if factor >= 1:
        return None

    width = max(short_side, round(image.width * factor))
    height = max(short_side, round(image.height * factor))
    buffer = io.BytesIO()
    image.resize((width, height)).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue(), ".jpg"


class ShardFile:
    """A tar file with its sha256, and the offset and size of each image in it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = hashlib.sha256()
        self.length = 0
        self.offsets: list[int] = []
        self.sizes: list[int] = []

    def add_image(self, name: str, content: bytes) -> None:
        """Append an image and record its offset and size."""
        self.add(name, content)

        # The content is at the end of the file, before the padding to whole blocks.
        padding = -len(content) % tarfile.BLOCKSIZE
        self.offsets.append(self.length - padding - len(content))
        self.sizes.append(len(content))

    def add(self, name: str, content: bytes) -> None:
        """Append a file."""
        member = tarfile.TarInfo(name)
        member.size = len(content)
        padding = bytes(-len(content) % tarfile.BLOCKSIZE)
        self._write(member.tobuf(tarfile.USTAR_FORMAT) + content + padding)

    def finish(self) -> None:
        """Write the end of the archive, and flush it to the disk."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self.file.flush()
        os.fsync(self.file.fileno())

    def _write(self, block: bytes) -> None:
        self.file.write(block)
        self.hash.update(block)
        self.length += len(block)


def pack(
    images: StoredImages,
    classes: Classes,
    folder: Path,
    packing: Packing,
    plan: dict[str, Any],
    bar: Any,
) -> None:
    """Write the missing shards of a split, then the index.

    Args:
        images: Images of the split.
        classes: Classes of the split.
        folder: Folder of the shards.
        packing: Options of the shards.
        plan: All settings that the shards depend on. Shards with other settings raise an error.
        bar: Progress bar, which counts images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan | {"images": len(images), "labels": _fingerprint(images.labels)}
    file = folder / "packing.json"
    if not file.is_file():
        _replace(file, json.dumps(plan).encode())
    elif json.loads(file.read_text()) != plan:
        raise ConfigError(
            f"{folder}: contains shards of other data or settings; use another folder"
        )

    records = []
    for number, first in enumerate(range(0, len(images), packing.images_per_shard)):
        # The record is written after the shard, so a shard with a record is complete.
        record = folder / f"shard-{number:06}.json"
        last = min(first + packing.images_per_shard, len(images))
        if record.is_file():
            bar.update(last - first)
        else:
            write_shard(images, classes, record.with_suffix(".tar"), first, last, packing, bar)
        records.append(json.loads(record.read_text()))
    write_index(folder / "index.npz", images.labels, classes, records)


def _fingerprint(labels: Labels) -> str:
    """Return a hash of all labels."""
    digest = hashlib.sha256()
    for array in (labels.starts, labels.classes, labels.values):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def write_shard(
    images: StoredImages,
    classes: Classes,
    path: Path,
    first: int,
    last: int,
    packing: Packing,
    bar: Any,
) -> None:
    """Write one shard under a temporary name, rename it, and then write its record."""
    contents = Contents(images, first, last, packing)
    loader: Loader[list[tuple[bytes, str] | str]] = Loader(
        contents, batch_size=16, num_workers=packing.workers, collate_fn=list
    )

    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        shard = ShardFile(file)
        for batch in loader:
            for item in batch:
                if isinstance(item, str):
                    raise DataError(item)

                content, suffix = item
                index = first + len(shard.sizes)
                shard.add_image(f"{index:09}{suffix}", content)

                # For other WebDataset readers. Our reader gets the labels from the index.
                labels = label_names(images.labels, classes.names, index)
                shard.add(f"{index:09}.json", json.dumps(labels).encode())
                bar.update()
        shard.finish()
    temporary.replace(path)

    record = {
        "name": path.name,
        "sha256": shard.hash.hexdigest(),
        "bytes": shard.length,
        "first": first,
        "offsets": shard.offsets,
        "sizes": shard.sizes,
    }
    _replace(path.with_suffix(".json"), json.dumps(record).encode())


def label_names(labels: Labels, names: Sequence[str], index: int) -> dict[str, list[str]]:
    """Return the names of the positive and the negative labels of an image."""
    entries = slice(labels.starts[index], labels.starts[index + 1])
    classes = labels.classes[entries].tolist()
    result: dict[str, list[str]] = {"labels": [], "negatives": []}
    for column, value in zip(classes, labels.values[entries].tolist(), strict=True):
        if value == 1:
            result["labels"].append(names[column])
        elif value == 0:
            result["negatives"].append(names[column])
    return result


def write_index(
    path: Path, labels: Labels, classes: Classes, records: list[dict[str, Any]]
) -> None:
    """Write the index. `mldec.data.readers.tar_shards.Index` documents its arrays."""
    queries = np.zeros((0, 0), np.float32)
    if classes.word_vectors is not None:
        queries = classes.word_vectors.float().numpy()
    buffer = io.BytesIO()
    np.savez(
        buffer,
        shards=np.array([record["name"] for record in records]),
        sha256=np.array([record["sha256"] for record in records]),
        bytes=np.array([record["bytes"] for record in records], np.int64),
        first=np.array([record["first"] for record in records] + [len(labels)], np.int64),
        offsets=np.concatenate([record["offsets"] for record in records]).astype(np.int64),
        sizes=np.concatenate([record["sizes"] for record in records]).astype(np.int64),
        starts=labels.starts,
        label_classes=labels.classes,
        values=labels.values,
        rest=labels.default,
        classes=np.array(classes.names, np.str_),
        exclusive=classes.exclusive,
        queries=queries,
        format=FORMAT,
    )
    _replace(path, buffer.getvalue())


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically, and flush it to the disk."""
    with replacing(path, durable=True) as file:
        file.write(content)


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("out", metavar="OUT", help="folder of the shards")
    arguments.add_argument(
        "settings", nargs="*", metavar="key=value", help="such as data=coco data.root=/data/coco"
    )
    arguments.add_argument(
        "--split", choices=("train", "val"), action="append", help="default: both"
    )
    arguments.add_argument(
        "--images", type=positive, default=5000, help="images per shard (default: %(default)s)"
    )
    arguments.add_argument(
        "--short-side", type=positive, metavar="N", help="maximum short side in pixels"
    )
    arguments.add_argument(
        "--workers", type=int, default=2, help="processes that read images (default: %(default)s)"
    )
    return arguments


def main() -> None:
    with one_line():
        args = parser().parse_intermixed_args()
        config, data, _ = build.data_from_settings(args.settings)

        splits = {part: getattr(data, part) for part in args.split or ("train", "val")}
        for part, split in splits.items():
            if not isinstance(split.dataset, StoredImages):
                raise ConfigError(f"data.{part}: no image files; use a dataset of files")

        packing = Packing(args.images, args.short_side, data.bad_images == "skip", args.workers)
        shards = {"short_side": args.short_side, "images_per_shard": args.images}
        plan = {"settings": config.data | shards}
        total = sum(len(split.dataset) for split in splits.values())
        with writing(args.out), tqdm(total=total, disable=not sys.stderr.isatty()) as bar:
            for part, split in splits.items():
                pack(split.dataset, split.classes, Path(args.out, part), packing, plan, bar)
        print(f"{args.out}: {total:,} images packed; use data=shards data.root={args.out}")


if __name__ == "__main__":
    main()
