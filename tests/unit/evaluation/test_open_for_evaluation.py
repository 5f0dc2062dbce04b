"""What a checkpoint is asked about: data, image size, precision, word vectors and thresholds."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from clip_models import clip_folder, siglip_folder
from networks import save_calibrated

from mldec import build
from mldec.checkpoint import load_model
from mldec.checkpoint.state import Calibration
from mldec.config.compose import compose, override
from mldec.data.fingerprint import fingerprint
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, Split
from mldec.errors import CheckpointError, ConfigError
from mldec.evaluation.open import (
    check_size,
    chosen_settings,
    chosen_thresholds,
    fit_to_device,
    open_for_evaluation,
    stored_thresholds,
    with_same_classes,
)
from mldec.evaluation.options import EvalOptions
from mldec.runtime import distributed
from mldec.words.encoder import open_encoder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return clip_folder(tmp_path_factory.mktemp("tower") / "clip")


@pytest.fixture(scope="module")
def tower(folder):
    return load_model(f"clip:{folder}")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def options(*settings, **changes):
    changes.setdefault("checkpoint", "clip:X")
    return EvalOptions(settings=[*settings], **changes)


def digits(tower, name="digits"):
    return build.data(chosen_settings(tower, options(f"data={name}", "data.val_images=4"))[1])


def with_classes(data, **changes):
    split = replace(data.val, classes=replace(data.val.classes, **changes))
    return replace(data, load_val=lambda: split)


def test_the_image_settings_of_a_tower_take_the_place_of_those_of_the_data(tower):
    # imagenet.yaml has a crop and a size of its own; the user's own settings count.
    config, parts = chosen_settings(tower, options("data=imagenet", "data.root=somewhere"))
    assert parts["data"].shared(build.View).eval() == tower.transform
    assert config.data["test_interpolation"] == "bicubic"
    _, parts = chosen_settings(tower, options("data=imagenet", "data.root=x", "data.test_crop=0.5"))
    assert parts["data"].shared(build.View).eval() == replace(tower.transform, crop=0.5)

    # Generated images have a size only.
    _, parts = chosen_settings(tower, options("data=digits"))
    assert parts["data"].arguments["image_size"] == 32
    assert "test_crop" not in parts["data"].arguments

    # A checkpoint of a run gets the settings of the data, but for --image-size.
    config = replace(tower.config, data={"_target_": "x", "image_size": 32})
    run = replace(tower, config=config)
    for size in (None, 32):
        _, parts = chosen_settings(run, options("data=imagenet", "data.root=x", image_size=size))
        assert (parts["data"].arguments["image_size"] == 32) == (size == 32)


def test_what_does_not_fit_the_checkpoint_is_refused(tower):
    with pytest.raises(ConfigError, match=r"^data._target_ is missing; .*data=NAME"):
        open_for_evaluation(tower, options())
    data = replace(digits(tower), transform=EvalTransform(image_size=64))
    with pytest.raises(ConfigError, match=r"^data.image_size 64: clip:X takes images of 32 pixels"):
        check_size(data, tower, options())


@pytest.mark.parametrize(("name", "exclusive"), [("digits", False), ("digits_single", True)])
def test_a_tower_is_asked_for_the_classes_of_the_data(tower, folder, name, exclusive, caplog):
    caplog.set_level(logging.WARNING, "mldec")
    args = options(f"data={name}", "data.val_images=4", "device=cpu")
    setup = open_for_evaluation(tower, args)
    classes = setup.data.val.classes
    assert setup.loaded.classes is classes
    assert classes.exclusive == exclusive
    assert classes.origin == tower.classes.origin

    wanted = open_encoder(f"clip:{folder}").encode_names(classes.names, ["a photo of a {}."])
    torch.testing.assert_close(classes.word_vectors, wanted)

    # The scores of a softmax have no threshold.
    assert setup.ranks_only == (not exclusive)
    said = "mAP holds, precision, recall and F1 do not" in caplog.text
    assert said == setup.ranks_only
    assert setup.scores().logits.shape == (4, 10)
    caplog.clear()
    open_for_evaluation(tower, args, calibrated=False)
    assert not caplog.messages


def test_vectors_of_the_data_must_be_of_the_tower(tower, tmp_path):
    data = digits(tower)
    with pytest.raises(CheckpointError, match=r"word vectors of 16 numbers, .* vectors of 5"):
        with_same_classes(tower, with_classes(data, word_vectors=torch.randn(10, 5)), "clip:X")

    # The same width does not make them those of the tower.
    other = load_model(f"clip:{siglip_folder(tmp_path / 'siglip', seed=3)}")
    _, asked = with_same_classes(other, data, "clip:Y")
    for theirs in (asked, with_classes(asked, origin=None)):
        with pytest.raises(CheckpointError, match=r"^clip:X .* other word vectors: those of 10 cl"):
            with_same_classes(tower, theirs, "clip:X")

    # Its own are taken as they are, and other checkpoints stay as they are.
    _, own = with_same_classes(tower, data, "clip:X")
    assert with_same_classes(tower, own, "clip:X")[1] is own
    trained = replace(tower, classes=data.val.classes)
    assert with_same_classes(trained, data, "best.pt") == (trained, data)


@pytest.mark.parametrize(
    ("recorded", "words", "used", "level"),
    [
        ("bf16", [], "fp32", "INFO"),
        ("bf16", ["train.precision=bf16"], "bf16", "WARNING"),
        ("fp32", [], "fp32", None),
        ("fp16", ["train.precision=fp16"], "fp32", "INFO"),
        ("auto", [], "fp32", None),
    ],
)
def test_half_precision_is_left_out_on_a_cpu_unless_it_is_chosen(
    recorded, words, used, level, caplog, monkeypatch
):
    caplog.set_level("INFO", "mldec")
    monkeypatch.setattr(distributed, "prepare_device", lambda device, **options: None)
    config = compose(["+experiment=digits", f"train.precision={recorded}"])
    fit_to_device(config, words, CPU)
    assert config.train.precision.value == used
    assert [record.levelname for record in caplog.records] == ([level] if level else [])

    on_cuda = override(config, [f"train.precision={recorded}"])
    fit_to_device(on_cuda, words, torch.device("cuda:0"))
    assert on_cuda.train.precision.value == recorded
    assert (config.train.channels_last, on_cuda.train.channels_last) == (False, True)


# -------------------------------------------------------------------------------------- thresholds

TRAINED, CURRENT = Classes(("a", "b", "c")), Classes(("c", "a", "b"))
IMAGES = range(7)
DATA = SimpleNamespace(val=Split(IMAGES, CURRENT))
PER_CLASS = Calibration(
    weights="raw",
    objective="f1",
    scope="class",
    thresholds=(0.1, 0.2, 0.3),
    slopes=(1.0,),
    offsets=(0.0,),
    images=7,
    data={},
    fingerprint=fingerprint(DATA.val),
    date="2026-11-21",
)
GLOBAL = replace(PER_CLASS, scope="global", thresholds=(0.4,))
ONE_LABEL = replace(PER_CLASS, objective=None, scope=None, thresholds=())


def loaded(calibration, classes=TRAINED):
    return SimpleNamespace(calibration=calibration, classes=classes)


@pytest.mark.parametrize(
    ("calibration", "stored", "in_order"),
    [
        (PER_CLASS, [0.1, 0.2, 0.3], [0.3, 0.1, 0.2]),
        (GLOBAL, [0.4, 0.4, 0.4], [0.4]),
        (ONE_LABEL, None, None),
        (None, None, None),
    ],
)
def test_stored_thresholds_are_taken_unless_the_user_chooses_others(calibration, stored, in_order):
    checkpoint = loaded(calibration)
    assert stored_thresholds(checkpoint) == stored
    assert chosen_thresholds(DATA, checkpoint, options()) == in_order
    assert chosen_thresholds(DATA, checkpoint, options(threshold=0.7)) == [0.7]
    assert chosen_thresholds(DATA, checkpoint, options("data.threshold=0.8")) is None


@pytest.mark.parametrize(
    ("images", "part"), [(7, "are optimistic"), (8, "fitted on 7 other images")]
)
def test_it_is_said_whether_they_were_fitted_on_these_images(caplog, images, part):
    dataset = range(images)
    data = SimpleNamespace(val=Split(dataset, CURRENT))
    with caplog.at_level(logging.INFO, "mldec"):
        chosen_thresholds(data, loaded(PER_CLASS), options())
    assert part in caplog.text


def test_calibrated_checkpoint_refuses_more_classes_than_its_own(tmp_path):
    loaded = load_model(save_calibrated(tmp_path / "x.pt"))
    assert loaded.classes.names == ("zero", "one", "two")
    args = options("data=digits", "data.val_images=4", checkpoint="x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt has other classes than the data, 3 and 10"):
        open_for_evaluation(loaded, args)
