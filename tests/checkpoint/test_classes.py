"""Which classes of the data a checkpoint knows."""

from pathlib import Path

import pytest
import torch

from mldec.checkpoint.classes import check_classes, check_queries
from mldec.data.base import Classes
from mldec.errors import CheckpointError

PATH = Path("x.pt")
NAMES = ("a", "b", "c")


def words(names: tuple[str, ...] = NAMES, width: int = 5, seed: int = 0) -> Classes:
    """Return classes with word vectors."""
    generator = torch.Generator().manual_seed(seed)
    return Classes(names, queries=torch.randn(len(names), width, generator=generator))


@pytest.mark.parametrize("check", [check_classes, check_queries])
@pytest.mark.parametrize(
    ("current", "fault"),
    [
        (Classes(NAMES), None),
        (Classes(NAMES, exclusive=True), None),
        (Classes(("a", "b")), "x.pt knows 3 classes, the data has 2: choose data with its classes"),
        (
            Classes(("a", "c", "b")),
            "x.pt has other classes than the data: number 1 is 'b' there and 'c' here",
        ),
    ],
)
def test_a_closed_set_has_the_same_classes_in_the_same_order(check, current, fault) -> None:
    if fault is None:
        check(Classes(NAMES), current, PATH)
        return
    with pytest.raises(CheckpointError) as caught:
        check(Classes(NAMES), current, PATH)
    assert str(caught.value) == fault


def test_a_zero_shot_model_scores_any_classes_that_have_vectors_of_its_width() -> None:
    for current in (words(), words(("x", "y")), words(NAMES, seed=1)):
        check_queries(words(), current, PATH)


@pytest.mark.parametrize(
    ("current", "given"),
    [(Classes(NAMES), "none"), (words(width=4), "vectors of 4 numbers")],
)
def test_other_vectors_are_refused_with_both_widths(current: Classes, given: str) -> None:
    message = f"x.pt asks by word vectors of 5 numbers, the data has {given}: choose the vectors"
    with pytest.raises(CheckpointError, match=message):
        check_queries(words(), current, PATH)


def test_a_run_goes_on_with_the_same_vectors_only() -> None:
    check_classes(words(), words(), PATH)
    with pytest.raises(CheckpointError, match=r"x\.pt is of other word vectors .*data\.vectors"):
        check_classes(words(), words(seed=1), PATH)
