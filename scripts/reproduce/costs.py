"""What a row costs: multiply-accumulates per image, GPU hours, and a micro-batch that fits a GPU.

Nothing here was measured on a GPU: the assumptions are `SUSTAINED`, `H100`, `H100_FP32`,
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

SUSTAINED = 5e13  # floating-point operations per second of a GPU in training, our assumption
# The same of an H100: a fifth of the 989.5e12 that its data sheet promises of dense bf16 products.
H100 = 2e14
# A fifth of the 494.7e12 of TF32 products: for runs without half precision.
H100_FP32 = 1e14
# Of convolutional networks a H100 does less: batch norms and activations wait for its memory.
H100_CONVOLUTIONS = 6e13
CONVOLUTIONAL = ("tresnet", "resnet")  # how the names of such networks begin
# GMAC of a micro-batch that fits a GPU with `MEMORY` bytes: the official batch, 56 images of
# TResNet-L at 448 pixels. More or less memory holds as many more or fewer images.
FITS = 56 * 36.2
MEMORY = 80e9
BACKWARD = 3  # a training step costs about three forward passes


class Dataset(NamedTuple):
    """A dataset of the rows: its section in DATASETS.md, and its published size."""

    section: str
    classes: int  # that the model scores in training
    images: int  # in an epoch; of several published counts the one that the experiments have


# By the function that reads it, and the year if it has one.
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
    """Return the config of a run with every argument of its parts.

    Raises:
        ConfigError: for a wrong setting.
    """
    config = compose(list(settings))
    return build.recorded(config, build.check(config))


def dataset(config: Config) -> Dataset | None:
    """Return the dataset of a config from `composed`; None if it is none of the paper's."""
    reader = str(config.data["_target_"]).rpartition(".")[2]
    return DATASETS.get(f"{reader}{config.data.get('year', '')}")


class Work(NamedTuple):
    """The billions of multiply-accumulates of a forward pass per image."""

    backbone: float
    head: float


@lru_cache
def work(settings: tuple[str, ...]) -> Work | None:
    """Count the work of a forward pass.

    Args:
        settings: that compose the run, as of the functions below.

    Returns:
        None for data that is none of the paper's.

    Raises:
        ConfigError: if the model cannot be built, as without an extra that it needs.
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
    """Return the billions of multiply-accumulates of a forward pass per image; see `work`."""
    forward = work(settings)
    return None if forward is None else sum(forward)


def gpu_hours(settings: tuple[str, ...], sustained: float = SUSTAINED) -> float | None:
    """Estimate the hours of one GPU that a run takes; None for data that is none of the paper's.

    Args:
        settings: that compose the run.
        sustained: floating-point operations per second of the GPU in training.
    """
    config = composed(settings)
    data, forward = dataset(config), work(settings)
    if data is None or forward is None:
        return None

    # A frozen backbone has no backward pass.
    backbone_passes = 1 if "backbone" in config.train.freeze else BACKWARD
    step = backbone_passes * forward.backbone + BACKWARD * forward.head
    operations = 2 * step * 1e9 * data.images * config.train.last_epoch
    return operations / sustained / 3600


def h100(settings: tuple[str, ...]) -> float:
    """Return the operations per second that an H100 is assumed to do in a run's training."""
    config = composed(settings)
    if str(config.backbone.get("name")).startswith(CONVOLUTIONAL):
        return H100_CONVOLUTIONS
    return H100_FP32 if config.train.precision is Precision.fp32 else H100


def gpu_memory() -> float:
    """Return the bytes of memory of this machine's first GPU; `MEMORY` where there is none."""
    if not torch.cuda.is_available():
        return MEMORY
    return float(torch.cuda.get_device_properties(0).total_memory)


def accumulation(settings: tuple[str, ...], gpus: int) -> int:
    """Return the micro-batches per step with which the images of one fit each of the GPUs.

    It is the smallest number that divides the batch of a process and makes a micro-batch fit, from
    the run's own `train.accumulate` on.
    """
    train, forward = composed(settings).train, gmac(settings)
    images = train.batch_size // gpus
    if forward is None:
        return train.accumulate

    fits = FITS * gpu_memory() / MEMORY
    for number in range(train.accumulate, images + 1):
        if images % number == 0 and images // number * forward <= fits:
            return number
    return images


def usable(batch_size: int, gpus: int) -> int:
    """Return how many of the GPUs a batch can be divided among, the most that is possible."""
    return max(number for number in range(1, gpus + 1) if batch_size % number == 0)
