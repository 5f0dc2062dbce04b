"""The job of `mldec benchmark` that takes the way from an image file to a training image apart."""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torchvision import transforms

from mldec.data.images import check_decoder, open_image
from mldec.data.official_augment import augment_by_pair, cutout
from mldec.data.sampling import SampleRandom, sample_seed
from mldec.data.transforms import RESIZES, TrainTransform, View, as_pillow, to_tensor
from mldec.tools.benchmark import listed
from mldec.tools.benchmark.throughput import times_as_long
from mldec.tools.predict.inputs import Inputs

PHOTO = (640, 480)  # pixels of the made file
PARTS = ("decode", "resize", "cutout", "operations", "tensor")
SIZE = 448  # side of the training image in pixels
ROUNDS = 15  # the median round is reported
IMAGES = 40  # per round and way
# Every way, and the title of its row in the table.
WAYS = {
    "official": "official transform",
    "default": "mldec",
    "fast": "mldec, simplejpeg and tensor",
}


# A way from an image file to a training image of S x S pixels: steps by the names in `PARTS`. The
# first takes the path of the file, the next one what the step before returned.
Way = dict[str, Callable[[Any, SampleRandom], Any]]


def ours(size: int, *, decoder: str = "pillow", resize: str = "pillow") -> Way:
    """Return the steps of `TrainTransform` with the settings of the official recipe."""
    transform = TrainTransform(View(image_size=size, decoder=decoder, resize=resize))
    resized, prepared = transform.resizes[0], RESIZES[resize]
    return {
        "decode": lambda path, _: open_image(path, decoder=decoder),
        "resize": lambda image, _: as_pillow(resized(prepared(image))),
        "cutout": lambda image, rng: cutout(image, transform.cutout, rng),
        "operations": transform.augment,
        "tensor": lambda image, _: to_tensor(image),
    }


def official(size: int) -> Way:
    """Return the official transform, made of Pillow and torchvision: float32 [3, S, S].

    It is written from the description of train.py, helper_functions.py and the package
    `randaugment` 1.0.2. With the random numbers of ours it returns the same pixels.
    """
    resize, tensor = transforms.Resize((size, size)), transforms.ToTensor()
    return {
        "decode": lambda path, _: Image.open(path).convert("RGB"),
        "resize": lambda image, _: resize(image),
        "cutout": _official_cutout,
        "operations": augment_by_pair,
        "tensor": lambda image, _: tensor(image),
    }


def _official_cutout(image: Image.Image, rng: Random) -> Image.Image:
    """Draw a rectangle of half the side on the image itself."""
    half_width, half_height = (int(0.5 * side + 0.5) // 2 for side in image.size)
    x, y = (rng.randrange(side) for side in image.size)
    colour = (rng.randrange(256), rng.randrange(256), rng.randrange(256))

    corners = (x - half_width, y - half_height, x + half_width, y + half_height)
    ImageDraw.Draw(image).rectangle(corners, fill=colour)
    return image


def data(args: argparse.Namespace) -> dict[str, Any]:
    """Time the training transform of one image on one core, beside the official one.

    All ways take turns on the same files, and processor time is measured: of a made picture of
    640 x 480 pixels, and of the photos of a folder, if one is given.
    """
    check_decoder("simplejpeg")
    photos = []
    if args.folder is not None:
        # Files of their own, not members of tar files.
        found = [item.path for item in Inputs([args.folder]) if item.path == item.name]
        photos = found[:: max(1, len(found) // IMAGES)][:IMAGES]

    # torch does the tensor operations: one thread, as a loader process has.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            photo = Path(folder, "photo.jpg")
            made_photo().save(photo, quality=90)
            figures = _measured("made", [str(photo)])
            figures["file_kib"] = photo.stat().st_size / 2**10
        if photos:
            figures |= _measured("photos", photos)
    finally:
        torch.set_num_threads(threads)

    # The names of these figures are promised.
    subject = "photos" if photos else "made"
    return figures | {
        "images_per_second": figures["made_default_images_per_second"],
        "official_images_per_second": figures["made_official_images_per_second"],
        "times_official": figures[f"{subject}_times_official"],
        "times_official_fast": figures[f"{subject}_times_official_fast"],
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures of `data` as text: the milliseconds of each part of each way."""
    lines = []
    columns = ("seeding", *PARTS, "all")
    titles = "".join(f"{part:>12}" for part in columns)
    for subject, title in (("made", "a made picture of 640 x 480"), ("photos", "the photos")):
        if f"{subject}_times_official" not in figures:
            continue

        lines += ["", f"milliseconds per image, of {title}", f"{'':<32}{titles}{'images/s':>12}"]
        for way, name in WAYS.items():
            values = [figures.get(f"{subject}_{way}_{part}_ms") for part in columns]
            cells = ["-" if value is None else f"{value:.3f}" for value in values]
            cells.append(f"{figures[f'{subject}_{way}_images_per_second']:.0f}")
            lines.append(f"{name:<32}" + "".join(cell.rjust(12) for cell in cells))

    of_subjects = ("made_", "photos_")
    others = {name: value for name, value in figures.items() if not name.startswith(of_subjects)}
    return "\n".join([*lines, "", listed(others)])


def made_photo(seed: int = 0) -> Image.Image:
    """Return an image with coarse and fine structure, for a JPEG file as large as a photo's."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    fine = Image.fromarray(rng.integers(0, 256, (240, 320, 3), np.uint8))
    return Image.blend(coarse.resize(PHOTO, Image.Resampling.BICUBIC), fine.resize(PHOTO), 0.3)


def _measured(subject: str, files: Sequence[str]) -> dict[str, float]:
    """Time every way on some files; the subject begins the names of the figures."""
    ways = {
        "official": official(SIZE),
        "default": ours(SIZE),
        "fast": ours(SIZE, decoder="simplejpeg", resize="tensor"),
    }

    # The first round warms up.
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    for turn in range(ROUNDS + 1):
        for name, way in ways.items():
            seconds = _seconds(way, files, turn, seeds=name != "official")
            if turn > 0:
                rounds[name].append(seconds)

    figures: dict[str, float] = {}
    for name, parts in rounds.items():
        for part in parts[0]:
            median = statistics.median(seconds[part] for seconds in parts)
            figures[f"{subject}_{name}_{part}_ms"] = 1000 * median
        figures[f"{subject}_{name}_images_per_second"] = 1000 / figures[f"{subject}_{name}_all_ms"]

    times = {name: [seconds["all"] for seconds in parts] for name, parts in rounds.items()}
    figures[f"{subject}_times_official"] = times_as_long(times, "official", "default")
    figures[f"{subject}_times_official_fast"] = times_as_long(times, "official", "fast")
    return figures


def _seconds(way: Way, files: Sequence[str], turn: int, *, seeds: bool) -> dict[str, float]:
    """Return the mean processor time per image of each part, and of all.

    `IMAGES` files are taken, if need be again. With `seeds` every image has a generator of its own,
    as in a loader, which takes time too.
    """
    spent: dict[str, float] = defaultdict(float)
    for number in range(IMAGES):
        # Frees the image before, whose time is nobody's.
        value: Any = files[number % len(files)]

        before = time.process_time()
        rng = SampleRandom(sample_seed(0, turn, number))
        after = time.process_time()
        if seeds:
            spent["seeding"] += after - before

        for part, step in way.items():
            before = after
            value = step(value, rng)
            after = time.process_time()
            spent[part] += after - before

    spent["all"] = sum(spent.values())
    return {part: seconds / IMAGES for part, seconds in spent.items()}
