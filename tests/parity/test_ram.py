"""RAM and RAM++ against the official code, on rebuilt weights."""

from functools import cache
from pathlib import Path

import fill
import numpy as np
import official
import pytest
import torch
from PIL import Image

from mldec import build
from mldec.checkpoint import released
from mldec.checkpoint.loading import COMPUTED, load_strict
from mldec.checkpoint.state import Checkpoint
from mldec.config.compose import parse


@cache
def tensor(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor before its factor. Both models have the same backbone."""
    return fill.tensor(key, shape)


def converted(name: str) -> tuple[Checkpoint, build.Parts]:
    """Return the checkpoint of a small model, and its parts."""
    facts = official.read(name)

    def factor(key: str) -> float:
        fits = (own == key or (own[0] == "." and key.endswith(own)) for own in facts["factors"])
        return next((f for f, fit in zip(facts["factors"].values(), fits, strict=True) if fit), 1)

    state = {}
    for key, shape in facts["keys"].items():
        state[key] = torch.from_numpy(np.float32(factor(key)) * tensor(key, tuple(shape)))
    # Unused buffers of the official modules.
    state |= {key: torch.zeros(shape) for key, shape in facts["buffers"].items()}
    content = {"model": state, "optimizer": {}, "epoch": 1}
    checkpoint = released.convert(content, Path(f"{name}.pth"), image_size=None, names=None)
    return checkpoint, build.check(parse(checkpoint.config), build.MODEL_PARTS)


@pytest.fixture(scope="module")
def swin():
    """The backbone of both models, and its tokens of two images and of noise."""
    checkpoint, parts = converted("ram_plus_small")
    model = build.model(parts, checkpoint.classes, pretrained=False).eval()
    load_strict(model, checkpoint.model, Path("ram_plus_small.pth"), COMPUTED)
    noise = np.minimum(fill.features(224, (1, 3, 224, 224)), 1)
    with torch.no_grad():
        tokens = model.backbone(torch.from_numpy(np.concatenate([fill.images(224), noise])))
    return model.backbone, tokens


@pytest.fixture(scope="module", params=["ram_plus_small", "ram_small"])
def small(request):
    """The name of a small model, its checkpoint, its head, and the official numbers."""
    checkpoint, parts = converted(request.param)
    with torch.device("meta"):
        head = build.model(parts, checkpoint.classes, pretrained=False).head.eval()
    tensors = {}
    for key, value in checkpoint.model.items():
        if key.startswith("head."):
            tensors[key.removeprefix("head.")] = value
    head.load_state_dict(tensors, assign=True)
    return request.param, checkpoint, head, np.load(official.NUMBERS / f"{request.param}.npz")


@torch.no_grad()
def test_logits_attention_and_description_weights(swin, small):
    name, checkpoint, head, numbers = small
    assert checkpoint.classes.names[19] == "class 19"
    assert checkpoint.transform.image_size == 224
    _, tokens = swin
    logits, attention = head(tokens, attention=True)
    expected = np.concatenate([numbers["logits"], numbers["logits_noise"]])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    expected = numbers["attention1"].mean(0)[:, 1:]  # first image, three tags
    np.testing.assert_allclose(attention[0, :3], expected, rtol=0, atol=1e-5)

    # RAM++ weights the rows of each tag per image.
    if name == "ram_plus_small":
        mean = head.embed(tokens[:2].mean(1))
        rows = head.label_embed.view(20, 51, -1)
        weights = torch.einsum("bw,tdw->btd", mean / mean.norm(dim=1, keepdim=True), rows) / 0.07
        weights = weights.softmax(-1)
        np.testing.assert_allclose(weights, numbers["description_weights"], rtol=0, atol=1e-4)
        summed = torch.einsum("btd,tdw->btw", weights, rows)
        torch.testing.assert_close(head._label_embeddings(mean), summed)


def test_preprocessing(swin, small):
    _, checkpoint, _, numbers = small
    backbone, _ = swin
    picture = np.random.RandomState(5).randint(0, 256, (300, 500, 3)).astype(np.uint8)
    pixels = checkpoint.transform(Image.fromarray(picture)) / 255
    normalized = (pixels - backbone.mean) / backbone.std
    expected = numbers["preprocessed"]
    np.testing.assert_allclose(normalized[:, ::16, ::16], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "descriptions"), [("ram_plus", 51), ("ram", 1)])
def test_released_layout_is_converted(name, descriptions):
    shapes = official.read(f"{name}_released.keys")
    with torch.device("meta"):
        state = {key: torch.empty(shape) for key, shape in shapes.items()}
        file = Path(f"{name}_swin_large_14m.pth")
        checkpoint = released.convert({"model": state}, file, image_size=None, names=None)
        config = parse(checkpoint.config)
        parts = build.check(config, build.MODEL_PARTS)
        model = build.model(parts, checkpoint.classes, pretrained=False)
        load_strict(model, checkpoint.model, file, COMPUTED)

    assert (len(checkpoint.classes), model.head.descriptions) == (4585, descriptions)
    assert config.backbone["name"] == "swin_large_patch4_window12_384"
    assert checkpoint.transform.image_size == 384
    assert not checkpoint.classes.exclusive
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert millions == pytest.approx({"ram_plus": 329.5, "ram": 211.9}[name], abs=1)
