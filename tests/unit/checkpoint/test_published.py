"""The published form of a checkpoint: the same scores bit for bit, and hostile files refused."""

import json
import math
import shutil
from dataclasses import replace

import hostile
import networks
import pytest
import torch
from safetensors.torch import load_file, save_file

from mldec import build
from mldec.checkpoint import load_model
from mldec.checkpoint.loading import load
from mldec.checkpoint.published import CONFIG, QUERIES, WEIGHTS, with_weights, write
from mldec.checkpoint.state import Best, Checkpoint
from mldec.errors import CheckpointError, ConfigError
from mldec.evaluation.run import scores
from mldec.files.torch_files import sha256_of
from mldec.words.types import VectorOrigin

IMAGES = torch.randint(
    0, 256, (4, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A calibrated checkpoint of three classes, whose two sets of weights differ."""
    path = networks.save_calibrated(tmp_path_factory.mktemp("own") / "own.pt")
    saved = load(path)
    calibration = saved.calibration
    changed = replace(
        saved,
        # Numbers that decimals cannot write in a few digits.
        calibration=replace(calibration, slopes=(math.pi,), offsets=(1e-17,)),
        metrics={"val/mAP": math.nan, "val/OP": 0.1},
        ema={name: tensor * 1.01 for name, tensor in saved.ema.items()},
        unseen=hostile.NAMES[1:],
    )
    torch.save(changed.to_state(), path)
    return path


@pytest.fixture(scope="module")
def of_stranger(tmp_path_factory):
    """One that needs no plugin; tests must not change it."""
    folder = tmp_path_factory.mktemp("stranger") / "it"
    saved = Checkpoint.from_state(hostile.good(), folder)
    write(folder, with_weights(saved, "raw", folder))
    return folder


@pytest.fixture
def stranger(of_stranger, tmp_path):
    return shutil.copytree(of_stranger, tmp_path / "stranger")


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_scores_are_the_same_bit_for_bit(own, tmp_path, weights):
    write(tmp_path / "mine", with_weights(load(own), weights, own))

    before = load_model(own, weights)
    other = load_model(tmp_path / "mine")
    assert other.weights == weights
    assert (before.calibration is None) == (weights == "ema")
    for name in ("classes", "transform", "calibration", "fingerprint", "config", "unseen"):
        assert getattr(other, name) == getattr(before, name)
    assert other.metrics["val/OP"] == 0.1
    assert math.isnan(other.metrics["val/mAP"])
    assert torch.equal(scores(before, IMAGES), scores(other, IMAGES))

    unwanted = {"ema": "raw", "raw": "ema"}[weights]
    with pytest.raises(CheckpointError, match=f"pass --weights {weights}"):
        load_model(tmp_path / "mine", unwanted)


def test_only_what_belongs_to_the_chosen_weights_is_kept(own):
    saved = load(own)
    assert with_weights(saved, "raw", own).calibration == saved.calibration
    assert with_weights(saved, "raw", own).best == saved.best
    changed = with_weights(saved, "ema", own)
    assert changed.calibration is None
    assert changed.best == Best(weights="ema")
    assert not changed.optimizer["state"]
    assert changed.model == {}
    with pytest.raises(CheckpointError, match="holds no moving average"):
        with_weights(replace(saved, ema=None), "ema", own)


def test_a_zero_shot_model_keeps_its_word_vectors(tmp_path):
    words = [*hostile.WORDS, "head.num_groups=null", "head.word_dim=5"]
    saved = Checkpoint.from_state(hostile.good(words, word_vectors=torch.randn(3, 5)), tmp_path)
    origin = VectorOrigin("clip:ViT-B-32:openai", "0" * 64, ("a {}", "the {}"))
    saved = replace(saved, classes=replace(saved.classes, origin=origin))
    torch.save(saved.to_state(), tmp_path / "own.pt")
    write(tmp_path / "mine", with_weights(saved, "raw", tmp_path))

    before, other = load_model(tmp_path / "own.pt", "raw"), load_model(tmp_path / "mine")
    assert other.classes.origin == origin
    assert torch.equal(before.classes.word_vectors, other.classes.word_vectors)
    assert torch.equal(scores(before, IMAGES), scores(other, IMAGES))
    assert QUERIES in load_file(tmp_path / "mine" / WEIGHTS)


LACKING = object()


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        ("library", "timm", "is not one that mldec publish wrote"),
        ("layout", 2, "use a newer mldec"),
        ("sha256", LACKING, "cannot be used"),
        ("sha256", {WEIGHTS: "0" * 64}, "is damaged: its sha256"),
        ("checkpoint", [], "cannot be used"),
        ("checkpoint/format", None, "use another version of it"),
        ("checkpoint/config/head", {"_target_": "os.system"}, "'os.system'"),
        ("checkpoint/config/head/embed_dim", 10**7, "does not fit the model"),
    ],
)
def test_a_hostile_config_is_one_line(stranger, place, value, fault):
    content = json.loads((stranger / CONFIG).read_text())
    if value is LACKING:
        del content[place]
    else:
        hostile.put(content, place, value)
    (stranger / CONFIG).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=fault) as caught:
        load_model(stranger)
    message = str(caught.value)
    assert str(stranger) in message
    assert "\n" not in message
    assert len(message) < 700


def test_tensors_that_do_not_fit_are_refused(stranger):
    tensors = load_file(stranger / WEIGHTS)
    name = next(iter(tensors))
    for changed, fault in (
        ({}, "pass --weights ema"),
        ({**tensors, "more": torch.zeros(1)}, "unexpected"),
        ({**tensors, name: torch.zeros(1, 2, 3)}, "of another shape"),
        ({key: value for key, value in tensors.items() if key != name}, "is missing"),
        ({**tensors, QUERIES: torch.zeros(2, 4)}, "2 word vectors for 3 classes"),
    ):
        save_file(changed, stranger / WEIGHTS)
        content = json.loads((stranger / CONFIG).read_text())
        content["sha256"][WEIGHTS] = sha256_of(stranger / WEIGHTS)
        (stranger / CONFIG).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=fault):
            load_model(stranger)


def test_damage_of_one_bit_and_missing_files_are_named(stranger):
    path = stranger / WEIGHTS
    good = path.read_bytes()
    for place in (0, 9, len(good) // 2, len(good) - 1):
        content = bytearray(good)
        content[place] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"is damaged: .* delete {path}"):
            load_model(stranger)
    path.write_bytes(good)
    (stranger / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=f"lacks the {CONFIG}"):
        load_model(stranger)
    with pytest.raises(CheckpointError, match="no file at"):
        load_model(stranger / "other.safetensors")


def test_a_link_to_a_file_is_one_and_plugins_of_the_file_are_dropped(stranger, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in (CONFIG, WEIGHTS):
        shutil.move(stranger / name, tmp_path / f"blob-{name}")
        (linked / name).symlink_to(tmp_path / f"blob-{name}")
    content = json.loads((linked / CONFIG).read_text())
    content["checkpoint"]["config"]["plugins"] = ["antigravity"]
    content["checkpoint"]["config"]["data"] = {"_target_": "os.system", "command": "false"}
    (linked / CONFIG).write_text(json.dumps(content))
    loaded = load_model(linked)
    assert loaded.config.plugins == []
    with pytest.raises(ConfigError, match=r"data\._target_"):
        build.check(loaded.config, ["data"])
