"""Names of devices and number formats."""

import os

import pytest
import torch

from mldec.errors import ConfigError
from mldec.runtime.devices import Precision, check_device, processors


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:9999"])
def test_devices(name: str) -> None:
    check_device(name)


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:12345", "cpu ", "cpu:0"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^device '{name}' is unknown: choose auto, cpu, cuda"):
        check_device(name)


CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")]
)
def test_auto_is_what_the_device_can_do_well(
    capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert Precision.auto.on(GPU).value == expected
    assert Precision.auto.on(CPU) is Precision.fp32


def test_a_precision_that_is_named_is_used_but_for_fp16_on_a_cpu() -> None:
    named = (Precision.fp32, Precision.fp16, Precision.bf16)
    assert tuple(precision.on(GPU) for precision in named) == named
    assert [precision.on(CPU).value for precision in named] == ["fp32", "fp32", "bf16"]

    warned = [precision for precision in Precision if precision.warning(CPU)]
    assert warned == [Precision.bf16]
    assert Precision.bf16.warning(GPU) is None


def test_the_processors_are_shared_by_the_processes_of_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert processors() == 6
    for processes, expected in ((2, 3), (4, 1), (8, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert processors() == expected
