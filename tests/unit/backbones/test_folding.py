"""Folded batch norms: equal tokens, and no change of the network itself."""

import pytest
import torch
from random_weights import batch_norms, randomize_norms
from timm.layers import ScaledStdConv2d
from torch import nn

from mldec.backbones import TimmBackbone
from mldec.backbones.folding import fold_batchnorms


# The last network normalizes before its convolutions, so some norms follow no convolution.
@pytest.mark.parametrize(
    ("name", "left"), [("test_resnet", 0), ("test_efficientnet", 0), ("resnetv2_18", 9)]
)
def test_tokens_are_equal_without_batch_norms(name, left):
    backbone = randomize_norms(TimmBackbone(name))
    before = len(batch_norms(backbone))
    images = torch.randint(256, (3, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        expected = backbone(images)
        folded = fold_batchnorms(backbone, 64)
        torch.testing.assert_close(folded(images), expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(backbone(images), expected)
    assert (len(batch_norms(folded)), len(batch_norms(backbone))) == (left, before)


class Preact(nn.Module):
    """The batch norm is not the only user of the output of the convolution."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, images):
        x = self.conv(images / 255)
        return x + self.norm(x)


def test_networks_that_cannot_be_folded_are_returned():
    without_norms = nn.Conv2d(3, 4, 3)
    standardized = nn.Sequential(Scale(), ScaledStdConv2d(3, 4, 3), nn.BatchNorm2d(4))
    for network in (without_norms, Preact(), standardized):
        randomize_norms(network)
        assert fold_batchnorms(network, 16) is network


class Scale(nn.Module):
    def forward(self, images):
        return images / 255
