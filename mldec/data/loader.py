"""From a dataset to batches: the order of images, their random numbers, and the workers."""

import multiprocessing
import multiprocessing.queues
import multiprocessing.util
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from mldec.config.schema import Mix
from mldec.data.base import DataModule, ImageDataset
from mldec.data.mixing import Mixing
from mldec.errors import ConfigError, DataError

Key = tuple[int, int, int]  # (epoch, index, number of its version)
Sample = tuple[Tensor, Tensor, Key]  # image, target

# What to do about loader processes that died or cannot hand over what they loaded.
ADVICE = "as happens when memory or /dev/shm is full: lower train.workers, or enlarge /dev/shm (docker run --shm-size=8g)"

# The number of workers is the user's choice; torch would remark on it at every loader.
warnings.filterwarnings("ignore", message="This DataLoader will create")


class Batch(NamedTuple):
    """Images uint8 [b, 3, H, W], targets int8 [b, K], float32 if mixed, and the images' indices in the dataset [b]."""

    images: Tensor
    targets: Tensor
    indices: Tensor
    bad: Sequence[str] = ()  # of images left out: which, and what is wrong with it


class TrainBatches(Sampler[list[Key]]):
    """The micro-batches of one process in one epoch: a pure function of (seed, epoch), from any step of it on.

    The shuffled images are cut into global batches, each of them dealt to world_size x accumulate micro-batches in
    turn. The last batch may be smaller, as officially; it is left out where a micro-batch of it would hold fewer than
    two images, which batch norm cannot train on.

    With `repeats`, each of the shuffled images is there that often, one after the other, and an epoch ends after as
    many as there are images: it sees a part of them, as in timm's RepeatAugSampler, whose batches these are on any
    number of processes. Only the end differs: timm rounds an epoch down to a multiple of 256 images.

    Args:
        num_images: size of the dataset.
        batch_size: images an optimiser step, over all processes.
        accumulate: micro-batches a step on each process.
        repeats: versions of an image, each with random numbers of its own.
        seed: of the run.
        rank: number of this process.
        world_size: number of processes.

    Raises:
        ConfigError: if the batch size is not divisible, or the dataset gives no batch, or no full one to repeat in.
    """

    def __init__(
        self,
        num_images: int,
        *,
        batch_size: int,
        accumulate: int = 1,
        repeats: int = 1,
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
        self.repeats, self.seed, self.rank = repeats, seed, rank
        self.epoch = self.start = 0  # the epoch, and the first step of it that is still to be done
        tail = num_images % batch_size
        self.steps = num_images // batch_size + (tail >= 2 * self.parts)
        if self.steps == 0:
            raise ConfigError(
                f"train.batch_size {batch_size} is too large for {num_images} training images"
            )
        if repeats > 1 and num_images < batch_size:
            raise ConfigError(
                f"train.repeats {repeats} needs as many images as a batch: there are {num_images} training images "
                f"for train.batch_size {batch_size}; lower that, or leave train.repeats out"
            )

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
            places = range(
                step * self.batch_size, step * self.batch_size + self.images_in_step(step)
            )
            for part in range(first, first + self.accumulate):
                mine = places[part :: self.parts]
                yield [
                    (self.epoch, int(order[place // self.repeats]), place % self.repeats)
                    for place in mine
                ]


class SeededDataset(Dataset[Any]):
    """Give every sample random numbers of its own, from (seed, epoch, index, version), whatever process draws it.

    A `DataError` is returned rather than raised, so that it crosses from a worker as it is, without a traceback.
    """

    def __init__(self, dataset: ImageDataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: Key) -> Sample | DataError:
        try:
            with seeded(sample_seed(self.seed, *key)):
                image, target = self.dataset[key[1]]
        except DataError as error:
            return error
        return image, target, key


def train_loader(
    data: DataModule, batches: TrainBatches, *, workers: int, pin: bool, mix: Mix | None = None
) -> DataLoader[Batch]:
    """Load the micro-batches of training, mixed; set `batches.epoch` and `batches.start` before each pass."""
    mixing = Mixing(mix, len(data.train.classes)) if mix and mix.soft else None
    return _loader(data.train.dataset, batches, data.bad_images, batches.seed, workers, pin, mixing)


def eval_loader(
    data: DataModule,
    *,
    batch_size: int,
    workers: int,
    pin: bool,
    rank: int = 0,
    world_size: int = 1,
) -> DataLoader[Batch]:
    """Load every validation image once; nothing is padded or dropped.

    The batches are the same whatever the number of processes, which take them in turn: so each image meets the same
    arithmetic, and the scores are equal to the last bit.
    """
    starts = range(0, len(data.val.dataset), batch_size)[rank::world_size]
    keys = [
        [(0, i, 0) for i in range(start, min(start + batch_size, len(data.val.dataset)))]
        for start in starts
    ]
    return _loader(data.val.dataset, keys, data.bad_images, 0, workers, pin)


def unwrap(loader: DataLoader[Batch]) -> Iterator[Batch]:
    """Iterate over a loader, raising in this process the `DataError` that a worker met, or one for its death."""
    # Workers keep sockets in a temporary folder: with one made here first, it is theirs too, and
    # it goes with this process even if they are killed.
    if loader.num_workers:
        multiprocessing.util.get_temp_dir()

    _deaths.error = None  # of a loader that nobody waits for any more
    try:
        with _deaths.reported():
            iterator = iter(loader)
        _deaths.watch()
        while True:
            with _deaths.reported():
                batch = next(iterator, None)
            if batch is None:
                return
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except (RuntimeError, OSError, EOFError) as error:
        # What the dataset itself raises stays what it is; from a worker it comes as "Caught ...".
        if not loader.num_workers or str(error).startswith("Caught "):
            raise
        detail = " ".join(str(error).split()) or type(error).__name__
        what = "cannot be used" if isinstance(error, OSError) else "died"
        raise DataError(f"a loader process {what} ({detail}), {ADVICE}") from error


def end_workers() -> None:
    """Kill the loader processes of this one, so that none that hangs keeps it from ending.

    They would note other signals only, as this process does. Each of them leads a group of its own.
    """
    for child in multiprocessing.active_children():
        if child.daemon and child.pid and os.getpgid(child.pid) == child.pid:
            child.kill()


class _Deaths:
    """Report the deaths of loader processes where a batch is waited for, and only there.

    torch raises an error in its handler of SIGCHLD, wherever the main thread is at that moment: in
    the middle of an optimiser step, or of a save. We stand before that handler and keep its error.
    """

    def __init__(self) -> None:
        self.handler: Callable[[int, FrameType | None], Any] | None = None  # torch's
        self.waiting = False
        self.error: RuntimeError | None = None

    def watch(self) -> None:
        """Take the place of torch's handler, which its first workers put there."""
        handler = signal.getsignal(signal.SIGCHLD)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if callable(handler) and handler != self.note and in_main_thread:
            self.handler = handler
            signal.signal(signal.SIGCHLD, self.note)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle the end of a child process."""
        assert self.handler
        try:
            self.handler(number, frame)
        except RuntimeError as error:
            if self.waiting:
                raise
            self.error = error

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Wait for loader processes, with an error if one has died or dies now."""
        self.waiting = True
        try:
            if self.error:
                raise self.error
            yield
        finally:
            self.waiting = False


_deaths = _Deaths()


def sample_seed(*numbers: int) -> int:
    """Return a well-mixed 63-bit number from some, such as seed, epoch and index; zeros at the end do not count."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


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


def collate(
    samples: Sequence[Sample | DataError],
    *,
    skip: bool = False,
    mixing: Mixing | None = None,
    seed: int = 0,
) -> Batch | DataError:
    """Stack samples into a batch; hand on the first error among them, or leave those samples out by name.

    The random numbers of a mixing are a function of the seed and the batch's first sample.
    """
    bad = [sample for sample in samples if isinstance(sample, DataError)]
    if bad and not skip:
        return bad[0]
    good = [sample for sample in samples if not isinstance(sample, DataError)]
    if not good:
        return Batch(torch.empty(0), torch.empty(0), torch.empty(0), [str(error) for error in bad])
    stacked, labels, keys = zip(*good, strict=True)
    images, targets = torch.stack(stacked), torch.stack(labels)
    if mixing:
        with seeded(sample_seed(seed, *keys[0], 1)):  # with a number more than the sample itself
            images, targets = mixing(images, targets)
    return Batch(
        images,
        targets,
        torch.tensor([index for _, index, _ in keys]),
        [str(error) for error in bad],
    )


def _loader(
    dataset: ImageDataset,
    keys: Sampler[list[Key]] | list[list[Key]],
    bad_images: str,
    seed: int,
    workers: int,
    pin: bool,
    mixing: Mixing | None = None,
) -> DataLoader[Batch]:
    return DataLoader(
        SeededDataset(dataset, seed),
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=partial(collate, skip=bad_images == "skip", mixing=mixing, seed=seed),
        pin_memory=pin,
        persistent_workers=workers > 0,
        worker_init_fn=start_worker,
        generator=torch.Generator(),  # its own: the loader must not draw from the model's random numbers
    )


def start_worker(worker: int) -> None:
    """Prepare a loader process, in it, before its first sample.

    Ctrl-C, torchrun and schedulers, which signal whole process groups, reach the main process only:
    it still needs a batch to stop in order. A worker whose parent is gone ends by itself.
    """
    os.setpgrp()
    # The thread that sends batches would drop one that it cannot send, and say so to nobody: the
    # main process would wait for it for ever.
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_fault  # type: ignore[attr-defined]


def _send_fault(results: Any, error: Exception, lost: Any) -> None:
    """Send a `DataError` in the place of a batch that could not be sent, as if memory is short.

    Args:
        results: the queue to the main process.
        error: why the batch could not be sent.
        lost: number of the batch, and the batch; already serialised if it is sending that failed.
    """
    if not isinstance(lost, tuple) or isinstance(lost[1], DataError):
        os._exit(1)  # nothing can be sent: this the main process sees
    number, detail = lost[0], " ".join(str(error).split())
    fault = DataError(f"a loader process cannot hand over a batch ({detail}), {ADVICE}")
    results.put((number, fault))
