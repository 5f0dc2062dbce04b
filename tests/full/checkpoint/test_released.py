"""Big networks in the layouts of the authors give their logits, and commands take such files."""

import re

import fill
import numpy as np
import official
import official_cvt
import pytest
import timm
import torch
from timm.models.swin_transformer import checkpoint_filter_fn
from torch import nn

from mldec.backbones import TimmBackbone
from mldec.checkpoint import load_model
from mldec.heads.gap import GAP
from mldec.heads.ml_decoder import OFFICIAL_NAMES as ML_DECODER
from mldec.heads.ml_decoder import MLDecoder
from mldec.heads.query2label import Query2Label
from mldec.model import Classifier


def from_keys(name):
    """Return the rebuilt weights of a released file, under the released names."""
    return official.rebuilt(official.read(f"{name}.keys"))


def tresnet_layout(model):
    """Return a model's weights under the names of the official TResNet repositories."""
    names = {}
    for key, value in model.state_dict().items():
        if key.startswith("backbone.network."):
            key = key.removeprefix("backbone.network.")
            key = re.sub(r"(conv\d|downsample\.\d)\.conv\.", r"\1.0.", key)
            names[re.sub(r"(conv\d|downsample\.\d)\.bn\.", r"\1.1.", key)] = value
        elif key.startswith("head."):
            for old, new in reversed(ML_DECODER):
                key = re.sub(rf"\b{re.escape(new)}\b", old, key)
            names[key] = value
    return names


MEAN = [0.485, 0.456, 0.406]
STD = [0.229, 0.224, 0.225]
SIZES = {"embed_dim": 64, "mlp_dim": 96, "input_proj": True}
# Names in the head -> names in lib/models/query2label.py and transformer.py.
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


def random_weights(shapes):
    """Return random weights with positive variances and scales near 1."""
    torch.manual_seed(0)
    state = {key: 0.02 * torch.randn(shape) for key, shape in shapes.items()}
    for key in state:
        if key.endswith("running_var") or re.search(r"(norm\d?|bn)\.weight$", key):
            state[key] = 1 + state[key].abs()
    return state


def official_head(head):
    state = {}
    for key, value in head.state_dict().items():
        for ours, theirs in HEAD:
            key = re.sub(ours, theirs, key)
        value = value[None] if key in ("fc.W", "fc.b") else value
        state[key] = value[..., None, None] if key == "input_proj.weight" else value
    return state


def saved(path, backbone, head):
    """Save a file as main_mlc.py does, with the buffer of the position encoding."""
    state = {f"backbone.0.{key}": value for key, value in backbone.items()}
    state |= {"backbone.1.pe": torch.zeros(1, 64, 2, 2), **official_head(head)}
    state = {f"module.{key}": value for key, value in state.items()}
    torch.save({"state_dict": state, "epoch": 9, "best_mAP": 90.5}, path)
    return path


@pytest.fixture
def save(tmp_path):
    def save(content, name="tresnet_m_COCO_224_84_2.pth"):
        torch.save(content, tmp_path / name)
        return tmp_path / name

    return save


def logits(path, size, **options):
    with torch.no_grad():
        return load_model(path, **options).model(torch.from_numpy(fill.images(size))).numpy()


@pytest.mark.parametrize(
    ("name", "file", "size", "classes"),
    [
        ("tresnet_l_coco_448", "tresnet_l_COCO__448_90_0.pth", 448, 80),
        ("tresnet_m_openimages_224", "tresnet_m_open_images_200_groups_86_8.pth", 224, 9605),
    ],
)
def test_released_file_gives_official_logits(save, name, file, size, classes):
    names = {index: f"'thing {index}'" for index in range(classes)}
    path = save({"model": from_keys(name), "idx_to_class": names}, file)
    loaded = load_model(path)
    assert loaded.transform.image_size == size
    assert loaded.classes.names[:2] == ("thing 0", "thing 1")
    assert len(loaded.classes) == classes
    expected = np.load(official.NUMBERS / f"{name}.npz")["logits"]
    np.testing.assert_allclose(logits(path, size), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("file", "backbone", "head", "size"),
    [
        (
            "tresnet_xl_COCO_640_91_4.pth",
            {"name": "tresnet_v2_l", "model_args": {"layers": [3, 8, 34, 5]}},
            {"num_classes": 80},
            640,
        ),
        (
            "tresnet_l_stanford_card_96.41.pth",
            {"name": "tresnet_v2_l"},
            {"num_classes": 196, "num_groups": 100},
            384,
        ),
    ],
)
def test_networks_are_inferred_from_their_blocks(save, file, backbone, head, size):
    model = Classifier(TimmBackbone(**backbone), MLDecoder(2048, **head))
    loaded = load_model(save({"model": tresnet_layout(model)}, file))
    assert loaded.config.backbone.items() >= backbone.items()
    assert loaded.config.head["num_groups"] == head.get("num_groups", 80)
    assert loaded.transform.image_size == size
    assert loaded.classes.exclusive == (len(loaded.classes) == 196)


@pytest.mark.parametrize(
    ("file", "layers", "width_factor", "classes", "bottleneck", "size", "network"),
    [
        ("MS_COCO_TRresNet_M_224_81.8.pth", [3, 4, 11, 3], 1.0, 80, None, 224, "tresnet_m"),
        ("MS_COCO_TResNet_xl_640_88.4.pth", [4, 5, 24, 3], 1.3, 80, None, 640, "tresnet_xl"),
        ("Open_ImagesV6_TRresNet_L_448.pth", [4, 5, 18, 3], 1.2, 9605, 512, 448, "tresnet_l"),
    ],
)
def test_asl_file_gives_logits_of_the_formulas(
    save, file, layers, width_factor, classes, bottleneck, size, network
):
    shapes = official.tresnet_shapes(layers, width_factor)
    features = shapes["body.layer4.2.conv3.1.weight"][0]
    state = official.rebuilt(shapes | official.gap_shapes(features, classes, bottleneck))
    names = {index: f"thing {index}" for index in range(classes)}
    path = save({"model": state, "num_classes": classes, "idx_to_class": names}, file)

    loaded = load_model(path)
    assert loaded.config.backbone["name"] == network
    assert loaded.transform.image_size == size
    assert loaded.classes.names == tuple(names.values())
    assert not loaded.classes.exclusive
    images = torch.from_numpy(fill.images(64))
    with torch.no_grad():
        expected = official.gap_logits(state, official.tresnet_features(state, images))
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(loaded.model(images), expected, rtol=1e-4, atol=1e-4)


def test_csl_file_with_gap_on_the_network_of_the_paper(save):
    model = Classifier(TimmBackbone("tresnet_v2_l"), GAP(2048, 30)).eval()
    state = tresnet_layout(model)
    assert state["head.fc.weight"].shape == (30, 2048)
    loaded = load_model(save({"model": state}, "ltresnet_v2_opim_87.34.pth"), image_size=64)
    assert loaded.config.backbone["name"] == "tresnet_v2_l"
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("self_attention", [False, True])
@pytest.mark.parametrize("network", ["resnet101", "tresnet_l", "tresnet_v2_l"])
def test_query2label_files(tmp_path, network, self_attention):
    torch.manual_seed(0)
    backbone = TimmBackbone(network)
    head = Query2Label(backbone.num_features, 80, self_attention=self_attention, **SIZES)
    body = tresnet_layout(Classifier(backbone, nn.Identity()))
    body = {f"body.{key.removeprefix('body.')}": value for key, value in body.items()}
    loaded = load_model(saved(tmp_path / "checkpoint.pkl", body, head), image_size=64)
    images = torch.rand(2, 3, 64, 64)
    model = Classifier(backbone, head).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), model(images), rtol=1e-2, atol=1e-2)


def test_resnet_with_official_head(save):
    model = Classifier(TimmBackbone("resnet101"), MLDecoder(2048, 21, num_groups=21)).eval()
    state = {}
    for key, value in tresnet_layout(model).items():
        if key.startswith("head."):
            key = "fc." + key.removeprefix("head.")
        state[key] = value
    loaded = load_model(save(state, "voc.pth"), image_size=64)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), model(images))
    assert loaded.classes.names[3] == "class 3"


def swin_shapes(name, windows):
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


def normalized(images):
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def test_swin_gives_logits_of_timm(tmp_path):
    state = random_weights(swin_shapes("swin_tiny_patch4_window7_224", 64))
    head = Query2Label(768, 80, **SIZES).eval()
    path = saved(tmp_path / "q2l.pkl", state, head)
    loaded = load_model(path, image_size=224)
    assert loaded.config.backbone["name"] == "swin_tiny_patch4_window7_224"

    network = timm.create_model("swin_tiny_patch4_window7_224", num_classes=0).eval()
    buffers = ("attn_mask", "relative_position_index")
    weights = {key: value for key, value in state.items() if not key.endswith(buffers)}
    # timm takes a layout with a classifier for the official one.
    weights["head.weight"] = torch.zeros(1000, 768)
    renamed = checkpoint_filter_fn(weights, network)
    network.load_state_dict({key: renamed[key] for key in network.state_dict()})

    images = torch.randint(256, (2, 3, 224, 224), dtype=torch.uint8)
    with torch.no_grad():
        tokens = network.forward_features(normalized(images)).flatten(1, 2)
        torch.testing.assert_close(loaded.model.backbone(images), tokens)
        torch.testing.assert_close(loaded.model(images), head(tokens))


def test_cvt_gives_logits_of_the_formulas(tmp_path):
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    state = random_weights(official_cvt.shapes([64, 192, 384], [1, 2, 10]))
    head = Query2Label(384, 80, **SIZES).eval()
    loaded = load_model(saved(tmp_path / "q2l.pkl", state, head), image_size=96)
    images = torch.randint(256, (2, 3, 96, 96), dtype=torch.uint8)
    with torch.no_grad():
        tokens = official_cvt.tokens(state, normalized(images))
        assert tokens.shape == (2, 36, 384)
        torch.testing.assert_close(loaded.model.backbone(images), tokens, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(loaded.model(images), head(tokens), rtol=1e-4, atol=1e-4)
