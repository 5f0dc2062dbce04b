import inspect
import os
import pickle
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import timm
import torch
import yaml
from safetensors.torch import save_file
from timm.models import group_parameters
from torch.nn import functional as F

from mldec.backbones import TimmBackbone
from mldec.errors import ConfigError

FOLDER = Path(__file__).parents[3] / "configs" / "backbone"
# All of timm but the one whose network the user chooses.
OPTIONS = sorted(
    path
    for path in FOLDER.glob("*.yaml")
    if "TimmBackbone" in path.read_text(encoding="utf-8") and path.stem != "timm"
)
PARAMETERS = {
    "tresnet_m": 29.34,
    "tresnet_l": 44.13,
    "tresnet_xl": 67.25,
}  # millions, counted by others
SHALLOW = {"depth": 2, "embed_dim": 64, "num_heads": 4}

# Image encoders that were trained together with a text encoder, and their normalisation.
CLIP_IMAGES = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
ALIGNED = {
    "vit_base_patch16_clip_224.openai": CLIP_IMAGES,
    "vit_base_patch16_clip_quickgelu_224.openai": CLIP_IMAGES,
    "vit_base_patch16_siglip_224.v2_webli": ([0.5] * 3, [0.5] * 3),
}

# Name, further settings, side of the image in pixels, tokens a side. Small networks, small images.
MAPS = [
    ("resnet18", {}, 64, 2),
    ("tresnet_m", {}, 64, 2),
    ("regnety_002", {}, 64, 2),
    ("convnext_atto", {"feature_norm": "none"}, 64, 2),
    ("swin_tiny_patch4_window7_224", {"image_size": 64}, 64, 2),
    ("swinv2_tiny_window8_256", {"image_size": 64}, 64, 2),
]
SEQUENCES = [
    ("mixer_s32_224", {"image_size": 64}, 64, 2),
    ("vit_tiny_patch16_224", {"image_size": 64}, 64, 4),
    ("deit_tiny_patch16_224", {"image_size": 64}, 64, 4),
    ("deit_tiny_distilled_patch16_224", {"image_size": 64}, 64, 4),
    ("vit_small_patch14_reg4_dinov2", {"image_size": 56, "model_args": SHALLOW}, 56, 4),
    (
        "beit_base_patch16_224",
        {"image_size": 64, "model_args": SHALLOW, "feature_norm": "none"},
        64,
        4,
    ),
    ("eva02_tiny_patch14_224", {"image_size": 56, "feature_norm": "none"}, 56, 4),
    ("volo_d1_224", {"image_size": 64}, 64, 4),
    *((name, {"image_size": 64, "model_args": SHALLOW}, 64, 4) for name in ALIGNED),
]
# The norm that stands behind the pooling.
NORMS_BEHIND = [
    ("convnext_atto", {}, 64, "head.norm"),
    ("davit_tiny", {}, 64, "head.norm"),
    ("hiera_tiny_224", {}, 224, "head.norm"),
    ("mambaout_femto", {}, 64, "head.norm"),
    ("beit_base_patch16_224", {"image_size": 64, "model_args": SHALLOW}, 64, "fc_norm"),
    ("eva02_tiny_patch14_224", {"image_size": 56}, 56, "fc_norm"),
    (
        "vit_tiny_patch16_224",
        {"image_size": 64, "model_args": {"global_pool": "avg"}},
        64,
        "fc_norm",
    ),
]


def build(name, **settings):
    """A backbone in evaluation mode without parameters of 0 or 1, so that each one counts."""
    torch.manual_seed(0)
    backbone = TimmBackbone(name, **settings).eval()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return backbone


def photos(size, count=2):
    return torch.randint(
        256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def normalised(backbone, images):
    """What the network should see, from the words of timm."""
    cfg = backbone.network.pretrained_cfg
    mean, std = (torch.tensor(cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (images.float() / 255 - mean) / std


def message(name, **settings):
    """The one line that a user sees."""
    with pytest.raises(ConfigError) as caught:
        TimmBackbone(name, **settings)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("backbone")
    assert len(text) < 450
    return text


class TestTokens:
    @pytest.mark.parametrize(
        ("name", "settings", "size", "side"), MAPS + SEQUENCES, ids=lambda value: str(value)[:30]
    )
    def test_they_are_the_map_of_timm_row_by_row(self, name, settings, size, side):
        backbone, images = build(name, **settings), photos(size)
        with torch.no_grad():
            tokens = backbone(images)
            *_, expected = backbone.network.forward_intermediates(
                normalised(backbone, images),
                indices=1,
                norm=True,
                output_fmt="NCHW",
                intermediates_only=True,
            )
        assert tokens.shape == (2, side * side, backbone.num_features)
        for row in range(side):
            for column in range(side):
                torch.testing.assert_close(
                    tokens[:, row * side + column], expected[:, :, row, column]
                )

    @pytest.mark.parametrize(
        ("name", "settings", "size", "side"),
        [*MAPS[:3], ("efficientnet_b0", {}, 64, 2), *MAPS[4:], SEQUENCES[0]],
        ids=lambda value: str(value)[:30],
    )
    def test_their_mean_is_what_timm_pools(self, name, settings, size, side):
        backbone, images = build(name, **settings), photos(size)
        network = backbone.network
        with torch.no_grad():
            tokens = backbone(images)
            pooled = network.forward_head(
                network.forward_features(normalised(backbone, images)), pre_logits=True
            )
        assert tokens.shape == (2, side * side, backbone.num_features)
        torch.testing.assert_close(tokens.mean(1), pooled.flatten(1))

    @pytest.mark.parametrize(
        ("name", "settings", "size", "path"), NORMS_BEHIND, ids=lambda value: str(value)[:30]
    )
    def test_the_norm_behind_the_pooling_is_applied_to_each(self, name, settings, size, path):
        backbone, images = build(name, **settings), photos(size)
        norm = backbone.network.get_submodule(path)
        settings = {**settings, "feature_norm": "none"}
        plain = build(name, **settings)
        plain.network.load_state_dict(backbone.network.state_dict())
        with torch.no_grad():
            expected = F.layer_norm(
                plain(images), (backbone.num_features,), norm.weight, norm.bias, norm.eps
            )
            torch.testing.assert_close(backbone(images), expected)
        assert [key for key in backbone.state_dict() if key.endswith(f"{path}.weight")] == [
            f"network.{path}.weight"
        ]
        frozen = {key for key, parameter in plain.named_parameters() if not parameter.requires_grad}
        assert frozen >= {f"network.{path}.weight", f"network.{path}.bias"}
        settings["feature_norm"] = "pretrained"
        assert TimmBackbone(name, **settings)(images).shape == expected.shape

    def test_a_new_norm_is_a_layer_norm_on_top(self):
        backbone = TimmBackbone("resnet10t", feature_norm="new")
        tokens = backbone(photos(64))
        torch.testing.assert_close(tokens.mean(-1), torch.zeros(2, 4), atol=1e-5, rtol=0)
        assert backbone.norm.weight.requires_grad
        assert {key for key in backbone.state_dict() if key.startswith("norm.")} == {
            "norm.weight",
            "norm.bias",
        }

    def test_a_norm_of_another_width_or_over_the_batch_is_none_of_the_tokens(self):
        assert (
            TimmBackbone("inception_next_atto")._norm_path is None
        )  # 960 wide, behind a further layer
        assert TimmBackbone("levit_128s", image_size=64)._norm_path is None


class TestImages:
    @pytest.mark.parametrize("name", ["resnet10t", "tresnet_m"])
    def test_bytes_are_fractions_of_255(self, name):
        backbone, images = build(name), photos(64)
        with torch.no_grad():
            assert torch.equal(backbone(images), backbone(images.float() / 255))
            assert torch.equal(backbone(images.double() / 255), backbone(images.float() / 255))

    def test_other_integers_are_refused(self):
        with pytest.raises(
            ValueError, match=r"images are torch.int64; give uint8 in 0..255 or floating point"
        ):
            TimmBackbone("resnet10t")(photos(64).long())

    def test_mean_and_deviation_are_of_the_weights_and_in_the_checkpoint(self):
        state = TimmBackbone("resnet10t").state_dict()
        assert state["mean"].flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
        assert state["std"].flatten().tolist() == pytest.approx([0.229, 0.224, 0.225])
        ours = build("resnet10t", mean=[0.1, 0.2, 0.3], std=[1, 2, 3])
        other = build("resnet10t")
        with torch.no_grad():
            assert not torch.allclose(ours(photos(64)), other(photos(64)))
            other.load_state_dict(ours.state_dict())
            assert torch.equal(ours(photos(64)), other(photos(64)))

    @pytest.mark.parametrize("name", ALIGNED)
    def test_an_encoder_aligned_with_text_has_its_own_normalisation(self, name):
        backbone = TimmBackbone(name, image_size=64, model_args=SHALLOW)
        mean, std = ALIGNED[name]
        assert backbone.mean.flatten().tolist() == pytest.approx(mean)
        assert backbone.std.flatten().tolist() == pytest.approx(std)
        # The head takes tokens: the attention pooling of SigLIP has no part in them.
        frozen = {key for key, value in backbone.named_parameters() if not value.requires_grad}
        assert all(key.startswith("network.attn_pool.") for key in frozen)
        assert bool(frozen) == ("siglip" in name)

    def test_the_type_is_that_of_the_parameters(self):
        backbone, images = build("resnet10t"), photos(64)
        with torch.no_grad():
            single, double = backbone(images), backbone.double()(images)
        assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(single, double.float(), atol=1e-4, rtol=1e-4)

    def test_they_are_normalised_in_full_precision_under_autocast(self):
        backbone, seen = build("resnet10t"), []
        backbone.network.conv1.register_forward_pre_hook(
            lambda module, inputs: seen.append(inputs[0])
        )
        with torch.autocast("cpu", torch.bfloat16):
            tokens = backbone(photos(64))
        assert tokens.dtype == torch.bfloat16  # so it was on
        torch.testing.assert_close(seen[0], normalised(backbone, photos(64)))


class TestLayers:
    @pytest.mark.parametrize(
        "name",
        ["resnet18", "tresnet_m", "vit_tiny_patch16_224", "convnext_atto", "test_efficientnet"],
    )
    def test_they_are_those_of_timm_with_the_head_in_the_place_of_the_classifier(self, name):
        with torch.device("meta"):
            backbone, whole = TimmBackbone(name), timm.create_model(name)
        layers = group_parameters(whole, whole.group_matcher(coarse=False), reverse=True)
        below_head = backbone.layers_below_head()
        assert below_head.keys() == dict(backbone.named_parameters()).keys()
        for key, depth in below_head.items():
            assert depth == max(layers.values()) - layers[key.removeprefix("network.")], key

    def test_a_new_norm_is_next_to_the_head(self):
        backbone = TimmBackbone("test_resnet", feature_norm="new")
        assert backbone.layers_below_head()["norm.weight"] == 0

    def test_a_network_whose_layers_timm_does_not_know_is_refused(self, monkeypatch):
        backbone = TimmBackbone("test_resnet")
        monkeypatch.delattr(type(backbone.network), "group_matcher")
        with pytest.raises(ConfigError, match="timm does not know the layers of test_resnet"):
            backbone.layers_below_head()


class TestTraining:
    @pytest.mark.parametrize(
        ("name", "settings", "size", "unused"),
        [
            ("resnet10t", {}, 64, set()),
            ("tresnet_m", {}, 64, set()),
            ("convnext_atto", {}, 64, set()),
            (
                "convnext_atto",
                {"feature_norm": "none"},
                64,
                {"network.head.norm.weight", "network.head.norm.bias"},
            ),
            (
                "mobilenetv3_small_050",
                {},
                64,
                {"network.conv_head.weight", "network.conv_head.bias"},
            ),
            ("vit_tiny_patch16_224", {"image_size": 64}, 64, set()),
            ("eva02_tiny_patch14_224", {"image_size": 56}, 56, set()),
        ],
        ids=lambda value: str(sorted(value) if isinstance(value, set) else value)[:40],
    )
    def test_what_takes_no_part_is_frozen_and_all_else_gets_a_gradient(
        self, name, settings, size, unused
    ):
        backbone = TimmBackbone(name, **settings)
        frozen = {
            key for key, parameter in backbone.named_parameters() if not parameter.requires_grad
        }
        backbone.requires_grad_()
        assert backbone.training
        backbone(photos(size)).square().sum().backward()
        assert (
            frozen
            == {key for key, parameter in backbone.named_parameters() if parameter.grad is None}
            == unused
        )

    def test_the_trial_draws_no_random_numbers_and_leaves_no_trace(self):
        torch.manual_seed(3)
        network = timm.create_model("resnet10t", num_classes=0)
        after = torch.rand(4)
        torch.manual_seed(3)
        backbone = TimmBackbone("resnet10t")
        assert torch.equal(torch.rand(4), after)
        assert all(module.training for module in backbone.modules())
        state = backbone.network.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())

    def test_it_is_built_alike_without_gradients(self):
        with torch.inference_mode():
            inference = TimmBackbone("mobilenetv3_small_050")
        usual = TimmBackbone("mobilenetv3_small_050")
        assert [p.requires_grad for p in inference.parameters()] == [
            p.requires_grad for p in usual.parameters()
        ]

    def test_drop_path_rises_to_its_rate(self):
        drops = [
            m
            for m in TimmBackbone("resnet18", drop_path=0.2).modules()
            if type(m).__name__ == "DropPath"
        ]
        assert drops[-1].drop_prob == pytest.approx(0.2)
        assert not [m for m in TimmBackbone("resnet18").modules() if type(m).__name__ == "DropPath"]

    @pytest.mark.parametrize(
        ("name", "settings"), [("resnet10t", {}), ("vit_tiny_patch16_224", {"image_size": 64})]
    )
    def test_checkpointing_changes_no_gradient(self, name, settings):
        plain, sparing = build(name, **settings), build(name, checkpointing=True, **settings)
        for backbone in (plain, sparing):
            backbone.train()(photos(64)).square().mean().backward()
        assert sparing.network.grad_checkpointing
        for expected, parameter in zip(plain.parameters(), sparing.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "parts"),
        [
            ({"name": "resnet81"}, ["backbone.name=resnet81", "did you mean resnet18"]),
            ({"name": "hf-hub:timm/resnet18"}, ["no such network"]),
            ({"name": "resnet18.tv_in"}, ["no weights of this tag", "'tv_in1k'"]),
            (
                {"name": "pit_ti_224"},
                ["pit_ti_224: its features are 0 tokens where there are 729 patches"],
            ),
            (
                {"name": "crossvit_tiny_240"},
                ["crossvit_tiny_240: its features are a list", "288 channels"],
            ),
            ({"name": "coat_tiny"}, ["coat_tiny: its features are a list"]),
            (
                {"model_args": {"lyers": 3}},
                ["backbone.model_args.lyers=3: resnet10t takes no such setting"],
            ),
            ({"model_args": {"output_stride": 3}}, ["cannot build resnet10t", "output_stride=3"]),
            ({"model_args": {"checkpoint_path": "x.pth"}}, ["backbone.model_args.checkpoint_path"]),
            ({"model_args": {"num_classes": 3}}, ["backbone.model_args.num_classes"]),
            ({"image_size": 64}, ["backbone.image_size=64", "leave it out"]),
            (
                {"name": "vit_tiny_patch16_224", "image_size": 10},
                ["a trial image of 10 x 10 pixels failed"],
            ),
            (
                {"name": "dla46_c", "drop_path": 0.1},
                ["backbone.drop_path=0.1: dla46_c", "leave it out"],
            ),
            ({"drop_path": 1.5}, ["backbone.drop_path=1.5", "[0, 1)"]),
            (
                {"name": "dla46_c", "checkpointing": True},
                ["backbone.checkpointing=true: dla46_c", "leave it out"],
            ),
            (
                {"feature_norm": "pretrained"},
                ["backbone.feature_norm=pretrained: resnet10t has no norm", "auto"],
            ),
            ({"feature_norm": "pretraind"}, ["backbone.feature_norm=pretraind", "'pretrained'"]),
            ({"mean": [0.5, 0.5]}, ["backbone.mean=[0.5, 0.5]"]),
            ({"std": [0, 1, 1]}, ["backbone.std=[0, 1, 1]"]),
            (
                {"name": "botnet50ts_256", "pretrained": True},
                ["publishes no weights of botnet50ts_256", "=false"],
            ),
        ],
        ids=lambda value: str(value)[:50],
    )
    def test_a_setting_that_does_not_fit(self, settings, parts):
        text = message(**{"name": "resnet10t", **settings})
        assert [part for part in parts if part not in text] == []

    def test_a_setting_that_a_network_refuses_in_other_words(self):
        with suppress(TypeError):
            timm.create_model("hrnet_w18_small", drop_path_rate=0.1)
            pytest.skip("this version of timm lets it pass")
        assert "backbone.drop_path=0.1: hrnet_w18_small takes no such setting" in message(
            "hrnet_w18_small", drop_path=0.1
        )


class Hostile:
    """A pickle that makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


class TestWeightsFromFile:
    @pytest.fixture
    def trained(self):
        """A classifier of seven classes, as somebody else's training left it."""
        torch.manual_seed(7)
        return timm.create_model("resnet10t", num_classes=7)

    def tokens(self, network):
        images = normalised(TimmBackbone("resnet10t"), photos(64))
        with torch.no_grad():
            return network.eval().forward_features(images).flatten(2).transpose(1, 2)

    @pytest.mark.parametrize(
        "kind", ["whole.pth", "nested.pth", "wrapped.pth", "headless.pth", "whole.safetensors"]
    )
    def test_it_gives_the_same_tokens(self, tmp_path, trained, kind):
        state, file = trained.state_dict(), tmp_path / kind
        if kind.endswith("safetensors"):
            save_file(state, file)
        elif kind == "headless.pth":
            torch.save(
                {key: value for key, value in state.items() if not key.startswith("fc.")}, file
            )
        else:
            wrapped = {f"module.{key}": value for key, value in state.items()}
            torch.save(
                {"whole.pth": state, "nested.pth": {"state_dict": state}, "wrapped.pth": wrapped}[
                    kind
                ],
                file,
            )
        backbone = TimmBackbone("resnet10t", pretrained=str(file)).eval()
        assert not [key for key in backbone.state_dict() if ".fc." in key]
        with torch.no_grad():
            torch.testing.assert_close(backbone(photos(64)), self.tokens(trained))

    @pytest.mark.parametrize(
        ("name", "num_classes"),
        [
            ("convnext_atto", 5),
            ("convnext_atto", 0),
            ("swin_tiny_patch4_window7_224", 5),
            ("deit_tiny_distilled_patch16_224", 5),
            ("deit_tiny_distilled_patch16_224", 0),
        ],
    )
    def test_it_fits_other_families_with_and_without_classifier(self, tmp_path, name, num_classes):
        source = timm.create_model(name, num_classes=num_classes).state_dict()
        torch.save(source, tmp_path / "weights.pth")
        loaded = TimmBackbone(name, pretrained=str(tmp_path / "weights.pth")).network.state_dict()
        assert len(source) - len(loaded) in ({0} if num_classes == 0 else {2, 4})
        assert all(torch.equal(value, source[key]) for key, value in loaded.items())

    def test_position_embeddings_are_resampled_to_the_image(self, tmp_path):
        source = timm.create_model("vit_tiny_patch16_224", num_classes=3)
        torch.save(source.state_dict(), tmp_path / "vit.pth")
        backbone = TimmBackbone(
            "vit_tiny_patch16_224", pretrained=str(tmp_path / "vit.pth"), image_size=96
        )
        assert backbone(photos(96)).shape == (2, 36, 192)
        assert torch.equal(
            backbone.network.blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight
        )
        half = F.interpolate(
            source.pos_embed[:, 1:].unflatten(1, (14, 14)).permute(0, 3, 1, 2), 6, mode="area"
        )
        ours = backbone.network.pos_embed[:, 1:].unflatten(1, (6, 6)).permute(0, 3, 1, 2)
        assert torch.corrcoef(torch.stack([half.flatten(), ours.flatten()]))[0, 1] > 0.8

    def test_the_numbers_drawn_after_it_are_those_without_it(self, tmp_path, trained):
        torch.save(trained.state_dict(), tmp_path / "weights.pth")
        drawn = []
        for pretrained in (False, str(tmp_path / "weights.pth")):
            torch.manual_seed(5)
            TimmBackbone("resnet10t", pretrained=pretrained)
            drawn.append(torch.rand(4))
        assert torch.equal(*drawn)

    def test_weights_of_another_network_are_refused(self, tmp_path, trained):
        file = tmp_path / "weights.pth"
        torch.save(trained.state_dict(), file)
        text = message("resnet14t", pretrained=str(file))
        assert f"backbone.pretrained={file}: the weights do not fit resnet14t" in text
        assert "backbone.pretrained=false" in text
        assert "do not fit" in message(
            "resnet10t", pretrained=str(file), model_args={"layers": [1, 1, 2, 1]}
        )

    @pytest.mark.parametrize("lost", ["layer3.0.conv1.weight", "bn1.running_mean"])
    def test_weights_with_a_gap_are_refused(self, tmp_path, trained, lost):
        state = trained.state_dict()
        del state[lost]
        torch.save(state, tmp_path / "gap.pth")
        text = message("resnet10t", pretrained=str(tmp_path / "gap.pth"))
        assert "do not fit" in text
        assert lost in text

    def test_a_missing_file_is_named(self):
        assert message("resnet10t", pretrained="no/such.pth").startswith(
            "backbone.pretrained=no/such.pth: no such file"
        )

    @pytest.mark.parametrize(
        "name", ["broken.pth", "broken.safetensors", "empty.pth", "list.pth", "cut.pth"]
    )
    def test_a_broken_file_is_named(self, tmp_path, trained, name):
        file = tmp_path / name
        file.write_bytes(b"no weights at all")
        if name == "empty.pth":
            torch.save({}, file)
        elif name == "list.pth":
            torch.save([1, 2], file)
        elif name == "cut.pth":
            torch.save(trained.state_dict(), file)
            file.write_bytes(file.read_bytes()[:-1000])
        assert f"{file}: not a .safetensors or .pth file" in message(
            "resnet10t", pretrained=str(file)
        )

    @pytest.mark.parametrize("form", ["pickle", "zip"])
    def test_a_hostile_file_is_not_executed(self, tmp_path, form):
        file, mark = tmp_path / "hostile.pth", tmp_path / "mark"
        if form == "pickle":
            file.write_bytes(pickle.dumps({"conv1.weight": Hostile(mark)}, protocol=2))
        else:
            torch.save({"conv1.weight": Hostile(mark)}, file)
        assert f"{file}: not a" in message("resnet10t", pretrained=str(file))
        assert not mark.exists()
        with file.open("rb") as opened:  # else this test could not fail
            pickle.load(opened) if form == "pickle" else torch.load(opened, weights_only=False)
        assert mark.exists()


PUBLISHED = """
import time
import torch
from mldec.backbones import TimmBackbone
from mldec.errors import one_line

slept = []
time.sleep = slept.append
print(float(TimmBackbone("resnet10t", pretrained=True).network.conv1[0].weight.sum()))
for name in ("resnet18.tv_in1k", "gcvit_xxtiny"):
    try:
        TimmBackbone(name, pretrained=True)
    except ValueError as error:
        print(len(slept), error)
"""


def test_published_weights_without_a_network(tmp_path):
    """From the cache at once, else one line and no wait: nothing listens at the addresses."""
    state = timm.create_model("resnet10t").state_dict()
    cached = tmp_path / "models--timm--resnet10t.c3_in1k"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40)).mkdir(parents=True)
    save_file(state, cached / "snapshots" / ("0" * 40) / "model.safetensors")
    dead = "http://127.0.0.1:9"
    surroundings = {
        "HF_ENDPOINT": dead,
        "HTTPS_PROXY": dead,
        "https_proxy": dead,
        "NO_PROXY": "127.0.0.1",
    }
    places = {"HF_HUB_CACHE": str(tmp_path), "TORCH_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PUBLISHED],
        env={**os.environ, **surroundings, **places},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    total, hub, address = done.stdout.splitlines()
    assert float(total) == pytest.approx(float(state["conv1.0.weight"].sum()), rel=1e-4)
    for line, place in (
        (hub, "timm/resnet18.tv_in1k"),
        (address, "gcvit_xxtiny_224_nvidia-d1d86009.pth"),
    ):
        waits, _, text = line.partition(" ")
        assert waits == "0"
        assert text.startswith("backbone.pretrained=true: the weights of ")
        assert place in text
        assert (
            "give a file with backbone.pretrained=FILE, "
            "or backbone.pretrained=false to start from random" in text
        )
    assert "Retry" not in done.stderr
    assert "Traceback" not in done.stderr


# The encoders of the recipes, with the number of tokens in front of the image's, the side of a
# patch and the mean that their weights want.
ENCODERS = [
    ("vit_large_patch16_dinov3.lvd1689m", 5, 16, (0.485, 0.456, 0.406)),
    ("vit_base_patch16_dinov3.lvd1689m", 5, 16, (0.485, 0.456, 0.406)),
    ("vit_base_patch14_reg4_dinov2.lvd142m", 5, 14, (0.485, 0.456, 0.406)),
    ("vit_large_patch14_clip_quickgelu_336.openai", 1, 14, (0.48145466, 0.4578275, 0.40821073)),
    ("vit_base_patch16_clip_quickgelu_224.openai", 1, 16, (0.48145466, 0.4578275, 0.40821073)),
    ("vit_base_patch16_siglip_gap_224.v2_webli", 0, 16, (0.5, 0.5, 0.5)),
]


@pytest.mark.parametrize(("name", "prefix", "patch", "mean"), ENCODERS)
def test_weights_of_encoders_serve_other_image_sizes(name, prefix, patch, mean, tmp_path):
    shallow = {"embed_dim": 32, "depth": 1, "num_heads": 2}
    published = timm.create_model(name, num_classes=0, **shallow).eval()
    state = published.state_dict()
    save_file(state, tmp_path / "weights.safetensors")

    size = 10 * patch
    settings = {"pretrained": str(tmp_path / "weights.safetensors"), "image_size": size}
    backbone = TimmBackbone(name, model_args=shallow, **settings).eval()
    assert backbone.mean.flatten().tolist() == pytest.approx(list(mean))

    # The same resampling by hand. DINOv3 has rotary positions, of which nothing is stored, and the
    # embeddings of DINOv2 with registers are those of the patches alone.
    if "pos_embed" in state:
        old = state["pos_embed"]
        own = old[:, : old.shape[1] - int((old.shape[1]) ** 0.5) ** 2]
        grid = old[:, own.shape[1] :]
        side = int(grid.shape[1] ** 0.5)
        image = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        new = F.interpolate(image, (10, 10), mode="bicubic", antialias=True)
        state["pos_embed"] = torch.cat([own, new.flatten(2).transpose(1, 2)], 1)
    by_hand = timm.create_model(name, num_classes=0, img_size=size, **shallow).eval()
    by_hand.load_state_dict(state)

    images = photos(size, count=2)
    normalised = (images.float() / 255 - backbone.mean) / backbone.std
    with torch.no_grad():
        tokens = backbone(images)
        expected = by_hand.forward_features(normalised)[:, prefix:]
    assert tokens.shape == (2, 100, 32)
    torch.testing.assert_close(tokens, expected, rtol=1e-4, atol=1e-5)


class TestOptions:
    def read(self, path, size):
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert node.pop("_target_") == "mldec.backbones.TimmBackbone"
        return {
            key: size if value == "${data.image_size}" else value for key, value in node.items()
        }

    def test_they_are_there(self):
        resnets = {f"resnet{depth}" for depth in (18, 34, 50, 101)}
        others = {"tiny", "vit_b16", "swin_l", "convnext_b"}
        assert {path.stem for path in OPTIONS} >= {*PARAMETERS, *resnets, *others}

    @pytest.mark.parametrize("path", OPTIONS, ids=lambda path: path.stem)
    def test_an_option_gives_tokens_and_says_its_size(self, path):
        settings = self.read(path, 224)
        inspect.signature(TimmBackbone).bind(**settings)
        backbone = TimmBackbone(**{**settings, "pretrained": False}).to(
            "meta"
        )  # the big ones would take long
        tokens = backbone(torch.empty(2, 3, 224, 224, dtype=torch.uint8, device="meta"))
        assert tokens.shape[::2] == (2, backbone.num_features)
        assert tokens.shape[1] >= 49
        millions = sum(parameter.numel() for parameter in backbone.network.parameters()) / 1e6
        text = path.read_text(encoding="utf-8")
        assert float(re.match(r"# .*?([\d.]+) M parameters", text)[1]) == pytest.approx(
            millions, rel=0.03
        )
        if path.stem in PARAMETERS:
            assert millions == pytest.approx(PARAMETERS[path.stem], abs=0.005)
            assert backbone.num_features == 2048

    @pytest.mark.parametrize("path", OPTIONS, ids=lambda path: path.stem)
    def test_the_weights_that_an_option_asks_for_are_published(self, path):
        settings = self.read(path, 224)
        if settings.get("pretrained"):
            assert (
                timm.models.get_pretrained_cfg(settings["name"]).hf_hub_id
                == f"timm/{settings['name']}"
            )
            assert "." in settings["name"]  # a tag: timm's default may change

    @pytest.mark.parametrize("size", [224, 384, 448])
    def test_swin_takes_the_sizes_of_the_paper(self, size):
        settings = self.read(next(path for path in OPTIONS if path.stem == "swin_l"), size)
        slim = {"embed_dim": 16, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8)}
        backbone = TimmBackbone(**{**settings, "pretrained": False, "model_args": slim})
        assert backbone(photos(size, count=1)).shape == (1, (size // 32) ** 2, 128)

    def test_tiny_is_fast(self):
        settings = self.read(next(path for path in OPTIONS if path.stem == "tiny"), 64)
        backbone, images = TimmBackbone(**settings), photos(64, count=32)
        times = []
        for _ in range(4):
            start = time.process_time()
            tokens = backbone(images)
            tokens.square().mean().backward()
            times.append(time.process_time() - start)
        assert tokens.shape == (32, 16, 128)
        assert min(times) < 0.5  # seconds of processor time: 0.06 on an idle machine
