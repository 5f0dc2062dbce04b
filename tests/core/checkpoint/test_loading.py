import dataclasses
import os
import pickle
import random
import resource
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch

from mldec import checkpoint
from mldec.checkpoint import load_model
from mldec.errors import CheckpointError
from mldec.files.torch_files import read_torch, save
from mldec.predict.engine import scores

STATE = {"format": 1, "model": {"weight": torch.arange(1000.0)}, "epoch": 3}


@pytest.fixture
def best(digits_run: Path, tmp_path: Path) -> Path:
    """A copy of a real checkpoint, to be harmed."""
    for name in ("best.pt", "best.pt.sha256"):
        shutil.copy(digits_run / "checkpoints" / name, tmp_path)
    return tmp_path / "best.pt"


def refused(path: Path, *, fix: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    message = str(caught.value)
    assert str(path) in message
    assert fix in message
    assert "\n" not in message
    return message


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    refused(tmp_path / "nothing.pt", fix="check the path")
    refused(tmp_path, fix="check the path")


NOISE = [random.Random(seed).randbytes(5000) for seed in range(30)]


@pytest.mark.parametrize(
    "content", [b"", b"<html>404 Not Found</html>", b"\x80\x02}q\x00.", *NOISE]
)
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    message = refused(path, fix="")
    assert any(
        part in message
        for part in ("is no file of tensors", "cannot be used", "is refused", "holds no weights")
    )


def test_a_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "hello")
    refused(path, fix="cannot be used")


def test_weights_without_a_config_are_not_a_checkpoint(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", fix="is of no known network")
    torch.save({"format": 99}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", fix="use another version of mldec")


@pytest.mark.parametrize(
    "name", ["config", "classes", "transform", "best", "model", "epoch", "step", "optimizer"]
)
def test_a_checkpoint_that_lacks_a_part_is_named_in_one_line(best: Path, name: str) -> None:
    state = read_torch(best)
    for changed in (
        {**state, name: [3]},
        {key: value for key, value in state.items() if key != name},
    ):
        save(best, changed)
        assert name in refused(best, fix="is no whole checkpoint")


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_checkpoint_is_refused(best: Path, share: float, checksum: bool) -> None:
    best.write_bytes(best.read_bytes()[: int(best.stat().st_size * share)])
    if not checksum:
        best.with_name("best.pt.sha256").unlink()
    refused(best, fix="use another copy" if checksum or share else "is no file of tensors")


def test_one_flipped_byte_is_found_wherever_it_is(best: Path) -> None:
    good = best.read_bytes()
    chosen = random.Random(0)
    for _ in range(20):
        content = bytearray(good)
        content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
        best.write_bytes(content)
        refused(best, fix="is damaged: its sha256 is not the one in best.pt.sha256")


class Runs:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("container", ["torch", "legacy", "pickle"])
def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path: Path, container: str) -> None:
    path, trace = tmp_path / "evil.pt", tmp_path / "trace"
    state = {**STATE, "config": Runs(f"touch {trace}")}
    if container == "pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=container == "torch")
    message = refused(path, fix="is refused")
    assert container != "torch" or "system" in message
    assert not trace.exists()


@pytest.mark.parametrize(
    "target", ["os.system", "torch.hub.load", "builtins.eval", "mldec.heads.gap.GAP.forward"]
)
def test_a_config_that_names_code_is_refused(best: Path, target: str) -> None:
    state = read_torch(best)
    state["config"]["head"] = {"_target_": target, "command": "true"}
    save(best, state)
    refused(best, fix=f"head._target_ '{target}' ")


def test_a_config_cannot_look_up_the_environment(best: Path) -> None:
    state = read_torch(best)
    state["config"]["data"]["root"] = "${oc.env:HOME}"
    save(best, state)
    refused(best, fix="holds an interpolation")


def test_a_file_cannot_allow_plugins(best: Path) -> None:
    assert read_torch(best)["config"]["plugins"] == ["patches"]
    refused(best, fix="needs plugins=[package]")
    assert load_model(best, plugins=["patches"]).classes.names[0] == "zero"


def test_tensors_that_do_not_fit_are_named(best: Path) -> None:
    for change, fix in [
        (lambda t: t.pop("head.pool_bias"), "1 tensor is missing (head.pool_bias)"),
        (lambda t: t.update(extra=torch.zeros(1)), "1 tensor is unexpected (extra)"),
        (
            lambda t: t.update({"head.pool_bias": torch.zeros(9)}),
            "1 tensor is of another shape (head.pool_bias)",
        ),
    ]:
        state = read_torch(best)
        for weights in ("model", "ema"):
            change(state[weights])
        save(best.with_name("changed.pt"), state)
        with pytest.raises(CheckpointError, match="does not fit the model") as caught:
            load_model(best.with_name("changed.pt"), plugins=["patches"])
        assert fix in str(caught.value)


def test_a_checkpoint_is_a_whole_fact(digits_run: Path) -> None:
    state = read_torch(digits_run / "checkpoints" / "last.pt")
    assert state["versions"].keys() == {"mldec", "torch", "timm"}
    assert state["epoch"] == 2
    assert state["step"] == 8
    assert state["transform"] == {
        "image_size": 64,
        "crop": None,
        "interpolation": "bilinear",
        "decoder": "pillow",
        "resize": "pillow",
    }
    loaded = load_model(digits_run / "checkpoints" / "last.pt", plugins=["patches"])
    assert loaded.config.name == "digits"
    assert not loaded.model.training
    assert loaded.metrics["val/mAP"] > 0
    assert loaded.fingerprint is not None
    assert dataclasses.asdict(loaded.fingerprint) == state["fingerprint"]
    images = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), loaded.model(images / 255))


def test_weights_are_those_asked_for(digits_run: Path) -> None:
    path = digits_run / "checkpoints" / "best.pt"
    state = read_torch(path)
    for weights, key in (("raw", "model"), ("ema", "ema")):
        loaded = load_model(path, weights, plugins=["patches"])
        assert all(
            torch.equal(value, state[key][name])
            for name, value in loaded.model.state_dict().items()
        )
    assert load_model(path, plugins=["patches"]).weights == state["best"]["weights"]


def test_no_moving_average_is_said(best: Path) -> None:
    state = read_torch(best)
    state["ema"] = None
    save(best, state)
    with pytest.raises(CheckpointError, match="pass --weights raw"):
        load_model(best, "ema", plugins=["patches"])


def test_init_copies_what_fits_and_reports_the_rest(digits_run: Path) -> None:
    path = digits_run / "checkpoints" / "best.pt"
    model = load_model(path, plugins=["patches"]).model
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.nn.init.zeros_(model.backbone.project.weight)
    model.head.pool_bias = torch.nn.Parameter(torch.zeros(4))
    model.extra = torch.nn.Linear(2, 2)
    report = checkpoint.initialise(model, path)
    assert torch.equal(model.backbone.project.weight, saved["backbone.project.weight"])
    assert "1 of another shape (head.pool_bias)" in report
    assert "2 not in the file (extra.bias, extra.weight)" in report
    with pytest.raises(CheckpointError, match="of another backbone"):
        checkpoint.initialise(torch.nn.Linear(3, 3), path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of parts of the package only."""
    path = tmp_path_factory.mktemp("small") / "small.pt"
    torch.save(hostile.good(), path)
    return path


@pytest.mark.parametrize("weights", ["zz", "RAW", "", "raw ", 1, True, ["raw"]])
def test_weights_of_another_name_are_refused(small: Path, weights: Any) -> None:
    with pytest.raises(ValueError, match=r"^weights is .*: choose 'ema', 'raw', or None") as caught:
        load_model(small, weights)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, 10**9, 4097, True, 64.0, "64"])
def test_an_image_size_out_of_range_is_refused(small: Path, size: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^image_size: .* (is not a positive whole number|is above 4,096) ?"
    ):
        load_model(small, image_size=size)
    assert load_model(small, image_size=96).transform.image_size == 96


def test_plugins_are_no_text(small: Path) -> None:
    with pytest.raises(
        ValueError, match=r"plugins is 'os': pass a list of packages, such as plugins=\['os'\]"
    ):
        load_model(small, plugins="os")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_a_model_is_the_same_under_any_default(
    small: Path, default: str, dtype: torch.dtype
) -> None:
    wanted = load_model(small).model.state_dict()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(default):
            found = load_model(small).model.state_dict()
        assert torch.get_default_dtype() is dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers have moved"
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)


def test_models_are_loaded_by_several_threads_at_once(small: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = [loaded.model.state_dict() for loaded in pool.map(load_model, [small] * 8)]
    for name, tensor in found[0].items():
        assert all(torch.equal(state[name], tensor) for state in found[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_word_vectors_of_any_precision_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    words = [*hostile.WORDS, "head.num_groups=null", "head.word_dim=5"]
    torch.manual_seed(0)
    state = hostile.good(words, queries=torch.randn(3, 5).to(dtype))
    torch.save(state, tmp_path / "x.pt")
    loaded = load_model(tmp_path / "x.pt")
    assert loaded.classes.queries is not None
    assert loaded.classes.queries.dtype is torch.float32
    assert scores(loaded, torch.zeros(2, 3, 64, 64)).shape == (2, 3)


def test_a_model_larger_than_its_file_is_not_built(tmp_path: Path) -> None:
    state = hostile.good()
    hostile.put(state, "config/head/embed_dim", 40_000)
    torch.save(state, tmp_path / "x.pt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_model(tmp_path / "x.pt")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000, f"{grown / 1000:.0f} MB"
