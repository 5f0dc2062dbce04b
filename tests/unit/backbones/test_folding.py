"""Folded batch norms: equal tokens, and no change of the network itself."""

import pytest
import torch
from timm.layers import ScaledStdConv2d
from torch import nn

from mldec.backbones import TimmBackbone
from mldec.backbones.folding import fold_batchnorms


def randomize(network):
    """Set random statistics, weights and biases of all batch norms."""
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for name in ("running_mean", "bias"):
                nn.init.normal_(getattr(module, name), std=0.1)
            for name in ("running_var", "weight"):
                nn.init.uniform_(getattr(module, name), 0.5, 1.5)
    return network.eval()


def count_norms(network):
    return sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())


# The last network normalizes before its convolutions, so some norms follow no convolution.
@pytest.mark.parametrize(
    ("name", "left"), [("test_resnet", 0), ("test_efficientnet", 0), ("resnetv2_18", 9)]
)
def test_tokens_are_equal_without_batch_norms(name, left):
    backbone = randomize(TimmBackbone(name))
    before = count_norms(backbone)
    images = torch.randint(256, (3, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        expected = backbone(images)
        folded = fold_batchnorms(backbone, 64)
        torch.testing.assert_close(folded(images), expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(backbone(images), expected)
    assert (count_norms(folded), count_norms(backbone)) == (left, before)


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
        randomize(network)
        assert fold_batchnorms(network, 16) is network


class Scale(nn.Module):
    def forward(self, images):
        return images / 255
