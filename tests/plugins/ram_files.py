"""Small files in the layout of RAM and RAM++, with random weights."""

import re
from functools import cache
from pathlib import Path

import timm
import torch
from random_weights import randomize

from mldec.heads import RAM
from mldec.heads.ram import OFFICIAL_NAMES

SWIN = "swin_tiny_patch4_window7_224"
HEAD = {"word_dim": 16, "embed_dim": 32, "mlp_dim": 24, "dropout": 0.1}


def state(tags: int, descriptions: int = 51, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the content of a file under its official names. The tensors are shared."""
    return dict(_state(tags, descriptions, seed))


@cache
def _state(tags: int, descriptions: int, seed: int) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        swin = timm.create_model(SWIN, num_classes=0).state_dict()
        head = RAM(768, tags, descriptions=descriptions, **HEAD)
    # Rows and classifier with a spread, so that tags and images differ.
    tensors = randomize(head, seed=seed).float().state_dict()
    tensors.pop("reweight_scale", None)

    content = {}
    for name, tensor in swin.items():
        merging = re.match(r"layers\.([1-3])\.(downsample\..+)", name)
        if merging:
            name = f"layers.{int(merging[1]) - 1}.{merging[2]}"
        content[f"visual_encoder.{name}"] = tensor
    content["visual_encoder.layers.0.blocks.1.attn_mask"] = torch.zeros(64, 49, 49)
    for name, tensor in tensors.items():
        for official, ours in reversed(OFFICIAL_NAMES[1:]):
            name = re.sub(rf"(^|\.){re.escape(ours)}", rf"\1{official}", name)
        content[name] = tensor.clone()
    return content


def write(path: Path, tags: int, descriptions: int = 51, seed: int = 0) -> Path:
    """Write such a file, with what else the training of the authors saves, and return its path."""
    content = state(tags, descriptions, seed)
    optimizer = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": []}
    torch.save({"model": content, "optimizer": optimizer, "config": {}, "epoch": 1}, path)
    return path
