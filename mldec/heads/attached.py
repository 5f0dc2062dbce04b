"""A head in a model of timm or torchvision, in the place of its pooling and classifier."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mldec.backbones.tokens import check_patches, freeze, norm_behind_pooling, timm_tokens, try_out
from mldec.errors import ConfigError, refusing
from mldec.heads.ml_decoder import MLDecoder

# Any: the models of timm and torchvision have no common interface that a type checker could know.


class Form(NamedTuple):
    """What a kind of models needs: where its head goes, and how its tokens are computed.

    The head takes the place of the first of the classifiers, which are paths of layers; the others,
    of a distilled model, become `nn.Identity`. The tokens may be a map too.
    """

    classifiers: tuple[str, ...]
    tokens: Callable[[Any, Tensor], Tensor]


def _in_order(layers: tuple[str, ...], model: Any, images: Tensor) -> Tensor:
    """Apply layers of a model one after the other."""
    features = images
    for layer in layers:
        features = model.get_submodule(layer)(features)
    return features


def _densenet(model: Any, images: Tensor) -> Tensor:
    # Its last ReLU is not a layer.
    return model.features(images).relu()


def _swin(model: Any, images: Tensor) -> Tensor:
    return model.norm(model.features(images)).flatten(1, 2)


def _vit(model: Any, images: Tensor) -> Tensor:
    patches = model._process_input(images)
    class_token = model.class_token.expand(patches.shape[0], -1, -1)
    return model.encoder(torch.cat([class_token, patches], 1))[:, 1:]


_RESNET = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
_FEATURES = Form(("classifier",), partial(_in_order, ("features",)))
# Classes of torchvision.models, by name because importing them takes longer than all else here. The
# norm of ConvNeXt that stands behind the pooling is applied to each token.
_TORCHVISION = {
    "resnet.ResNet": Form(("fc",), partial(_in_order, _RESNET)),
    "regnet.RegNet": Form(("fc",), partial(_in_order, ("stem", "trunk_output"))),
    "convnext.ConvNeXt": Form(("classifier.2",), partial(_in_order, ("features", "classifier.0"))),
    "efficientnet.EfficientNet": _FEATURES,
    "mobilenetv2.MobileNetV2": _FEATURES,
    "mobilenetv3.MobileNetV3": _FEATURES,
    "densenet.DenseNet": Form(("classifier",), _densenet),
    "swin_transformer.SwinTransformer": Form(("head",), _swin),
    "vision_transformer.VisionTransformer": Form(("heads",), _vit),
}
_POOLINGS = {"avgpool", "global_pool", "head.global_pool", "attn_pool"}


class Attached(nn.Module):
    """Mixed into the class of a model that has a head of ours."""

    _form: Form

    def forward(self, images: Tensor, *args: Any, **options: Any) -> Tensor:
        """Map images [B, 3, H, W], normalised as the model's weights need it, to logits [B, K].

        The rest is passed on to the head: queries [K, D_w], `attention=True`.
        """
        head = self.get_submodule(self._form.classifiers[0])
        return head(self._form.tokens(self, images), *args, **options)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle the model by its own class, since its present class has no module."""
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

    `model(images)` then gives logits [B, K]. Images are floating point and normalised by the
    caller, as the weights need it. The head stands where the classifier stood, under its name.
    Class and register tokens are dropped, and a norm behind the pooling is applied to each token,
    as in `TimmBackbone`. Layers behind the features are frozen.

    Args:
        model: a network of timm whose features are one map or one sequence of tokens, or ResNet,
            RegNet, ConvNeXt, EfficientNet, MobileNetV2, MobileNetV3, DenseNet, SwinTransformer or
            VisionTransformer of torchvision. A head that is attached already is replaced.
        num_classes: number of classes K.
        head: a class of this package, called with the width of the tokens and K.
        image_shape: channels, height and width that the model accepts; None for those that it was
            built with. Only a network of timm with other channels than its published weights needs
            it, or one that hides its size.
        options: keywords of the head, such as `num_groups=100`.

    Returns:
        The same model, whose class is now a subclass of its own.

    Raises:
        ConfigError: if the model has none of these forms; it is then as before.
    """
    kinds = ", ".join(kind.partition(".")[2] for kind in _TORCHVISION)
    remedy = f"take a network of timm that gives one map or sequence, or of torchvision: {kinds}"
    with refusing(f"attach: {type(model).__name__}", ConfigError, remedy=remedy):
        form = model._form if isinstance(model, Attached) else _form_of(model)
        trial = _Tokens(model, form)
        tokens, unused = try_out(trial, image_shape or _image_shape(model))
        check_patches(model, tokens)

    # Everything that can go wrong is done before the model changes.
    decoder = head(tokens.shape[2], num_classes, **options)
    parameter = next(model.parameters())
    decoder.to(parameter.device, parameter.dtype).train(model.training)

    freeze(trial, unused)
    path, *others = form.classifiers
    model.set_submodule(path, decoder)
    other_classifiers = set(others)
    poolings = _POOLINGS & dict(model.named_modules()).keys()
    for name in other_classifiers | poolings:
        model.set_submodule(name, nn.Identity())

    if hasattr(model, "num_classes"):
        model.num_classes = num_classes
    model._form = form
    if not isinstance(model, Attached):
        model.__class__ = _attached_class(type(model))
    return model


class _Tokens(nn.Module):
    """A model that gives its tokens [B, N, C]: what a trial needs."""

    def __init__(self, model: nn.Module, form: Form) -> None:
        super().__init__()
        self.model = model
        self._form = form

    def forward(self, images: Tensor) -> Tensor:
        tokens = self._form.tokens(self.model, images)
        return tokens.flatten(2).transpose(1, 2) if tokens.ndim == 4 else tokens


def _form_of(model: Any) -> Form:
    """Return the form of a model, from its class."""
    for cls in type(model).__mro__:
        package, _, kind = f"{cls.__module__}.{cls.__qualname__}".partition("torchvision.models.")
        if not package and kind in _TORCHVISION:
            return _TORCHVISION[kind]

    # timm keeps these two in every image network; `features_only=True` makes something else.
    classifiers = getattr(model, "pretrained_cfg", {}).get("classifier")
    if not classifiers or not hasattr(model, "forward_features"):
        raise ValueError("it is none of these")
    paths = (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)
    return Form(paths, partial(timm_tokens, norm_path=norm_behind_pooling(model)))


def _image_shape(model: Any) -> tuple[int, ...]:
    """Return channels, height and width of the images that a model was built for."""
    sides = getattr(getattr(model, "patch_embed", None), "img_size", None)  # timm
    if sides is None and hasattr(model, "image_size"):  # ViT of torchvision
        sides = (model.image_size, model.image_size)
    if sides is None:
        sides = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))[-2:]
    return (3, *sides)


def _attached_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"{base.__name__}WithHead", (Attached, base), {})


def _blank(base: type[nn.Module]) -> nn.Module:
    """Return a model without content, to be filled by `copy` or `pickle`."""
    cls = _attached_class(base)
    return cls.__new__(cls)
