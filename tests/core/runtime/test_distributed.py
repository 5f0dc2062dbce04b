"""What needs no second process; the rest is in tests/full/test_distributed.py."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import QUICK, one_line
from torch.cuda._utils import _get_device_index

from mldec.config.compose import compose
from mldec.errors import ConfigError, Stopped
from mldec.runtime import distributed
from mldec.runtime.distributed import pick_device

Cli = Callable[..., Any]


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_rank_without_a_group_is_one_line(
    command: str, cli: Cli, digits_run: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    words = QUICK
    if command == "evaluate":
        words = [digits_run / "checkpoints" / "best.pt", "--plugin", "patches"]
    status, _, err = cli(command, *words)
    assert status == 1
    one_line(err, "RANK is set, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not", "torchrun", "unset RANK")


@pytest.mark.parametrize(
    ("rank", "world_size"), [("two", "4"), ("-1", "4"), ("4", "4"), ("0", "four"), ("0", "0")]
)
def test_ranks_that_are_none_are_refused(
    rank: str, world_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    for name, value in described.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="they must be numbers, RANK from 0 to WORLD_SIZE - 1"):
        distributed.check_environment()


@pytest.fixture
def in_a_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be the first process of a group of three, whose store is torchrun's."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield
    del store  # it answers as long as it is held


# Devices: what a user types is checked in one place.
ODD = [
    "banana",
    "",
    "cpu:x",
    "cpu:0",
    "cuda:-1",
    "cuda:x",
    "cuda:\u0663",
    "cuda:0 ",
    " cuda",
    "cuda:",
    "cuda:1:2",
]
ODD += ["mps", "meta", "xla", "CPU", "cpu:99999999999", "cpu\n", "cuda:" + "9" * 5000]


@pytest.mark.parametrize("name", ODD)
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match="is unknown: choose auto, cpu, cuda or cuda:<number>"
    ) as caught:
        pick_device(name)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["banana", "cpu:x", "cuda:-1", "cuda:x", "mps"])
def test_settings_agree(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown: choose auto"):
        compose(["+experiment=digits", f"device='{name}'"])


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert pick_device("cuda") == torch.device("cuda:0")
    for name in ("cuda:2", "cuda:0099", "cuda:9999"):
        with pytest.raises(
            ConfigError, match=f"device {name} is not there: 2 CUDA devices; use device=cpu"
        ):
            pick_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == torch.device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(ConfigError, match="device 'cuda:x' is unknown"):
        pick_device("cuda")


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:1"])
def test_torch_takes_every_device_that_is_picked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # What torch.cuda.set_device does first: it refuses a device without an index.
    index = _get_device_index(pick_device(name))
    assert index == (1 if name == "cuda:1" else 0)


@pytest.mark.parametrize("tf32", [False, True])
def test_float32_means_the_same_in_products_and_convolutions(
    tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not tf32)
    before = torch.get_float32_matmul_precision()
    try:
        distributed.prepare_device(torch.device("cpu"), tf32=tf32)
        assert torch.get_float32_matmul_precision() == before

        distributed.prepare_device(torch.device("cuda:1"), tf32=tf32)
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is tf32
        assert chosen == [torch.device("cuda:1")]
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("in_a_group")
@pytest.mark.parametrize("error", [None, Stopped("stopped by SIGTERM", 143), ConfigError("no")])
def test_a_group_is_left_at_the_end_and_after_an_orderly_stop(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **words: calls.append(words))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append({}))

    for device in (torch.device("cpu"), torch.device("cuda:1")):
        calls.clear()
        with suppress(type(error) if error else ()), distributed.processes(device):
            if error:
                raise error

        # NCCL connects at once, and a process that hangs is noticed.
        joined, *left = calls
        assert joined["device_id"] == (device if device.type == "cuda" else None)
        assert joined["timeout"] == distributed.TIMEOUT
        assert len(left) == (not isinstance(error, ConfigError))
