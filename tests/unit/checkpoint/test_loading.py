"""Checkpoints of runs through `load_model`, and how the tensors of a file fit a model."""

import dataclasses
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import hostile
import networks
import pytest
import torch
from torch import nn

from mldec import build
from mldec.checkpoint import load_model, loading
from mldec.checkpoint.loading import copy_fitting, load_strict
from mldec.config.compose import compose
from mldec.config.schema import ByName, Init
from mldec.data.types import Classes
from mldec.errors import CheckpointError, UserError
from mldec.files.torch_files import read_torch, save


@pytest.fixture
def best(digits_run, tmp_path):
    """A copy of a real checkpoint, to be harmed."""
    for name in ("best.pt", "best.pt.sha256"):
        shutil.copy(digits_run / "checkpoints" / name, tmp_path)
    return tmp_path / "best.pt"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of parts of the package only."""
    path = tmp_path_factory.mktemp("small") / "small.pt"
    torch.save(hostile.good(), path)
    return path


def refused(path, *, fix, **options):
    with pytest.raises(CheckpointError) as caught:
        load_model(path, **options)
    message = str(caught.value)
    assert str(path) in message
    assert fix in message
    assert "\n" not in message


def test_what_is_no_checkpoint_is_named(tmp_path):
    refused(tmp_path / "nothing.pt", fix="check the path")
    refused(tmp_path, fix="is no folder of a run")
    torch.save([3], tmp_path / "list.pt")
    refused(tmp_path / "list.pt", fix="has no attribute")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", fix="is of no known network")


def test_a_config_that_names_code_is_refused(small, tmp_path):
    state = read_torch(small)
    state["config"]["head"] = {"_target_": "os.system", "command": "true"}
    torch.save(state, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", fix="head._target_: 'os.system' ")


def test_the_newest_version_that_is_intact_is_read(small, tmp_path, caplog):
    last, older = tmp_path / "last.pt", tmp_path / "last.1.pt"
    with pytest.raises(CheckpointError, match=f"no file at {last}"):
        loading.load_newest(last)
    shutil.copy(small, older)
    last.write_bytes(b"damaged")
    assert loading.load_newest(last)[0] == older
    assert f"going on from {older}" in caplog.text
    last.unlink()
    assert loading.load_newest(last)[0] == older


def test_a_file_cannot_allow_plugins(best):
    assert read_torch(best)["config"]["plugins"] == ["patches"]
    refused(best, fix="plugins=[PACKAGE]")
    assert load_model(best, plugins=["patches"]).classes.names[0] == "zero"


def test_a_checkpoint_is_a_whole_fact(digits_run):
    path = digits_run / "checkpoints" / "last.pt"
    state = read_torch(path)
    assert state["versions"].keys() == {"mldec", "torch", "timm"}
    assert (state["epoch"], state["step"]) == (2, 8)
    assert state["transform"] == {
        "image_size": 64,
        "crop": None,
        "interpolation": "bilinear",
        "decoder": "pillow",
        "resize": "pillow",
    }
    loaded = load_model(path, plugins=["patches"])
    assert loaded.config.name == "digits"
    assert not loaded.model.training
    assert loaded.metrics["val/mAP"] > 0
    assert dataclasses.asdict(loaded.fingerprint) == state["fingerprint"]
    images = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), loaded.model(images / 255))


def test_weights_are_those_asked_for(best):
    state = read_torch(best)
    for weights, key in (("raw", "model"), ("ema", "ema")):
        model = load_model(best, weights, plugins=["patches"]).model
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[key][name])
    assert load_model(best, plugins=["patches"]).weights == state["best"]["weights"]

    save(best, {**state, "ema": None})
    with pytest.raises(CheckpointError, match="pass --weights raw"):
        load_model(best, "ema", plugins=["patches"])


def test_a_calibration_is_of_one_set_of_weights(tmp_path, caplog):
    path = networks.save_calibrated(tmp_path / "x.pt")
    calibration = load_model(path, weights="raw").calibration
    assert calibration.thresholds == (0.2, 0.4, 0.6)
    assert not caplog.text

    state = hostile.good()
    torch.save({**state, "calibration": asdict(replace(calibration, weights="ema"))}, path)
    assert load_model(path, weights="raw").calibration is None
    assert "x.pt was calibrated with its ema weights: its thresholds are not used" in caplog.text


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"weights": "RAW"}, "KeyError: 'RAW'"),
        ({"image_size": 0}, r"^image_size: "),
        ({"image_size": 64.0}, r"^image_size: "),
        ({"image_size": 4097}, r"^image_size: "),
    ],
)
def test_arguments_that_are_wrong_are_refused(small, options, fault):
    with pytest.raises(ValueError, match=fault):
        load_model(small, **options)


def test_another_image_size_is_that_of_model_and_data(small):
    loaded = load_model(small, image_size=96)
    assert (loaded.transform.image_size, loaded.config.data["image_size"]) == (96, 96)


def test_a_model_is_the_same_on_any_default_device(small):
    wanted = load_model(small).model.state_dict()
    state = torch.get_rng_state()
    with torch.device("meta"):
        given = load_model(small).model.state_dict()
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers have moved"
    for name, tensor in wanted.items():
        assert given[name].dtype is tensor.dtype
        assert torch.equal(given[name], tensor)


def test_models_are_loaded_by_several_threads_at_once(small):
    with ThreadPoolExecutor(4) as pool:
        states = [loaded.model.state_dict() for loaded in pool.map(load_model, [small] * 8)]
    for name, tensor in states[0].items():
        assert all(torch.equal(state[name], tensor) for state in states[1:])


def test_a_model_larger_than_its_file_is_not_built(tmp_path):
    state = hostile.good()
    hostile.put(state, "config/head/embed_dim", 40_000)
    torch.save(state, tmp_path / "x.pt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(tmp_path / "x.pt", fix="does not fit the model")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000, f"{grown / 1000:.0f} MB"


def test_init_starts_from_a_checkpoint(digits_run):
    path = digits_run / "checkpoints" / "best.pt"
    model = load_model(path, plugins=["patches"]).model
    saved = model.backbone.project.weight.clone()
    torch.nn.init.zeros_(model.backbone.project.weight)
    assert loading.initialise(model, digits_run).startswith(f"init from {path}: ")
    assert torch.equal(model.backbone.project.weight, saved)


def test_two_scales_are_read_at_the_larger_one(tmp_path):
    torch.save(hostile.good(), tmp_path / "x.pt")
    loaded = load_model(tmp_path / "x.pt", views="scales")
    assert (loaded.transform.image_size, loaded.model.side) == (96, 64)
    assert loaded.config.data["image_size"] == 96
    loaded = load_model(tmp_path / "x.pt", views="scales", image_size=160)
    assert (loaded.transform.image_size, loaded.model.side) == (224, 160)

    vit = ["backbone=timm", "backbone.name=test_vit", "backbone.image_size=64"]
    torch.save(hostile.good([*hostile.WORDS[:1], *vit, "head=gap"]), tmp_path / "x.pt")
    refused(tmp_path / "x.pt", fix="trained for one size only; leave it out", views="scales")


BY_NAME = Init(path="x.pt", classes=ByName.by_name)


def named(words, names):
    """Return an untrained model of the network of `hostile`, with classes of these names."""
    own = [word for word in hostile.WORDS if "head=gap" not in words or "head." not in word]
    parts = build.check(compose([*own, *words]), build.MODEL_PARTS)
    return build.model(parts, Classes(names), pretrained=False).eval()


@torch.no_grad()
def test_init_by_name_carries_classes_over(tmp_path):
    state = hostile.good()
    torch.save(state, tmp_path / "x.pt")
    (tmp_path / "s.txt").write_text("nought; zero\n", encoding="utf-8")
    start = replace(BY_NAME, path=str(tmp_path / "x.pt"), synonyms=str(tmp_path / "s.txt"))
    names = ("Two", "four", "nought", "nine", "ten")
    model = named([], names)
    report = loading.initialise(model, start, names)
    tensors = len(model.state_dict()) - sum(
        name.endswith(("num_batches_tracked", "backbone.mean", "backbone.std"))
        for name in model.state_dict()
    )
    assert report == (
        f"init from {tmp_path / 'x.pt'}: {tensors} of {tensors} tensors loaded; "
        f"2 classes carried by name (Two, nought); 3 start anew (four, nine, ten)"
    )
    old = named([], hostile.NAMES)
    old.load_state_dict(state["model"])
    images = networks.noise(2)
    torch.testing.assert_close(model(images)[:, [0, 2]], old(images)[:, [2, 0]])

    # A group has one query.
    grouped = loading.initialise(named(["head.num_groups=2"], names), start, names)
    assert grouped.endswith(
        "1 classes carried by name (Two); 4 start anew (four, nought, nine, ten), 1 of them known, "
        "in a group that has the query of others"
    )


@pytest.mark.parametrize(
    ("words", "names", "fault"),
    [
        ([], ("cat", "dog"), r"has no class of the data, but zero, one, two; name those"),
        (["head.mlp_dim=16"], ("two",), r"has another head: 3 of its tensors .* choose its head"),
        (["head=gap"], ("two",), "has another head"),
        (["head.word_dim=5"], ("two",), "MLDecoder has nothing per class"),
    ],
)
def test_init_by_name_says_what_it_cannot_do(tmp_path, words, names, fault):
    torch.save(hostile.good(), tmp_path / "x.pt")
    with pytest.raises(UserError, match=rf"^init\.classes=by_name: .*{fault}"):
        loading.initialise(
            named(words, names), replace(BY_NAME, path=str(tmp_path / "x.pt")), names
        )


PATH = Path("x.pt")


class Small(nn.Module):
    """A backbone with a computed buffer, and a head."""

    def __init__(self, classes=3):
        super().__init__()
        self.backbone = nn.Linear(4, 4)
        self.backbone.register_buffer("mean", torch.full((3,), 0.5))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, classes)


def ones(changes=None, classes=3):
    """Return a state of `Small`, all of it ones, but for changed and missing tensors."""
    tensors = {
        name: torch.ones_like(tensor) for name, tensor in Small(classes).state_dict().items()
    }
    changed = {**tensors, **(changes or {})}
    return {name: tensor for name, tensor in changed.items() if tensor is not None}


def test_strict_means_all_of_them():
    model = Small()
    load_strict(model, ones(), PATH)
    assert all((tensor == 1).all() for tensor in model.state_dict().values())

    # Those that are optional stay as they are.
    model = Small()
    tensors = ones({"backbone.mean": None, "norm.num_batches_tracked": None})
    load_strict(model, tensors, PATH, optional=("backbone.mean", "num_batches_tracked"))
    assert model.backbone.mean.tolist() == [0.5] * 3
    assert torch.equal(model.head.weight, torch.ones(3, 4))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"head.bias": None}, r"1 tensor is missing \(head\.bias\)"),
        ({"more": torch.ones(1)}, r"1 tensor is unexpected \(more\)"),
        ({"head.bias": torch.ones(4)}, r"1 tensor is of another shape \(head\.bias\)"),
        ({"head.bias": None, "norm.bias": None}, r"2 tensors are missing \(head\.bias, norm\.bias"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(change, fault):
    model = Small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"^x\.pt cannot .* not fit the model: {fault}"):
        load_strict(model, ones(change), PATH)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_init_takes_what_fits_and_counts_the_rest():
    model = Small(classes=2)
    head = model.head.weight.clone()
    report = copy_fitting(model, ones({"norm.bias": None, "more": torch.ones(1)}), PATH)
    assert report == (
        "init from x.pt: 5 of 8 tensors loaded; "
        "2 of another shape (head.bias, head.weight); 1 not in the file (norm.bias); "
        "1 not in the model (more)"
    )
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.backbone.weight, torch.ones(4, 4))
    assert model.backbone.mean.tolist() == [0.5] * 3, "computed, not taken from the file"
    assert model.norm.num_batches_tracked == 0
    assert copy_fitting(Small(), ones(), PATH) == "init from x.pt: 8 of 8 tensors loaded"
