"""What a checkpoint without a data set of its own takes from the data that it is asked about."""

import argparse
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_towers import clip_folder, siglip_folder

from mldec import build
from mldec.checkpoint import Loaded, load_model
from mldec.data.text_encoder import TextEncoder
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, DataModule
from mldec.errors import CheckpointError, ConfigError
from mldec.evaluation import asked_for, check_size, chosen_data, warn_of_scores


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("tower") / "clip")


@pytest.fixture(scope="module")
def tower(folder: Path) -> Loaded:
    return load_model(f"clip:{folder}")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def chosen(*settings: str, image_size: int | None = None) -> argparse.Namespace:
    return argparse.Namespace(checkpoint="clip:X", image_size=image_size, settings=[*settings])


def digits(tower: Loaded, name: str = "digits") -> DataModule:
    _, parts = chosen_data(tower, chosen(f"data={name}", "data.val_images=4"))
    return build.data(parts)


def with_classes(data: DataModule, classes: Classes) -> DataModule:
    split = replace(data.val, classes=classes)
    return replace(data, load_val=lambda: split)


def test_the_image_settings_of_the_tower_take_the_place_of_those_of_the_data(tower: Loaded) -> None:
    # imagenet.yaml has a crop and a size of its own.
    config, parts = chosen_data(tower, chosen("data=imagenet", "data.root=somewhere"))
    assert parts["data"].shared(build.View).eval() == tower.transform
    assert config.data["test_crop"] == 1.0
    assert config.data["test_interpolation"] == "bicubic"

    # The user's own settings count.
    _, parts = chosen_data(tower, chosen("data=imagenet", "data.root=x", "data.test_crop=0.5"))
    assert parts["data"].shared(build.View).eval() == replace(tower.transform, crop=0.5)

    # Generated images have a size only.
    _, parts = chosen_data(tower, chosen("data=digits"))
    assert parts["data"].arguments["image_size"] == 32
    assert "test_crop" not in parts["data"].arguments


def test_a_checkpoint_of_a_run_gets_the_settings_of_the_data(tower: Loaded) -> None:
    config = replace(tower.config, data={"_target_": "x", "image_size": 32})
    _, parts = chosen_data(replace(tower, config=config), chosen("data=imagenet", "data.root=x"))
    assert parts["data"].shared(build.View).eval().image_size != 32


def test_data_must_be_chosen(tower: Loaded) -> None:
    with pytest.raises(ConfigError, match=r"^data._target_ is missing: .*data=NAME"):
        chosen_data(tower, chosen())


def test_a_tower_takes_images_of_one_size(tower: Loaded) -> None:
    data = replace(digits(tower), transform=EvalTransform(image_size=64))
    with pytest.raises(ConfigError, match=r"^data.image_size 64: clip:X takes images of 32 pixels"):
        check_size(data, tower, chosen())


@pytest.mark.parametrize(("name", "exclusive"), [("digits", False), ("digits_single", True)])
def test_the_classes_are_those_of_the_data(
    tower: Loaded, folder: Path, name: str, exclusive: bool
) -> None:
    data = digits(tower, name)
    names = data.val.classes.names
    loaded, asked = asked_for(tower, data, "clip:X")
    assert loaded.classes is asked.val.classes
    assert (loaded.classes.names, loaded.classes.exclusive) == (names, exclusive)

    sentences = [f"a photo of a {name}." for name in names]
    wanted = TextEncoder.open(f"clip:{folder}").encode(sentences)
    assert loaded.classes.queries is not None
    torch.testing.assert_close(loaded.classes.queries, wanted)
    assert loaded.classes.origin == tower.classes.origin


def test_vectors_of_the_data_must_be_of_the_tower(
    tower: Loaded, folder: Path, tmp_path: Path
) -> None:
    data = digits(tower)
    classes = replace(data.val.classes, queries=torch.randn(10, 5))
    with pytest.raises(CheckpointError, match=r"word vectors of 16 numbers, .* vectors of 5"):
        asked_for(tower, with_classes(data, classes), "clip:X")

    # The same width does not make them those of the tower.
    other = load_model(f"clip:{siglip_folder(tmp_path / 'siglip', seed=3)}")
    _, asked = asked_for(other, data, "clip:Y")
    with pytest.raises(CheckpointError, match=r"^clip:X .* other word vectors: those of 10 class"):
        asked_for(tower, asked, "clip:X")
    unknown = replace(asked.val.classes, origin=None)
    with pytest.raises(CheckpointError, match=r"^clip:X .* other word vectors: those of 10 class"):
        asked_for(tower, with_classes(data, unknown), "clip:X")

    # Its own are taken as they are.
    _, own = asked_for(tower, data, "clip:X")
    assert asked_for(tower, own, "clip:X")[1] is own


def test_other_checkpoints_stay_as_they_are(tower: Loaded) -> None:
    data = digits(tower)
    trained = replace(tower, classes=data.val.classes)
    assert asked_for(trained, data, "best.pt") == (trained, data)


def test_scores_of_a_softmax_have_no_threshold(
    tower: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "mldec")
    warn_of_scores(tower, digits(tower, "digits_single"), "clip:X")
    sigmoid: Any = replace(tower, classes=replace(tower.classes, exclusive=False))
    warn_of_scores(sigmoid, digits(tower), "clip:X")
    assert not caplog.messages

    warn_of_scores(tower, digits(tower), "clip:X")
    assert "mAP holds, precision, recall and F1 do not" in caplog.text
