import inspect
from pathlib import Path

import pytest
import torch
from support import read_option

FILES = sorted((Path(__file__).parents[3] / "configs" / "head").glob("*.yaml"))
TOO_BIG = 20_000_000  # parameters; such a head is built narrower
NARROW = {"embed_dim": 64, "mlp_dim": 128}


def build(path, num_classes):
    """The head of an option for tokens of width 2048, or a narrow one of its kind for width 64."""
    target, node = read_option(path)
    with torch.device("meta"):
        head = target(2048, num_classes, **node)
    if sum(parameter.numel() for parameter in head.parameters()) < TOO_BIG:
        return target(2048, num_classes, **node), 2048
    known = inspect.signature(target).parameters
    return target(
        64, num_classes, **{**node, **{key: value for key, value in NARROW.items() if key in known}}
    ), 64


def test_there_are_options():
    assert {path.stem for path in FILES} >= {
        "gap",
        "ml_decoder",
        "transformer_decoder",
        "query2label",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_option_fits_the_signature_of_its_class(path):
    target, node = read_option(path)
    assert issubclass(target, torch.nn.Module)
    inspect.signature(target).bind(2048, 80, **node)


@pytest.mark.parametrize("num_classes", [1, 7, 80])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_option_gives_finite_logits_and_uses_all_its_parameters(path, num_classes):
    torch.manual_seed(0)
    head, width = build(path, num_classes)
    word_dim = getattr(head, "word_dim", None)
    words = () if word_dim is None else (torch.randn(num_classes, word_dim),)
    logits = head(torch.randn(2, 49, width), *words)
    assert logits.shape == (2, num_classes)
    assert logits.isfinite().all()
    logits.square().sum().backward()
    assert [name for name, p in head.named_parameters() if p.requires_grad and p.grad is None] == []
    assert any(p.requires_grad for p in head.parameters())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_file_of_an_option_says_what_it_is(path):
    assert path.read_text(encoding="utf-8").startswith("# ")
