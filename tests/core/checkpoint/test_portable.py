"""The portable form of a checkpoint: the same scores bit for bit, and hostile files refused."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import QUICK, one_line

from mldec import build, checkpoint
from mldec.checkpoint import Best, Calibration, Checkpoint, load, load_model
from mldec.checkpoint.portable import CONFIG, QUERIES, WEIGHTS, with_weights, write
from mldec.data.fingerprint import Fingerprint
from mldec.data.types import VectorOrigin
from mldec.errors import CheckpointError, ConfigError
from mldec.files.torch_files import sha256_of
from mldec.predict.engine import scores

Cli = Callable[..., tuple[int, str, str]]
PLUGINS = ["patches"]


@pytest.fixture
def best(digits_run: Path) -> Path:
    return digits_run / "checkpoints" / "best.pt"


@pytest.fixture
def folder(best: Path, tmp_path: Path) -> Path:
    """A checkpoint in the portable form, to be harmed."""
    saved = load(best)
    write(tmp_path / "mine", with_weights(saved, saved.best.weights, best))
    return tmp_path / "mine"


@pytest.fixture(scope="module")
def of_stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that needs no plugin; tests must not change it."""
    folder = tmp_path_factory.mktemp("stranger") / "it"
    saved = Checkpoint.from_state(hostile.good(), folder)
    write(folder, with_weights(saved, "raw", folder))
    return folder


@pytest.fixture
def stranger(of_stranger: Path, tmp_path: Path) -> Path:
    return shutil.copytree(of_stranger, tmp_path / "stranger")


def images(side: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (4, 3, side, side), dtype=torch.uint8, generator=generator)


def calibrated(saved: Checkpoint, weights: str) -> Checkpoint:
    """Return a checkpoint with thresholds that decimals cannot write in a few digits."""
    count = len(saved.classes)
    calibration = Calibration(
        weights=weights,
        objective="f1",
        scope="class",
        thresholds=tuple(1 / (number + 3) for number in range(count)),
        slopes=(math.pi,),
        offsets=(1e-17,),
        images=40,
        data={"root": "x"},
        fingerprint=Fingerprint(40, "a", "b", "c"),
        date="2026-11-22T01:20:14+00:00",
    )
    return replace(saved, calibration=calibration, metrics={"val/mAP": math.nan, "val/OP": 0.1})


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_scores_are_the_same_bit_for_bit(best: Path, tmp_path: Path, weights: str) -> None:
    saved = calibrated(load(best), weights)
    torch.save(saved.to_state(), tmp_path / "own.pt")
    write(tmp_path / "mine", with_weights(saved, weights, best))

    own = load_model(tmp_path / "own.pt", weights, plugins=PLUGINS)
    other = load_model(tmp_path / "mine", plugins=PLUGINS)
    assert other.weights == weights
    assert other.classes.names == own.classes.names
    assert (other.transform, other.calibration, other.fingerprint) == (
        own.transform,
        own.calibration,
        own.fingerprint,
    )
    assert other.config == own.config
    assert other.metrics["val/OP"] == 0.1
    assert math.isnan(other.metrics["val/mAP"])
    batch = images(own.transform.image_size)
    assert torch.equal(scores(own, batch), scores(other, batch))

    unwanted = {"ema": "raw", "raw": "ema"}[weights]
    with pytest.raises(CheckpointError, match=f"pass --weights {weights}"):
        load_model(tmp_path / "mine", unwanted, plugins=PLUGINS)


def test_only_what_belongs_to_the_chosen_weights_is_kept(best: Path) -> None:
    saved = load(best)
    chosen = saved.best.weights
    other = {"ema": "raw", "raw": "ema"}[chosen]
    assert with_weights(calibrated(saved, chosen), chosen, best).calibration is not None
    changed = with_weights(calibrated(saved, chosen), other, best)
    assert changed.calibration is None
    assert changed.best == Best(weights=other)
    assert not changed.optimizer["state"]
    assert (changed.model == {}) == (other == "ema")
    with pytest.raises(CheckpointError, match="holds no moving average"):
        with_weights(replace(saved, ema=None), "ema", best)


def test_a_zero_shot_model_keeps_its_word_vectors(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["+experiment=digits_zsl", *QUICK[1:], "train.epochs=1"]
    assert cli("train", *words)[0] == 0
    path = checkpoint.local("outputs/digits_zsl")
    own = load_model(path, plugins=PLUGINS)
    # The vectors of this data are made by no file; those of a text encoder say how.
    origin = VectorOrigin("clip:ViT-B-32:openai", "0" * 64, ("a {}", "the {}"))
    saved = with_weights(load(path), own.weights, path)
    saved = replace(saved, classes=replace(saved.classes, origin=origin))
    write(tmp_path / "mine", saved)
    other = load_model(tmp_path / "mine", plugins=PLUGINS)
    assert own.classes.origin is None
    assert other.classes.origin == origin
    assert own.classes.queries is not None
    assert other.classes.queries is not None
    assert torch.equal(own.classes.queries, other.classes.queries)
    assert own.unseen is not None
    assert (own.unseen, len(own.unseen)) == (other.unseen, 8)
    assert set(own.unseen) < set(own.classes.names)
    batch = images(own.transform.image_size)
    assert torch.equal(scores(own, batch), scores(other, batch))
    assert QUERIES in load_file(tmp_path / "mine" / WEIGHTS)


def test_every_command_takes_a_folder(
    cli: Cli, folder: Path, best: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["--plugin", "patches", "data.val_images=20"]
    outcomes = [cli("evaluate", path, *few) for path in (best, folder, folder / WEIGHTS)]
    tables = [outcome.out.splitlines()[1:] for outcome in outcomes]
    assert tables[0] == tables[1] == tables[2]
    assert len(tables[0]) > 5

    # A calibrated copy is a file of the other kind, beside it.
    status, _, err = cli("calibrate", folder, *few)
    assert status == 0, err
    copy = folder / "model.calibrated.pt"
    assert load_model(copy, plugins=PLUGINS).calibration is not None

    model = load_model(best, plugins=PLUGINS).model
    assert " of " in checkpoint.initialise(model, folder)
    for name in (str(folder / WEIGHTS), "hf:me/mine"):
        status, _, err = cli("train", *QUICK, f"resume={name}", "name=again")
        assert status == 1
        one_line(err, "a published checkpoint holds no training state", f"pass init={name}")


# A stranger's files. Each change harms the content of config.json.


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


def put(value: Any, *keys: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


CHANGES = {
    "other_library": (put("timm", "library"), "is not one that mldec.publish wrote"),
    "newer_layout": (put(2, "layout"), "use a newer mldec"),
    "no_hash": (without("sha256"), "cannot be used"),
    "other_hash": (put({WEIGHTS: "0" * 64}, "sha256"), "is damaged: its sha256"),
    "no_checkpoint": (put([], "checkpoint"), "cannot be used"),
    "no_format": (put(None, "checkpoint", "format"), "use another version of mldec"),
    "no_classes": (put({}, "checkpoint", "classes"), "cannot be used"),
    "twice": (put(["a", "a"], "checkpoint", "classes", "names"), "are both called"),
    "no_transform": (put({"zoom": 2}, "checkpoint", "transform"), "cannot be used"),
    "interpolation": (put("${oc.env:HOME}", "checkpoint", "config", "name"), "interpolation"),
    "target": (
        put({"_target_": "os.system"}, "checkpoint", "config", "head"),
        "head._target_ 'os.system' is refused",
    ),
    "wide": (put(10**7, "checkpoint", "config", "head", "embed_dim"), "does not fit the model"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_hostile_config_is_one_line(stranger: Path, name: str) -> None:
    change, fault = CHANGES[name]
    content = json.loads((stranger / CONFIG).read_text())
    change(content)
    (stranger / CONFIG).write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as caught:
        load_model(stranger)
    message = str(caught.value)
    assert fault in message
    assert str(stranger) in message
    assert "\n" not in message
    assert len(message) < 700


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "JSONDecodeError"),
        (b"[" * 100_000, "RecursionError"),
        (b"\xff", "UnicodeDecodeError"),
        (b"[]", "AttributeError"),
        (b"{}", "is not one that mldec.publish wrote"),
    ],
)
def test_a_config_that_is_no_such_json_is_one_line(stranger: Path, text: bytes, fault: str) -> None:
    (stranger / CONFIG).write_bytes(text)
    with pytest.raises(CheckpointError, match=fault) as caught:
        load_model(stranger)
    assert str(stranger / CONFIG) in str(caught.value)


def with_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the tensors of a checkpoint, with a hash that fits."""
    save_file(tensors, folder / WEIGHTS)
    content = json.loads((folder / CONFIG).read_text())
    content["sha256"][WEIGHTS] = sha256_of(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(content))


def test_tensors_that_do_not_fit_are_refused(stranger: Path) -> None:
    tensors = load_file(stranger / WEIGHTS)
    name = next(iter(tensors))
    for changed, fault in (
        ({}, "pass --weights ema"),
        ({**tensors, "more": torch.zeros(1)}, "unexpected"),
        ({**tensors, name: torch.zeros(1, 2, 3)}, "of another shape"),
        ({key: value for key, value in tensors.items() if key != name}, "is missing"),
        ({**tensors, QUERIES: torch.zeros(2, 4)}, "2 word vectors for 3 classes"),
    ):
        with_tensors(stranger, changed)
        with pytest.raises(CheckpointError, match=fault):
            load_model(stranger)


def test_damage_of_one_bit_and_missing_files_are_named(stranger: Path) -> None:
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


def test_a_link_to_a_file_is_one_and_plugins_of_the_file_are_dropped(
    stranger: Path, tmp_path: Path
) -> None:
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
    with pytest.raises(ConfigError, match=r"data\._target_ .* is refused"):
        build.check(loaded.config, ["data"])


def test_a_setting_that_json_cannot_hold_is_one_line(best: Path, tmp_path: Path) -> None:
    saved = load(best)
    data = {**saved.config["data"], "cutout": math.inf}
    changed = replace(saved, config={**saved.config, "data": data})
    with pytest.raises(CheckpointError, match="is no finite number"):
        write(tmp_path / "mine", with_weights(changed, "raw", best))


def test_a_folder_of_another_library_is_not_taken_for_ours(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text('{"architecture": "resnet50"}')
    with pytest.raises(CheckpointError, match="use another checkpoint"):
        load_model(tmp_path)
