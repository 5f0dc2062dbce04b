import dataclasses
from typing import Any

import hostile
import pytest
import torch

from mldec.checkpoint import Loaded, load_model
from mldec.data.types import Classes
from mldec.predict.engine import decided, scores


class Given(torch.nn.Module):
    """A model whose logits are the mean colours, and which keeps its queries."""

    queries: torch.Tensor | None = None

    def forward(self, images: torch.Tensor, queries: torch.Tensor | None = None) -> torch.Tensor:
        self.queries = queries
        images = images if images.is_floating_point() else images.float() / 255
        return 4 * images.mean((2, 3)).half() - 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    path = tmp_path_factory.mktemp("scoring") / "x.pt"
    torch.save(hostile.good(), path)
    return load_model(path)


def with_model(whole: Loaded, model: Any, **classes: Any) -> Loaded:
    return dataclasses.replace(whole, model=model, classes=Classes(("r", "g", "b"), **classes))


def test_scores_are_sigmoids_or_a_softmax_in_float32(whole: Loaded) -> None:
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    logits = Given()(images).float()
    several = scores(with_model(whole, Given()), images)
    assert several.dtype == torch.float32
    torch.testing.assert_close(several, 1 / (1 + (-logits).exp()))
    one = scores(with_model(whole, Given(), exclusive=True), images)
    torch.testing.assert_close(one, logits.exp() / logits.exp().sum(1, keepdim=True))
    torch.testing.assert_close(scores(with_model(whole, Given()), images / 255), several)


def test_a_zero_shot_model_gets_its_word_vectors(whole: Loaded) -> None:
    words, model = torch.randn(3, 5), Given()
    scores(with_model(whole, model, queries=words), torch.zeros(1, 3, 8, 8))
    assert model.queries is words


def test_decisions_are_at_thresholds_or_the_most_probable_class() -> None:
    rows = torch.tensor([[0.5, 0.4, 0.1], [0.2, 0.4, 0.4]])
    at_thresholds = decided(rows, torch.tensor([0.5, 0.5, 0.4]))
    assert at_thresholds.tolist() == [[True, False, False], [False, False, True]]
    assert decided(rows, None).tolist() == [[True, False, False], [False, True, False]]
