"""How the tensors of a file fit a model."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mldec.checkpoint.loading import (
    LONGEST,
    NAMED,
    copy_fitting,
    load_strict,
    match_tensors,
)
from mldec.errors import CheckpointError

PATH = Path("x.pt")


class Small(nn.Module):
    """A backbone with a computed buffer, and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 4)
        self.backbone.register_buffer("mean", torch.full((3,), 0.5))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, classes)


def ones(model: nn.Module) -> dict[str, Tensor]:
    """Return a state for a model, all of it ones."""
    return {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}


def test_names_and_shapes_are_compared() -> None:
    tensors = ones(Small())
    del tensors["norm.bias"], tensors["head.bias"]
    tensors["head.weight"] = torch.ones(5, 4)
    tensors["z"] = tensors["a"] = torch.ones(1)
    match = match_tensors(Small(), tensors)
    assert match.other_shape == ["head.weight"]
    assert match.missing == ["head.bias", "norm.bias"]
    assert match.unexpected == ["a", "z"]
    assert sorted([*match.fitting, "head.weight", "head.bias", "norm.bias"]) == sorted(
        Small().state_dict()
    )


def test_strict_means_all_of_them() -> None:
    model = Small()
    tensors = ones(model)
    load_strict(model, tensors, PATH)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head.bias": None}, r"1 tensor is missing \(head\.bias\)"),
        ({"more": torch.ones(1)}, r"1 tensor is unexpected \(more\)"),
        ({"head.bias": torch.ones(4)}, r"1 tensor is of another shape \(head\.bias\)"),
        ({"head.bias": None, "norm.bias": None}, r"2 tensors are missing \(head\.bias, norm\.bias"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(
    change: dict[str, Tensor | None], said: str
) -> None:
    model = Small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = {**ones(model), **change}
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=rf"^x\.pt does not fit the model: {said}"):
        load_strict(model, tensors, PATH)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_message_names_few_tensors_and_cuts_their_names() -> None:
    tensors = {
        **ones(Small()),
        **{f"{number:02}" + "x" * 500: torch.ones(1) for number in range(50)},
    }
    with pytest.raises(CheckpointError) as caught:
        load_strict(Small(), tensors, PATH)
    message = str(caught.value)
    assert "50 tensors are unexpected" in message
    assert message.count("xx, ") == NAMED - 1
    assert len(message) < NAMED * (LONGEST + 2) + 100


def test_optional_tensors_stay_as_they_are() -> None:
    model = Small()
    tensors = ones(model)
    del tensors["backbone.mean"], tensors["norm.num_batches_tracked"]
    with pytest.raises(CheckpointError, match="2 tensors are missing"):
        load_strict(model, tensors, PATH)
    load_strict(model, tensors, PATH, optional=("backbone.mean", "num_batches_tracked"))
    assert model.backbone.mean.tolist() == [0.5] * 3
    assert torch.equal(model.head.weight, torch.ones(3, 4))


def test_init_takes_what_fits_and_counts_the_rest() -> None:
    model = Small(classes=2)
    head = model.head.weight.clone()
    tensors = {**ones(Small(classes=3)), "more": torch.ones(1)}
    del tensors["norm.bias"]
    report = copy_fitting(model, tensors, PATH)
    assert report == (
        "init from x.pt: 5 of 8 tensors loaded; "
        "2 of another shape (head.bias, head.weight); 1 not in the file (norm.bias); "
        "1 not in the model (more)"
    )
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.backbone.weight, torch.ones(4, 4))
    assert model.backbone.mean.tolist() == [0.5] * 3, "computed, not taken from the file"
    assert model.norm.num_batches_tracked == 0


def test_a_file_that_fits_completely_needs_no_more_words() -> None:
    report = copy_fitting(Small(), ones(Small()), PATH)
    assert report == "init from x.pt: 8 of 8 tensors loaded"


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"other": torch.ones(1)},
        {**ones(Small()), "backbone.weight": torch.ones(2, 2)},
        {name: tensor for name, tensor in ones(Small()).items() if name != "backbone.bias"},
    ],
)
def test_another_backbone_is_refused(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(CheckpointError, match=r"^init=x\.pt is of another backbone: .*NAME$"):
        copy_fitting(Small(), tensors, PATH)
