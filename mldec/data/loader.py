"""Data loaders with random numbers that are a function of seed and epoch."""

import math
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from mldec.data.labels import Labels, from_dense
from mldec.data.sampling import SampleRandom, draw_images, sample_seed, seeded
from mldec.data.types import DataModule, ImageDataset, Split, StoredImages
from mldec.errors import ConfigError, DataError, brief

Loaded = TypeVar("Loaded")  # type of the batches

# Maps images and targets to mixed images and targets, see `Mixing`.
Mixer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# Advice for worker processes that died or ran out of shared memory.
ADVICE = (
    "memory or /dev/shm may be full: lower train.workers (predict: --workers), or enlarge /dev/shm "
    "(docker run --shm-size=8g)"
)

# Workers are forked on Linux and share the memory of the main process. Python 3.14 has another
# default. Workers are spawned on other systems.
START = "fork" if sys.platform == "linux" else "spawn"


class Loader(DataLoader[Loaded]):
    """A DataLoader that raises worker failures in the main process as DataError.

    An exception from a worker has a traceback in its message. A worker therefore returns an error
    message as a batch of type str, which is raised as DataError.

    `options` are further arguments of DataLoader.
    """

    def __init__(self, dataset: Dataset[Any], *, num_workers: int, **options: Any) -> None:
        super().__init__(
            dataset,
            num_workers=num_workers,
            multiprocessing_context=START if num_workers else None,
            worker_init_fn=start_worker,
            # The default draws a seed from the global generator, which the model uses.
            generator=torch.Generator(),
            **options,
        )

    def __iter__(self) -> Iterator[Loaded]:  # type: ignore[override]
        # Workers keep sockets in a temporary folder. If the main process creates it first, they
        # share it, and it is removed at exit even if they are killed.
        if self.num_workers:
            multiprocessing.util.get_temp_dir()

        # The handler of torch raises an error at any point of the main thread, such as during a
        # save. Without it, torch detects a dead worker within five seconds of waiting. Windows has
        # no such signal.
        sigchld = getattr(signal, "SIGCHLD", None)
        handler = sigchld and signal.getsignal(sigchld)
        try:
            batches = super().__iter__()
            if sigchld and signal.getsignal(sigchld) is not handler:
                signal.signal(sigchld, handler)
            for batch in batches:
                if isinstance(batch, str):
                    raise DataError(batch)
                yield batch
        except (RuntimeError, OSError, EOFError) as error:
            # Do not convert errors of the dataset, which start with "Caught " in a worker.
            if not self.num_workers or str(error).startswith("Caught "):
                raise
            # A worker that dies during a transfer breaks the connection.
            died = isinstance(error, (RuntimeError, EOFError, ConnectionError))
            problem = "died" if died else "cannot be used"
            raise DataError(f"a loader process {problem} ({brief(error)}); {ADVICE}") from error


def end_workers() -> None:
    """Kill all worker processes, so that a hanging worker cannot block the exit.

    Workers ignore SIGTERM: they inherit handlers that only record the signal.
    """
    for child in multiprocessing.active_children():
        # A worker leads its own process group, see `start_worker`. Windows has no such groups.
        is_worker = child.daemon
        if hasattr(os, "getpgid"):
            is_worker = is_worker and os.getpgid(child.pid or 0) == child.pid
        if is_worker:
            child.kill()


def start_worker(worker: int) -> None:
    """Initialize a worker process (`worker_init_fn` of DataLoader)."""
    # Ctrl-C, torchrun and schedulers signal whole process groups. The main process still needs
    # batches for an orderly stop. A worker exits by itself when its parent exits.
    if hasattr(os, "setpgrp"):
        os.setpgrp()


Key = tuple[int, int, int]  # epoch, index, repetition within the epoch
Sample = tuple[Tensor, Tensor, Key]  # image, target, key

# The number of workers is set by the user. torch would warn for every loader.
warnings.filterwarnings("ignore", message="This DataLoader will create")


class Batch(NamedTuple):
    """The images and targets of a micro-batch."""

    images: Tensor  # uint8 [b, 3, H, W]
    targets: Tensor  # int8 [b, K], or float32 [b, K] if mixed
    indices: Tensor  # dataset indices of the images, [b]
    bad: Sequence[str] = ()  # messages about skipped unreadable images


@dataclass(eq=False)
class TrainBatches(Sampler[list[Key]]):
    """Batch sampler that yields the micro-batches of one rank, from any step of an epoch.

    The batches are a pure function of (seed, epoch), so a run can be resumed within an epoch.
    Shuffled images are split into global batches of `batch_size`. The images of each batch are
    distributed round-robin over world_size x accumulate micro-batches. The last batch may be
    smaller, as in the official code. It is dropped if a micro-batch has fewer than two images,
    because batch norm cannot train on one image.

    Repeated augmentation: each image appears `repeats` times in succession, with different random
    numbers. An epoch covers 1 / `repeats` of the images. The batches equal timm's RepeatAugSampler
    except for the end of an epoch, which timm rounds down to a multiple of 256.

    Raises:
        ConfigError: If there are too few images for the batch size.
    """

    num_images: int  # training images, or with `factors` the images of an epoch
    _: KW_ONLY
    batch_size: int  # images per global batch, over all ranks and accumulation steps
    accumulate: int = 1  # accumulation steps
    repeats: int = 1  # appearances of each image in succession
    # Mean number of appearances of each image per epoch, float64 [N], see `draw_images`.
    factors: np.ndarray | None = None
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    # Set by the trainer: the current epoch and its first step.
    epoch: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        if self.factors is not None:
            self.num_images = math.ceil(self.factors.sum())
        self.parts = self.accumulate * self.world_size  # micro-batches per global batch

        # The last batch is kept if each of its micro-batches has at least two images.
        tail = self.num_images % self.batch_size
        self.steps = self.num_images // self.batch_size + (tail >= 2 * self.parts)

        if self.steps == 0:
            fault = f"{self.batch_size} is too big for {self.num_images} images"
            raise ConfigError(f"train.batch_size: {fault}")
        if self.repeats > 1 and self.num_images < self.batch_size:
            raise ConfigError(
                f"train.repeats: {self.repeats} needs at least one batch of {self.batch_size} "
                f"images, there are {self.num_images}; lower train.batch_size"
            )

    def __len__(self) -> int:
        return (self.steps - self.start) * self.accumulate

    def images_in_step(self, step: int) -> int:
        """Return the number of images in the global batch of a step of the epoch."""
        return min(self.batch_size, self.num_images - step * self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        # [L]: the images of the epoch, and their numbers of previous appearances.
        generator = torch.Generator().manual_seed(sample_seed(self.seed, self.epoch, 0))
        if self.factors is not None:
            order, appearances = draw_images(self.factors, generator)
        else:
            order = torch.randperm(self.num_images, generator=generator)
            appearances = torch.zeros(self.num_images, dtype=torch.int8)

        # All ranks draw the same order. Each rank takes its micro-batches of a step.
        first_part = self.rank * self.accumulate
        for step in range(self.start, self.steps):
            start = step * self.batch_size
            positions = range(start, start + self.images_in_step(step))

            for part in range(first_part, first_part + self.accumulate):
                keys = []
                for position in positions[part :: self.parts]:
                    shuffled, repetition = divmod(position, self.repeats)
                    # Each appearance of an image in an epoch has different random numbers.
                    repetition += int(appearances[shuffled]) * self.repeats
                    keys.append((self.epoch, int(order[shuffled]), repetition))
                yield keys


@dataclass(frozen=True, eq=False)
class SeededDataset(Dataset[Any]):
    """Dataset that seeds each sample with (seed, epoch, index, repetition)."""

    dataset: ImageDataset
    seed: int

    def __getitem__(self, key: Key) -> Sample | str:
        """Return a sample, or an error message if the image cannot be read."""
        rng = SampleRandom(sample_seed(self.seed, *key))
        try:
            image, target = self.dataset.load(key[1], rng)
        except DataError as error:
            return str(error)
        return image, target, key


def train_loader(
    data: DataModule,
    batches: TrainBatches,
    *,
    workers: int,
    pin: bool,
    mixing: Mixer | None = None,
) -> Loader[Batch]:
    """Return a loader of the training micro-batches.

    Set `batches.epoch` and `batches.start` before each iteration over the loader. `pin` uses pinned
    memory. `mixing` mixes each micro-batch.
    """
    dataset = data.train.dataset
    return _loader(data, dataset, batches, workers, pin, seed=batches.seed, mixing=mixing)


def eval_loader(
    data: DataModule,
    *,
    batch_size: int,
    workers: int,
    pin: bool,
    rank: int = 0,
    world_size: int = 1,
    dataset: ImageDataset | None = None,
) -> Loader[Batch]:
    """Return a loader that loads each image of a dataset once, without padding or dropping.

    The batches do not depend on the number of ranks, because results may depend on the batch. They
    are distributed round-robin over the ranks. `dataset` is the validation split by default. For
    the other arguments see `train_loader`.
    """
    if dataset is None:
        dataset = data.val.dataset
    indices = range(len(dataset))
    batches = []
    for start in indices[::batch_size][rank::world_size]:
        batches.append([(0, index, 0) for index in indices[start : start + batch_size]])

    return _loader(data, dataset, batches, workers, pin)


def stack(samples: Sequence[Sample], *, mixing: Mixer | None = None, seed: int = 0) -> Batch:
    """Stack samples into a batch and mix it if `mixing` is given."""
    image_list, target_list, keys = zip(*samples, strict=True)
    images = torch.stack(image_list)
    targets = torch.stack(target_list)

    # The seed has an extra number, so that it differs from the seed of the sample.
    if mixing:
        with seeded(sample_seed(seed, *keys[0], 1)):
            images, targets = mixing(images, targets)

    return Batch(images, targets, torch.tensor([index for _, index, _ in keys]))


def collate(
    samples: Sequence[Sample | str],
    *,
    skip: bool = False,
    mixing: Mixer | None = None,
    seed: int = 0,
) -> Batch | str:
    """Stack samples into a batch, or return an error message for `Loader` to raise.

    `samples` contains an error message (str) for each unreadable image. With `skip`, these images
    are skipped and their messages are in `Batch.bad`.
    """
    bad = []
    readable = []
    for sample in samples:
        if isinstance(sample, str):
            bad.append(sample)
        else:
            readable.append(sample)
    if bad and not skip:
        return bad[0]

    # An empty batch still has the messages about its images.
    if not readable:
        return Batch(torch.empty(0), torch.empty(0), torch.empty(0), bad)

    batch = stack(readable, mixing=mixing, seed=seed)._replace(bad=bad)
    error = share(batch[:3])
    return batch if error is None else error


def share(tensors: Iterable[Tensor]) -> str | None:
    """Move the tensors of a worker to shared memory. Returns an error message if it is full."""
    # The queue thread of a worker would silently drop a batch that does not fit.
    if get_worker_info() is None:
        return None

    try:
        for tensor in tensors:
            tensor.share_memory_()
    except RuntimeError as error:
        return f"a loader process cannot share a batch ({brief(error)}); {ADVICE}"
    return None


def _loader(
    data: DataModule,
    dataset: ImageDataset,
    keys: Sampler[list[Key]] | list[list[Key]],
    workers: int,
    pin: bool,
    *,
    seed: int = 0,
    mixing: Mixer | None = None,
) -> Loader[Batch]:
    # The transfer from a worker takes longer than making a generated image.
    workers = workers if data.loads_slowly else 0
    skip = data.bad_images == "skip"
    return Loader(
        SeededDataset(dataset, seed),
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=partial(collate, skip=skip, mixing=mixing, seed=seed),
        pin_memory=pin,
        persistent_workers=workers > 0,
    )


def labels_of(split: Split, seed: int = 0) -> Labels:
    """Return the labels of a split.

    The images are loaded one by one if the dataset has no table of labels. `seed` determines the
    images of a dataset that generates a new image on each access.
    """
    dataset = split.dataset
    if isinstance(dataset, StoredImages):
        return dataset.labels

    rng = SampleRandom(sample_seed(seed))
    targets = []
    for index in range(len(dataset)):
        _, target = dataset.load(index, rng)
        targets.append(target)
    return from_dense(torch.stack(targets).numpy())
