"""Data, image size, precision, word vectors and thresholds of an evaluation."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from clip_models import clip_folder, siglip_folder
from networks import CALIBRATION, save_calibrated
from support import experiment

from mldec import build
from mldec.checkpoint import load_model
from mldec.config.compose import override
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
    thresholds_origin,
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


def test_image_settings_of_an_open_clip_model_override_the_data(tower):
    # Settings of the command line have precedence.
    config, parts = chosen_settings(tower, options("data=imagenet", "data.root=somewhere"))
    assert parts["data"].shared(build.View).eval() == tower.transform
    assert config.data["test_interpolation"] == "bicubic"
    _, parts = chosen_settings(tower, options("data=imagenet", "data.root=x", "data.test_crop=0.5"))
    assert parts["data"].shared(build.View).eval() == replace(tower.transform, crop=0.5)

    # Generated images have no crop.
    _, parts = chosen_settings(tower, options("data=digits"))
    assert parts["data"].arguments["image_size"] == 32
    assert "test_crop" not in parts["data"].arguments

    # A checkpoint of a run uses the settings of the data, except --image-size.
    config = replace(tower.config, data={"_target_": "x", "image_size": 32})
    run = replace(tower, config=config)
    for size in (None, 32):
        _, parts = chosen_settings(run, options("data=imagenet", "data.root=x", image_size=size))
        assert (parts["data"].arguments["image_size"] == 32) == (size == 32)


def test_unfitting_data_raises_an_error(tower, tmp_path):
    data = digits(tower)
    large = replace(data, transform=EvalTransform(image_size=64))
    own = load_model(save_calibrated(tmp_path / "x.pt"))
    of_own = options("data=digits", "data.val_images=4", checkpoint=str(own.path))
    narrow = with_classes(data, word_vectors=torch.randn(10, 5))
    other = load_model(f"clip:{siglip_folder(tmp_path / 'siglip', seed=3)}")
    _, of_other = with_same_classes(other, data, "clip:Y")
    unnamed = with_classes(of_other, origin=None)
    for call, error, name in (
        (lambda: open_for_evaluation(tower, options()), ConfigError, "data=NAME"),
        (lambda: check_size(large, tower, options()), ConfigError, r"^data\.image_size=64"),
        (lambda: open_for_evaluation(own, of_own), CheckpointError, r"x\.pt has 3 classes"),
        (lambda: with_same_classes(tower, narrow, "clip:X"), CheckpointError, "5-dim"),
        (lambda: with_same_classes(tower, of_other, "clip:X"), CheckpointError, "sha256"),
        (lambda: with_same_classes(tower, unnamed, "clip:X"), CheckpointError, "sha256"),
    ):
        with pytest.raises(error, match=name):
            call()


@pytest.mark.parametrize(("name", "exclusive"), [("digits", False), ("digits_single", True)])
def test_open_clip_model_encodes_the_classes_of_the_data(tower, folder, name, exclusive):
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
    assert setup.scores().logits.shape == (4, 10)


def test_data_with_the_same_word_vectors_is_unchanged(tower):
    data = digits(tower)
    _, own = with_same_classes(tower, data, "clip:X")
    assert with_same_classes(tower, own, "clip:X")[1] is own
    trained = replace(tower, classes=data.val.classes)
    assert with_same_classes(trained, data, "best.pt") == (trained, data)


@pytest.mark.parametrize(
    ("recorded", "words", "has_bf16", "used"),
    [
        ("bf16", [], False, "fp32"),
        ("bf16", [], True, "fp32"),
        ("bf16", ["train.precision=bf16"], False, "bf16"),
        ("bf16", ["train.precision=bf16"], True, "bf16"),
        ("fp32", [], True, "fp32"),
        ("fp16", ["train.precision=fp16"], True, "fp32"),
        ("auto", [], True, "fp32"),
    ],
)
def test_half_precision_on_a_cpu_is_chosen_by_the_user(
    recorded, words, has_bf16, used, monkeypatch, caplog
):
    caplog.set_level("INFO", "mldec")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(distributed, "prepare_device", lambda device, **options: None)
    config = override(experiment("digits"), [f"train.precision={recorded}"])
    fit_to_device(config, options(*words), CPU, 7)
    assert config.train.precision.value == used
    assert f"{used} on cpu" in caplog.text

    on_cuda = override(config, [f"train.precision={recorded}"])
    fit_to_device(on_cuda, options(*words), torch.device("cuda:0"), 7)
    assert on_cuda.train.precision.value == ("bf16" if recorded == "auto" else recorded)
    assert (config.train.channels_last, on_cuda.train.channels_last) == (used == "bf16", True)


TRAINED, CURRENT = Classes(("a", "b", "c")), Classes(("c", "a", "b"))
IMAGES = range(7)
DATA = SimpleNamespace(val=Split(IMAGES, CURRENT))
PER_CLASS = replace(
    CALIBRATION, thresholds=(0.1, 0.2, 0.3), images=7, fingerprint=fingerprint(DATA.val)
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
def test_stored_thresholds_are_used_unless_overridden(calibration, stored, in_order):
    checkpoint = loaded(calibration)
    assert stored_thresholds(checkpoint) == stored
    assert chosen_thresholds(DATA, checkpoint, options()) == in_order
    assert chosen_thresholds(DATA, checkpoint, options(threshold=0.7)) == [0.7]
    assert chosen_thresholds(DATA, checkpoint, options("data.threshold=0.8")) is None


def test_thresholds_of_the_same_images_are_optimistic():
    other = SimpleNamespace(val=Split(range(8), CURRENT))
    assert "optimistic" in thresholds_origin(PER_CLASS, DATA)
    assert "optimistic" not in thresholds_origin(PER_CLASS, other)
