"""Devices and ranks in one process. tests/full/test_distributed.py uses torchrun."""

import os
import sys
import sysconfig
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import in_processes

from mldec import triton_can_compile
from mldec.errors import ConfigError, Stopped
from mldec.runtime import distributed
from mldec.runtime.devices import Precision, check_device, has_fast_bf16, processors
from mldec.runtime.distributed import pick_device

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def in_a_group(monkeypatch):
    """Set the environment variables of rank 0 of three."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield
    del store  # keeps it alive until here


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:12345", "cpu ", "mps"])
def test_unknown_or_missing_device_is_named(name):
    for known in ("auto", "cpu", "mps", "cuda", "cuda:0", "cuda:9999"):
        check_device(known)
    with pytest.raises(ConfigError, match=f"device.*{name}"):
        pick_device(name)


def test_auto_prefers_cuda_then_mps(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto") == pick_device("mps") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == GPU


def test_cuda_is_device_of_local_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert pick_device("cuda") == GPU
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")]
)
def test_auto_precision_depends_on_capability(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert Precision.auto.for_device(GPU).value == expected
    assert Precision.auto.for_device(CPU) is Precision.fp32


def test_fp16_falls_back_to_fp32_on_cpu():
    named = (Precision.fp32, Precision.fp16, Precision.bf16)
    assert tuple(precision.for_device(GPU) for precision in named) == named
    assert [precision.for_device(CPU).value for precision in named] == ["fp32", "fp32", "bf16"]


@pytest.mark.parametrize(
    ("instructions", "is_fast"),
    [({}, False), ({"avx512_f": True, "avx512_bf16": False}, False)]
    + [({"avx512_bf16": True}, True), ({"amx_bf16": True}, True)],
)
def test_bf16_is_fast_on_cpus_with_instructions_for_it(instructions, is_fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    assert has_fast_bf16(CPU) == is_fast
    assert not has_fast_bf16(GPU)

    slow = [] if is_fast else [Precision.bf16]
    assert [precision for precision in Precision if precision.warning(CPU)] == slow
    assert Precision.bf16.warning(GPU) is None
    used = [precision.after_training(CPU).value for precision in Precision]
    assert used == ["fp32"] * 4
    assert [precision.after_training(GPU) for precision in Precision] == [*Precision]


def test_ranks_of_host_share_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    for processes, expected in ((1, 6), (2, 3), (4, 1), (8, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert processors() == expected


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE=x"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"RANK": "1"}, "WORLD_SIZE=1"),
        ({"RANK": "x"}, "RANK=x"),
        ({"RANK": "0", "MASTER_PORT": "1"}, "MASTER_ADDR"),
        ({"RANK": "0", "MASTER_ADDR": "localhost"}, "MASTER_PORT"),
        ({"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "MASTER_PORT=x"),
    ],
)
def test_invalid_variable_of_torchrun_is_named(monkeypatch, variables, named):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def read_all():
        processors()
        distributed.rank_and_world_size()
        with distributed.processes(CPU):
            pass

    with pytest.raises(ConfigError, match=named):
        read_all()


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")
def test_triton_needs_compiler_and_python_header(tmp_path, monkeypatch):
    header = tmp_path / "Python.h"
    header.touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert not triton_can_compile()

    # Triton uses CC if it is set, else gcc or clang.
    (tmp_path / "clang").touch(mode=0o700)
    assert triton_can_compile()
    monkeypatch.setenv("CC", str(tmp_path / "missing"))
    assert not triton_can_compile()
    monkeypatch.setenv("CC", str(tmp_path / "clang"))
    assert triton_can_compile()
    header.unlink()
    assert not triton_can_compile()


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_applies_to_products_and_convolutions(tf32, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not tf32)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    before = torch.get_float32_matmul_precision()
    try:
        distributed.prepare_device(torch.device("cpu"), tf32=tf32, deterministic=False)
        assert torch.get_float32_matmul_precision() == before
        assert not torch.backends.cudnn.benchmark

        for deterministic in (False, True):
            device = torch.device("cuda:1")
            distributed.prepare_device(device, tf32=tf32, deterministic=deterministic)
            assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is tf32
            assert torch.backends.cudnn.benchmark is not deterministic
            assert chosen.pop() == device
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("in_a_group")
@pytest.mark.parametrize("error", [None, Stopped("stopped by SIGTERM", 143), ConfigError("no")])
def test_process_group_is_destroyed_or_aborted(error, monkeypatch):
    calls = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **words: calls.append(words))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append({}))
    aborted = []
    backend = SimpleNamespace(abort=lambda: aborted.append(True))
    group = SimpleNamespace(_get_backend=lambda device: backend)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))

    for device in (torch.device("cpu"), torch.device("cuda:1")):
        calls.clear()
        with suppress(type(error) if error else ()), distributed.processes(device):
            if error:
                raise error

        # With `device_id`, NCCL connects at once.
        joined, *left = calls
        assert joined["device_id"] == (device if device.type == "cuda" else None)
        assert joined["timeout"] == distributed.TIMEOUT
        assert len(left) == (not isinstance(error, ConfigError))
        # NCCL is aborted, because other ranks may be waiting.
        fails_on_cuda = isinstance(error, ConfigError) and device.type == "cuda"
        assert len(aborted) == fails_on_cuda


def _fault(rank, count):
    def job():
        raise ConfigError("wrong")

    with pytest.raises(ConfigError, match="wrong") as caught:
        distributed.on_main(job)
    assert caught.value.shared is bool(rank), "only rank 0 prints it"


def test_error_on_main_rank_is_raised_on_all():
    in_processes(_fault, 2)
