"""Which errors are those of memory, and what takes the place of their message."""

import pytest
import torch

from mldec.errors import OutOfMemoryError
from mldec.runtime.facts import explain_out_of_memory


def allocate() -> None:
    """Ask torch for more memory than any machine has."""
    torch.empty(2**60, dtype=torch.uint8)


def exhaust() -> None:
    raise MemoryError


def exhaust_a_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fault", [allocate, exhaust, exhaust_a_device])
def test_each_kind_of_the_error_becomes_the_advice(fault) -> None:
    with pytest.raises(OutOfMemoryError, match=r"^use less$") as caught:  # noqa: SIM117
        with explain_out_of_memory(lambda: "use less"):
            fault()
    assert isinstance(caught.value.__cause__, RuntimeError | MemoryError)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("memory"), KeyError()])
def test_another_error_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:  # noqa: SIM117
        with explain_out_of_memory(lambda: pytest.fail("it is no such error")):
            raise error
    assert caught.value is error


def test_nothing_is_asked_without_an_error() -> None:
    with explain_out_of_memory(lambda: pytest.fail("there was no error")):
        pass
