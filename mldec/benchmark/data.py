"""The jobs of `mldec.benchmark` that measure data: starts, and the way from a JPEG file to a training image."""

import argparse
import json
import multiprocessing
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import transforms

from mldec import build
from mldec.data.official_augment import PairAugment, cutout
from mldec.data.transforms import TrainTransform, read_image

COCO_TRAIN = (82_783, 600_000)  # images, objects
PHOTO, SIZE = (640, 480), 448  # pixels of the file, and a side of the training image
ROUNDS, IMAGES = 15, 40  # the median round counts


def data(words: argparse.Namespace) -> dict[str, Any]:
    """Time one image of 640 x 480 through decoding, resizing to 448, cutout and pair augmentation, on one core.

    Both pipelines take turns on the same file with the same random choices; processor time counts.
    The cutout and the two random operations are ours on both sides: the official package needs an
    older numpy.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "photo.jpg")
        _photo().save(file, quality=90)
        learn = TrainTransform(image_size=SIZE)
        ours, official = [], []
        for turn in range(ROUNDS + 1):
            pair = _seconds(lambda: learn(read_image(file)), turn), _seconds(_official(file), turn)
            if turn:  # the first warms up
                ours.append(pair[0])
                official.append(pair[1])
        kib = file.stat().st_size / 2**10
    torch.set_num_threads(threads)
    ratios = [slow / fast for fast, slow in zip(ours, official, strict=True)]
    return {
        "images_per_second": 1 / statistics.median(ours),
        "official_images_per_second": 1 / statistics.median(official),
        "times_faster": statistics.median(ratios),
        "file_kib": kib,
    }


def _photo() -> Image.Image:
    """Return a picture with coarse and fine structure, so that its JPEG file is about as large as a photo's."""
    rng = np.random.default_rng(0)
    coarse, fine = (
        Image.fromarray(rng.integers(0, 256, shape, np.uint8))
        for shape in ((12, 16, 3), (240, 320, 3))
    )
    return Image.blend(coarse.resize(PHOTO, Image.Resampling.BICUBIC), fine.resize(PHOTO), 0.3)


def _official(file: Path) -> Callable[[], Any]:
    """Return what gives a training image as the official code does. Source: official train.py; float32 [3, S, S]."""
    resize, augment, tensor = transforms.Resize((SIZE, SIZE)), PairAugment(), transforms.ToTensor()

    def run() -> Any:
        with Image.open(file) as image:
            return tensor(augment(cutout(resize(image.convert("RGB")), 0.5)))

    return run


def _seconds(job: Callable[[], Any], seed: int) -> float:
    """Return the mean processor time of a job."""
    random.seed(seed)
    start = time.process_time()
    for _ in range(IMAGES):
        job()
    return (time.process_time() - start) / IMAGES


def labels(words: argparse.Namespace) -> dict[str, Any]:
    """Write a COCO split of full size (labels and empty image files), and time its first and second start."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        _write_full_size(Path(root))
        for turn in ("first", "second"):
            with multiprocessing.get_context("spawn").Pool(
                1
            ) as fresh:  # a process of its own: memory is comparable
                found |= {
                    f"{turn}_start_{name}": value
                    for name, value in fresh.apply(_start_coco, (root,)).items()
                }
    return found


def _start_coco(root: str) -> dict[str, Any]:
    before, start = _memory_gib(), time.perf_counter()
    target = "mldec.data.readers.coco.coco"
    node = {"_target_": target, "root": root, "val": "train2014", "cache_dir": f"{root}/cache"}
    train = build.data({"data": build.resolve("data", node)}).train
    passed = time.perf_counter() - start
    return {"seconds": passed, "mib": 1024 * (_memory_gib() - before), "images": len(train.dataset)}


def _write_full_size(root: Path) -> None:
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
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30
