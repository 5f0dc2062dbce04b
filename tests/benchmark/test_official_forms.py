"""The official forms compute what the product computes, which the parity tests compare further."""

import copy

import pytest
import torch

from mldec.benchmark.official_forms import (
    OfficialHead,
    OfficialLoop,
    asymmetric_loss,
    group_projection,
)
from mldec.heads.ml_decoder import MLDecoder
from mldec.losses.asymmetric import AsymmetricLoss


@pytest.mark.parametrize(("classes", "groups"), [(12, 4), (10, 4), (5, 5)])
@torch.no_grad()
def test_the_projection_is_one_product_per_class(classes: int, groups: int) -> None:
    head = MLDecoder(6, classes, num_groups=groups, embed_dim=8, num_heads=2, mlp_dim=8)
    head.pool_weight.normal_()
    head.pool_bias.normal_()
    x = torch.randn(3, groups, 8)
    logits = group_projection(x, head.pool_weight, head.pool_bias)

    size = head.pool_weight.shape[2]
    for number in range(classes):
        group, slot = divmod(number, size)
        expected = x[:, group] @ head.pool_weight[group, :, slot] + head.pool_bias[number]
        torch.testing.assert_close(logits[:, number], expected)
    torch.testing.assert_close(logits, head.pool(x))


def test_the_head_gives_the_logits_and_gradients_of_ours_with_its_weights() -> None:
    sizes = {"num_groups": 4, "embed_dim": 8, "num_heads": 2, "mlp_dim": 12, "dropout": 0.0}
    official, ours = OfficialHead(6, 10, **sizes), MLDecoder(6, 10, **sizes)
    ours.load_state_dict(official.state_dict())

    logits, gradients = [], []
    for head in (official, ours):
        tokens = torch.linspace(-1, 1, 2 * 5 * 6).view(2, 5, 6).requires_grad_()
        logits.append(head(tokens))
        logits[-1].square().sum().backward()
        gradients.append(tokens.grad)
    torch.testing.assert_close(logits[0], logits[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_loss_is_that_of_the_recipe() -> None:
    logits = torch.randn(4, 7).mul(3).requires_grad_()
    targets = (torch.rand(4, 7) < 0.3).long()
    values = [asymmetric_loss(logits, targets), AsymmetricLoss()(logits, targets)]
    gradients = [torch.autograd.grad(value, logits)[0] for value in values]
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_step_changes_the_weights_and_a_little_their_average() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    before = copy.deepcopy(model[1].weight.detach())
    loop = OfficialLoop(
        model, device=torch.device("cpu"), autocast=None, steps=10, lr=0.1, ema_decay=0.75
    )
    targets = torch.zeros(2, 3, 3, dtype=torch.int64)
    targets[:, 1, 2] = 1  # present in the second size only
    images = torch.rand(2, 3, 2, 2)
    expected = asymmetric_loss(model(images), targets.amax(1))

    torch.testing.assert_close(loop.step(images, targets), expected.detach())
    after = model[1].weight.detach()
    assert (after != before).all()
    torch.testing.assert_close(loop.ema[1].weight, 0.75 * before + 0.25 * after)
