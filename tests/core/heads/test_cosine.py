import math

import pytest
import torch
from torch import Tensor

from mldec.errors import ConfigError
from mldec.heads.words import Cosine

WIDTH = 12


def some(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def head(*, bias: bool) -> Cosine:
    made = Cosine(WIDTH, 3, bias=bias).double()
    with torch.no_grad():
        made.logit_scale.fill_(math.log(100))
        if made.logit_bias is not None:
            made.logit_bias.fill_(-10)
    return made


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_the_head_equals_its_formula(bias: bool) -> None:
    tokens, words = some(2, 4, WIDTH), some(5, WIDTH)
    for image, row in zip(tokens, head(bias=bias)(tokens, words), strict=True):
        pooled = image.mean(0)
        for word, logit in zip(words, row, strict=True):
            cosine = (pooled @ word / pooled.norm() / word.norm()).item()
            assert logit.item() == pytest.approx(100 * cosine - 10 * bias)


def test_without_an_offset_there_is_no_parameter_for_it() -> None:
    assert set(Cosine(WIDTH, 3).state_dict()) == {"logit_scale"}
    assert set(Cosine(WIDTH, 3, bias=True).state_dict()) == {"logit_scale", "logit_bias"}


def test_half_precision_makes_no_ties() -> None:
    # Cosines of CLIP differ in the third digit, which bfloat16 does not have.
    near = torch.ones(64, 1, WIDTH) + 0.1 * torch.randn(
        64, 1, WIDTH, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = head(bias=False).float()(near, torch.ones(1, WIDTH))
    assert logits.dtype == torch.float32
    assert len(logits.unique()) > 60


def test_vectors_of_another_width_are_refused() -> None:
    with pytest.raises(ConfigError, match="got vectors of width 5"):
        Cosine(WIDTH, 3)(torch.zeros(1, 1, WIDTH), torch.zeros(2, 5))
    with pytest.raises(ConfigError, match="got none"):
        Cosine(WIDTH, 3)(torch.zeros(1, 1, WIDTH))
