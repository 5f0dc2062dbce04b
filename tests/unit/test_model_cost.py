"""Cost of a model against closed formulas."""

import pytest
import torch
from support import decoder_macs
from torch import nn

from mldec.heads.gap import GAP
from mldec.heads.ml_decoder import MLDecoder
from mldec.heads.query2label import Query2Label
from mldec.model import Classifier, multiply_accumulates


class Free(nn.Module):
    """A backbone without cost. The number of tokens is the width of the image."""

    num_features = 2048

    def forward(self, images):
        return images.new_empty(len(images), images.shape[-1], self.num_features)


def head_macs(head, tokens, num_classes, **arguments):
    with torch.device("meta"):
        model = Classifier(Free(), head(2048, num_classes, **arguments))
        return multiply_accumulates(model, tokens)


@pytest.mark.parametrize(
    ("tokens", "groups", "classes"), [(196, 20, 80), (49, 100, 9600), (5, 3, 10)]
)
def test_cost_of_ml_decoder_equals_formula(tokens, groups, classes):
    expected = decoder_macs(tokens, groups, classes)
    assert head_macs(MLDecoder, tokens, classes, num_groups=groups) == expected
    full = head_macs(MLDecoder, tokens, groups, num_groups=None, self_attention=True)
    assert full == decoder_macs(tokens, groups, groups, self_attention=True)


def test_cost_of_other_parts_equals_formula():
    assert head_macs(GAP, 49, 9600) == 2048 * 9600  # pooling has no products
    convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    assert multiply_accumulates(convolution, 10) == 5 * 5 * 8 * 27

    t, k, d, f = 49, 80, 2048, 8192
    encoder = 4 * t * d * d + 2 * t * t * d + 2 * t * d * f
    decoder = 2 * t * d * d + 2 * k * d * d + 2 * k * t * d + 2 * k * d * f
    assert head_macs(Query2Label, t, k) == encoder + 2 * decoder

    # A full decoding has one pooling vector, as one class per group. Each query costs 300 x 768.
    model = Classifier(Free(), MLDecoder(2048, 925, num_groups=None, word_dim=300))
    expected = decoder_macs(49, 1006, 1006) + 1006 * 300 * 768
    assert multiply_accumulates(model, 49, (1006, 300)) == expected
