"""Heat maps: their place on the image, whatever the network does to it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldec.errors import ConfigError
from mldec.heads import GAP, MLDecoder
from mldec.model import Classifier
from mldec.predict import heat_maps as maps
from mldec.predict import heat_maps as relevance
from mldec.predict.heat_maps import Explainer

SIZE, CELL = 32, 8


class Cells(nn.Module):
    """Tokens that are the mean colours of cells, which may be moved to the right and down."""

    def __init__(self, right: int = 0, down: int = 0, extra: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.right, self.down, self.extra = right, down, extra

    def forward(self, images: Tensor) -> Tensor:
        images = images.to(self.weight.dtype) / (255 if images.dtype == torch.uint8 else 1)
        moved = images.roll((-self.down, -self.right), (2, 3))
        cells = nn.functional.avg_pool2d(moved, CELL).flatten(2).mT * self.weight
        return torch.cat([cells, cells[:, : self.extra]], 1)


def model(**moves: int) -> Classifier:
    head = GAP(3, 3)
    with torch.no_grad():
        head.fc.weight.copy_(torch.eye(3))
        head.fc.bias.zero_()
    return Classifier(Cells(**moves), head).eval()


def spot(left: int, top: int, channel: int = 0) -> Tensor:
    """An image that is black, but for a cell of one colour."""
    image = torch.zeros(3, SIZE, SIZE, dtype=torch.uint8)
    image[channel, top : top + CELL, left : left + CELL] = 255
    return image


def peak(heat: Tensor) -> tuple[float, float]:
    """The position of the maximum, in pixels of the image."""
    row, column = divmod(int(heat.argmax()), heat.shape[1])
    scale = SIZE / heat.shape[1]
    return (column + 0.5) * scale, (row + 0.5) * scale


def test_a_map_has_its_maximum_at_what_it_shows() -> None:
    explainer = Explainer(model(), SIZE)
    assert explainer.method == relevance.ACTIVATION
    images = torch.stack([spot(8, 16), spot(24, 0, channel=2)])
    first, second = explainer.maps(images, [[0, 1], [2]])
    assert first.shape == (2, maps.MAP_SIZE, maps.MAP_SIZE)
    assert peak(first[0]) == pytest.approx((12, 20), abs=1)
    assert not first[1].any(), "nothing green in this image"
    assert peak(second[0]) == pytest.approx((28, 4), abs=1)
    assert (second >= 0).all()


@pytest.mark.parametrize(("right", "down"), [(3, 0), (-3, 2)])
def test_tokens_that_look_beside_their_cells_are_moved_back(right: int, down: int) -> None:
    explainer = Explainer(model(right=right, down=down), SIZE)
    [heat] = explainer.maps(spot(8 + right, 16 + down)[None], [[0]])
    assert peak(heat[0]) == pytest.approx((12 + right, 20 + down), abs=1)


def test_negative_evidence_is_no_heat() -> None:
    given = model()
    head: Any = given.head
    with torch.no_grad():
        head.fc.weight.neg_()
    [heat] = Explainer(given, SIZE).maps(spot(8, 8)[None], [[0]])
    assert not heat.any()


def test_images_without_classes_have_no_maps() -> None:
    explainer = Explainer(model(), SIZE)
    choices: list[list[list[int]]] = [[[], []], [[1], []]]
    for classes in choices:
        both = explainer.maps(torch.stack([spot(0, 0), spot(8, 8)]), classes)
        assert [len(heat) for heat in both] == [len(wanted) for wanted in classes]


def test_tokens_that_are_no_square_map_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^the backbone gives 17 tokens, which form no square"):
        Explainer(model(extra=1), SIZE)


def test_one_token_for_the_whole_image_is_no_map() -> None:
    class Pooled(Cells):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images).mean(1, keepdim=True)

    given = model()
    given.backbone = Pooled()
    with pytest.raises(ConfigError, match="heat maps need tokens of its parts"):
        Explainer(given, SIZE)


def test_a_frozen_backbone_without_gradients_has_no_shift() -> None:
    class Frozen(Cells):
        @torch.no_grad()
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images)

    given = model()
    given.backbone = Frozen(right=3)
    [heat] = Explainer(given, SIZE).maps(spot(11, 8)[None], [[0]])
    assert peak(heat[0]) == pytest.approx((12, 12), abs=1)


def test_a_decoder_gets_attention_and_leaves_no_gradient_behind() -> None:
    torch.manual_seed(0)
    head = MLDecoder(3, 5, num_groups=2, embed_dim=16, num_heads=2, mlp_dim=16)
    given = Classifier(Cells(), head).eval()
    explainer = Explainer(given, SIZE)
    assert explainer.method == relevance.THROUGH_ATTENTION
    [heat] = explainer.maps(torch.rand(1, 3, SIZE, SIZE), [[4, 0]])
    assert heat.shape == (2, maps.MAP_SIZE, maps.MAP_SIZE)
    assert heat.dtype == torch.float32
    assert all(parameter.grad is None for parameter in given.parameters())
