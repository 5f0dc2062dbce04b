"""The job of `mldec.benchmark` that times the start of a data set."""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from mldec import build

COCO_TRAIN = (82_783, 600_000)  # images, objects


def labels(args: argparse.Namespace) -> dict[str, Any]:
    """Time the first and the second start of a COCO split of full size.

    The second one has the cache that the first one writes. The image files are empty.
    """
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        _write_full_size(Path(root))
        for turn in ("first", "second"):
            # A process of its own per start, so that the memory of both is comparable.
            with multiprocessing.get_context("spawn").Pool(1) as fresh:
                start = fresh.apply(_start_coco, (root,))
            for name, value in start.items():
                figures[f"{turn}_start_{name}"] = value
    return figures


def _start_coco(root: str) -> dict[str, Any]:
    """Build the dataset, and return the time and memory that it takes."""
    # Training images serve for validation too, so that only one split is read.
    before, start = _memory_gib(), time.perf_counter()
    node = {
        "_target_": "mldec.data.readers.coco.coco",
        "root": root,
        "val": "train2014",
        "cache_dir": f"{root}/cache",
    }
    train = build.data({"data": build.resolve("data", node)}).train

    seconds = time.perf_counter() - start
    mib = 1024 * (_memory_gib() - before)
    return {"seconds": seconds, "mib": mib, "images": len(train.dataset)}


def _write_full_size(root: Path) -> None:
    """Write the annotations of a COCO split of full size, and an empty file per image."""
    # Objects are spread evenly over images and classes.
    images, objects = COCO_TRAIN
    generator = torch.Generator().manual_seed(0)
    owners = torch.randint(images, (objects,), generator=generator).tolist()
    kinds = torch.randint(80, (objects,), generator=generator).tolist()
    names = [f"COCO_train2014_{i:012}.jpg" for i in range(images)]
    content = {
        "images": [
            {"id": i, "file_name": name, "width": 640, "height": 480}
            for i, name in enumerate(names)
        ],
        "annotations": [
            {
                "id": i,
                "image_id": owner,
                "category_id": kind + 1,
                "iscrowd": 0,
                "area": 5000.0,
                "bbox": [1, 2, 3, 4],
            }
            for i, (owner, kind) in enumerate(zip(owners, kinds, strict=True))
        ],
        "categories": [
            {"id": i + 1, "name": f"class {i}", "supercategory": "thing"} for i in range(80)
        ],
    }

    (root / "annotations").mkdir()
    (root / "train2014").mkdir()
    (root / "annotations" / "instances_train2014.json").write_text(json.dumps(content))
    for name in names:
        (root / "train2014" / name).touch()


def _memory_gib() -> float:
    """Return the memory that this process holds at the moment."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30
