"""Batches from loader processes, whose random numbers are a function of seed and epoch."""

import math
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from mldec.data.labels import Labels, from_dense
from mldec.data.sampling import SampleRandom, draw, sample_seed, seeded
from mldec.data.types import DataModule, ImageDataset, Split, StoredImages
from mldec.errors import ConfigError, DataError, brief

Loaded = TypeVar("Loaded")  # what a loader yields
Mixer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of images and targets, see `Mixing`

# What to do about loader processes that died or cannot hand over what they loaded.
ADVICE = (
    "as happens when memory or /dev/shm is full: lower train.workers (predict: --workers), "
    "or enlarge /dev/shm (docker run --shm-size=8g)"
)

# Loader processes share the memory of this one on Linux, where that is safe; Python would choose
# otherwise from 3.14 on. Elsewhere they start anew.
START = "fork" if sys.platform == "linux" else "spawn"


class Loader(DataLoader[Loaded]):
    """A DataLoader whose worker faults are raised in this process as a `DataError`.

    An exception of a worker would arrive with a traceback in its message. A batch of type str is
    therefore raised as the message of a `DataError`.

    Args:
        dataset: the dataset, with `__getitem__` for each key of the batch sampler.
        num_workers: number of worker processes, or 0 to load in this process.
        options: further arguments of DataLoader.
    """

    def __init__(self, dataset: Dataset[Any], *, num_workers: int, **options: Any) -> None:
        super().__init__(
            dataset,
            num_workers=num_workers,
            multiprocessing_context=START if num_workers else None,
            worker_init_fn=start_worker,
            # By default, a seed is drawn from the global generator, which the model uses.
            generator=torch.Generator(),
            **options,
        )

    def __iter__(self) -> Iterator[Loaded]:  # type: ignore[override]
        # Workers keep sockets in a temporary folder. If this process makes it first, they share it,
        # and it is removed with this process even if they are killed.
        if self.num_workers:
            multiprocessing.util.get_temp_dir()

        try:
            for batch in self._start():
                if isinstance(batch, str):
                    raise DataError(batch)
                yield batch
        except (RuntimeError, OSError, EOFError) as error:
            # An error of the dataset itself, from a worker as "Caught ...", stays what it is.
            if not self.num_workers or str(error).startswith("Caught "):
                raise
            # A worker that dies while it hands over a batch is a broken connection.
            died = isinstance(error, (RuntimeError, EOFError, ConnectionError))
            problem = "died" if died else "cannot be used"
            raise DataError(f"a loader process {problem} ({brief(error)}), {ADVICE}") from error

    def _start(self) -> Iterator[Loaded]:
        """Return an iterator without the handler of SIGCHLD that torch installs.

        The handler would raise the death of a worker wherever the main thread is, in the middle of
        a step or of a save. Without it, torch finds the death where a batch is waited for, within
        five seconds.
        """
        number = getattr(signal, "SIGCHLD", None)
        if number is None:
            return super().__iter__()

        handler = signal.getsignal(number)
        iterator = super().__iter__()
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
        return iterator


def end_workers() -> None:
    """Kill the loader processes of this process, so that a hanging one cannot keep it from ending.

    SIGTERM would not end them: they have inherited handlers that only take note of a signal.
    """
    # Loader processes are recognised by the process group of their own, see `start_worker`.
    for child in multiprocessing.active_children():
        has_group = not hasattr(os, "getpgid") or os.getpgid(child.pid or 0) == child.pid
        if child.daemon and has_group:
            child.kill()


def start_worker(worker: int) -> None:
    """Prepare a loader process; torch calls this inside it, before its first sample."""
    # Ctrl-C, torchrun and schedulers signal whole process groups, and the main process still needs
    # batches to stop in order. A worker whose parent is gone ends by itself.
    if hasattr(os, "setpgrp"):
        os.setpgrp()


Key = tuple[int, int, int]  # epoch, index, number of the repetition in the epoch
Sample = tuple[Tensor, Tensor, Key]  # image, target, key

# The number of workers is the user's choice; torch would warn of it at every loader.
warnings.filterwarnings("ignore", message="This DataLoader will create")


class Batch(NamedTuple):
    """The images and targets of a micro-batch."""

    images: Tensor  # uint8 [b, 3, H, W]
    targets: Tensor  # int8 [b, K], or float32 [b, K] if mixed
    indices: Tensor  # of the images in the dataset, [b]
    bad: Sequence[str] = ()  # messages about the images that cannot be read and were left out


class TrainBatches(Sampler[list[Key]]):
    """The micro-batches of one process in one epoch, from any step on.

    They are a pure function of (seed, epoch), so that a run can be resumed within an epoch. The
    shuffled images are cut into global batches of `batch_size`, and the images of each are dealt in
    turn to world_size x accumulate micro-batches. The last batch may be smaller, as officially; it
    is left out if one of its micro-batches would hold fewer than two images, on which batch norm
    cannot train.

    Repeated augmentation: each image appears `repeats` times in succession, with other random
    numbers, and an epoch covers 1 / `repeats` of the images. The batches are those of timm's
    RepeatAugSampler, except at the end of an epoch, which timm rounds down to a multiple of 256.

    With `factors`, how often each image appears per epoch on average, [num_images], see `draw`, the
    attribute `num_images` is that of an epoch. A `ConfigError` says that there are too few images.
    """

    def __init__(
        self,
        num_images: int,
        *,
        batch_size: int,
        accumulate: int = 1,
        repeats: int = 1,
        factors: np.ndarray | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if factors is not None:
            num_images = math.ceil(factors.sum())
        self.factors = factors
        self.parts = accumulate * world_size  # micro-batches per global batch
        self.num_images, self.batch_size, self.accumulate = num_images, batch_size, accumulate
        self.repeats, self.seed, self.rank = repeats, seed, rank

        # The trainer sets both: the epoch, and its first step that is still to be done.
        self.epoch = self.start = 0

        # The incomplete batch at the end counts if each of its micro-batches has two images.
        tail = num_images % batch_size
        self.steps = num_images // batch_size + (tail >= 2 * self.parts)

        if self.steps == 0:
            raise ConfigError(
                f"train.batch_size {batch_size} is too large for {num_images} training images"
            )
        if repeats > 1 and num_images < batch_size:
            raise ConfigError(
                f"train.repeats {repeats} needs as many images as a batch: "
                f"there are {num_images} training images for train.batch_size {batch_size}; "
                f"lower that, or leave train.repeats out"
            )

    def __len__(self) -> int:
        return (self.steps - self.start) * self.accumulate

    def images_in_step(self, step: int) -> int:
        """Return the number of images in the global batch of a step of the epoch."""
        return min(self.batch_size, self.num_images - step * self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        order, appearances = self._order()

        # All processes draw the same order; each of them takes its own micro-batches of a step.
        first_part = self.rank * self.accumulate
        for step in range(self.start, self.steps):
            start = step * self.batch_size
            positions = range(start, start + self.images_in_step(step))

            for part in range(first_part, first_part + self.accumulate):
                keys = []
                for position in positions[part :: self.parts]:
                    shuffled, repetition = divmod(position, self.repeats)
                    # Every appearance of an image in an epoch has other random numbers.
                    repetition += int(appearances[shuffled]) * self.repeats
                    keys.append((self.epoch, int(order[shuffled]), repetition))
                yield keys

    def _order(self) -> tuple[Tensor, Tensor]:
        """Return the images of the epoch, and how often each appeared in it before, [L]."""
        generator = torch.Generator().manual_seed(sample_seed(self.seed, self.epoch, 0))
        if self.factors is not None:
            return draw(self.factors, generator)

        order = torch.randperm(self.num_images, generator=generator)
        return order, torch.zeros(self.num_images, dtype=torch.int8)


class SeededDataset(Dataset[Any]):
    """Load every sample with the random numbers of (seed, epoch, index, repetition)."""

    def __init__(self, dataset: ImageDataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: Key) -> Sample | str:
        """Return a sample, or the message about an image that cannot be read."""
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
    """Load the micro-batches of training, mixed by `mixing` if it is given.

    Set `batches.epoch` and `batches.start` before each pass over the loader.
    """
    return _loader(data, data.train, batches, batches.seed, workers, pin, mixing)


def eval_loader(
    data: DataModule,
    *,
    batch_size: int,
    workers: int,
    pin: bool,
    rank: int = 0,
    world_size: int = 1,
) -> Loader[Batch]:
    """Load every validation image once; nothing is padded or dropped.

    The processes take the same batches in turn: the arithmetic on an image may depend on its batch.
    """
    indices = range(len(data.val.dataset))
    batches = []
    for start in indices[::batch_size][rank::world_size]:
        batches.append([(0, index, 0) for index in indices[start : start + batch_size]])

    return _loader(data, data.val, batches, 0, workers, pin)


def stack(samples: Sequence[Sample], *, mixing: Mixer | None = None, seed: int = 0) -> Batch:
    """Stack samples into a batch, mixed by `mixing` if it is given."""
    image_list, target_list, keys = zip(*samples, strict=True)
    images = torch.stack(image_list)
    targets = torch.stack(target_list)

    # The seed has one more number than that of the sample itself, so that the two differ.
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
    """Stack samples into a batch, or return the message of a fault, which `Loader` raises.

    A sample of type str is the message about an image that cannot be read. With `skip` these images
    are left out and listed in `Batch.bad`.
    """
    bad = [sample for sample in samples if isinstance(sample, str)]
    if bad and not skip:
        return bad[0]

    # An empty batch still carries the messages about its images.
    readable = [sample for sample in samples if not isinstance(sample, str)]
    if not readable:
        return Batch(torch.empty(0), torch.empty(0), torch.empty(0), bad)

    batch = stack(readable, mixing=mixing, seed=seed)._replace(bad=bad)
    return share(batch[:3]) or batch


def share(tensors: Iterable[Tensor]) -> str | None:
    """Move what a loader process has loaded into shared memory; return the fault if it is full."""
    # The thread that hands batches over would silently drop one that does not fit.
    if get_worker_info() is None:
        return None

    try:
        for tensor in tensors:
            tensor.share_memory_()
    except RuntimeError as error:
        return f"a loader process cannot hand over a batch ({brief(error)}), {ADVICE}"
    return None


def _loader(
    data: DataModule,
    split: Split,
    keys: Sampler[list[Key]] | list[list[Key]],
    seed: int,
    workers: int,
    pin: bool,
    mixing: Mixer | None = None,
) -> Loader[Batch]:
    """Return a loader of the batches of a split with these keys."""
    workers = workers if data.loads_slowly else 0
    skip = data.bad_images == "skip"
    return Loader(
        SeededDataset(split.dataset, seed),
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=partial(collate, skip=skip, mixing=mixing, seed=seed),
        pin_memory=pin,
        persistent_workers=workers > 0,
    )


def labels_of(split: Split, seed: int = 0) -> Labels:
    """Return the labels of a split; where no table holds them, image by image.

    Where every access draws a new image, the seed decides whose labels these are.
    """
    dataset = split.dataset
    if isinstance(dataset, StoredImages):
        return dataset.labels

    rng = SampleRandom(sample_seed(seed))
    targets = [dataset.load(index, rng)[1] for index in range(len(dataset))]
    return from_dense(np.stack([target.numpy() for target in targets]))
