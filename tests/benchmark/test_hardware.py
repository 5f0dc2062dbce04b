"""What the hardware can do: measured, and published."""

import pytest
import torch

from mldec.benchmark import hardware
from mldec.benchmark.hardware import product_flops, published
from mldec.runtime.devices import Precision


def test_a_product_is_measured_in_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hardware.SIDE, "cpu", 64)
    dtypes = []
    matmul = torch.Tensor.__matmul__

    def noted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dtypes.append(a.dtype)
        return matmul(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", noted)
    before = torch.get_float32_matmul_precision()
    for precision in (Precision.auto, Precision.fp32, Precision.bf16):
        assert 1e6 < product_flops(torch.device("cpu"), precision) < 1e15
    assert list(dict.fromkeys(dtypes)) == [torch.float32, torch.bfloat16]
    assert torch.get_float32_matmul_precision() == before


def test_operations_are_two_per_element_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hardware.SIDE, "cpu", 10)
    monkeypatch.setattr(hardware, "in_turns", lambda *_, **__: {"product": [0.5, 0.1, 0.3]})
    assert product_flops(torch.device("cpu"), Precision.fp32) == pytest.approx(2 * 1000 / 0.1)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312),
    ],
)
def test_published_peaks_of_half_precision(name: str, teraflops: float) -> None:
    value, source = published(name, Precision.bf16) or (0, "")
    assert value == pytest.approx(teraflops * 1e12)
    assert "data sheet" in source


def test_float32_counts_as_tf32_where_convolutions_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed, teraflops in ((True, 156), (False, 19.5)):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        value, _ = published("NVIDIA A100-SXM4-80GB", Precision.fp32) or (0, "")
        assert value == pytest.approx(teraflops * 1e12)


def test_nothing_is_said_of_an_unknown_gpu() -> None:
    assert published("Some GPU", Precision.bf16) is None
    assert published("", Precision.fp32) is None
