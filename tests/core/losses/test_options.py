import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import loss_of_option, read_option

FILES = sorted((Path(__file__).parents[3] / "configs" / "loss").glob("*.yaml"))


def test_there_are_options():
    assert {path.stem for path in FILES} >= {"asl", "asl_single_label", "bce", "cross_entropy"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_option_fits_the_signature_of_its_class(path):
    target, node = read_option(path)
    assert issubclass(target, torch.nn.Module)
    inspect.signature(target).bind(**node)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_option_gives_one_finite_number_that_falls_along_its_gradient(path, dtype):
    torch.manual_seed(0)
    loss = loss_of_option(path)
    assert loss.reduction in ("sum", "mean")
    logits = torch.randn(8, 5).to(dtype).requires_grad_()
    targets = F.one_hot(torch.arange(8) % 5, 5).to(torch.int8)
    value = loss(logits, targets)
    assert value.shape == ()
    assert value.dtype == torch.float32
    assert value.isfinite()
    value.backward()
    assert logits.grad.isfinite().all()
    assert logits.grad.abs().sum() > 0
    with torch.no_grad():
        step = 0.01 / logits.grad.float().abs().max()
        assert loss(logits.float() - step * logits.grad.float(), targets) < loss(
            logits.float(), targets
        )


# The two-way loss also compares the images of a batch with each other.
@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem != "two_way"], ids=lambda path: path.stem
)
def test_the_reduction_is_what_the_value_does_when_the_batch_is_doubled(path):
    torch.manual_seed(0)
    loss = loss_of_option(path)
    logits, targets = torch.randn(8, 5), F.one_hot(torch.arange(8) % 5, 5)
    once, twice = loss(logits, targets), loss(logits.repeat(2, 1), targets.repeat(2, 1))
    torch.testing.assert_close(twice, once * (2 if loss.reduction == "sum" else 1))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_file_of_an_option_says_what_it_is(path):
    assert path.read_text(encoding="utf-8").startswith("# ")
