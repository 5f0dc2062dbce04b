"""The image settings that all readers share: they reach both transforms or are refused at once."""

from dataclasses import fields
from inspect import signature
from typing import Any

import pytest
import torch
from PIL import Image

from mldec.data.randomness import SampleRandom
from mldec.data.settings import View
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.errors import ConfigError


def test_the_defaults_are_those_of_the_official_recipe() -> None:
    assert View().eval() == EvalTransform(image_size=448)
    train = View().train()
    assert (train.cutout, train.flip, train.erase) == (0.5, False, None)


def test_training_takes_every_setting_of_its_transform() -> None:
    """A setting of the transform that the view forgets could not be set by anybody."""
    assert set(signature(TrainTransform).parameters) <= {field.name for field in fields(View)}
    view = View(
        image_size=16,
        augment="none",
        cutout=0.25,
        flip=True,
        crop=0.5,
        interpolation="random",
        erase=1.0,
    )
    train = view.train()
    assert (train.cutout, train.flip, len(train.resizes)) == (0.25, True, 2)
    assert train.resizes[0].scale == (0.5, 1.0)
    assert train.erase is not None

    image = Image.new("RGB", (20, 30), (10, 20, 30))
    assert train(image, SampleRandom(0)).shape == (3, 16, 16)
    plain = View(image_size=16, augment="none", cutout=0).train()
    assert torch.equal(plain(image, SampleRandom(0)), EvalTransform(image_size=16)(image))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, EvalTransform(image_size=32)),
        ({"test_size": 48}, EvalTransform(image_size=48)),
        ({"test_crop": 0.875}, EvalTransform(image_size=32, crop=0.875)),
        ({"interpolation": "bicubic"}, EvalTransform(image_size=32, interpolation="bicubic")),
        ({"interpolation": "random"}, EvalTransform(image_size=32, interpolation="bicubic")),
        (
            {"interpolation": "random", "test_interpolation": "bilinear"},
            EvalTransform(image_size=32, interpolation="bilinear"),
        ),
        ({"test_interpolation": "bicubic"}, EvalTransform(image_size=32, interpolation="bicubic")),
        ({"resize": "tensor"}, EvalTransform(image_size=32, resize="tensor")),
    ],
)
def test_evaluation_has_settings_of_its_own(
    settings: dict[str, Any], expected: EvalTransform
) -> None:
    assert View(image_size=32, **settings).eval() == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"image_size": 0},
        {"augment": "strong"},
        {"cutout": 1.5},
        {"crop": 0.0},
        {"interpolation": "nearest"},
        {"erase": -0.1},
        {"test_crop": 2.0},
        {"test_size": 0},
        {"test_interpolation": "random"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_wrong_value_is_refused_when_the_view_is_made(settings: dict[str, Any]) -> None:
    (value,) = settings.values()
    with pytest.raises(ConfigError, match=str(value)):
        View(**settings)


def test_decoder_and_resize_are_those_of_both_transforms() -> None:
    pytest.importorskip("torchcodec", reason="an extra")
    view = View(decoder="torchcodec", resize="tensor")
    for transform in (view.train(), view.eval()):
        assert (transform.decoder, transform.resize) == ("torchcodec", "tensor")


def test_a_decoder_that_is_not_installed_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^data.decoder: torchcodec is not installed; run pip"):
        View(decoder="torchcodec")
