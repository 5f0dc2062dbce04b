from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import decoder_macs
from torch import Tensor, nn

from mldec.heads.gap import GAP
from mldec.heads.ml_decoder import MLDecoder
from mldec.heads.query2label import Query2Label
from mldec.model import Classifier
from mldec.runtime.facts import count_parameters, multiply_accumulates


class Free(nn.Module):
    """A backbone without work: as many tokens as an image has pixels a side."""

    num_features = 2048

    def forward(self, images: Tensor) -> Tensor:
        return images.new_empty(len(images), images.shape[-1], self.num_features)


def head_macs(
    head: Callable[..., nn.Module], tokens: int, num_classes: int, **arguments: Any
) -> float:
    with torch.device("meta"):
        return multiply_accumulates(
            Classifier(Free(), head(2048, num_classes, **arguments)), tokens
        )


@pytest.mark.parametrize(
    ("tokens", "groups", "classes"), [(196, 20, 80), (196, 80, 80), (49, 100, 9600), (5, 3, 10)]
)
def test_counter_against_the_closed_formula(tokens: int, groups: int, classes: int) -> None:
    assert head_macs(MLDecoder, tokens, classes, num_groups=groups) == decoder_macs(
        tokens, groups, classes
    )
    full = head_macs(MLDecoder, tokens, groups, num_groups=None, self_attention=True)
    assert full == decoder_macs(tokens, groups, groups, self_attention=True)


def test_gap_and_convolution_by_hand() -> None:
    assert head_macs(GAP, 49, 9600) == 2048 * 9600  # pooling has no products
    convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    assert multiply_accumulates(convolution, 10) == 5 * 5 * 8 * 27


def test_query2label_counts_too() -> None:
    t, k, d, f = 49, 80, 2048, 8192
    encoder = 4 * t * d * d + 2 * t * t * d + 2 * t * d * f
    decoder = 2 * t * d * d + 2 * k * d * d + 2 * k * t * d + 2 * k * d * f
    assert head_macs(Query2Label, t, k) == encoder + 2 * decoder


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert multiply_accumulates(model, 4) == 16 * 12
    assert [module.training for module in model] == [True, False, True]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_values_do_not_matter_to_the_count() -> None:
    head = MLDecoder(2048, 10, embed_dim=32, mlp_dim=16)
    small = multiply_accumulates(Classifier(Free(), head), 9)
    assert small == head_macs(MLDecoder, 9, 10, embed_dim=32, mlp_dim=16)


def test_word_queries_cost_their_projection_and_one_product_each() -> None:
    options = {"num_groups": None, "word_dim": 300}
    model = Classifier(Free(), MLDecoder(2048, 925, **options))
    for count in (81, 1006):
        # One pooling vector for all: a full decoding with one class per group has that; then
        # 300 x 768 per query.
        expected = decoder_macs(49, count, count) + count * 300 * 768
        assert multiply_accumulates(model, 49, (count, 300)) == expected


@pytest.mark.parametrize(
    ("classes", "groups", "trainable"),
    [(20, 20, 7_104_532), (1000, 100, 7_858_152), (9605, 100, 14_548_357), (9605, 200, 14_625_157)],
)
def test_parameters_of_the_published_heads(classes: int, groups: int, trainable: int) -> None:
    with torch.device("meta"):
        head = MLDecoder(2048, classes, num_groups=groups)
    assert count_parameters(head) == (trainable, trainable + groups * 768)
