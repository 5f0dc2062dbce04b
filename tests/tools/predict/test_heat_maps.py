"""Heat maps: relevance against independent forms, its place on the image, and pictures."""

import os
from pathlib import Path

import networks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pictures import picture
from PIL import Image
from random_weights import randomize
from torch import Tensor, nn

from mldec.backbones import TimmBackbone
from mldec.data.transforms import EvalTransform
from mldec.errors import ConfigError
from mldec.heads import GAP, MLDecoder, Query2Label, RidgeHead, WordGAP, WordGroupDecoder
from mldec.model import Classifier
from mldec.tools import heat_maps
from mldec.tools.heat_maps import (
    Explainer,
    file_name,
    fonts,
    heated,
    missing_glyphs,
    times_tokens,
)
from mldec.tools.predict import answers
from mldec.tools.predict.answers import Pictures, Prediction
from mldec.tools.predict.decode import Item
from mldec.tools.predict.engine import TorchEngine

IN, CLASSES, SIDE = 6, 7, 3
SIZES = {"embed_dim": 16, "num_heads": 4, "mlp_dim": 12}
WORDS = torch.randn(CLASSES, 5, generator=torch.Generator().manual_seed(5)).double()
WANTED = [[4, 0], [], [6, 1, 2]]


def tokens(batch=3):
    return torch.randn(batch, SIDE**2, IN, generator=torch.Generator().manual_seed(1)).double()


def model(head):
    return Classifier(nn.Identity(), randomize(head))


def groups(num_groups, **options):
    return model(MLDecoder(IN, CLASSES, num_groups=num_groups, **SIZES, **options))


def test_one_query_per_class_uses_its_attention():
    for given, word_vectors in (
        (groups(None, num_layers=2), None),
        (groups(None, self_attention=True), None),
        (model(Query2Label(IN, CLASSES, input_proj=True, **SIZES)), None),
        (model(MLDecoder(IN, 0, num_groups=None, word_dim=5, **SIZES)), WORDS),
        (model(WordGroupDecoder(IN, 0, word_dim=5, group_size=1, **SIZES)), WORDS),
    ):
        method, function = heat_maps.choose(given, tokens(1), word_vectors)
        assert method == heat_maps.ATTENTION
        result = function(given, tokens(), WANTED, word_vectors)

        _, attention = given.classify(tokens(), word_vectors, attention=True)
        assert [rows.shape for rows in result] == [(2, 9), (0, 9), (3, 9)]
        assert torch.equal(result[2], attention[2, [6, 1, 2]].detach())
        torch.testing.assert_close(result[0].sum(1), torch.ones(2))


def plain_groups(head, tokens):
    """An ML-Decoder written out, whose attention weights [B, heads, G, N] are in the graph."""
    memory = F.relu(head.embed(tokens))
    x, all_weights = head.queries.expand(len(tokens), -1, -1), []
    for layer in head.layers:
        x = layer.norm1(x + x)
        attn = layer.cross_attn
        (wq, wk, wv), (bq, bk, bv) = attn.in_proj_weight.chunk(3), attn.in_proj_bias.chunk(3)
        heads = [
            part.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)
            for part in (x @ wq.T + bq, memory @ wk.T + bk, memory @ wv.T + bv)
        ]
        q, k, v = heads
        all_weights.append((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1))
        x = layer.norm2(x + attn.out_proj((all_weights[-1] @ v).transpose(1, 2).flatten(2)))
        x = layer.norm3(x + layer.mlp(x))
    logits = torch.einsum("bgd,gds->bgs", x, head.pool_weight).flatten(1)
    return logits[:, : head.num_classes] + head.pool_bias, all_weights


@pytest.mark.parametrize("num_layers", [1, 2])
def test_groups_use_the_rule_of_chefer(num_layers):
    given = groups(3, num_layers=num_layers)
    method, function = heat_maps.choose(given, tokens(1), None)
    assert method == heat_maps.THROUGH_ATTENTION
    result = function(given, tokens(), WANTED, None)

    # As in the authors' code, the relevance R of queries to tokens starts at 0. Each layer adds the
    # mean over heads of ReLU(gradient * weight), because R of queries to queries is the identity.
    head = given.head
    logits, all_weights = plain_groups(head, tokens())
    torch.testing.assert_close(logits, given.classify(tokens()))
    for image, wanted in enumerate(WANTED):
        assert len(result[image]) == len(wanted)
        for row, k in zip(result[image], wanted, strict=True):
            gradients = torch.autograd.grad(logits[image, k], all_weights, retain_graph=True)
            expected = torch.zeros(head.queries.shape[0], SIDE**2, dtype=torch.float64)
            for weights, gradient in zip(all_weights, gradients, strict=True):
                expected += (gradient * weights)[image].clamp(min=0).mean(0)
            row_of_group = expected[k // 3]  # ceil(7 / 3) classes per group
            torch.testing.assert_close(row.double(), row_of_group, rtol=1e-5, atol=1e-7)
            assert row_of_group.max() > 0

    given = model(WordGroupDecoder(IN, 0, word_dim=5, group_size=2, **SIZES))
    method, function = heat_maps.choose(given, tokens(1), WORDS)
    assert method == heat_maps.THROUGH_ATTENTION
    result = function(given, tokens(), WANTED, WORDS)
    assert not torch.allclose(result[2][1], result[2][2]), "two classes, two maps"


@pytest.mark.parametrize("kind", ["plain", "bottleneck", "words"])
def test_pooling_uses_class_activation_maps(kind):
    head = GAP(IN, CLASSES, bottleneck=4 if kind == "bottleneck" else None)
    word_vectors = None
    if kind == "words":
        head, word_vectors = WordGAP(IN, 0, word_dim=5), WORDS
    given = model(head)
    method, function = heat_maps.choose(given, tokens(1), word_vectors)
    assert method == heat_maps.ACTIVATION
    result = function(given, tokens(), WANTED, word_vectors)

    # The mean over the tokens is the logit without its bias.
    zero = given.classify(torch.zeros(1, SIDE**2, IN).double(), word_vectors)
    no_bias = given.classify(tokens(), word_vectors) - zero
    torch.testing.assert_close(result[0].mean(1).double(), no_bias[0, [4, 0]].detach())
    if kind == "plain":
        expected = tokens() @ head.fc.weight.T
        torch.testing.assert_close(result[2].double(), expected[2, :, [6, 1, 2]].T.detach())


class Largest(nn.Module):
    """A head without attention: the maximum of each channel."""

    def forward(self, tokens, word_vectors=None):
        return tokens.amax(1)


class Counting(nn.Module):
    def forward(self, tokens, word_vectors=None):
        return (tokens > 0).sum(1)


def test_other_heads_use_gradient_times_tokens():
    given = Classifier(nn.Identity(), Largest())
    method, function = heat_maps.choose(given, tokens(1), None)
    assert method == heat_maps.TIMES_TOKENS
    [row] = function(given, tokens(1), [[2]], None)
    column = tokens(1)[0, :, 2]
    expected = torch.where(column == column.max(), SIDE**2 * column, 0)
    torch.testing.assert_close(row[0].double(), expected)

    given = Classifier(nn.Identity(), Counting())
    _, function = heat_maps.choose(given, tokens(1), None)
    with pytest.raises(ConfigError, match="head Counting"):
        function(given, tokens(1), [[0]], None)


@pytest.mark.parametrize("head", ["gap", "groups"])
def test_heat_map_does_not_depend_on_the_batch(head):
    given = groups(3) if head == "groups" else model(GAP(IN, CLASSES))
    _, function = heat_maps.choose(given, tokens(1), None)
    together = function(given, tokens(), WANTED, None)
    for image, wanted in enumerate(WANTED):
        [alone] = function(given, tokens()[image : image + 1], [wanted], None)
        torch.testing.assert_close(alone, together[image])
        assert not alone.requires_grad
    assert all(parameter.grad is None for parameter in given.parameters())


# Place on the image

SIZE, CELL = 32, 8


class Cells(nn.Module):
    """Tokens that are the mean colors of cells, which may be shifted to the right and down."""

    def __init__(self, right=0, down=0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.right, self.down = right, down

    def forward(self, images):
        images = images.to(self.weight.dtype) / (255 if images.dtype == torch.uint8 else 1)
        moved = images.roll((-self.down, -self.right), (2, 3))
        return nn.functional.avg_pool2d(moved, CELL).flatten(2).mT * self.weight


def cells(sign=1, **moves):
    head = GAP(3, 3)
    with torch.no_grad():
        head.fc.weight.copy_(sign * torch.eye(3))
        head.fc.bias.zero_()
    return Classifier(Cells(**moves), head).eval()


def spot(left, top, channel=0):
    """A black image with one colored cell."""
    image = torch.zeros(3, SIZE, SIZE, dtype=torch.uint8)
    image[channel, top : top + CELL, left : left + CELL] = 255
    return image


def peak(heat):
    """The position of the maximum, in pixels of the image."""
    row, column = divmod(int(heat.argmax()), heat.shape[1])
    scale = SIZE / heat.shape[1]
    return (column + 0.5) * scale, (row + 0.5) * scale


def test_maximum_is_at_the_evidence():
    explainer = Explainer(cells(), SIZE)
    images = torch.stack([spot(8, 16), spot(24, 0, channel=2)])
    first, second = explainer.maps(images, [[0, 1], [2]])
    assert first.shape == (2, heat_maps.MAP_SIZE, heat_maps.MAP_SIZE)
    assert peak(first[0]) == pytest.approx((12, 20), abs=1)
    assert not first[1].any(), "no green in this image"
    assert peak(second[0]) == pytest.approx((28, 4), abs=1)
    assert (second >= 0).all()
    assert [len(heat) for heat in explainer.maps(images, [[1], []])] == [1, 0]

    [heat] = Explainer(cells(sign=-1), SIZE).maps(spot(8, 8)[None], [[0]])
    assert not heat.any(), "negative evidence is zero"


@pytest.mark.parametrize(("right", "down"), [(3, 0), (-3, 2)])
def test_shift_of_tokens_is_corrected(right, down):
    explainer = Explainer(cells(right=right, down=down), SIZE)
    [heat] = explainer.maps(spot(8 + right, 16 + down)[None], [[0]])
    assert peak(heat[0]) == pytest.approx((12 + right, 20 + down), abs=1)


def test_tokens_must_be_a_square_and_frozen_tokens_have_no_shift():
    class Other(Cells):
        def __init__(self, change):
            super().__init__(right=3)
            self.change = change

        def forward(self, images):
            return self.change(super().forward(images))

    given = cells()
    for change in (
        lambda tokens: torch.cat([tokens, tokens[:, :1]], 1),
        lambda tokens: tokens.mean(1, keepdim=True),
    ):
        given.backbone = Other(change)
        with pytest.raises(ConfigError, match="backbone"):
            Explainer(given, SIZE)
    given.backbone = Other(Tensor.detach)
    [heat] = Explainer(given, SIZE).maps(spot(11, 8)[None], [[0]])
    assert peak(heat[0]) == pytest.approx((12, 12), abs=1)


# Pictures


def heat(row=1, column=6):
    values = np.zeros((8, 8))
    values[row, column] = 0.3
    return values


def test_picture_is_brightest_at_the_maximum():
    gray = Image.new("RGB", (80, 40), (90, 60, 200))
    pixels = np.asarray(heated(gray, heat())).astype(int).sum(2)
    row, column = np.unravel_index(pixels.argmax(), pixels.shape)
    assert (row, column) == (pytest.approx(7, abs=3), pytest.approx(65, abs=5))

    # The image is gray far away from the maximum, and for an all-zero map.
    untouched = np.asarray(heated(gray, np.zeros((8, 8))))
    assert len(np.unique(untouched)) == 1
    assert (pixels[30:, :30] == untouched[0, 0].astype(int).sum()).all()


def test_glyphs_that_a_font_lacks():
    [font, *_] = fonts()
    assert missing_glyphs("Dog (3) a\u00a0b \u732b\u72ac\u732b", font) == ["\u732b", "\u72ac"]


def test_file_names_are_unique_and_valid():
    odd = Path(os.fsdecode(b"a/\xff\n.png"))
    paths = [Path("a/x.png"), Path("b/x.png"), Path("a/x.jpg"), odd, Path("a/?.png")]
    paths += [Path("a") / f"{'long' * 60}{end}.png" for end in "12"]
    names = [file_name(path) for path in paths]
    assert len(set(names)) == len(names)
    for name, start in zip(names, ("x-", "x-", "x-", "__-", "_-", "long", "long"), strict=True):
        assert name.startswith(start)
        assert len(name.encode("utf-8")) < 255
        assert name.endswith(".jpg")
        assert name.isprintable()
    assert file_name(Path("a/x.png")) == file_name(Path.cwd() / "a" / "x.png")


@pytest.mark.parametrize(("crop", "size"), [(None, (400, 200)), (0.5, (100, 100))])
def test_picture_shows_the_visible_part(tmp_path, monkeypatch, crop, size):
    drawn = []
    monkeypatch.setattr(answers, "draw", lambda image, *rest: drawn.append(image) or image)
    path = str(tmp_path / "x.png")
    picture(400, 200).save(path)
    loaded = networks.loaded(size=64, crop=crop)
    assert loaded.transform == EvalTransform(image_size=64, crop=crop)

    pictures = Pictures(TorchEngine(loaded), tmp_path / "drawn", fonts())
    target = pictures.add(Item(path, path), [Prediction(1, loaded.classes.names[1], 0.5)])
    assert target.is_file()
    [image] = drawn
    left, top = (400 - size[0]) // 2, (200 - size[1]) // 2
    expected = picture(400, 200).crop((left, top, left + size[0], top + size[1]))
    assert (image.size, image.tobytes()) == (size, expected.tobytes())


def test_maps_of_pooled_blocks_are_derivatives_by_the_tokens():
    torch.manual_seed(0)
    backbone = TimmBackbone("test_efficientnet", blocks=True).eval()
    backbone.allocate({"class_weight": torch.zeros(5, backbone.network.num_features)})
    nn.init.normal_(backbone.class_weight)
    nn.init.normal_(backbone.class_bias)
    head = RidgeHead(backbone.num_features, 2, blocks=backbone.block_sizes)
    rng = np.random.default_rng(0)
    features = backbone(torch.rand(30, 3, 64, 64)).detach()
    head.fit(features, rng.integers(0, 2, (30, 2)))
    explainer = Explainer(Classifier(backbone, head), 64)

    image = torch.rand(1, 3, 64, 64)
    maps = explainer.model.backbone(image).detach()
    [relevance] = times_tokens(explainer.model, maps, [[1]])
    count = maps.shape[1]
    width = backbone.network.num_features
    step = 1e-2
    for token in range(count):
        logits = []
        for factor in (1 + step, 1 - step):
            changed = maps.clone()
            changed[0, token, :width] *= factor
            logits.append(head(backbone.pool(changed))[0, 1].item())
        derivative = (logits[0] - logits[1]) / (2 * step)
        assert relevance[0, token].item() == pytest.approx(count * derivative, rel=0.05, abs=0.05)
    [heat] = explainer.maps(image, [[0, 1]])
    assert heat.shape[0] == 2
