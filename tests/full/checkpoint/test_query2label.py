"""Query2Label files with a Swin or a CvT, rebuilt from the official names and shapes."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import official_cvt
import pytest
import timm
import torch
from PIL import Image
from timm.models.swin_transformer import checkpoint_filter_fn
from torch import Tensor

from mldec.checkpoint import load_model
from mldec.errors import CheckpointError
from mldec.heads.query2label import Query2Label

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SIZES = {"embed_dim": 64, "mlp_dim": 96, "input_proj": True}
# Our names in the head -> those of lib/models/query2label.py and transformer.py.
HEAD = [
    (r"^encoder\.", "transformer.encoder.layers."),
    (r"^decoder\.", "transformer.decoder.layers."),
    (r"^norm\.", "transformer.decoder.norm."),
    (r"cross_attn", "multihead_attn"),
    (r"mlp\.0", "linear1"),
    (r"mlp\.3", "linear2"),
    (r"^queries$", "query_embed.weight"),
    (r"^fc_weight$", "fc.W"),
    (r"^fc_bias$", "fc.b"),
]


def rebuilt(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return random weights, the variances positive and the scales near 1."""
    torch.manual_seed(0)
    state = {key: 0.02 * torch.randn(shape) for key, shape in shapes.items()}
    for key in state:
        if key.endswith("running_var") or re.search(r"(norm\d?|bn)\.weight$", key):
            state[key] = 1 + state[key].abs()
    return state


def official_head(head: Query2Label) -> dict[str, Tensor]:
    state = {}
    for key, value in head.state_dict().items():
        for ours, theirs in HEAD:
            key = re.sub(ours, theirs, key)
        value = value[None] if key in ("fc.W", "fc.b") else value
        state[key] = value[..., None, None] if key == "input_proj.weight" else value
    return state


def saved(path: Path, backbone: dict[str, Tensor], head: Query2Label, side: int) -> Path:
    """Save a file as main_mlc.py does, with the buffer of the position encoding."""
    state = {f"backbone.0.{key}": value for key, value in backbone.items()}
    state |= {"backbone.1.pe": torch.zeros(1, 64, side, side), **official_head(head)}
    state = {f"module.{key}": value for key, value in state.items()}
    torch.save({"state_dict": state, "epoch": 9, "best_mAP": 90.5}, path)
    return path


def normalised(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def swin_shapes(name: str, windows: int) -> dict[str, list[int]]:
    """Return names and shapes of the official Swin, in which a stage ends with the merging."""
    shapes = {}
    with torch.device("meta"):
        network = timm.create_model(name, num_classes=0)
    for key, value in network.state_dict().items():
        merging = re.match(r"layers\.(\d)\.downsample\.(.*)", key)
        if merging:
            key = f"layers.{int(merging[1]) - 1}.downsample.{merging[2]}"
        shapes[key] = list(value.shape)

        # Buffers of the official network: every second block shifts its windows.
        if key.endswith("relative_position_bias_table"):
            block = key.removesuffix("attn.relative_position_bias_table")
            shapes[f"{block}attn.relative_position_index"] = [49, 49]
            if re.search(r"blocks\.\d*[13579]\.$", block):
                shapes[f"{block}attn_mask"] = [windows, 49, 49]
    return shapes


@pytest.fixture(scope="module")
def swin_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], Any]:
    state = rebuilt(swin_shapes("swin_tiny_patch4_window7_224", 64))
    torch.manual_seed(1)
    head = Query2Label(768, 80, **SIZES).eval()
    return saved(tmp_path_factory.mktemp("swin") / "q2l.pkl", state, head, 7), state, head


@pytest.fixture(scope="module")
def cvt_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], Any]:
    state = rebuilt(official_cvt.shapes([64, 192, 384], [1, 2, 10]))
    counters = {
        key.replace("running_mean", "num_batches_tracked"): torch.tensor(7)
        for key in state
        if key.endswith("running_mean")
    }
    torch.manual_seed(1)
    head = Query2Label(384, 80, **SIZES).eval()
    path = saved(tmp_path_factory.mktemp("cvt") / "q2l.pkl", {**state, **counters}, head, 14)
    return path, state, head


def test_a_swin_gives_the_logits_of_timm_under_its_own_renaming(swin_file: Any) -> None:
    path, state, head = swin_file
    loaded = load_model(path, image_size=224)
    assert loaded.config.backbone["name"] == "swin_tiny_patch4_window7_224"
    assert loaded.transform.image_size == 224

    network = timm.create_model("swin_tiny_patch4_window7_224", num_classes=0).eval()
    buffers = ("attn_mask", "relative_position_index")
    weights = {key: value for key, value in state.items() if not key.endswith(buffers)}
    # timm takes a layout with a classifier for the official one.
    weights["head.weight"] = torch.zeros(1000, 768)
    renamed = checkpoint_filter_fn(weights, network)
    network.load_state_dict({key: renamed[key] for key in network.state_dict()})

    images = torch.randint(256, (2, 3, 224, 224), dtype=torch.uint8)
    with torch.no_grad():
        tokens = network.forward_features(normalised(images)).flatten(1, 2)
        torch.testing.assert_close(loaded.model.backbone(images), tokens)
        torch.testing.assert_close(loaded.model(images), head(tokens))


def test_a_cvt_gives_the_logits_of_the_official_formulas(cvt_file: Any) -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    path, state, head = cvt_file
    loaded = load_model(path, image_size=96)
    images = torch.randint(256, (2, 3, 96, 96), dtype=torch.uint8)
    with torch.no_grad():
        tokens = official_cvt.tokens(state, normalised(images))
        assert tokens.shape == (2, 36, 384)
        torch.testing.assert_close(loaded.model.backbone(images), tokens, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(loaded.model(images), head(tokens), rtol=1e-4, atol=1e-4)


def test_the_size_that_is_built_in_can_be_named_again(
    swin_file: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    path = swin_file[0]
    with pytest.raises(CheckpointError, match="pass --image-size"):
        load_model(path)
    Image.new("RGB", (50, 40), (200, 30, 30)).save(tmp_path / "red.png")
    words = ["--image-size", "224", "--device", "cpu", "--top", "1"]
    status, out, err = cli("predict", path, tmp_path / "red.png", *words)
    assert status == 0, err
    assert out.startswith(f"{tmp_path / 'red.png'}: ")


def test_a_cvt_is_evaluated(
    cvt_file: Any, cli: Callable[..., Any], tmp_path: Path, sample_data: Path
) -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    words = [f"data.root={sample_data / 'coco2014_mini'}", "train.workers=0", "device=cpu"]
    words += ["--image-size", "64", "--json", str(tmp_path / "report.json")]
    status, _, err = cli("evaluate", cvt_file[0], *words)
    assert status == 0, err
    assert json.loads((tmp_path / "report.json").read_text())["images"] == 38
