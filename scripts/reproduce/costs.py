"""Estimates for a row: multiply-accumulates per image, GPU hours, and micro-batches that fit a GPU.

They follow from assumptions, not from measurements: `SUSTAINED`, `H100`, `H100_FP32`,
`H100_CONVOLUTIONS`, `FITS` and `MEMORY`.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from mldec import build
from mldec.config.compose import compose
from mldec.config.schema import Config, Precision
from mldec.data.types import Classes
from mldec.model import multiply_accumulates

SUSTAINED = 5e13  # assumed floating-point operations per second of a GPU in training
H100 = 2e14  # a fifth of its 989.5e12 for dense bf16 products
H100_FP32 = 1e14  # a fifth of its 494.7e12 for TF32 products
# Batch norms and activations of convolutional networks are limited by the memory. With this number,
# `coco_tresnet_l` takes the 2.3 to 3 hours of the roofline estimate in docs/gpus.md.
H100_CONVOLUTIONS = 7.5e13
CONVOLUTIONAL = ("tresnet", "resnet")  # prefixes of the names of convolutional networks
# GMAC of a micro-batch that fits a GPU with `MEMORY` bytes: the official batch of 56 images of
# TResNet-L at 448 pixels. The GMAC are assumed to be proportional to the memory.
FITS = 56 * 36.2
MEMORY = 80e9
BACKWARD = 3  # cost of a training step in forward passes


class Dataset(NamedTuple):
    """A dataset of the paper, with its published size."""

    section: str  # in DATASETS.md
    classes: int  # in training
    images: int  # per epoch, as in the experiments


# Keys are names of readers, followed by the year if there is one.
DATASETS = {
    "coco": Dataset("MS-COCO 2014", 80, 82_081),
    "openimages_miil": Dataset("Open Images V6", 9_605, 9_011_219),
    "nuswide_zsl": Dataset("NUS-WIDE", 925, 161_789),
    "nuswide81": Dataset("NUS-WIDE", 81, 119_103),
    "voc2007": Dataset("Pascal VOC 2007 and 2012", 20, 5_011),
    "voc2012": Dataset("Pascal VOC 2007 and 2012", 20, 5_717),
    "vg500": Dataset("Visual Genome 500", 500, 82_904),
    "imagenet": Dataset("ImageNet-1k", 1_000, 1_281_167),
    "cars": Dataset("Stanford-Cars", 196, 8_144),
    "cifar100": Dataset("CIFAR-100", 100, 50_000),
}


def composed(settings: tuple[str, ...]) -> Config:
    """Return the config of settings, with all arguments of its parts."""
    config = compose(list(settings))
    return build.recorded(config, build.check(config))


def dataset(config: Config) -> Dataset | None:
    """Return the dataset of a config from `composed`, or None if it is not in the paper."""
    reader = str(config.data["_target_"]).rpartition(".")[2]
    return DATASETS.get(f"{reader}{config.data.get('year', '')}")


class Work(NamedTuple):
    """Billions of multiply-accumulates per image of a forward pass."""

    backbone: float
    head: float


@lru_cache
def work(settings: tuple[str, ...]) -> Work | None:
    """Count the work of a forward pass. Returns None for data that is not in the paper.

    Raises:
        ConfigError: If the model cannot be built, for example because of a missing package.
    """
    config = composed(settings)
    data = dataset(config)
    if data is None:
        return None

    parts = build.check(config, build.MODEL_PARTS)
    classes = Classes(tuple(f"class {number}" for number in range(data.classes)))
    with torch.device("meta"):
        model = build.model(parts, classes, pretrained=False)

    word_dim = getattr(model.head, "word_dim", None)
    word_vectors = (data.classes, word_dim) if word_dim else None
    size = config.data["image_size"]
    total = multiply_accumulates(model, size, word_vectors) / 1e9
    backbone = multiply_accumulates(model.backbone, size) / 1e9
    return Work(backbone, total - backbone)


def gmac(settings: tuple[str, ...]) -> float | None:
    """Return billions of multiply-accumulates per image of a forward pass; see `work`."""
    forward = work(settings)
    return None if forward is None else sum(forward)


def gpu_hours(settings: tuple[str, ...], sustained: float = SUSTAINED) -> float | None:
    """Estimate the GPU hours of a run. Returns None for data that is not in the paper.

    Args:
        settings: Settings of the run.
        sustained: Floating-point operations per second of the GPU in training.
    """
    config = composed(settings)
    data = dataset(config)
    forward = work(settings)
    if data is None or forward is None:
        return None

    # A frozen backbone has no backward pass.
    backbone_passes = 1 if "backbone" in config.train.freeze else BACKWARD
    step = backbone_passes * forward.backbone + BACKWARD * forward.head
    operations = 2 * step * 1e9 * data.images * config.train.last_epoch
    return operations / sustained / 3600


def h100(settings: tuple[str, ...]) -> float:
    """Return the assumed operations per second of an H100 in the training of a run."""
    config = composed(settings)
    if str(config.backbone.get("name")).startswith(CONVOLUTIONAL):
        return H100_CONVOLUTIONS
    return H100_FP32 if config.train.precision is Precision.fp32 else H100


def gpu_memory() -> float:
    """Return the bytes of memory of the first GPU, or `MEMORY` without a GPU."""
    if not torch.cuda.is_available():
        return MEMORY
    return float(torch.cuda.get_device_properties(0).total_memory)


def accumulation(settings: tuple[str, ...], gpus: int) -> int:
    """Return the number of micro-batches per step, so that each fits the memory of a GPU.

    This is the smallest divisor of the batch per GPU that fits, at least `train.accumulate`.
    """
    train = composed(settings).train
    forward = gmac(settings)
    images = train.batch_size // gpus
    if forward is None:
        return train.accumulate

    fits = FITS * gpu_memory() / MEMORY
    for number in range(train.accumulate, images + 1):
        if images % number == 0 and images // number * forward <= fits:
            return number
    return images


def divisible_gpus(batch_size: int, gpus: int) -> int:
    """Return the largest number of GPUs, at most `gpus`, that divides the batch."""
    return max(number for number in range(1, gpus + 1) if batch_size % number == 0)
