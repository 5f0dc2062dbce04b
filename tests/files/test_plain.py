"""The copy of an untrusted file's content: exact plain types, within a budget."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mldec.errors import CheckpointError
from mldec.files import plain as plain_module
from mldec.files.plain import MAX_DEPTH, MAX_TEXT, MAX_VALUES, TENSOR_TYPES, plain


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the kinds of values that a checkpoint holds."""
    path = tmp_path_factory.mktemp("plain") / "good.pt"
    state = {
        "model": nn.Linear(3, 4).state_dict(),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-4}]},
        "best": {"metric": None, "value": -float("inf"), "exclusive": True},
        "classes": ["a", "b"],
        "step": 4,
    }
    torch.save(state, path)
    return path


def test_plain_keeps_what_a_checkpoint_needs(checkpoint: Path) -> None:
    state = torch.load(checkpoint, weights_only=True)
    state["tied"] = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    state["betas"] = (0.9, 0.999)
    copied = plain(state, checkpoint)
    assert copied.keys() == state.keys()
    assert copied["betas"] == (0.9, 0.999)
    assert torch.equal(copied["tied"], state["tied"])
    assert type(copied["model"]) is dict
    assert list(copied["model"]) == list(state["model"])
    assert all(
        torch.equal(copied["model"][name], tensor) for name, tensor in state["model"].items()
    )


def test_plain_counts_values_and_bytes(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=f"more than {MAX_VALUES:,} values"):
        plain({"a": [0] * MAX_VALUES}, checkpoint)
    size = checkpoint.stat().st_size
    plain(
        {"a": torch.zeros(size, dtype=torch.uint8), "b": torch.zeros(size, dtype=torch.uint8)},
        checkpoint,
    )
    with pytest.raises(
        CheckpointError, match="its 'a' holds tensors that claim more than the whole file has"
    ):
        plain({"a": torch.zeros(1, dtype=torch.uint8).expand(2 * size + 1)}, checkpoint)


def refused(value: Any, path: Path) -> str:
    """Return the message that a value must end in."""
    with pytest.raises(CheckpointError, match=r"good\.pt is refused: ") as caught:
        plain(value, path)
    message = str(caught.value)
    assert "\n" not in message
    return message.partition("is refused: ")[2]


class Text(str):
    """A text that is more than a text."""


class Mapping(dict):
    """A mapping whose methods do something else."""

    def items(self) -> Any:
        raise AssertionError("a method of the object was called")

    __iter__ = keys = values = __len__ = items


def test_the_types_of_a_copy_are_exact(checkpoint: Path) -> None:
    shadowed = Mapping({"a": Text("b")})
    ordered = OrderedDict([("z", 1), ("a", 2)])
    ordered._metadata = "dropped"  # type: ignore[attr-defined]
    copied = plain([shadowed, ordered, (True, 2, 3.5, None)], checkpoint)
    assert [type(item) for item in copied] == [dict, dict, tuple]
    assert copied[0] == {"a": "b"}
    assert type(copied[0]["a"]) is str
    assert list(copied[1]) == ["z", "a"]
    assert not hasattr(copied[1], "_metadata")
    assert [type(item) for item in copied[2]] == [bool, int, float, type(None)]


@pytest.mark.parametrize("dtype", sorted(TENSOR_TYPES, key=str))
def test_dense_tensors_of_ordinary_types_pass(checkpoint: Path, dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 3).to(dtype)
    assert torch.equal(plain(tensor, checkpoint), tensor)


def test_a_parameter_becomes_a_tensor_and_a_negated_view_its_values(checkpoint: Path) -> None:
    copied = plain(nn.Parameter(torch.ones(2)), checkpoint)
    assert type(copied) is torch.Tensor
    assert not copied.requires_grad
    negated = torch._neg_view(torch.ones(2))
    assert negated.is_neg()
    assert not plain(negated, checkpoint).is_neg()
    assert plain(negated, checkpoint).tolist() == [-1, -1]


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        b"bytes",
        1j,
        np.float64(1),
        torch.float32,
        2**64,
        object(),
        Text("a" * (MAX_TEXT + 1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused_and_the_part_is_named(checkpoint: Path, value: Any) -> None:
    kind = type(value).__name__
    said = f"its 'metrics' holds a {kind} that no such file needs"
    assert refused({"metrics": {"deep": [value]}}, checkpoint) == said
    assert refused(value, checkpoint) == f"the file holds a {kind} that no such file needs"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.complex64),
    ],
    ids=["sparse", "meta", "complex"],
)
def test_other_tensors_are_refused(checkpoint: Path, tensor: torch.Tensor) -> None:
    said = refused({"model": {"a": tensor}}, checkpoint)
    what = f"a tensor that is not dense numbers in memory ({tensor.dtype})"
    assert said == f"its 'model' holds {what}"


def test_containers_may_be_so_deep_and_may_not_hold_themselves(checkpoint: Path) -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH):
        value = [value]
    assert plain(value, checkpoint) == value
    assert "is nested too deep" in refused([value], checkpoint)

    endless: dict[str, Any] = {}
    endless["config"] = {"a": [endless]}
    assert refused(endless, checkpoint).startswith("its 'config' is nested too deep")


class Key(tuple):
    """A tuple that can be a key though it holds a list."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def test_a_key_is_a_value_too(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "holds what no such file does" in refused({Key([[1]]): 0}, checkpoint)
    monkeypatch.setattr(plain_module, "MAX_VALUES", 5)
    assert plain({"a": 1, "b": 2}, checkpoint) == {"a": 1, "b": 2}
    assert "more than 5 values" in refused({"a": 1, "b": 2, "c": 3}, checkpoint)
