"""The job `data`: time the parts of the training transform on one core."""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mldec.data.images import check_decoder, open_image
from mldec.data.official_augment import cutout
from mldec.data.sampling import SampleRandom, sample_seed
from mldec.data.transforms import RESIZES, TrainTransform, View, as_pillow, to_tensor
from mldec.tools.predict.inputs import Inputs

PARTS = ("seeding", "decode", "resize", "cutout", "operations", "tensor", "all")
SIZE = 448  # pixels per side of a training image
ROUNDS = 15  # the median is reported
IMAGES = 40  # per round and pipeline

# Named steps that turn the path of an image file into a training image [3, S, S]. The arguments of
# a step are the result of the previous step and the random generator of the image.
Pipeline = dict[str, Callable[[Any, SampleRandom], Any]]


def pipeline(size: int, *, decoder: str = "pillow", resize: str = "pillow") -> Pipeline:
    """Return the steps of `TrainTransform` with the settings of the official recipe."""
    transform = TrainTransform(View(image_size=size, decoder=decoder, resize=resize))
    prepare = RESIZES[resize]
    return {
        "decode": lambda path, _: open_image(path, decoder=decoder),
        "resize": lambda image, _: as_pillow(transform.resizes[0](prepare(image))),
        "cutout": lambda image, rng: cutout(image, transform.cutout, rng),
        "operations": transform.augment,
        "tensor": lambda image, _: to_tensor(image),
    }


def data(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time the training transform with the default decoder and with the fast one."""
    check_decoder("simplejpeg")
    pipelines = {
        "default": pipeline(SIZE),
        "fast": pipeline(SIZE, decoder="simplejpeg", resize="tensor"),
    }
    yield time_pipelines(pipelines, photos_in(args.folder))


def photos_in(folder: str) -> list[str]:
    """Return the paths of at most `IMAGES` photos in a folder. Members of tar files are skipped."""
    paths = [item.path for item in Inputs([folder]) if item.path == item.name]
    return paths[:: max(1, len(paths) // IMAGES)][:IMAGES]


def time_pipelines(pipelines: Mapping[str, Pipeline], files: Sequence[str]) -> dict[str, float]:
    """Time pipelines alternately on image files.

    Returns NAME_PART_ms, the median processor time per image, and NAME_images_per_second.
    """
    torch.set_num_threads(1)  # as in a loader process
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    for turn in range(ROUNDS + 1):
        for name, steps in pipelines.items():
            seconds = _seconds_per_part(steps, files, turn)
            # The first round is a warm-up.
            if turn > 0:
                rounds[name].append(seconds)

    figures = {}
    for name, times in rounds.items():
        for part in PARTS:
            median = statistics.median(seconds[part] for seconds in times)
            figures[f"{name}_{part}_ms"] = 1000 * median
        figures[f"{name}_images_per_second"] = 1000 / figures[f"{name}_all_ms"]
    return figures


def _seconds_per_part(steps: Pipeline, files: Sequence[str], turn: int) -> dict[str, float]:
    spent = dict.fromkeys(PARTS, 0.0)
    for number in range(IMAGES):
        # This frees the previous image outside of the measurement.
        value: Any = files[number % len(files)]

        start = time.process_time()
        rng = SampleRandom(sample_seed(0, turn, number))
        end = time.process_time()
        spent["seeding"] += (end - start) / IMAGES
        for part, step in steps.items():
            start = end
            value = step(value, rng)
            end = time.process_time()
            spent[part] += (end - start) / IMAGES

    spent["all"] = sum(spent.values())
    return spent
