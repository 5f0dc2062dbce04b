"""`attach`: a head in a model of timm or torchvision."""

import copy
import pickle

import pytest
import timm
import torch
import torch.nn.functional as F
from torchvision import models
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.densenet import DenseNet
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

from mldec.backbones import TimmBackbone
from mldec.errors import ConfigError
from mldec.heads import GAP, MLDecoder, attach
from mldec.model import Classifier

SMALL = {"embed_dim": 16, "num_heads": 2, "mlp_dim": 16}
SIZE = 64  # pixels per side


def small_vit():
    return VisionTransformer(SIZE, 16, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=16)


def small_swin():
    return SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4])


def small_resnet():
    return ResNet(BasicBlock, [1, 1, 1, 1])


# Small networks of torchvision, and the path of their classifier.
POOLED = {
    "resnet": (small_resnet, "fc"),
    "regnet": (models.regnet_x_400mf, "fc"),
    "mobilenet_v2": (lambda: models.mobilenet_v2(width_mult=0.25), "classifier"),
    "mobilenet_v3": (lambda: models.mobilenet_v3_small(width_mult=0.5), "classifier"),
    "densenet": (lambda: DenseNet(8, (2, 2), 16), "classifier"),
    "swin": (small_swin, "head"),
}


IMAGES = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def perturbed(model):
    """Add noise to the parameters, because a weight of 0 or 1 could hide an error."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


SHALLOW = {"img_size": SIZE, "depth": 1, "embed_dim": 32, "num_heads": 2}
SWIN = {"img_size": SIZE, "depths": [1] * 4, "embed_dim": 16, "num_heads": [1] * 4}


@pytest.mark.parametrize(
    ("name", "options", "path"),
    [
        ("resnet10t", {}, "fc"),
        ("test_convnext", {}, "head.fc"),
        ("mobilenetv3_small_050", {}, "classifier"),
        ("deit_tiny_distilled_patch16_224", SHALLOW, "head"),
        ("swin_tiny_patch4_window7_224", SWIN, "head.fc"),
    ],
)
@torch.no_grad()
def test_timm_model_is_equal_to_classifier(name, options, path):
    torch.manual_seed(0)
    arguments = {key: value for key, value in options.items() if key != "img_size"}
    backbone = TimmBackbone(name, image_size=options.get("img_size"), model_args=arguments)
    head = MLDecoder(backbone.num_features, 7, **SMALL)
    classifier = perturbed(Classifier(backbone, head))

    model = attach(timm.create_model(name, **options), 7, **SMALL).eval()
    # Only the head is new. It has the name of the classifier.
    missing, unexpected = model.load_state_dict(backbone.network.state_dict(), strict=False)
    assert {key.removeprefix(f"{path}.") for key in missing} == set(head.state_dict())
    assert not unexpected
    model.get_submodule(path).load_state_dict(head.state_dict())

    logits = model((IMAGES - backbone.mean) / backbone.std)
    assert torch.equal(logits, classifier(IMAGES))
    assert model.num_classes == 7


@pytest.mark.parametrize("kind", POOLED)
@torch.no_grad()
def test_mean_token_is_the_pooled_feature_of_torchvision(kind):
    torch.manual_seed(0)
    build, path = POOLED[kind]
    model = perturbed(build())
    pooled = []
    handle = model.get_submodule(path).register_forward_pre_hook(
        lambda _, inputs: pooled.append(inputs[0])
    )
    model(IMAGES)
    handle.remove()

    width = pooled[0].shape[1]
    attach(model, width, head=GAP)
    head = model.get_submodule(path)
    head.fc.load_state_dict({"weight": torch.eye(width), "bias": torch.zeros(width)})
    torch.testing.assert_close(model(IMAGES), pooled[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_norm_of_torchvision_convnext_is_applied_to_each_token():
    torch.manual_seed(0)
    blocks = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)]
    model = perturbed(ConvNeXt(blocks, num_classes=5))
    norm = model.classifier[0]
    tokens = model.features(IMAGES).permute(0, 2, 3, 1).flatten(1, 2)
    tokens = F.layer_norm(tokens, (32,), norm.weight, norm.bias, norm.eps)
    attach(model, 5, **SMALL)
    torch.testing.assert_close(model(IMAGES), model.classifier[2](tokens))


@torch.no_grad()
def test_class_token_of_torchvision_vit_is_dropped():
    torch.manual_seed(0)
    model = perturbed(small_vit())
    encoded = []
    handle = model.encoder.register_forward_hook(lambda *call: encoded.append(call[2]))
    model(IMAGES)
    handle.remove()
    attach(model, 5, **SMALL)
    assert encoded[0].shape == (2, 17, 16)
    assert torch.equal(model(IMAGES), model.heads(encoded[0][:, 1:]))


@torch.no_grad()
def test_word_vectors_and_attention_are_passed_through():
    model = attach(small_resnet(), 5, num_groups=None, word_dim=6, **SMALL).eval()
    words = torch.randn(9, 6)
    logits, attention = model(IMAGES, words, attention=True)
    assert (logits.shape, attention.shape) == ((2, 9), (2, 9, 4))
    assert torch.equal(model(IMAGES, words), logits)


@pytest.mark.parametrize(
    ("build", "options", "error", "name"),
    [
        (lambda: models.vgg11(num_classes=2), {}, ConfigError, "VGG"),
        (lambda: timm.create_model("resnet10t", in_chans=1), {}, ConfigError, "ResNet"),
        (small_vit, {"num_heads": 5}, ConfigError, "num_heads"),
        (small_vit, {"num_grops": 3}, TypeError, "num_grops"),
    ],
)
def test_error_leaves_model_unchanged(build, options, error, name):
    with torch.device("meta"):
        model = build()
    kind = type(model)
    layers = list(model.modules())
    with pytest.raises(error, match=name):
        attach(model, 5, **options)
    assert type(model) is kind
    assert list(model.modules()) == layers


def test_image_shape_is_required_for_other_channels():
    model = timm.create_model("resnet10t", in_chans=1)
    attach(model, 5, image_shape=(1, SIZE, SIZE), **SMALL)
    assert model(torch.randn(2, 1, SIZE, SIZE)).shape == (2, 5)


@pytest.mark.parametrize(
    ("build", "duplicate"),
    [
        (lambda: timm.create_model("test_convnext"), copy.deepcopy),
        (small_vit, lambda model: pickle.loads(pickle.dumps(model))),
    ],
)
@torch.no_grad()
def test_copy_is_equal_and_independent(build, duplicate):
    model = attach(build(), 5, **SMALL).eval()
    expected = model(IMAGES)
    twin = duplicate(model)
    assert isinstance(twin, type(model).__mro__[2])
    for parameter in model.parameters():
        parameter.zero_()
    assert torch.equal(twin(IMAGES), expected)
    # The state dict fits a model that is built in the same way.
    again = attach(build(), 5, **SMALL).eval()
    again.load_state_dict(twin.state_dict())
    assert torch.equal(again(IMAGES), expected)


def test_modes_and_weights_are_kept_and_unused_layers_are_frozen():
    # The last convolution follows the pooling, so it is unused.
    model = timm.create_model("mobilenetv3_small_050")
    model.blocks.eval()
    before = copy.deepcopy(model.state_dict())
    attach(model, 5, **SMALL)
    assert (model.training, model.classifier.training, model.blocks.training) == (True, True, False)
    after = model.state_dict()
    kept = [key for key in before if not key.startswith("classifier.")]
    assert all(torch.equal(after[key], before[key]) for key in kept)

    model(IMAGES).square().sum().backward()
    without = {key for key, value in model.named_parameters() if value.grad is None}
    frozen = {key for key, value in model.named_parameters() if not value.requires_grad}
    assert without == frozen == {"conv_head.weight", "conv_head.bias"}
