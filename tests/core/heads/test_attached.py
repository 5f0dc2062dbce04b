"""A head in models of timm and torchvision: the same numbers as elsewhere, and still that model."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision import models
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.densenet import DenseNet
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

from mldec.backbones import TimmBackbone
from mldec.errors import ConfigError
from mldec.heads import GAP, MLDecoder, Query2Label, attach
from mldec.heads.ml_decoder import OFFICIAL_NAMES as ML_DECODER
from mldec.model import Classifier

SMALL: dict[str, Any] = {"embed_dim": 16, "num_heads": 2, "mlp_dim": 16}
SIZE = 64  # of all images below, in pixels


def small_convnext() -> ConvNeXt:
    return ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=5)


def small_vit() -> VisionTransformer:
    return VisionTransformer(SIZE, 16, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=16)


def small_swin() -> SwinTransformer:
    return SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4])


# Small networks of torchvision, and the layer that takes their pooled features.
POOLED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet": (lambda: ResNet(BasicBlock, [1, 1, 1, 1]), "fc"),
    "regnet": (models.regnet_x_400mf, "fc"),
    "efficientnet": (models.efficientnet_b0, "classifier"),
    "mobilenet_v2": (lambda: models.mobilenet_v2(width_mult=0.25), "classifier"),
    "mobilenet_v3": (lambda: models.mobilenet_v3_small(width_mult=0.5), "classifier"),
    "densenet": (lambda: DenseNet(8, (2, 2), 16), "classifier"),
    "swin": (small_swin, "head"),
}


def photos(count: int = 2) -> Tensor:
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def perturbed(model: nn.Module) -> Any:
    """Return a model in evaluation mode without parameters of 0 or 1, so that each one counts."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def small_resnet(num_classes: int = 5, **head: Any) -> Any:
    torch.manual_seed(0)
    model = perturbed(ResNet(BasicBlock, [1, 1, 1, 1]))
    return attach(model, num_classes, **{**SMALL, **head})


class TestNumbers:
    @pytest.mark.parametrize(
        ("name", "size", "path"),
        [
            ("resnet18", {}, "fc"),
            ("tresnet_m", {}, "head.fc"),
            ("convnext_atto", {}, "head.fc"),
            ("mobilenetv3_small_050", {}, "classifier"),
            ("vit_tiny_patch16_224", {"img_size": SIZE}, "head"),
            ("deit_tiny_distilled_patch16_224", {"img_size": SIZE}, "head"),
            ("swin_tiny_patch4_window7_224", {"img_size": SIZE}, "head.fc"),
        ],
    )
    @torch.no_grad()
    def test_a_model_of_timm_equals_our_classifier_to_the_last_bit(
        self, name: str, size: dict[str, int], path: str
    ) -> None:
        torch.manual_seed(0)
        backbone = TimmBackbone(name, image_size=size.get("img_size"))
        head = MLDecoder(backbone.num_features, 7, **SMALL)
        classifier = perturbed(Classifier(backbone, head))

        model = attach(timm.create_model(name, **size), 7, **SMALL).eval()
        # A head behind the classifier's own name, and nothing else, is new.
        missing, unexpected = model.load_state_dict(backbone.network.state_dict(), strict=False)
        assert {key.removeprefix(f"{path}.") for key in missing} == set(head.state_dict())
        assert not unexpected
        model.get_submodule(path).load_state_dict(head.state_dict())

        images = torch.rand(2, 3, SIZE, SIZE)
        logits = model((images - backbone.mean) / backbone.std)
        assert torch.equal(logits, classifier(images))
        assert model.num_classes == 7

    @pytest.mark.parametrize("kind", POOLED)
    @torch.no_grad()
    def test_the_mean_of_the_tokens_is_what_torchvision_pools(self, kind: str) -> None:
        torch.manual_seed(0)
        build, path = POOLED[kind]
        model = perturbed(build())
        pooled: list[Tensor] = []
        handle = model.get_submodule(path).register_forward_pre_hook(
            lambda _, inputs: pooled.append(inputs[0])
        )
        model(photos())
        handle.remove()

        width = pooled[0].shape[1]
        attach(model, width, head=GAP)
        head = model.get_submodule(path)
        head.fc.load_state_dict({"weight": torch.eye(width), "bias": torch.zeros(width)})
        torch.testing.assert_close(model(photos()), pooled[0], rtol=1e-4, atol=1e-5)

    @torch.no_grad()
    def test_the_norm_of_torchvisions_convnext_is_applied_to_each_token(self) -> None:
        torch.manual_seed(0)
        model = perturbed(small_convnext())
        norm = model.classifier[0]
        tokens = model.features(photos()).permute(0, 2, 3, 1).flatten(1, 2)
        tokens = F.layer_norm(tokens, (32,), norm.weight, norm.bias, norm.eps)
        attach(model, 5, **SMALL)
        torch.testing.assert_close(model(photos()), model.classifier[2](tokens))

    @torch.no_grad()
    def test_the_class_token_of_torchvisions_vit_is_dropped(self) -> None:
        torch.manual_seed(0)
        model = perturbed(small_vit())
        encoded: list[Tensor] = []
        handle = model.encoder.register_forward_hook(lambda *call: encoded.append(call[2]))
        model(photos())
        handle.remove()
        attach(model, 5, **SMALL)
        assert encoded[0].shape == (2, 17, 16)
        assert torch.equal(model(photos()), model.heads(encoded[0][:, 1:]))

    @torch.no_grad()
    def test_a_whole_resnet_of_the_official_code_loads(self) -> None:
        ours = small_resnet()
        state = {}
        for key, value in ours.state_dict().items():
            if key.startswith("fc."):
                key = key.removeprefix("fc.")
                for official, name in reversed(ML_DECODER):
                    key = re.sub(rf"\b{re.escape(name)}\b", official, key)
                key = f"fc.{key}"
            state[key] = value
        assert "fc.decoder.duplicate_pooling" in state

        other = small_resnet()
        for parameter in other.parameters():
            parameter.zero_()
        other.load_state_dict(state)
        assert torch.equal(other(photos()), ours(photos()))


class TestArguments:
    def test_any_head_can_be_attached(self) -> None:
        options = {**SMALL, "input_proj": True}
        model = attach(small_vit(), 4, head=Query2Label, **options)
        assert isinstance(model.heads, Query2Label)
        assert model(photos()).shape == (2, 4)

    @torch.no_grad()
    def test_queries_and_attention_go_to_and_from_the_head(self) -> None:
        model = small_resnet(num_groups=None, word_dim=6)
        words = torch.randn(9, 6)
        logits, attention = model(photos(), words, attention=True)
        assert (logits.shape, attention.shape) == ((2, 9), (2, 9, 4))
        assert torch.equal(model(photos(), words), logits)

    def test_another_head_replaces_the_first(self) -> None:
        model = small_resnet()
        kind = type(model)
        attach(model, 11, head=GAP)
        assert type(model) is kind
        assert isinstance(model.fc, GAP)
        assert model(photos()).shape == (2, 11)

    def test_a_network_of_grey_images_needs_their_shape(self) -> None:
        model = timm.create_model("resnet18", in_chans=1)
        with pytest.raises(ConfigError, match="a trial image of 224 x 224 pixels failed"):
            attach(model, 5)
        attach(model, 5, image_shape=(1, SIZE, SIZE), **SMALL)
        assert model(torch.randn(2, 1, SIZE, SIZE)).shape == (2, 5)


class TestRefusals:
    @pytest.mark.parametrize(
        ("build", "fault"),
        [
            (lambda: models.vgg11(num_classes=2), "VGG: it is none of these"),
            (lambda: nn.Linear(3, 4), "Linear: it is none of these"),
            (lambda: timm.create_model("crossvit_tiny_240"), "CrossVit: its features are a list"),
            (
                lambda: timm.create_model("resnet18", features_only=True),
                "FeatureListNet: it is none of these",
            ),
        ],
    )
    def test_other_models_are_refused_in_one_line(
        self, build: Callable[[], nn.Module], fault: str
    ) -> None:
        with torch.device("meta"):
            model = build()
        kind, layers = type(model), list(model.modules())
        with pytest.raises(ConfigError) as caught:
            attach(model, 5)
        message = str(caught.value)
        assert message.startswith(f"attach: {fault}")
        assert "timm" in message
        assert "torchvision: ResNet, " in message
        assert "\n" not in message
        assert type(model) is kind
        assert list(model.modules()) == layers

    @pytest.mark.parametrize(
        ("options", "error"),
        [({"num_heads": 5}, ConfigError), ({"num_grops": 3}, TypeError)],
    )
    def test_a_wrong_option_leaves_the_model_as_it_was(
        self, options: dict[str, int], error: type[Exception]
    ) -> None:
        model = small_vit()
        layers = list(model.modules())
        with pytest.raises(error, match=next(iter(options))):
            attach(model, 5, **options)
        assert type(model) is VisionTransformer
        assert list(model.modules()) == layers


class TestItIsStillThatModel:
    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
    )
    @pytest.mark.parametrize("timm_model", [False, True])
    @torch.no_grad()
    def test_a_copy_gives_the_same_and_is_independent(
        self, duplicate: Callable[[Any], Any], timm_model: bool
    ) -> None:
        if timm_model:
            model = attach(timm.create_model("convnext_atto"), 5, **SMALL).eval()
        else:
            model = small_resnet()
        expected = model(photos())
        twin = duplicate(model)
        assert isinstance(twin, type(model).__mro__[2])
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(photos()), expected)
        assert attach(twin, 3, **SMALL)(photos()).shape == (2, 3)

    @torch.no_grad()
    def test_a_state_dict_is_taken_by_a_model_built_alike(self, tmp_path: Path) -> None:
        model = small_resnet()
        torch.save(model.state_dict(), tmp_path / "model.pth")
        other = attach(ResNet(BasicBlock, [1, 1, 1, 1]), 5, **SMALL).eval()
        other.load_state_dict(torch.load(tmp_path / "model.pth", weights_only=True))
        assert torch.equal(other(photos()), model(photos()))

    def test_modes_and_statistics_stay(self) -> None:
        model = ResNet(Bottleneck, [1, 1, 1, 1])
        model.layer1.eval()
        before = copy.deepcopy(model.state_dict())
        attach(model, 5, **SMALL)
        assert (model.training, model.fc.training, model.layer1.training) == (True, True, False)
        after = model.state_dict()
        kept = [key for key in before if not key.startswith("fc.")]
        assert all(torch.equal(after[key], before[key]) for key in kept)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    @torch.no_grad()
    def test_the_head_has_the_number_format_of_the_model(self, dtype: torch.dtype) -> None:
        model = attach(small_vit().to(dtype), 5, **SMALL).eval()
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert model(photos().to(dtype)).dtype == dtype

    @torch.no_grad()
    def test_autocast_stays_near_float32(self) -> None:
        model = small_resnet()
        exact = model(photos())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(photos())
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, exact, rtol=0, atol=0.1)

    @pytest.mark.slow
    @torch.no_grad()
    def test_it_is_compiled_in_one_graph(self) -> None:
        model = attach(small_vit(), 5, **SMALL).eval()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(photos()), model(photos()))

    def test_ddp_finds_a_gradient_for_every_parameter(self, tmp_path: Path) -> None:
        # Its last convolution stands behind the pooling, so that nothing uses it any more.
        model = attach(timm.create_model("mobilenetv3_small_050"), 5, **SMALL)
        assert not model.conv_head.weight.requires_grad
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
        try:
            parallel = DistributedDataParallel(model)
            for _ in range(2):  # DDP complains of a parameter without gradient at the second step
                parallel(photos()).square().sum().backward()
        finally:
            dist.destroy_process_group()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
