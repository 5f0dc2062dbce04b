"""Published checkpoints give the same scores bit for bit."""

import json
import math
import shutil
from dataclasses import replace

import hostile
import networks
import pytest
import torch

from mldec.checkpoint import load_model
from mldec.checkpoint.loading import load
from mldec.checkpoint.published import CONFIG, WEIGHTS, with_weights, write
from mldec.checkpoint.state import Best, Checkpoint
from mldec.errors import CheckpointError
from mldec.evaluation.run import scores
from mldec.words.types import VectorOrigin

IMAGES = torch.randint(
    0, 256, (4, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A calibrated checkpoint of three classes with two sets of weights."""
    path = networks.save_calibrated(tmp_path_factory.mktemp("own") / "own.pt")
    saved = load(path)
    changed = replace(
        saved,
        # Numbers without a short decimal form.
        calibration=replace(saved.calibration, slopes=(math.pi,), offsets=(1e-17,)),
        metrics={"val/mAP": math.nan, "val/OP": 0.1},
        ema={name: tensor * 1.01 for name, tensor in saved.ema.items()},
        unseen=hostile.NAMES[1:],
    )
    torch.save(changed.to_state(), path)
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "it"
    saved = Checkpoint.from_state(hostile.good(), folder)
    write(folder, with_weights(saved, "raw", folder))
    return folder


@pytest.fixture
def published(original, tmp_path):
    """A published checkpoint that needs no plugin."""
    return shutil.copytree(original, tmp_path / "published")


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_published_checkpoint_gives_same_scores(own, tmp_path, weights):
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


def test_with_weights_drops_the_other_set_and_training_state(own):
    saved = load(own)
    assert with_weights(saved, "raw", own).calibration == saved.calibration
    assert with_weights(saved, "raw", own).best == saved.best
    changed = with_weights(saved, "ema", own)
    assert changed.calibration is None
    assert changed.best == Best(weights="ema")
    assert not changed.optimizer["state"]
    assert changed.model == {}


def test_zero_shot_model_keeps_its_word_vectors(tmp_path):
    settings = hostile.WORDS + ["head.num_groups=null", "head.word_dim=5"]
    saved = Checkpoint.from_state(hostile.good(settings, word_vectors=torch.randn(3, 5)), tmp_path)
    origin = VectorOrigin("clip:ViT-B-32:openai", "0" * 64, ("a {}", "the {}"))
    saved = replace(saved, classes=replace(saved.classes, origin=origin))
    torch.save(saved.to_state(), tmp_path / "own.pt")
    write(tmp_path / "mine", with_weights(saved, "raw", tmp_path))

    before = load_model(tmp_path / "own.pt", "raw")
    other = load_model(tmp_path / "mine")
    assert other.classes.origin == origin
    assert torch.equal(before.classes.word_vectors, other.classes.word_vectors)
    assert torch.equal(scores(before, IMAGES), scores(other, IMAGES))


def write_config(folder, change):
    content = json.loads((folder / CONFIG).read_text())
    change(content)
    (folder / CONFIG).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("place", "value", "name"),
    [
        ("layout", 2, CONFIG),
        ("sha256", {WEIGHTS: "0" * 64}, WEIGHTS),
        ("checkpoint/format", None, "format"),
        ("checkpoint/config/head", {"_target_": "os.system"}, "os.system"),
        ("checkpoint/config/head/embed_dim", 64, "head.embed.bias"),
    ],
)
def test_invalid_config_raises_an_error(published, place, value, name):
    write_config(published, lambda content: hostile.put(content, place, value))
    with pytest.raises(CheckpointError, match=rf"{published}.*{name}") as caught:
        load_model(published)
    assert "\n" not in str(caught.value)


def test_damaged_and_missing_files_raise_an_error(published):
    path = published / WEIGHTS
    good = path.read_bytes()
    for place in (0, 9, len(good) // 2, len(good) - 1):
        content = bytearray(good)
        content[place] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=str(path)):
            load_model(published)
    path.write_bytes(good)
    (published / CONFIG).unlink()
    for missing, name in ((published, CONFIG), (published / "other.safetensors", "other")):
        with pytest.raises(CheckpointError, match=name):
            load_model(missing)


def test_links_are_followed_and_plugins_of_the_file_are_ignored(published, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in (CONFIG, WEIGHTS):
        shutil.move(published / name, tmp_path / f"blob-{name}")
        (linked / name).symlink_to(tmp_path / f"blob-{name}")
    data = {"_target_": "os.system", "command": "false"}
    changes = {"plugins": ["antigravity"], "data": data}
    write_config(linked, lambda content: content["checkpoint"]["config"].update(changes))
    loaded = load_model(linked)
    assert loaded.config.plugins == []
    assert loaded.config.data == data
