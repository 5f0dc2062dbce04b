"""Replace the pooling and classifier of a timm or torchvision model by a head."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mldec.errors import ConfigError, naming_errors
from mldec.heads.ml_decoder import MLDecoder
from mldec.tokens import (
    check_patches,
    classifier_paths,
    freeze,
    norm_behind_pooling,
    timm_tokens,
    try_out,
)

# Models are typed as Any, because timm and torchvision models have no common interface.


class Layout(NamedTuple):
    """Paths of the classifiers of a model class, and the computation of its tokens."""

    # The head replaces the first classifier. Distilled models have a second one, which becomes
    # `nn.Identity`.
    classifiers: tuple[str, ...]
    # Maps a model and images to tokens [B, N, C] or to a map [B, C, H, W].
    tokens: Callable[[Any, Tensor], Tensor]


def _apply(layers: tuple[str, ...], model: Any, images: Tensor) -> Tensor:
    """Apply layers of a model in order."""
    features = images
    for layer in layers:
        features = model.get_submodule(layer)(features)
    return features


def _densenet(model: Any, images: Tensor) -> Tensor:
    # The last ReLU is not a module.
    return model.features(images).relu()


def _swin(model: Any, images: Tensor) -> Tensor:
    return model.norm(model.features(images)).flatten(1, 2)


def _vit(model: Any, images: Tensor) -> Tensor:
    patches = model._process_input(images)
    class_token = model.class_token.expand(patches.shape[0], -1, -1)
    return model.encoder(torch.cat([class_token, patches], 1))[:, 1:]


_RESNET = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
_FEATURES = Layout(("classifier",), partial(_apply, ("features",)))
# Classes of torchvision.models. They are listed by name, because their import is slow. The norm
# after the pooling of ConvNeXt is applied to each token.
_TORCHVISION = {
    "resnet.ResNet": Layout(("fc",), partial(_apply, _RESNET)),
    "regnet.RegNet": Layout(("fc",), partial(_apply, ("stem", "trunk_output"))),
    "convnext.ConvNeXt": Layout(("classifier.2",), partial(_apply, ("features", "classifier.0"))),
    "efficientnet.EfficientNet": _FEATURES,
    "mobilenetv2.MobileNetV2": _FEATURES,
    "mobilenetv3.MobileNetV3": _FEATURES,
    "densenet.DenseNet": Layout(("classifier",), _densenet),
    "swin_transformer.SwinTransformer": Layout(("head",), _swin),
    "vision_transformer.VisionTransformer": Layout(("heads",), _vit),
}
_POOLINGS = {"avgpool", "global_pool", "head.global_pool", "attn_pool"}


class Attached(nn.Module):
    """Mixin for the class of a model with an attached head."""

    _layout: Layout

    def forward(self, images: Tensor, *args: Any, **options: Any) -> Tensor:
        """Compute the output of the head for normalized images [B, 3, H, W].

        The other arguments are passed to the head, such as word vectors or `attention=True`.
        """
        head = self.get_submodule(self._layout.classifiers[0])
        return head(self._layout.tokens(self, images), *args, **options)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle by the original class, because the new class is not importable."""
        return _blank, (type(self).__mro__[2],), self.__getstate__()


def attach(
    model: Any,
    num_classes: int,
    *,
    head: Callable[..., nn.Module] = MLDecoder,
    image_shape: tuple[int, int, int] | None = None,
    **options: Any,
) -> Any:
    """Replace the pooling and classifier of a model by a head, in place.

    `model(images)` then returns logits [B, K] of normalized images. The head is registered under
    the name of the classifier. Class and register tokens are dropped. A norm after the pooling is
    applied to each token, as in `TimmBackbone`. Unused layers are frozen.

    Args:
        model: A timm network whose features are one map or one token sequence, or a ResNet, RegNet,
            ConvNeXt, EfficientNet, MobileNetV2, MobileNetV3, DenseNet, SwinTransformer or
            VisionTransformer of torchvision. An attached head is replaced.
        num_classes: Number of classes K.
        head: A head class of this package. It is called with the token width and K.
        image_shape: Channels, height and width of the input images. None for three channels and the
            image size of the model's config, or 224 pixels if it has none.
        options: Keyword arguments of the head, such as `num_groups=100`.

    Returns:
        The same model. Its class is now a subclass of the original class.

    Raises:
        ConfigError: If the model is not supported. The model is unchanged after an error.
    """
    kinds = ", ".join(kind.partition(".")[2] for kind in _TORCHVISION)
    remedy = f"supported: timm networks with one map or sequence, and torchvision: {kinds}"
    with naming_errors(f"attach: {type(model).__name__}", ConfigError, remedy=remedy):
        layout = model._layout if isinstance(model, Attached) else _layout_of(model)
        trial = _Tokens(model, layout)
        tokens, unused = try_out(trial, image_shape or _image_shape(model))
        check_patches(model, tokens)

    # Build the head first, so that an error leaves the model unchanged.
    decoder = head(tokens.shape[2], num_classes, **options)
    parameter = next(model.parameters())
    decoder.to(parameter.device, parameter.dtype).train(model.training)

    freeze(trial, unused)
    model.set_submodule(layout.classifiers[0], decoder)
    poolings = _POOLINGS & dict(model.named_modules()).keys()
    for name in poolings.union(layout.classifiers[1:]):
        model.set_submodule(name, nn.Identity())

    if hasattr(model, "num_classes"):
        model.num_classes = num_classes
    model._layout = layout
    if not isinstance(model, Attached):
        model.__class__ = _attached_class(type(model))
    return model


class _Tokens(nn.Module):
    """Wrapper whose forward returns the tokens [B, N, C] of a model."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.model = model
        self._layout = layout

    def forward(self, images: Tensor) -> Tensor:
        tokens = self._layout.tokens(self.model, images)
        if tokens.ndim == 4:
            tokens = tokens.flatten(2).transpose(1, 2)
        return tokens


def _layout_of(model: Any) -> Layout:
    """Return the layout of a model, based on its class."""
    for cls in type(model).__mro__:
        package, _, kind = f"{cls.__module__}.{cls.__qualname__}".partition("torchvision.models.")
        if not package and kind in _TORCHVISION:
            return _TORCHVISION[kind]

    # Every timm image network has both, except for those built with `features_only=True`.
    classifiers = classifier_paths(model)
    if not classifiers or not hasattr(model, "forward_features"):
        raise ValueError("unsupported class")
    return Layout(classifiers, partial(timm_tokens, norm_path=norm_behind_pooling(model)))


def _image_shape(model: Any) -> tuple[int, ...]:
    """Return channels, height and width of the input images of a model."""
    sides = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))[-2:]
    if hasattr(model, "image_size"):  # ViT of torchvision
        sides = (model.image_size, model.image_size)
    patch_embed = getattr(model, "patch_embed", None)  # timm
    height, width = getattr(patch_embed, "img_size", None) or sides
    return 3, height, width


def _attached_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"{base.__name__}WithHead", (Attached, base), {})


def _blank(base: type[nn.Module]) -> nn.Module:
    """Return an uninitialized model, to be filled by `copy` or `pickle`."""
    cls = _attached_class(base)
    return cls.__new__(cls)
