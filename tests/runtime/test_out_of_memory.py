"""What an out-of-memory error is, and which settings its message names."""

import pytest
import torch

from mldec.config.compose import compose, override
from mldec.config.schema import Config
from mldec.errors import OutOfMemoryError
from mldec.runtime import distributed, out_of_memory

GIB = 2**30


@pytest.fixture(scope="module")
def config() -> Config:
    words = ["train.batch_size=64", "train.accumulate=4", "train.eval_batch_size=48"]
    return compose(["+experiment=digits", *words])


def allocate() -> None:
    """Ask torch for more memory than any machine has."""
    torch.empty(2**60, dtype=torch.uint8)


def exhaust() -> None:
    raise MemoryError


def exhaust_a_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fault", [allocate, exhaust, exhaust_a_device])
def test_each_kind_of_the_error_becomes_one_message(fault, config: Config) -> None:
    with (
        pytest.raises(OutOfMemoryError) as caught,
        out_of_memory.explained(config, torch.device("cpu")),
    ):
        fault()
    assert str(caught.value) == (
        "out of memory on cpu: 16 training images at a time on each process, 48 in evaluation, "
        "at 64 pixels; for the same batch in smaller pieces pass train.accumulate=8; "
        "train.eval_batch_size and data.image_size help too"
    )
    assert isinstance(caught.value.__cause__, RuntimeError | MemoryError)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("memory"), KeyError()])
def test_another_error_stays_what_it_is(error: Exception) -> None:
    with (
        pytest.raises(type(error)) as caught,
        out_of_memory.explained_by(lambda: pytest.fail("it is no such error")),
    ):
        raise error
    assert caught.value is error


def test_nothing_is_asked_without_an_error() -> None:
    with out_of_memory.explained_by(lambda: pytest.fail("there was no error")):
        pass


@pytest.mark.parametrize(
    ("precision", "half"), [("fp32", True), ("bf16", False), ("auto", False), ("fp16", False)]
)
def test_on_cuda_the_peak_and_half_precision_are_named(
    config: Config, precision: str, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * GIB // 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 8 * GIB))
    config = override(config, [f"train.precision={precision}"])
    with (
        pytest.raises(OutOfMemoryError) as caught,
        out_of_memory.explained(config, torch.device("cuda:1")),
    ):
        exhaust_a_device()
    message = str(caught.value)
    assert message.startswith("out of memory on cuda:1: ")
    assert "at 64 pixels, 1.5 GiB of 8.0 at the peak; " in message
    assert ("train.precision=bf16, train.eval_batch_size" in message) == half


def test_the_images_are_those_of_one_process(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with (
        pytest.raises(OutOfMemoryError, match="8 training images at a time on each process"),
        out_of_memory.explained(config, torch.device("cpu")),
    ):
        exhaust()
