"""A complete checkpoint, and hostile files: code, damage and other content."""

import copy
import io
import os
import pickle
import random
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mldec import build
from mldec.checkpoint.state import FORMAT
from mldec.config.compose import compose, to_dict
from mldec.data.types import Classes
from mldec.runtime import environment as facts

NAMES = ("zero", "one", "two")
WORDS = [
    "+experiment=digits",
    "backbone.name=test_resnet",
    "backbone.model_args.channels=[16,16,16,16]",
]
WORDS += ["head.embed_dim=32", "head.mlp_dim=32", "train.workers=0"]


def good(words: list[str] = WORDS, word_vectors: torch.Tensor | None = None) -> dict[str, Any]:
    """Return a complete checkpoint of an untrained network."""
    state = copy.deepcopy(_good(tuple(words)))
    state["classes"]["queries"] = word_vectors
    return state


@cache
def _good(words: tuple[str, ...]) -> dict[str, Any]:
    config = compose(list(words))
    classes = Classes(NAMES)
    model = build.model(build.check(config, build.MODEL_PARTS), classes, pretrained=False)
    weights = model.state_dict()
    return {
        "format": FORMAT,
        "config": to_dict(config),
        "classes": {"names": list(NAMES), "exclusive": False, "queries": None},
        "transform": {"image_size": 64},
        "metrics": {"val/mAP": 1.0},
        "best": {"metric": "mAP", "value": 1.0, "weights": "raw", "epoch": 1},
        "epoch": 1,
        "step": 4,
        "model": weights,
        "ema": {name: tensor.clone() for name, tensor in weights.items()},
        "optimizer": {
            "state": {0: {"exp_avg": torch.zeros(3)}},
            "param_groups": [{"lr": 1e-4, "params": [0]}],
        },
        "scaler": {},
        "steps_per_epoch": 4,
        "loss": {},
        "log": {"lines": 1, "loss": 0.0, "steps": 0, "skipped": 0, "bad_images": 0},
        "versions": facts.installed(),
        "git": None,
    }


def put(state: dict[str, Any], place: str, value: Any) -> None:
    """Replace the value at a place such as config/head/num_layers."""
    *parents, last = place.split("/")
    for name in parents:
        state = state[name]
    state[last] = value


class Runs:
    """Unpickling this object runs a shell command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def write_program(path: Path, call: Runs) -> None:
    """Write a file of torch.export that runs a command in torch.export.load."""
    program = io.BytesIO()
    torch.export.save(torch.export.export(nn.Identity(), (torch.zeros(2),)), program)
    with zipfile.ZipFile(program) as source, zipfile.ZipFile(path, "w") as file:
        for name in source.namelist():
            is_pickle = name.endswith("sample_inputs/model.pt")
            file.writestr(name, pickle.dumps(call) if is_pickle else source.read(name))


# Changes of a valid checkpoint: the place and its new value.
CHANGES: dict[str, tuple[str, Any]] = {
    "target": ("config/head", {"_target_": "os.system", "command": "true"}),
    "steers": ("classes/names", ["a", "b", "\x1b]0;title\x07"]),
    "shape": ("model/head.pool_bias", torch.zeros(9)),
    "text": ("model", {"weight": "x"}),
}


def write_all(folder: Path, trace: Path) -> list[Path]:
    """Write the corpus, and return the paths of its files.

    Args:
        folder: Folder of the files.
        trace: File that exists if a file of the corpus has run its code.
    """
    call = Runs(f"touch {trace}")
    whole = io.BytesIO()
    torch.save(good(), whole)

    contents = {
        "empty.pt": b"",
        "page.pt": b"<!DOCTYPE html><script>x</script>",
        "half.pt": whole.getvalue()[: len(whole.getvalue()) // 2],
        "noise.pt": random.Random(0).randbytes(5000),
        "deep.pt": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        "pickle.pth": pickle.dumps({"model": call}),
        "noise.safetensors": random.Random(1).randbytes(5000),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)

    torch.save({"model": call}, folder / "zip.pth")
    torch.save({"model": call}, folder / "old.pth", _use_new_zipfile_serialization=False)
    write_program(folder / "program.pt2", call)
    for name, (place, value) in CHANGES.items():
        state = good()
        put(state, place, value)
        torch.save(state, folder / f"{name}.pt")
    return sorted(folder.iterdir())
