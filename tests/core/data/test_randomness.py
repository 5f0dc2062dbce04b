"""Random numbers of samples: the same for the same seed, in any process and thread."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from pictures import picture
from torch import Tensor

from mldec.data.randomness import SampleRandom, sample_seed, seeded
from mldec.data.transforms import TrainTransform


def test_the_numbers_of_a_sample_are_those_of_pythons_generator() -> None:
    rng = SampleRandom(2**62 + 5)
    state = random.getstate()
    with seeded(rng.initial_seed):
        expected = [random.random(), random.randrange(1000), random.getrandbits(64)]
    assert [rng.random(), rng.randrange(1000), rng.getrandbits(64)] == expected
    assert random.getstate() == state


def test_seeds_are_well_mixed() -> None:
    seeds = {
        sample_seed(seed, epoch, index)
        for seed in range(10)
        for epoch in range(10)
        for index in range(100)
    }
    assert len(seeds) == 10_000
    assert min(seeds) >= 0
    assert 2**62 < max(seeds) < 2**63
    assert sample_seed(3, 1) == sample_seed(3, 1, 0)


def test_all_global_generators_are_seeded_and_restored() -> None:
    def draws() -> tuple[float, ...]:
        return torch.rand(()).item(), random.random(), np.random.rand()

    with seeded(3):
        before = draws()
        with seeded(7):
            inner = draws()
        after = draws()
    with seeded(3):
        assert draws() == before
        assert draws() == after
    with seeded(7):
        assert draws() == inner
    assert len({*before, *after, *inner}) == 9

    with pytest.raises(ValueError, match="inside"), seeded(3):
        raise ValueError("inside")
    with seeded(3):
        assert draws() == before


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"crop": 0.3, "flip": True, "erase": 0.5, "augment": "randaugment"},
        {"crop": 0.3, "augment": "rand-m7-mstd0.5-inc1", "interpolation": "random"},
    ],
)
def test_threads_draw_what_one_thread_draws(settings: dict[str, object]) -> None:
    transform = TrainTransform(image_size=40, **settings)  # type: ignore[arg-type]
    image = picture(60, 50)

    def load(seed: int) -> Tensor:
        return transform(image, SampleRandom(seed))

    alone = [load(seed) for seed in range(60)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(load, range(60)))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert len({image.numpy().tobytes() for image in alone}) > 40
