"""The job of `mldec.benchmark` that takes the way from an image file to a training image apart."""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torchvision import transforms

from mldec.data.images import FORMATS, check_decoder, open_image, read_image
from mldec.data.loader import TrainBatches, train_loader, unwrap
from mldec.data.official_augment import cutout
from mldec.data.randomness import SampleRandom, sample_seed
from mldec.data.table import from_single
from mldec.data.tasks import SingleLabel
from mldec.data.transforms import (
    RESIZES,
    EvalTransform,
    TrainTransform,
    as_pillow,
    to_tensor,
)
from mldec.data.types import Classes, DataModule, ImageFiles, Split, StoredImages
from mldec.errors import ConfigError

PHOTO = (640, 480)  # pixels of the made file
PARTS = ("decode", "resize", "cutout", "operations", "tensor")
SIZE = 448  # side of the training image in pixels
ROUNDS = 15  # the median round is reported
IMAGES = 40  # per round and way
LOADED = 480  # images per run of the loader
LOADS = 3  # runs of the loader with each number of workers
BATCH = 16  # images per batch of the loader
NEEDED = 1820  # images/s that one H200 trains on, of TResNet-L at 448 pixels
CORES = 16
QUALITY = 95  # of images that scripts/pack_shards.py makes smaller

# Every way, and the title of its row in the table.
WAYS = {
    "official": "official transform",
    "default": "mldec",
    "fast": "mldec, torchcodec and tensor",
    "shards": "mldec, files of short side 448",
}


# Ways from an image file to a training image of S x S pixels, as named steps


# What the step before returned (the first takes the path of the file) -> what the next one takes.
Step = Callable[[Any, SampleRandom], Any]


@dataclass(frozen=True)
class Pipeline:
    """A way from a file to a training image.

    Attributes:
        steps: by the names in `PARTS`, in this order; a part may be missing.
        seeds: every image has a generator of its own, which takes time too.
    """

    steps: dict[str, Step]
    seeds: bool = False

    def __call__(self, path: str, rng: SampleRandom) -> Any:
        """Return the training image of a file."""
        value: Any = path
        for step in self.steps.values():
            value = step(value, rng)
        return value


def ours(size: int, *, decoder: str = "pillow", resize: str = "pillow") -> Pipeline:
    """Return the steps of `TrainTransform` with the settings of the official recipe."""
    transform = TrainTransform(image_size=size, decoder=decoder, resize=resize)
    resized, prepared = transform.resizes[0], RESIZES[resize]
    return Pipeline(
        {
            "decode": lambda path, _: open_image(path, decoder=decoder),
            "resize": lambda image, _: as_pillow(resized(prepared(image))),
            "cutout": lambda image, rng: cutout(image, transform.cutout, rng),
            "operations": transform.augment,
            "tensor": lambda image, _: to_tensor(image),
        },
        seeds=True,
    )


def official(size: int) -> Pipeline:
    """Return the official transform, made of Pillow and torchvision: float32 [3, S, S].

    It is written from the description of train.py, helper_functions.py and the package
    `randaugment` 1.0.2, which needs an older numpy. Unlike there, the random numbers come from an
    argument, in the order of ours; with them it returns the same pixels.
    """
    resize, tensor = transforms.Resize((size, size)), transforms.ToTensor()
    return Pipeline(
        {
            "decode": lambda path, _: _open(path),
            "resize": lambda image, _: resize(image),
            "cutout": _official_cutout,
            "operations": _official_operations,
            "tensor": lambda image, _: tensor(image),
        }
    )


def _open(path: str) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def _official_cutout(image: Image.Image, rng: Random) -> Image.Image:
    """Draw a rectangle of half the side on the image itself."""
    half_width, half_height = (int(0.5 * side + 0.5) // 2 for side in image.size)
    x, y = (rng.randrange(side) for side in image.size)
    colour = (rng.randrange(256), rng.randrange(256), rng.randrange(256))

    corners = (x - half_width, y - half_height, x + half_width, y + half_height)
    ImageDraw.Draw(image).rectangle(corners, fill=colour)
    return image


def _official_operations(image: Image.Image, rng: Random) -> Image.Image:
    """Apply two of fifteen operations, of magnitude 1 to 9, each with probability 0.5."""
    names = list(RANGES)
    pair = [(rng.choice(names), rng.randrange(1, 10)) for _ in range(2)]
    for name, level in pair:
        if rng.random() < 0.5:
            image = _operate(image, name, level, rng)
    return image


# The magnitudes of level 0 and of level 9, between which the others are evenly spaced.
RANGES = {
    "shearX": (0, 0.3),
    "shearY": (0, 0.3),
    "translateX": (0, 150 / 331),
    "translateY": (0, 150 / 331),
    "rotate": (0, 30),
    "color": (0, 0.9),
    "contrast": (0, 0.9),
    "brightness": (0, 0.9),
    "sharpness": (0, 0.9),
    "posterize": (8, 4),
    "solarize": (256, 0),
    "cutout": (0, 20),
    "autocontrast": (0, 0),
    "equalize": (0, 0),
    "invert": (0, 0),
}
_ENHANCEMENTS = {
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "brightness": ImageEnhance.Brightness,
    "sharpness": ImageEnhance.Sharpness,
}
_GREY = (128, 128, 128)


def _operate(image: Image.Image, name: str, level: int, rng: Random) -> Image.Image:
    """Apply an operation of the package with one of its ten levels."""
    weakest, strongest = RANGES[name]
    magnitude = weakest + (strongest - weakest) * level / 9
    if name in _ENHANCEMENTS:
        return _ENHANCEMENTS[name](image).enhance(1 + magnitude * rng.choice([-1, 1]))
    if name == "rotate":
        return image.rotate(magnitude, fillcolor=_GREY)
    if name == "posterize":
        return ImageOps.posterize(image, round(magnitude))
    if name == "solarize":
        return ImageOps.solarize(image, magnitude)  # type: ignore[arg-type]
    if name == "cutout":
        return _small_cutout(image, round(magnitude), rng)
    if name in ("autocontrast", "equalize", "invert"):
        operation: Callable[[Image.Image], Image.Image] = getattr(ImageOps, name)
        return operation(image)

    # Pillow takes the colour of pixel (x, y) from (ax + by + c, dx + ey + f).
    signed = magnitude * rng.choice([-1, 1])
    matrices = {
        "shearX": (1, signed, 0, 0, 1, 0),
        "shearY": (1, 0, 0, signed, 1, 0),
        "translateX": (1, 0, signed * image.width, 0, 1, 0),
        "translateY": (1, 0, 0, 0, 1, signed * image.height),
    }
    resample = Image.Resampling.NEAREST
    if name.startswith("shear"):
        resample = Image.Resampling.BICUBIC
    return image.transform(
        image.size, Image.Transform.AFFINE, matrices[name], resample, fillcolor=_GREY
    )


def _small_cutout(image: Image.Image, side: int, rng: Random) -> Image.Image:
    """Cover a square of at most 20 pixels per side."""
    x, y = rng.randrange(image.width), rng.randrange(image.height)
    left, top = max(0, x - side // 2), max(0, y - side // 2)
    right, bottom = min(image.width, x + side // 2), min(image.height, y + side // 2)

    values = np.array(image)
    values[top:bottom, left:right] = (125, 122, 113)
    return Image.fromarray(values)


# The job


def data(args: argparse.Namespace) -> dict[str, Any]:
    """Time the training transform of one image on one core, beside the official one.

    An image is decoded, resized to 448, and goes through cutout and the two random operations. All
    ways take turns on the same files, and processor time is measured: of a made picture of 640 x
    480 pixels, and of the photos of a folder, if one is given.

    Raises:
        ConfigError: if the folder has no images, or torchcodec is not installed.
    """
    check_decoder("torchcodec")
    photos = [] if args.folder is None else _images(Path(args.folder))

    # torch does the tensor operations: one thread, as a loader process has.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            photo = Path(folder, "photo.jpg")
            _photo().save(photo, quality=90)
            figures = _measured("made", [photo], Path(folder))
            figures["file_kib"] = photo.stat().st_size / 2**10

            subject, files = "made", [photo]
            if photos:
                subject, files = "photos", photos
                figures |= _measured(subject, files, Path(folder))
            figures |= _loader_figures(files)
    finally:
        torch.set_num_threads(threads)

    # The names of these figures are promised.
    figures["images_per_second"] = figures["made_default_images_per_second"]
    figures["official_images_per_second"] = figures["made_official_images_per_second"]
    figures["times_faster"] = figures["made_times_official"]
    for name in ("times_official", "times_official_fast"):
        figures[name] = figures[f"{subject}_{name}"]

    for way in ("default", "fast"):
        of_one_core = figures[f"{subject}_{way}_images_per_second"]
        figures[f"{way}_images_per_second_of_{CORES}_cores"] = CORES * of_one_core
    return figures | {"needed_images_per_second": NEEDED}


def table(figures: dict[str, Any]) -> str:
    """Return the figures of `data` as text: the milliseconds of each part of each way."""
    lines = []
    for subject, title in (("made", "a made picture of 640 x 480"), ("photos", "the photos")):
        if f"{subject}_times_official" not in figures:
            continue

        titles = "".join(f"{part:>12}" for part in ("seeding", *PARTS, "all"))
        lines += ["", f"milliseconds per image, of {title}", f"{'':<32}{titles}{'images/s':>12}"]
        for way, name in WAYS.items():
            cells = ""
            for part in ("seeding", *PARTS, "all"):
                value = figures.get(f"{subject}_{way}_{part}_ms")
                cells += f"{'-':>12}" if value is None else f"{value:>12.3f}"
            rate = figures[f"{subject}_{way}_images_per_second"]
            lines.append(f"{name:<32}{cells}{rate:>12.0f}")

    lines.append("")
    for name, value in figures.items():
        if not name.startswith(("made_", "photos_")):
            text = f"{value:,.4g}" if isinstance(value, float) else f"{value}"
            lines.append(f"  {name:<36} {text}")
    return "\n".join(lines)


def _photo() -> Image.Image:
    """Return an image with coarse and fine structure, for a JPEG file as large as a photo's."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    fine = Image.fromarray(rng.integers(0, 256, (240, 320, 3), np.uint8))
    return Image.blend(coarse.resize(PHOTO, Image.Resampling.BICUBIC), fine.resize(PHOTO), 0.3)


def _images(folder: Path) -> list[Path]:
    """Return the image files below a folder, at most `IMAGES`, at equal distances.

    Raises:
        ConfigError: if there are none.
    """
    suffixes = {f".{name.lower()}" for name in (*FORMATS, "JPG")}
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    if not files:
        raise ConfigError(f"{folder}: no images; name a folder with photos")
    return files[:: max(1, len(files) // IMAGES)][:IMAGES]


def _measured(subject: str, files: Sequence[Path], folder: Path) -> dict[str, float]:
    """Time every way on some files.

    Args:
        subject: begins the names of the figures.
        files: of images.
        folder: for the files that are made smaller.
    """
    smaller = []
    for number, file in enumerate(files):
        smaller.append(_smaller(file, folder / f"{subject}_{number}.jpg"))

    ways: dict[str, tuple[Pipeline, Sequence[Path]]] = {
        "official": (official(SIZE), files),
        "default": (ours(SIZE), files),
        "fast": (ours(SIZE, decoder="torchcodec", resize="tensor"), files),
        "shards": (ours(SIZE), smaller),
    }

    # The first round warms up.
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    for turn in range(ROUNDS + 1):
        for way, (pipeline, of_way) in ways.items():
            seconds = _seconds(pipeline, [str(file) for file in of_way], turn)
            if turn > 0:
                rounds[way].append(seconds)

    figures: dict[str, float] = {}
    for way, parts in rounds.items():
        for part in parts[0]:
            median = statistics.median(seconds[part] for seconds in parts)
            figures[f"{subject}_{way}_{part}_ms"] = 1000 * median
        figures[f"{subject}_{way}_images_per_second"] = 1000 / figures[f"{subject}_{way}_all_ms"]

    # The two halves of a round met the same load of the machine: compare within rounds.
    for way, name in (("default", "times_official"), ("fast", "times_official_fast")):
        ratios = [
            slow["all"] / fast["all"]
            for fast, slow in zip(rounds[way], rounds["official"], strict=True)
        ]
        figures[f"{subject}_{name}"] = statistics.median(ratios)
    return figures


def _smaller(file: Path, target: Path) -> Path:
    """Write an image as scripts/pack_shards.py --short-side 448 packs it."""
    image = read_image(file)
    factor = SIZE / min(image.size)
    if factor >= 1:
        return file

    width, height = (max(SIZE, round(side * factor)) for side in image.size)
    image.resize((width, height)).save(target, "JPEG", quality=QUALITY)
    return target


def _seconds(pipeline: Pipeline, files: Sequence[str], turn: int) -> dict[str, float]:
    """Return the mean processor time per image of each part, and of all.

    Args:
        pipeline: from a file to a training image.
        files: of images, of which `IMAGES` are taken, if need be again.
        turn: decides the random numbers, which are those of a loader.
    """
    spent: dict[str, float] = defaultdict(float)
    for number in range(IMAGES):
        # Frees the image before, whose time is nobody's.
        value: Any = files[number % len(files)]

        before = time.process_time()
        rng = SampleRandom(sample_seed(0, turn, number))
        after = time.process_time()
        if pipeline.seeds:
            spent["seeding"] += after - before

        for part, step in pipeline.steps.items():
            before = after
            value = step(value, rng)
            after = time.process_time()
            spent[part] += after - before

    spent["all"] = sum(spent.values())
    return {part: seconds / IMAGES for part, seconds in spent.items()}


def _loader_figures(files: Sequence[Path]) -> dict[str, float]:
    """Return images/s of a loader with one and two workers: the time on the clock.

    The two take turns. They need a core each, so that other programs disturb this.
    """
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(LOADS):
        for workers in rates:
            rates[workers].append(_loaded_per_second(files, workers))

    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    return {
        "loader_images_per_second_1_worker": statistics.median(rates[1]),
        "loader_images_per_second_2_workers": statistics.median(rates[2]),
        "workers_2_of_1": statistics.median(ratios),
    }


def _loaded_per_second(files: Sequence[Path], workers: int) -> float:
    """Return the images/s of a loader from its first batch on."""
    names = np.array([str(file).encode() for file in files] * (LOADED // len(files) + 1))[:LOADED]
    storage = ImageFiles(Path("/"), names, "")
    labels = from_single(np.zeros(len(names), np.int64), 1)
    dataset = StoredImages(storage, labels, ("photo",), TrainTransform(image_size=SIZE))
    split = Split(dataset, Classes(("photo",), exclusive=True))
    module = DataModule(
        lambda: split, lambda: split, SingleLabel().evaluator, EvalTransform(image_size=SIZE)
    )

    batches = TrainBatches(len(names), batch_size=BATCH)
    loader = unwrap(train_loader(module, batches, workers=workers, pin=False))
    for _ in range(workers):
        next(loader)

    start = time.perf_counter()
    loaded = sum(len(batch.images) for batch in loader)
    return loaded / (time.perf_counter() - start)
