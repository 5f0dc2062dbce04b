"""Names of devices and number formats."""

import pytest

from mldec.errors import ConfigError
from mldec.runtime.devices import Precision, check_device


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:9999"])
def test_devices(name: str) -> None:
    check_device(name)


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:12345", "cpu ", "cpu:0"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^device '{name}' is unknown: choose auto, cpu, cuda"):
        check_device(name)


def test_auto_is_what_the_device_can_do_well() -> None:
    assert [Precision.auto.on("cuda"), Precision.auto.on("cpu")] == [Precision.fp16, Precision.fp32]
    assert [precision.on("cpu") for precision in (Precision.bf16, Precision.fp16)] == [
        Precision.bf16,
        Precision.fp16,
    ]
    assert (
        Precision.auto.warning("cpu")
        is Precision.fp32.warning("cpu")
        is Precision.fp16.warning("cuda")
        is None
    )
    assert "slow on a CPU" in str(Precision.bf16.warning("cpu"))
