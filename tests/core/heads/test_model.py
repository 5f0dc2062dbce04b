"""What the classifier and its heads say of inputs that are none."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mldec.backbones import TimmBackbone
from mldec.heads.gap import GAP
from mldec.heads.ml_decoder import MLDecoder
from mldec.heads.query2label import Query2Label
from mldec.heads.words import WordGAP, WordGroupDecoder
from mldec.model import Classifier

SIZES = {"embed_dim": 16, "mlp_dim": 16, "num_heads": 2}
HEADS: dict[str, Any] = {
    "gap": lambda: GAP(8, 3),
    "ml_decoder": lambda: MLDecoder(8, 3, num_groups=2, **SIZES),
    "zero-shot": lambda: MLDecoder(8, 3, num_groups=None, word_dim=5, **SIZES),
    "query2label": lambda: Query2Label(8, 3, input_proj=True, **SIZES),
    "word_gap": lambda: WordGAP(8, 3, word_dim=5),
    "word_groups": lambda: WordGroupDecoder(8, 3, word_dim=5, group_size=2, **SIZES),
}
WORDS = ("zero-shot", "word_gap", "word_groups")
ATTENTION = ("ml_decoder", "zero-shot", "query2label", "word_groups")


def queries(head: str) -> Tensor | None:
    return torch.randn(3, 5) if head in WORDS else None


@pytest.fixture(scope="module")
def backbone() -> nn.Module:
    return TimmBackbone("test_resnet", model_args={"channels": [8, 8, 8, 8]}).eval()


def classifier(backbone: nn.Module, head: str = "ml_decoder") -> Classifier:
    torch.manual_seed(0)
    width = backbone.num_features
    made = {
        "gap": lambda: GAP(width, 3),
        "ml_decoder": lambda: MLDecoder(width, 3, num_groups=2, **SIZES),
    }
    return Classifier(backbone, made[head]()).eval()


IMAGE = torch.zeros(2, 3, 64, 64)
WRONG_IMAGES: list[tuple[Any, str]] = [
    (IMAGE.numpy(), r"images are a ndarray: give a tensor \[B, 3, H, W\]"),
    ([1, 2], "images are a list"),
    (None, "images are a NoneType"),
    (IMAGE[0], r"images have the shape \[3, 64, 64\]: give a batch"),
    (IMAGE[None], r"images have the shape \[1, 2, 3, 64, 64\]"),
    (IMAGE[:, :1], r"images have the shape \[2, 1, 64, 64\]"),
    (torch.zeros(2, 4, 64, 64), r"images have the shape \[2, 4, 64, 64\]"),
    (torch.zeros(2, 64, 64, 3), r"images have the shape \[2, 64, 64, 3\]"),
    (torch.zeros(2, 3, 64, 64, dtype=torch.int64), "images are torch.int64; give uint8"),
    (torch.zeros(2, 3, 64, 64, dtype=torch.bool), "images are torch.bool; give uint8"),
    (torch.zeros(2, 3, 64, 64, dtype=torch.complex64), "images are torch.complex64; give uint8"),
]


@pytest.mark.parametrize(("images", "fault"), WRONG_IMAGES)
def test_images_that_are_none_are_named(backbone: nn.Module, images: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        classifier(backbone)(images)


def test_attention_of_a_head_without_it_is_refused(backbone: nn.Module) -> None:
    with pytest.raises(
        ValueError, match="attention=True: a GAP head has no attention; leave it out"
    ):
        classifier(backbone, "gap")(IMAGE, attention=True)
    logits, attention = classifier(backbone)(IMAGE, attention=True)
    assert (len(logits), attention.shape[:2]) == (2, (2, 2))


WRONG_TOKENS: list[tuple[Any, str]] = [
    (np.zeros((2, 4, 8), np.float32), r"tokens are a ndarray: give a tensor \[B, N, 8\]"),
    (
        torch.zeros(4, 8),
        r"tokens are torch.float32 of the shape \[4, 8\]: give floating point \[B, N, 8\]",
    ),
    (torch.zeros(2, 9, 2, 2), r"of the shape \[2, 9, 2, 2\].*or \[B, 8, H, W\]"),
    (torch.zeros(2, 4, 1), r"of the shape \[2, 4, 1\]"),
    (torch.zeros(2, 4, 9), r"of the shape \[2, 4, 9\]"),
    (torch.zeros(2, 4, 8, dtype=torch.int64), "tokens are torch.int64"),
]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("tokens", "fault"), WRONG_TOKENS)
def test_tokens_that_are_none_are_named(head: str, tokens: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        HEADS[head]()(tokens, queries(head))


WRONG_WORDS: list[tuple[Any, str]] = [
    (None, "got none"),
    (np.zeros((3, 5), np.float32), "got a ndarray"),
    (torch.zeros(3, 4), "got vectors of width 4"),
    (torch.zeros(5), r"got torch.float32 of the shape \[5\]"),
    (torch.zeros(1, 3, 5), r"got torch.float32 of the shape \[1, 3, 5\]"),
    (torch.zeros(3, 5, dtype=torch.int64), "got torch.int64 of the shape"),
]


@pytest.mark.parametrize("head", WORDS)
@pytest.mark.parametrize(("words", "fault"), WRONG_WORDS)
def test_word_queries_that_are_none_are_named(head: str, words: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=f"word_dim=5 needs word queries.*{fault}"):
        HEADS[head]()(torch.zeros(2, 4, 8), words)


@pytest.mark.parametrize("head", WORDS)
def test_word_queries_of_another_precision_are_converted(head: str) -> None:
    torch.manual_seed(0)
    module, tokens, words = HEADS[head]().eval(), torch.randn(2, 4, 8), torch.randn(3, 5)
    torch.testing.assert_close(module(tokens, words.double()), module(tokens, words))


@pytest.mark.parametrize("head", ["gap", "ml_decoder"])
def test_a_checked_classifier_is_still_exported_and_runs_under_autocast(
    backbone: nn.Module, head: str
) -> None:
    model = classifier(backbone, head)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        program = torch.export.export(model, (images,)).module()
        torch.testing.assert_close(program(images), model(images))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(images).shape == (2, 3)
