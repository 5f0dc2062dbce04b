"""From a dataset to batches: the order of images, their random numbers, and the workers."""

import os
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from mldec.data.base import DataModule, ImageDataset
from mldec.errors import ConfigError, DataError

Key = tuple[int, int]  # (epoch, index)

# The number of workers is the user's choice; torch would remark on it at every loader.
warnings.filterwarnings("ignore", message="This DataLoader will create")


class Batch(NamedTuple):
    """Images uint8 [b, 3, H, W], targets int8 [b, K], and the images' indices in the dataset [b]."""

    images: Tensor
    targets: Tensor
    indices: Tensor
    bad: Sequence[str] = ()  # of images left out: which, and what is wrong with it


class TrainBatches(Sampler[list[Key]]):
    """The micro-batches of one process in one epoch: a pure function of (seed, epoch), from any step of it on.

    The shuffled images are cut into global batches, each of them into world_size x accumulate micro-batches. The last
    batch may be smaller, as officially; it is left out where a micro-batch of it would hold fewer than two images,
    which batch norm cannot train on.

    Args:
        num_images: size of the dataset.
        batch_size: images an optimiser step, over all processes.
        accumulate: micro-batches a step on each process.
        seed: of the run.
        rank: number of this process.
        world_size: number of processes.

    Raises:
        ConfigError: if the batch size is not divisible, or the dataset gives no batch.
    """

    def __init__(
        self,
        num_images: int,
        *,
        batch_size: int,
        accumulate: int = 1,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.parts = accumulate * world_size
        if batch_size % self.parts:
            raise ConfigError(
                f"train.batch_size {batch_size} is not divisible by "
                f"{world_size} processes x train.accumulate {accumulate}"
            )
        self.num_images, self.batch_size, self.accumulate = num_images, batch_size, accumulate
        self.seed, self.rank = seed, rank
        self.epoch = self.start = 0  # the epoch, and the first step of it that is still to be done
        tail = num_images % batch_size
        self.steps = num_images // batch_size + (tail >= 2 * self.parts)
        if self.steps == 0:
            raise ConfigError(f"train.batch_size {batch_size} is too large for {num_images} training images")

    def __len__(self) -> int:
        return (self.steps - self.start) * self.accumulate

    def images_in_step(self, step: int) -> int:
        """Return the images of the global batch of a step of the epoch."""
        return min(self.batch_size, self.num_images - step * self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        generator = torch.Generator().manual_seed(sample_seed(self.seed, self.epoch, 0))
        order = torch.randperm(self.num_images, generator=generator)
        first = self.rank * self.accumulate
        for step in range(self.start, self.steps):
            parts = order[step * self.batch_size :][: self.batch_size].tensor_split(self.parts)
            for part in parts[first : first + self.accumulate]:
                yield [(self.epoch, index) for index in part.tolist()]


class SeededDataset(Dataset[Any]):
    """Give every sample random numbers of its own, from (seed, epoch, index), whatever process draws it.

    A `DataError` is returned rather than raised, so that it crosses from a worker as it is, without a traceback.
    """

    def __init__(self, dataset: ImageDataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor, int] | DataError:
        epoch, index = key
        try:
            with seeded(sample_seed(self.seed, epoch, index)):
                image, target = self.dataset[index]
        except DataError as error:
            return error
        return image, target, index


def train_loader(data: DataModule, batches: TrainBatches, *, workers: int, pin: bool) -> DataLoader[Batch]:
    """Load the micro-batches of training; set `batches.epoch` and `batches.start` before each pass."""
    return _loader(data.train.dataset, batches, data.bad_images, batches.seed, workers, pin)


def eval_loader(
    data: DataModule, *, batch_size: int, workers: int, pin: bool, rank: int = 0, world_size: int = 1
) -> DataLoader[Batch]:
    """Load every validation image once; nothing is padded or dropped.

    The batches are the same whatever the number of processes, which take them in turn: so each image meets the same
    arithmetic, and the scores are equal to the last bit.
    """
    starts = range(0, len(data.val.dataset), batch_size)[rank::world_size]
    keys = [[(0, i) for i in range(start, min(start + batch_size, len(data.val.dataset)))] for start in starts]
    return _loader(data.val.dataset, keys, data.bad_images, 0, workers, pin)


def unwrap(loader: DataLoader[Batch]) -> Iterator[Batch]:
    """Iterate over a loader, raising in this process the `DataError` that a worker met, or one for its death."""
    try:
        for batch in loader:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            f"a loader process died ({' '.join(str(error).split())}), as it does when memory or /dev/shm is full: "
            f"lower train.workers"
        ) from error


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return a well-mixed 63-bit number from the three."""
    return int(np.random.SeedSequence((seed, epoch, index)).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, random and numpy, and put their states back afterwards."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    # Not torch.manual_seed, which would seed the GPU too.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def collate(samples: Sequence[tuple[Tensor, Tensor, int] | DataError], *, skip: bool = False) -> Batch | DataError:
    """Stack samples into a batch; hand on the first error among them, or leave those samples out by name."""
    bad = [sample for sample in samples if isinstance(sample, DataError)]
    if bad and not skip:
        return bad[0]
    good = [sample for sample in samples if not isinstance(sample, DataError)]
    if not good:
        return Batch(torch.empty(0), torch.empty(0), torch.empty(0), [str(error) for error in bad])
    images, targets, indices = zip(*good, strict=True)
    return Batch(torch.stack(images), torch.stack(targets), torch.tensor(indices), [str(error) for error in bad])


def _loader(
    dataset: ImageDataset,
    keys: Sampler[list[Key]] | list[list[Key]],
    bad_images: str,
    seed: int,
    workers: int,
    pin: bool,
) -> DataLoader[Batch]:
    return DataLoader(
        SeededDataset(dataset, seed),
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=partial(collate, skip=bad_images == "skip"),
        pin_memory=pin,
        persistent_workers=workers > 0,
        worker_init_fn=_leave_the_group,
        generator=torch.Generator(),  # its own: the loader must not draw from the model's random numbers
    )


def _leave_the_group(worker: int) -> None:
    """Let Ctrl-C, torchrun and schedulers, which signal whole process groups, reach the main process only.

    It still needs a batch to stop in order. A worker whose parent is gone ends by itself.
    """
    os.setpgrp()
