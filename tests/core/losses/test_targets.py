"""What every loss does to its inputs first."""

import math
import re

import pytest
import torch

from mldec.errors import DataError
from mldec.losses.common import prepare


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_logits_are_at_least_float32_and_targets_of_their_type(
    dtype: torch.dtype, expected: torch.dtype
) -> None:
    logits = torch.randn(3, 4).to(dtype)
    targets = torch.randint(2, (3, 4), dtype=torch.int8)
    ours, labels = prepare(logits, targets)
    assert ours.dtype == labels.dtype == expected
    assert torch.equal(ours, logits.to(expected))
    assert torch.equal(labels.to(torch.int8), targets)


def test_logits_that_are_fine_are_not_copied() -> None:
    for dtype in (torch.float32, torch.float64):
        logits = torch.randn(2, 3, dtype=dtype)
        assert prepare(logits, torch.zeros(2, 3))[0] is logits


def test_the_gradient_goes_through() -> None:
    logits = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    prepare(logits, torch.zeros(2, 3))[0].sum().backward()
    assert torch.equal(logits.grad, torch.ones_like(logits))


# For each value of a target: whether it is taken plain, with `unknown`, with `soft`, with both.
TAKEN = {
    0.0: (True, True, True, True),
    1.0: (True, True, True, True),
    -1.0: (False, True, False, True),
    0.5: (False, False, True, True),
    2.0: (False, False, False, False),
    -0.5: (False, False, False, False),
    1.001: (False, False, False, False),
    math.nan: (False, False, False, False),
    math.inf: (False, False, False, False),
}
ALLOWED = ("0 and 1", "0 and 1 and -1", "0 to 1", "0 to 1 and -1")


@pytest.mark.parametrize("value", TAKEN)
@pytest.mark.parametrize("place", range(4))
def test_values(value: float, place: int) -> None:
    flags = {"unknown": place in (1, 3), "soft": place in (2, 3)}
    targets = torch.tensor([[0.0, 1.0], [value, 1.0]])
    if TAKEN[value][place]:
        assert torch.equal(prepare(torch.zeros(2, 2), targets, **flags)[1], targets)
        return
    message = f"target {value:g} is not allowed: this loss takes {ALLOWED[place]}"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        prepare(torch.zeros(2, 2), targets, **flags)


@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (2, 4, 1), (4,), (0, 4)])
def test_shapes_must_be_equal_though_they_could_be_broadcast(shape: tuple[int, ...]) -> None:
    message = f"targets {shape} do not have the shape of the logits (2, 4)"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        prepare(torch.zeros(2, 4), torch.zeros(shape))


def test_a_batch_without_images_is_fine() -> None:
    logits, targets = prepare(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.int8))
    assert logits.shape == targets.shape == (0, 4)
