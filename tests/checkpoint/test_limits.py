"""A model may not outgrow the tensors that are to fill it, whatever its config says."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mldec.checkpoint.limits import (
    FREE_NUMBERS,
    FREE_TENSORS,
    FREE_VALUE,
    check_sizes,
    limited,
)
from mldec.errors import CheckpointError
from mldec.heads.ml_decoder import MLDecoder

PATH = Path("odd.pt")
META = torch.device("meta")


def tensors(numbers: int, count: int = 1) -> dict[str, torch.Tensor]:
    """Return so many tensors, with so many elements in each; they take no memory."""
    return {str(number): torch.empty(numbers, device=META) for number in range(count)}


@pytest.mark.parametrize(
    ("node", "fits"),
    [
        ({"num_layers": FREE_VALUE}, True),
        ({"num_layers": FREE_VALUE + 1}, False),
        ({"num_layers": -FREE_VALUE - 1}, False),
        ({"deep": {"er": [[1, (2, FREE_VALUE + 1)]]}}, False),
        ({"lr": 1e30, "name": "9" * 30, "on": True, "none": None}, True),
    ],
)
def test_no_setting_exceeds_what_a_small_file_holds(node: dict[str, Any], fits: bool) -> None:
    nodes = [{"_target_": "x"}, node]
    if fits:
        check_sizes(nodes, tensors(10), PATH)
        return
    with pytest.raises(CheckpointError, match=r"^the model in odd\.pt cannot be built: one of its"):
        check_sizes(nodes, tensors(10), PATH)


def test_a_larger_file_allows_larger_settings() -> None:
    size = 3 * FREE_VALUE
    check_sizes([{"width": size}], tensors(FREE_VALUE, 3), PATH)
    with pytest.raises(CheckpointError, match=f"one of its settings is {size + 1}, more than all"):
        check_sizes([{"width": size + 1}], tensors(FREE_VALUE, 3), PATH)


@pytest.mark.parametrize("extra", [0, 1])
def test_the_elements_of_all_tensors_count(extra: int) -> None:
    held = 1000
    allowed = 2 * held + FREE_NUMBERS
    with torch.device(META):
        if not extra:
            with limited(tensors(held), PATH):
                nn.Linear(1, allowed, bias=False)
            return
        with pytest.raises(CheckpointError, match="larger than all that the file holds"):  # noqa: SIM117
            with limited(tensors(held), PATH):
                nn.Linear(1, allowed + extra, bias=False)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_parameters_and_buffers_are_counted_and_nothing_that_is_none(kind: str) -> None:
    def register(times: int) -> None:
        module = nn.Module()
        for number in range(times):
            if kind == "buffer":
                module.register_buffer(str(number), torch.zeros(1))
                module.register_buffer(f"none {number}", None)
            else:
                module.register_parameter(str(number), nn.Parameter(torch.zeros(1)))
                module.register_parameter(f"none {number}", None)

    allowed = 2 * 5 + FREE_TENSORS
    with limited(tensors(1, 5), PATH):
        register(allowed)
    with pytest.raises(CheckpointError), limited(tensors(1, 5), PATH):
        register(allowed + 1)


def test_a_real_head_fits_its_own_weights_and_a_forged_one_does_not() -> None:
    options: dict[str, Any] = {"embed_dim": 512, "num_heads": 8, "mlp_dim": 2048}
    with torch.device(META):
        weights = MLDecoder(2048, 80, **options).state_dict()
        with limited(weights, PATH):
            MLDecoder(2048, 80, **options)
        for forged in ({"num_layers": 60_000}, {"embed_dim": 40_000}, {"mlp_dim": 10**6}):
            with pytest.raises(CheckpointError, match="cannot be built"), limited(weights, PATH):
                MLDecoder(2048, 80, **{**options, **forged})


def test_a_constructor_that_hides_the_error_does_not_hide_the_limit() -> None:
    def build() -> None:
        try:
            nn.Linear(2 * FREE_NUMBERS, 1, device=META)
        except CheckpointError as error:
            raise KeyError("my own") from error

    with pytest.raises(CheckpointError, match="larger than all that"), limited({}, PATH):
        build()


def test_another_error_stays_what_it_is_and_the_limit_ends() -> None:
    with pytest.raises(KeyError), limited({}, PATH):
        raise KeyError("something else")
    nn.Linear(2 * FREE_NUMBERS, 1, device=META)
    with limited(tensors(10), PATH), pytest.raises(CheckpointError):
        nn.Linear(2 * FREE_NUMBERS, 1, device=META)


def test_a_limit_is_that_of_its_thread() -> None:
    """Another thread may build a model meanwhile."""
    built = []

    def build() -> None:
        built.append(nn.Linear(2 * FREE_NUMBERS, 1, device=META))

    with limited({}, PATH):
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    assert len(built) == 1
