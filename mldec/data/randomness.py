"""Random numbers of samples: a function of seeds, whichever process or thread draws them."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# One thread at a time may use the global generators.
_GLOBAL_GENERATORS = threading.RLock()


class SampleRandom(random.Random):
    """The random numbers of one sample: those of Python's generator with this seed.

    Libraries that only know the global generators are seeded with `initial_seed`, see `seeded`.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.initial_seed = seed


def sample_seed(*numbers: int) -> int:
    """Hash numbers such as seed, epoch and index to a 63-bit seed; trailing zeros do not count."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, random and numpy, and restore their states afterwards.

    For libraries whose functions take no generator. Other threads that want the same wait.
    """
    with _GLOBAL_GENERATORS:
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()

        # `torch.manual_seed` would seed the GPU too.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

        try:
            yield
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])
