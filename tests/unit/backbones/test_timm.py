"""Networks of timm as backbones: their tokens, norms and weights are timm's."""

import pickle
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from mldec.backbones import TimmBackbone
from mldec.errors import ConfigError

SHALLOW = {"depth": 2, "embed_dim": 64, "num_heads": 4}
VIT = {"image_size": 64, "model_args": SHALLOW}


def build(name, **settings):
    """Return a backbone in evaluation mode without parameters of 0 or 1, so that each counts."""
    torch.manual_seed(0)
    backbone = TimmBackbone(name, **settings).eval()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return backbone


def photos(size, count=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def normalised(backbone, images):
    """Return what the network should see, from the words of timm."""
    cfg = backbone.network.pretrained_cfg
    mean, std = (torch.tensor(cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (images.float() / 255 - mean) / std


def message(name, **settings):
    """Return the one line that a user sees."""
    with pytest.raises(ConfigError) as caught:
        TimmBackbone(name, **settings)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("backbone")
    return text


# Name, further settings, side of the image in pixels, tokens per side, and the norm behind the
# pooling. Wide tables of real networks stand in tests/full/backbones.
NETWORKS = [
    ("resnet18", {}, 64, 2, None),
    ("convnext_atto", {}, 64, 2, "head.norm"),
    ("swin_tiny_patch4_window7_224", {"image_size": 64}, 64, 2, None),
    ("vit_tiny_patch16_224", VIT, 64, 4, None),
    ("deit_tiny_distilled_patch16_224", VIT, 64, 4, None),
    ("beit_base_patch16_224", VIT, 64, 4, "fc_norm"),
]


@pytest.mark.parametrize(("name", "settings", "size", "side", "path"), NETWORKS)
@torch.no_grad()
def test_tokens_are_the_map_of_timm_row_by_row_and_normed(name, settings, size, side, path):
    backbone, images = build(name, **settings), photos(size)
    *_, expected = backbone.network.forward_intermediates(
        normalised(backbone, images),
        indices=1,
        norm=True,
        output_fmt="NCHW",
        intermediates_only=True,
    )
    expected = torch.stack(
        [expected[:, :, row, column] for row in range(side) for column in range(side)], 1
    )
    if path is None:
        torch.testing.assert_close(backbone(images), expected)
        assert "no norm behind its pooling" in message(name, **settings, feature_norm="pretrained")
        return

    norm = backbone.network.get_submodule(path)
    normed = F.layer_norm(expected, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(backbone(images), normed)

    plain = TimmBackbone(name, **settings, feature_norm="none").eval()
    plain.load_state_dict(backbone.state_dict())
    torch.testing.assert_close(plain(images), expected)
    frozen = {key for key, value in plain.named_parameters() if not value.requires_grad}
    assert frozen == {f"network.{path}.weight", f"network.{path}.bias"}


def test_a_new_norm_is_a_layer_norm_on_top():
    backbone = TimmBackbone("resnet10t", feature_norm="new")
    torch.testing.assert_close(backbone(photos(64)).mean(-1), torch.zeros(2, 4), atol=1e-5, rtol=0)
    assert backbone.norm.weight.requires_grad
    assert backbone.layers_below_head()["norm.weight"] == 0


@torch.no_grad()
def test_images_are_scaled_and_normalised_in_the_type_of_the_parameters():
    backbone, images = build("resnet10t"), photos(64)
    single = backbone(images)
    assert torch.equal(backbone(images.float() / 255), single)
    assert torch.equal(backbone(images.double() / 255), single)
    with pytest.raises(ValueError, match=r"images are torch.int64; give uint8 in 0..255"):
        backbone(images.long())

    seen = []
    hook = backbone.network.conv1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    with torch.autocast("cpu", torch.bfloat16):
        assert backbone(images).dtype == torch.bfloat16
    hook.remove()
    torch.testing.assert_close(seen[0][0], normalised(backbone, images))

    double = backbone.double()(images)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), single, atol=1e-4, rtol=1e-4)


def test_mean_and_deviation_are_of_the_weights_and_in_the_checkpoint():
    state = TimmBackbone("vit_base_patch16_clip_224.openai", **VIT).state_dict()
    assert state["mean"].flatten().tolist() == pytest.approx([0.48145466, 0.4578275, 0.40821073])
    ours = build("resnet10t", mean=[0.1, 0.2, 0.3], std=[1, 2, 3])
    other = build("resnet10t")
    with torch.no_grad():
        assert not torch.allclose(ours(photos(64)), other(photos(64)))
        other.load_state_dict(ours.state_dict())
        assert torch.equal(ours(photos(64)), other(photos(64)))


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("resnet10t", set()),
        ("mobilenetv3_small_050", {"network.conv_head.weight", "network.conv_head.bias"}),
    ],
)
def test_what_takes_no_part_is_frozen_and_all_else_gets_a_gradient(name, unused):
    backbone = TimmBackbone(name)
    frozen = {key for key, value in backbone.named_parameters() if not value.requires_grad}
    backbone.requires_grad_()
    backbone(photos(64)).square().sum().backward()
    without = {key for key, value in backbone.named_parameters() if value.grad is None}
    assert frozen == without == unused


def test_the_trial_draws_no_random_numbers_and_leaves_no_trace():
    torch.manual_seed(3)
    network = timm.create_model("resnet10t", num_classes=0)
    after = torch.rand(4)
    torch.manual_seed(3)
    with torch.inference_mode():
        backbone = TimmBackbone("resnet10t")
        assert torch.equal(torch.rand(4), after)
    assert all(module.training for module in backbone.modules())
    state = backbone.network.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())


def test_drop_path_and_checkpointing_reach_the_network():
    backbone = TimmBackbone("resnet18", drop_path=0.2, checkpointing=True)
    drops = [module for module in backbone.modules() if type(module).__name__ == "DropPath"]
    assert drops[-1].drop_prob == pytest.approx(0.2)
    assert backbone.network.grad_checkpointing


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"name": "resnet81"}, ["backbone.name=resnet81", "did you mean resnet18"]),
        ({"name": "hf-hub:timm/resnet18"}, ["no such network"]),
        ({"name": "pit_ti_224"}, ["its features are 0 tokens where there are 729 patches"]),
        ({"name": "crossvit_tiny_240"}, ["its features are a list", "288 channels"]),
        ({"model_args": {"lyers": 3}}, ["resnet10t with", "lyers=3"]),
        ({"model_args": {"checkpoint_path": "x.pth"}}, ["backbone.model_args.checkpoint_path"]),
        ({"name": "vit_tiny_patch16_224", "image_size": 10}, ["tried with 10 x 10 pixels"]),
        ({"drop_path": 1.5}, ["backbone.drop_path=1.5", "[0, 1)"]),
        ({"name": "dla46_c", "checkpointing": True}, ["backbone.checkpointing=true: dla46_c"]),
        ({"mean": [0.5, 0.5]}, ["backbone.mean=[0.5, 0.5]: give red, green and blue"]),
        ({"name": "botnet50ts_256", "pretrained": True}, ["No pretrained weights exist"]),
    ],
)
def test_a_setting_that_does_not_fit_is_one_line(settings, parts):
    text = message(**{"name": "resnet10t", **settings})
    assert [part for part in parts if part not in text] == []


# Weights from a file


class Hostile:
    """A pickle that makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.fixture
def trained():
    """Return a classifier of seven classes, as somebody else's training left it."""
    torch.manual_seed(7)
    return timm.create_model("resnet10t", num_classes=7).eval()


@pytest.mark.parametrize("kind", ["whole", "nested", "wrapped", "headless", "safetensors"])
@torch.no_grad()
def test_a_file_of_weights_gives_the_same_tokens(tmp_path, trained, kind):
    state, file = trained.state_dict(), tmp_path / f"weights.{kind}"
    forms = {
        "whole": state,
        "nested": {"state_dict": state},
        "wrapped": {f"module.{key}": value for key, value in state.items()},
        "headless": {key: value for key, value in state.items() if not key.startswith("fc.")},
    }
    save_file(state, file) if kind == "safetensors" else torch.save(forms[kind], file)

    torch.manual_seed(5)
    plain, drawn = TimmBackbone("resnet10t"), torch.rand(4)
    torch.manual_seed(5)
    backbone = TimmBackbone("resnet10t", pretrained=str(file)).eval()
    # The head starts alike with and without pretrained weights.
    assert torch.equal(torch.rand(4), drawn)
    assert backbone.state_dict().keys() == plain.state_dict().keys()

    features = trained.forward_features(normalised(backbone, photos(64)))
    torch.testing.assert_close(backbone(photos(64)), features.flatten(2).transpose(1, 2))


def test_weights_of_another_network_or_with_a_gap_are_refused(tmp_path, trained):
    file, lost = tmp_path / "weights.pth", "layer3.0.conv1.weight"
    torch.save(trained.state_dict(), file)
    text = message("resnet14t", pretrained=str(file))
    assert text.startswith(f"backbone.pretrained={file}: the weights of resnet14t cannot be used")
    assert "backbone.pretrained=false" in text

    state = {key: value for key, value in trained.state_dict().items() if key != lost}
    torch.save(state, file)
    assert lost in message("resnet10t", pretrained=str(file))


@pytest.mark.parametrize("kind", ["missing", "cut", "pickle", "zip"])
def test_a_file_that_cannot_be_used_is_one_line_and_not_run(tmp_path, trained, kind):
    file, mark = tmp_path / "weights.pth", tmp_path / "mark"
    if kind == "cut":
        torch.save(trained.state_dict(), file)
        file.write_bytes(file.read_bytes()[:-1000])
    elif kind == "pickle":
        file.write_bytes(pickle.dumps({"conv1.weight": Hostile(mark)}, protocol=2))
    elif kind == "zip":
        torch.save({"conv1.weight": Hostile(mark)}, file)

    fault = "cannot be used ("
    text = message("resnet10t", pretrained=str(file))
    assert fault in text
    assert text.startswith(f"backbone.pretrained={file}: ")
    assert not mark.exists()
