"""Checkpoints of runs through `load_model`, and how the tensors of a file fit a model."""

import dataclasses
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import hostile
import networks
import pytest
import torch
from torch import nn

from mldec import build
from mldec.checkpoint import load_model, loading
from mldec.checkpoint.loading import initialize, load_newest, load_strict
from mldec.checkpoint.state import Best
from mldec.config.compose import compose
from mldec.config.schema import ByName, Init
from mldec.data.types import Classes
from mldec.errors import CheckpointError, UserError
from mldec.files.torch_files import read_torch

PATH = Path("x.pt")


@pytest.fixture
def best(digits_run, tmp_path):
    """A copy of the checkpoint of a run."""
    for name in ("best.pt", "best.pt.sha256"):
        shutil.copy(digits_run / "checkpoints" / name, tmp_path)
    return tmp_path / "best.pt"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint without plugins; tests must not change it."""
    path = tmp_path_factory.mktemp("small") / "small.pt"
    torch.save(hostile.good(), path)
    return path


VIT = ["backbone=timm", "backbone.name=test_vit", "backbone.image_size=64", "head=gap"]


@pytest.mark.parametrize(
    ("content", "options", "name"),
    [
        ([3], {}, "x.pt"),
        ({"weight": torch.zeros(3)}, {}, "MODEL_ZOO.md"),
        ("good", {"weights": "RAW"}, "RAW"),
        ("no average", {}, "--weights raw"),
        ("good", {"image_size": 0}, "image_size"),
        ("good", {"image_size": 64.0}, "image_size"),
        ("good", {"image_size": 4097}, "image_size"),
        ("vit", {"views": "scales"}, "--views scales"),
    ],
)
def test_load_model_errors_name_the_file_or_argument(tmp_path, content, options, name):
    if content == "good":
        content = hostile.good()
    if content == "no average":
        content = {**hostile.good(), "ema": None, "best": asdict(Best("mAP", 1.0, "ema", 1))}
    if content == "vit":
        content = hostile.good(hostile.WORDS[:1] + VIT)
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(UserError, match=name):
        load_model(tmp_path / "x.pt", **options)


def test_newest_valid_version_is_read(small, tmp_path):
    last = tmp_path / "last.pt"
    older = tmp_path / "last.1.pt"
    shutil.copy(small, older)
    last.write_bytes(b"damaged")
    assert load_newest(last)[0] == older
    last.unlink()
    assert load_newest(last)[0] == older


def test_plugins_in_a_file_are_ignored(best):
    assert read_torch(best)["config"]["plugins"] == ["patches"]
    with pytest.raises(CheckpointError, match="plugins"):
        load_model(best)
    assert load_model(best, plugins=["patches"]).classes.names[0] == "zero"


def test_checkpoint_is_complete(digits_run):
    path = digits_run / "checkpoints" / "last.pt"
    state = read_torch(path)
    assert state["versions"].keys() == {"mldec", "torch", "timm"}
    assert (state["epoch"], state["step"]) == (2, 8)
    loaded = load_model(path, plugins=["patches"])
    assert loaded.config.name == "digits"
    assert not loaded.model.training
    assert loaded.metrics["val/mAP"] > 0
    assert dataclasses.asdict(loaded.fingerprint) == state["fingerprint"]
    images = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), loaded.model(images / 255))


def test_calibration_of_other_weights_is_ignored(tmp_path):
    path = networks.save_calibrated(tmp_path / "x.pt")
    calibration = load_model(path, weights="raw").calibration
    assert calibration.thresholds == (0.2, 0.4, 0.6)

    state = hostile.good()
    torch.save({**state, "calibration": asdict(replace(calibration, weights="ema"))}, path)
    assert load_model(path, weights="raw").calibration is None


@pytest.mark.parametrize(
    ("options", "size", "side"),
    [
        ({"image_size": 96}, 96, None),
        ({"views": "scales"}, 96, 64),
        ({"views": "scales", "image_size": 160}, 224, 160),
    ],
)
def test_image_size_changes_transform_and_config(small, options, size, side):
    loaded = load_model(small, **options)
    assert loaded.transform.image_size == loaded.config.data["image_size"] == size
    assert getattr(loaded.model, "side", None) == side


def test_default_device_and_random_state_do_not_matter(small):
    wanted = load_model(small).model.state_dict()
    state = torch.get_rng_state()
    with torch.device("meta"):
        given = load_model(small).model.state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in wanted.items():
        assert given[name].dtype is tensor.dtype
        assert torch.equal(given[name], tensor)


def untrained(settings, names):
    """Return an untrained model of the network of `hostile`, with these classes."""
    own = [word for word in hostile.WORDS if "head=gap" not in settings or "head." not in word]
    parts = build.check(compose(own + settings), build.MODEL_PARTS)
    return build.model(parts, Classes(names), pretrained=False).eval()


@torch.no_grad()
def test_init_by_name_copies_the_rows_of_known_classes(small, tmp_path):
    (tmp_path / "s.txt").write_text("nought; zero\n", encoding="utf-8")
    start = Init(path=str(small), classes=ByName.by_name, synonyms=str(tmp_path / "s.txt"))
    names = ("Two", "four", "nought", "nine", "ten")
    model = untrained([], names)
    report = initialize(model, start, names)
    assert "(Two, nought)" in report
    assert "(four, nine, ten)" in report
    old = untrained([], hostile.NAMES)
    old.load_state_dict(read_torch(small)["model"])
    images = networks.noise(2)
    torch.testing.assert_close(model(images)[:, [0, 2]], old(images)[:, [2, 0]])

    # A group has one query, that of its first known class.
    grouped = initialize(untrained(["head.num_groups=2"], names), start, names)
    assert "(Two)" in grouped
    assert "(four, nought, nine, ten)" in grouped


@pytest.mark.parametrize(
    ("settings", "names", "name"),
    [
        ([], ("cat", "dog"), "zero, one, two"),
        (["head.mlp_dim=16"], ("two",), "x.pt"),
        (["head=gap"], ("two",), "x.pt"),
        (["head.word_dim=5"], ("two",), "MLDecoder"),
    ],
)
def test_init_by_name_errors(small, tmp_path, settings, names, name):
    shutil.copy(small, tmp_path / "x.pt")
    start = Init(path=str(tmp_path / "x.pt"), classes=ByName.by_name)
    with pytest.raises(UserError, match=rf"^init\.classes=by_name: .*{name}"):
        initialize(untrained(settings, names), start, names)


class Small(nn.Module):
    """A backbone with a computed buffer, and a head."""

    is_fitted = False

    def __init__(self, classes=3):
        super().__init__()
        self.backbone = nn.Linear(4, 4)
        self.backbone.register_buffer("mean", torch.full((3,), 0.5))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, classes)


def ones(changes=None):
    """Return a state of `Small` with all tensors 1, except changed and missing ones."""
    tensors = {name: torch.ones_like(tensor) for name, tensor in Small().state_dict().items()}
    tensors |= changes or {}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def test_load_strict_copies_all_tensors():
    model = Small()
    load_strict(model, ones(), PATH)
    assert all((tensor == 1).all() for tensor in model.state_dict().values())

    # Optional tensors may be missing.
    model = Small()
    tensors = ones({"backbone.mean": None, "norm.num_batches_tracked": None})
    load_strict(model, tensors, PATH, optional=("backbone.mean", "num_batches_tracked"))
    assert model.backbone.mean.tolist() == [0.5] * 3
    assert torch.equal(model.head.weight, torch.ones(3, 4))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"head.bias": None}, "head.bias"),
        ({"more": torch.ones(1)}, "more"),
        ({"head.bias": torch.ones(4)}, "head.bias"),
        ({"head.bias": None, "norm.bias": None}, "head.bias, norm.bias"),
        ({"head.bias": torch.tensor([1, math.nan, 1])}, "head.bias"),
        ({"backbone.mean": torch.full((3,), math.nan)}, "backbone.mean"),
    ],
)
def test_load_strict_names_unfitting_tensors_and_loads_nothing(change, names):
    model = Small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"^x\.pt .*{names}"):
        load_strict(model, ones(change), PATH)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_init_copies_fitting_tensors_and_counts_others():
    model = Small(classes=2)
    head = model.head.weight.clone()
    tensors = ones({"norm.bias": None, "more": torch.ones(1)})
    report = loading._copy_fitting(model, tensors, PATH)
    for part in ("5 of 8", "head.bias, head.weight", "norm.bias", "more"):
        assert part in report
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.backbone.weight, torch.ones(4, 4))
    # Computed buffers are not copied.
    assert model.backbone.mean.tolist() == [0.5] * 3
    assert model.norm.num_batches_tracked == 0
