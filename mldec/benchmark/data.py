"""The jobs of `mldec.benchmark` that measure data.

They time the start of a dataset, and the way from a JPEG file to a training image.
"""

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
from PIL import Image, ImageDraw
from timm.data.auto_augment import rand_augment_transform
from torchvision import transforms

from mldec import build
from mldec.data.images import read_image
from mldec.data.randomness import SampleRandom
from mldec.data.transforms import TrainTransform

COCO_TRAIN = (82_783, 600_000)  # images, objects
PHOTO = (640, 480)  # pixels of the file
SIZE = 448  # side of the training image in pixels
ROUNDS = 15  # the median round is reported
IMAGES = 40  # per round


def data(args: argparse.Namespace) -> dict[str, Any]:
    """Time the training transform of one image on one core, beside the official pipeline.

    An image of 640 x 480 pixels is decoded, resized to 448, and goes through cutout and the two
    random operations. Both pipelines take turns on the same file, and processor time is measured.
    The other pipeline has nothing of ours, see `_official`.
    """
    # torch does the tensor operations: one thread, as a loader process has.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "photo.jpg")
        _photo().save(file, quality=90)
        kib = file.stat().st_size / 2**10

        transform = TrainTransform(image_size=SIZE)
        official_transform = _official(file)
        ours, official = [], []
        for turn in range(ROUNDS + 1):
            our_seconds = _seconds(lambda rng: transform(read_image(file), rng), turn)
            official_seconds = _seconds(lambda _: official_transform(), turn)

            # The first round warms up.
            if turn > 0:
                ours.append(our_seconds)
                official.append(official_seconds)

    torch.set_num_threads(threads)

    # The two halves of a round met the same load of the machine: compare within rounds.
    ratios = [slow / fast for fast, slow in zip(ours, official, strict=True)]
    return {
        "images_per_second": 1 / statistics.median(ours),
        "official_images_per_second": 1 / statistics.median(official),
        "times_faster": statistics.median(ratios),
        "file_kib": kib,
    }


def _photo() -> Image.Image:
    """Return an image with coarse and fine structure, for a JPEG file as large as a photo's."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    fine = Image.fromarray(rng.integers(0, 256, (240, 320, 3), np.uint8))
    return Image.blend(coarse.resize(PHOTO, Image.Resampling.BICUBIC), fine.resize(PHOTO), 0.3)


def _official(file: Path) -> Callable[[], Any]:
    """Return a function that makes a training image, float32 [3, S, S], as the official code does.

    Its steps are those of torchvision, Pillow and timm.

    Source: official train.py.
    """
    steps = transforms.Compose(
        [
            transforms.Resize((SIZE, SIZE)),
            _draw_cutout,
            _random_operations(),
            transforms.ToTensor(),
        ]
    )

    def run() -> Any:
        with Image.open(file) as image:
            return steps(image.convert("RGB"))

    return run


def _random_operations() -> Callable[[Image.Image], Image.Image]:
    """Return a stand-in for the package `randaugment`, which needs an older numpy.

    It is timm's RandAugment, with the same draws: two of fifteen operations, each with probability
    0.5 and a uniform magnitude. Fourteen operations are the same; in place of a cutout of up to 20
    pixels, timm has SolarizeAdd.
    """
    # A standard deviation above 100 makes the magnitude uniform from 0 to 9.
    return rand_augment_transform("rand-m9-n2-p0.5-mstd101-inc1", {"img_mean": (128, 128, 128)})


def _draw_cutout(image: Image.Image) -> Image.Image:
    """Draw the cutout of the official code, CutoutPIL(0.5), on the image itself."""
    half_width, half_height = (int(0.5 * side + 0.5) // 2 for side in image.size)
    x, y = (random.randrange(side) for side in image.size)
    colour = (random.randrange(256), random.randrange(256), random.randrange(256))

    corners = (x - half_width, y - half_height, x + half_width, y + half_height)
    ImageDraw.Draw(image).rectangle(corners, fill=colour)
    return image


def _seconds(job: Callable[[SampleRandom], Any], seed: int) -> float:
    """Return the mean processor time of a job, with the random choices of a seed."""
    random.seed(seed)
    rng = SampleRandom(seed)

    start = time.process_time()
    for _ in range(IMAGES):
        job(rng)
    return (time.process_time() - start) / IMAGES


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
