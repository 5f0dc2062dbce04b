"""The names of devices: what a user types is checked in one place."""

import pytest
import torch

from mldec.config import compose
from mldec.distributed import pick_device
from mldec.errors import ConfigError

ODD = ["banana", "", "cpu:x", "cpu:0", "cuda:-1", "cuda:x", "cuda:\u0663", "cuda:0 ", " cuda", "cuda:", "cuda:1:2"]
ODD += ["mps", "meta", "xla", "CPU", "cpu:99999999999", "cpu\n", "cuda:" + "9" * 5000]


@pytest.mark.parametrize("name", ODD)
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown: choose auto, cpu, cuda or cuda:<number>") as caught:
        pick_device(name)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["banana", "cpu:x", "cuda:-1", "cuda:x", "mps"])
def test_settings_agree(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown: choose auto"):
        compose(["+experiment=digits", f"device='{name}'"])


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert pick_device("cuda") == torch.device("cuda")
    for name in ("cuda:2", "cuda:0099", "cuda:9999"):
        with pytest.raises(ConfigError, match=f"device {name} is not there: 2 CUDA devices; use device=cpu"):
            pick_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(ConfigError, match="device 'cuda:x' is unknown"):
        pick_device("cuda")
