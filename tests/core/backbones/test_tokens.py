"""The trial of a network without memory, and what it finds."""

import pytest
import timm
import torch
from torch import Tensor, nn

from mldec.backbones.tokens import (
    MisfitError,
    norm_behind_pooling,
    num_prefix_tokens,
    try_out,
)


class Network(nn.Module):
    """Tokens from a convolution with a batch norm; a second convolution is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Conv2d(3, 8, 4, stride=4)
        self.norm = nn.BatchNorm2d(8).eval()
        self.unused = nn.Conv2d(8, 8, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.used(images)).flatten(2).transpose(1, 2)


def test_a_trial_finds_what_is_unused_and_changes_nothing() -> None:
    network = Network()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    random_state = torch.get_rng_state()
    tokens, unused = try_out(network, (3, 16, 24))
    assert (tokens.shape, tokens.device.type) == ((1, 24, 8), "meta")
    assert unused == {"unused.weight", "unused.bias"}
    assert torch.equal(torch.get_rng_state(), random_state)
    assert network.training
    assert not network.norm.training
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_trial_of_a_frozen_network_without_gradients_finds_the_same() -> None:
    network = Network().requires_grad_(False)
    with torch.inference_mode():
        _, unused = try_out(network, (3, 16, 16))
    assert unused == {"unused.weight", "unused.bias"}
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_an_image_that_fails_is_named() -> None:
    with pytest.raises(MisfitError, match="a trial image of 2 x 3 pixels failed"):
        try_out(Network(), (3, 2, 3))


@pytest.mark.parametrize(
    ("name", "norm", "prefix"),
    [
        ("resnet18", None, 0),
        ("convnext_atto", "head.norm", 0),
        ("vit_tiny_patch16_224", None, 1),
        ("deit_tiny_distilled_patch16_224", None, 2),
        ("volo_d1_224", None, 1),
        ("beit_base_patch16_224", "fc_norm", 1),
        ("levit_128s", None, 0),
    ],
)
def test_norms_and_prefix_tokens_are_those_of_timm(
    name: str, norm: str | None, prefix: int
) -> None:
    with torch.device("meta"):
        network = timm.create_model(name)
    assert norm_behind_pooling(network) == norm
    assert num_prefix_tokens(network) == prefix
