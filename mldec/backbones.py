"""Backbones: one class that turns images into tokens with any image network of timm."""

import inspect
import math
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import huggingface_hub
import timm
import torch
from huggingface_hub.utils import EntryNotFoundError, get_session
from timm.models import get_arch_pretrained_cfgs, get_pretrained_cfg, load_state_dict
from timm.models._manipulate import group_with_matcher  # in its __all__, and exported nowhere else
from torch import Tensor, nn
from torch.func import functional_call

from mldec.errors import ConfigError, suggest

# B batch, H and W image height and width in pixels, N tokens, C backbone width

_FEATURE_NORMS = ["auto", "none", "pretrained", "new"]
# Arguments of timm that model_args must not hold. Some are settings of the backbone, and one of the
# two values would be ignored silently; `checkpoint_path` and `pretrained_cfg` would read a file or
# an address that nobody asked for.
_RESERVED = {"num_classes", "in_chans", "img_size", "drop_path_rate", "features_only"} | {
    argument for argument in inspect.signature(timm.create_model).parameters if argument != "kwargs"
}
# timm's arguments -> our settings, where the names differ.
_SETTINGS = {
    "img_size": "image_size",
    "drop_path_rate": "drop_path",
}
_REMEDY = (
    "give a file with backbone.pretrained=FILE, "
    "or backbone.pretrained=false to start from random weights"
)


class TimmBackbone(nn.Module):
    """Turn images into tokens with a network of timm's registry.

    Images are scaled to [0, 1] and normalised with the mean and standard deviation that the weights
    were trained with. Class and register tokens are dropped. The attributes `network`, `norm`,
    `mean` and `std` are public because their names are keys of a checkpoint; `num_features` is C,
    the width of the tokens.

    Args:
        name: a network of timm, with the tag of its weights if there are several:
            `resnet50.a1_in1k`.
        pretrained: true for timm's weights, which are downloaded once, or the path of a file with
            weights of this network (.safetensors, .pth).
        image_size: pixels per side, for a network that fixes it when built (ViT, Swin, Mixer); None
            for the default of timm.
        drop_path: highest rate of stochastic depth, in [0, 1).
        checkpointing: recompute activations in the backward pass, which saves memory and costs
            time.
        feature_norm: the norm of the tokens. `auto`: the one that the network has behind its
            pooling, if any; `pretrained`: the same, and an error if there is none; `new`: a fresh
            LayerNorm; `none`: no further norm.
        mean: of the three channels, for images in [0, 1]; None for that of timm's weights.
        std: likewise.
        model_args: further keyword arguments of the network's constructor in timm.

    Raises:
        ConfigError: if a setting does not fit the network, or the weights are not available.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        name: str,
        *,
        pretrained: bool | str = False,
        image_size: int | None = None,
        drop_path: float = 0.0,
        checkpointing: bool = False,
        feature_norm: str = "auto",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        model_args: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        arguments = _arguments(name, image_size, drop_path, model_args or {})
        self.network = _create(name, num_classes=0, **arguments)
        self.num_features: int = self.network.num_features
        self.norm = nn.LayerNorm(self.num_features) if feature_norm == "new" else nn.Identity()

        # Buffers, because the normalisation belongs to the weights: a checkpoint must hold it.
        cfg = self.network.pretrained_cfg
        self.register_buffer("mean", _channels("mean", cfg["mean"] if mean is None else mean))
        self.register_buffer("std", _channels("std", cfg["std"] if std is None else std))
        self._name = name
        self._num_prefix = _num_prefix_tokens(self.network)
        self._norm_path = _norm_path(self.network, name, feature_norm)
        self._freeze_unused(*((image_size, image_size) if image_size else cfg["input_size"][-2:]))

        if checkpointing:
            try:
                self.network.set_grad_checkpointing(True)
            except (AttributeError, AssertionError) as error:
                raise ConfigError(
                    f"backbone.checkpointing=true: {name} does not support it; leave it out"
                ) from error

        # At the end, so that nothing is downloaded before all other settings are known to be good.
        if pretrained:
            _load_weights(self.network, name, pretrained, arguments)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the tokens of a batch of images.

        Args:
            images: [B, 3, H, W], uint8 in 0..255, or floating point that is in [0, 1] already.

        Returns:
            [B, N, C], row by row over the image.

        Raises:
            ValueError: for images of another type.
            ConfigError: if the features of the network are neither a map nor a sequence of C
                channels.
        """
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        elif not images.is_floating_point():
            raise ValueError(
                f"images are {images.dtype}; give uint8 in 0..255 or floating point in [0, 1]"
            )

        # Autocast leaves both operations alone, so the images are normalised in the parameters'
        # type.
        images = (images.to(self.mean.dtype) - self.mean) / self.std
        return self.norm(self._tokens(self.network.forward_features(images)))

    def layers_below_head(self) -> dict[str, int]:
        """Return how many layers each parameter is below the head of the model, by its name.

        The layers are those of timm's layer decay: 1 for the last block, the most for the stem, and
        0 for what timm counts as part of the classifier, such as a norm behind the pooling.

        Raises:
            ConfigError: if timm does not know the layers of this network.
        """
        if not hasattr(self.network, "group_matcher"):
            raise ConfigError(
                f"optim.layer_decay: timm does not know the layers of {self._name}; leave it out"
            )

        # timm counts from the stem, and puts a name that it does not match at the end: "classifier"
        # stands for the classifier that this network does not have.
        named = [*self.network.named_parameters(), ("classifier", None)]
        matcher = self.network.group_matcher(coarse=False)
        layers = group_with_matcher(named, matcher, reverse=True)
        depth = {f"network.{name}": layers["classifier"] - layer for name, layer in layers.items()}
        return {name: depth.get(name, 0) for name, _ in self.named_parameters()}

    def _tokens(self, features: Any) -> Tensor:
        """Return the tokens [B, N, C] of a network's features.

        Args:
            features: a map [B, C, H, W] or [B, H, W, C], or a sequence [B, N, C] with class tokens.
        """
        shape = features.shape if isinstance(features, Tensor) else ()
        channels_last = len(shape) == 3 or getattr(self.network, "output_fmt", "NCHW") == "NHWC"
        if len(shape) not in (3, 4) or shape[-1 if channels_last else 1] != self.num_features:
            raise self._misfit(f"{list(shape)}" if shape else f"a {type(features).__name__}")

        # Before the map is flattened: the norm is made for the layout of its own network.
        if self._norm_path:
            features = self.network.get_submodule(self._norm_path)(features)

        if len(shape) == 3:
            return features[:, self._num_prefix :]
        return features.flatten(1, 2) if channels_last else features.flatten(2).transpose(1, 2)

    def _misfit(self, actual: str) -> ConfigError:
        """Return the error for features of a form that is not supported."""
        wanted = f"one map or sequence of {self.num_features} channels"
        return ConfigError(
            f"backbone.name={self._name}: its features are {actual}, not {wanted}; "
            f"take another network"
        )

    def _freeze_unused(self, height: int, width: int) -> None:
        """Check the layout with one image, and freeze parameters that the tokens do not depend on.

        Layers behind the features (the last convolution of a MobileNetV3, a norm that is not
        wanted) are kept, so that published weights fit. They get no gradient, which DDP would
        refuse, and weight decay would shrink them to zero.

        Args:
            height: of the image, in pixels.
            width: of the image, in pixels.

        Raises:
            ConfigError: if the network fails on such an image, or its features are not supported.
        """
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        trainable = [key for key, parameter in self.named_parameters() if parameter.requires_grad]

        # The meta device has shapes but no values: the trial takes no memory and draws no random
        # numbers.
        self.eval()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                meta = {key: torch.empty_like(value, device="meta") for key, value in own.items()}
                inputs = [meta[key].requires_grad_() for key in trainable]
                image = torch.empty(1, 3, height, width, dtype=self.mean.dtype, device="meta")
                tokens = functional_call(self, meta, (image,))
                gradients = torch.autograd.grad(tokens.sum(), inputs, allow_unused=True)
        except ConfigError:
            raise
        except Exception as error:
            trial = f"a trial image of {height} x {width} pixels failed ({_brief(error)})"
            raise ConfigError(
                f"backbone.name={self._name}: {trial}; take another network or size"
            ) from error
        self.train()

        # More tokens than patches mean that some of them are not of the image, such as class
        # tokens.
        grid = getattr(getattr(self.network, "patch_embed", None), "grid_size", None)
        most = math.prod(grid) if grid else tokens.shape[1]
        if not 0 < tokens.shape[1] <= most:
            raise self._misfit(f"{tokens.shape[1]} tokens where there are {most} patches")

        for key, gradient in zip(trainable, gradients, strict=True):
            if gradient is None:
                own[key].requires_grad_(False)


def _arguments(
    name: str, image_size: int | None, drop_path: float, model_args: dict[str, Any]
) -> dict[str, Any]:
    """Check the settings and return timm's keyword arguments.

    A setting that is left at its default is not passed on, because not every network takes it.

    Raises:
        ConfigError: for an unknown network or tag, a rate out of range, or a reserved argument.
    """
    architecture, _, tag = name.partition(".")

    # timm would also take the address of a repository or a folder here, and read it while building
    # the network. Only its registry is allowed.
    if not timm.is_model(architecture):
        near = get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() names all"
        raise ConfigError(
            f"backbone.name={name}: timm {timm.__version__} has no such network; {hint}"
        )

    tags = [known.partition(".")[2] for known in get_arch_pretrained_cfgs(architecture)]
    if tag and tag not in tags:
        raise ConfigError(
            f"backbone.name={name}: {architecture} has no weights of this tag{suggest(tag, tags)}"
        )

    if not 0 <= drop_path < 1:
        raise ConfigError(f"backbone.drop_path={drop_path}: give a rate in [0, 1)")
    if clash := sorted(_RESERVED & model_args.keys()):
        raise ConfigError(
            f"backbone.model_args.{clash[0]}: not to be set here; use the settings of the backbone"
        )

    size = {} if image_size is None else {"img_size": image_size}
    return model_args | size | ({"drop_path_rate": drop_path} if drop_path else {})


# Any: timm's networks have no common interface that a type checker could know.
def _create(name: str, **arguments: Any) -> Any:
    """Build a network without weights.

    Raises:
        ConfigError: if timm cannot build it with these arguments.
    """
    try:
        return timm.create_model(name, **arguments)
    except Exception as error:
        # An argument that the constructor does not have is a setting that this network does not
        # take.
        unknown = re.search(r"unexpected keyword argument\W+(?:s\W+)?(\w+)", str(error))
        if isinstance(error, TypeError) and unknown:
            setting = _SETTINGS.get(unknown[1], f"model_args.{unknown[1]}")
            message = (
                f"backbone.{setting}={arguments.get(unknown[1])}: "
                f"{name} takes no such setting; leave it out"
            )
            raise ConfigError(message) from error

        settings = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise ConfigError(
            f"backbone: timm cannot build {name} with {settings}: {_brief(error)}"
        ) from error


def _norm_path(network: Any, name: str, feature_norm: str) -> str | None:
    """Return the path of the norm behind the pooling of a network, such as `head.norm` of ConvNeXt.

    None if there is no such norm, or `feature_norm` does not use it.

    Raises:
        ConfigError: for an unknown `feature_norm`, or `pretrained` for a network without such a
            norm.
    """
    if feature_norm not in _FEATURE_NORMS:
        raise ConfigError(
            f"backbone.feature_norm={feature_norm}: unknown{suggest(feature_norm, _FEATURE_NORMS)}"
        )
    if feature_norm in ("none", "new"):
        return None

    for path in ("head.norm", "fc_norm"):
        with suppress(AttributeError):
            # Only norms over channels have this attribute. A norm of another width comes after a
            # further layer.
            if tuple(network.get_submodule(path).normalized_shape) == (network.num_features,):
                return path

    if feature_norm == "pretrained":
        raise ConfigError(
            f"backbone.feature_norm=pretrained: {name} has no norm behind its pooling; "
            f"use auto or new"
        )
    return None


def _num_prefix_tokens(network: Any) -> int:
    """Return the number of class and register tokens in front of the image's tokens."""
    # The attribute is missing or None on a CNN, and missing on VOLO, which has one class token.
    return int(getattr(network, "num_prefix_tokens", hasattr(network, "cls_token")) or 0)


def _channels(setting: str, values: Sequence[float]) -> Tensor:
    """Return three values, one per channel, as a tensor [3, 1, 1]."""
    if len(values) != 3 or (setting == "std" and min(values) <= 0):
        raise ConfigError(
            f"backbone.{setting}={list(values)}: give red, green and blue in [0, 1]; std is above 0"
        )

    return torch.tensor([float(value) for value in values]).view(3, 1, 1)


def _load_weights(
    network: Any, name: str, pretrained: bool | str, arguments: dict[str, Any]
) -> None:
    """Fill the whole network with published weights or those of a file.

    timm does not load strictly if the number of classes differs: layers that the weights lack stay
    random without a warning. So the weights go into a second network with their own number of
    classes, which timm fills strictly (adapting them as it does, to another image size for
    example), and from there into ours.

    Args:
        network: takes the weights; it has no classifier.
        name: of the network in timm.
        pretrained: True for timm's weights, or the path of a file.
        arguments: the other arguments that the network was built with.

    Raises:
        ConfigError: if the weights are not available, or do not fit the network.
    """
    state = _published(name) if pretrained is True else _from_file(str(pretrained))
    num_classes = _num_classes(state, network)

    # With an overlay, timm takes the weights from `state_dict` and downloads nothing.
    overlay = {"state_dict": state, "num_classes": num_classes, "label_offset": 0}
    arguments = {**arguments, "num_classes": num_classes, "pretrained_cfg_overlay": overlay}
    try:
        # The second network draws random numbers, but the head must start alike with and without
        # pretrained weights.
        with torch.random.fork_rng(devices=[]):
            weights = timm.create_model(name, pretrained=True, **arguments).state_dict()
        network.load_state_dict({key: weights[key] for key in network.state_dict()})
    except Exception as error:
        value = "true" if pretrained is True else pretrained
        misfit = f"the weights do not fit {name} with these settings ({_brief(error)})"
        raise ConfigError(f"backbone.pretrained={value}: {misfit}; {_REMEDY}") from error


def _num_classes(state: dict[str, Any], network: Any) -> int:
    """Return the number of classes of weights: the rows of their classifier, 0 without one."""
    cfg = network.pretrained_cfg
    classifier = cfg["classifier"]
    layers = [classifier] if isinstance(classifier, str) else list(classifier or ())

    # In files of other programs the classifier often has one of these two names.
    for layer in (*layers, "head", "fc"):
        if f"{layer}.weight" in state:
            return len(state[f"{layer}.weight"])

    # Our network has no classifier either. Otherwise let timm say what is wrong.
    return 0 if state.keys() == network.state_dict().keys() else cfg["num_classes"]


def _from_file(path: str) -> dict[str, Any]:
    """Read the weights in a file of plain tensors.

    Raises:
        ConfigError: if the file is missing, or is not a .safetensors or .pth file of plain tensors.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"backbone.pretrained={path}: no such file; {_REMEDY}")

    try:
        state = load_state_dict(str(file), weights_only=True)
        # timm would treat an empty dictionary as none, and download weights.
        if not state:
            raise ValueError("no tensors")
    except Exception as error:
        # The messages about a broken or hostile file are long and do not help a user.
        fault = "not a .safetensors or .pth file of plain tensors"
        raise ConfigError(f"backbone.pretrained={path}: {fault}; {_REMEDY}") from error
    return state


def _published(name: str) -> dict[str, Any]:
    """Return the weights that timm publishes for a network; they are downloaded only once.

    Raises:
        ConfigError: if there are none, or they cannot be downloaded.
    """
    cfg = get_pretrained_cfg(name)
    if not cfg or not cfg.has_weights:
        raise ConfigError(
            f"backbone.pretrained=true: timm publishes no weights of {name}; {_REMEDY}"
        )

    try:
        if cfg.hf_hub_id:
            return load_state_dict(_hub_file(cfg.hf_hub_id), weights_only=True)

        # torch reports a download on standard output, which is for results.
        with redirect_stdout(sys.stderr):
            return torch.hub.load_state_dict_from_url(
                str(cfg.url), map_location="cpu", weights_only=True
            )
    except Exception as error:
        address = (
            f"{huggingface_hub.constants.ENDPOINT}/{cfg.hf_hub_id}" if cfg.hf_hub_id else cfg.url
        )
        fault = f"the weights of {name} cannot be had from {address} ({_brief(error)})"
        raise ConfigError(f"backbone.pretrained=true: {fault}; {_REMEDY}") from error


def _hub_file(repository: str) -> str:
    """Return the local path of a repository's weights, downloaded if they are not in the cache.

    Raises:
        FileNotFoundError: if the repository holds no file of weights.
        Exception: any of huggingface_hub, if the download fails.
    """
    for offline in (True, False):
        # Without a network, this request fails at once, whereas a download retries for a minute.
        if not offline:
            get_session().head(huggingface_hub.constants.ENDPOINT, timeout=10)
        for filename in ("model.safetensors", "pytorch_model.bin"):
            with suppress(EntryNotFoundError):
                return huggingface_hub.hf_hub_download(
                    repository, filename, local_files_only=offline
                )

    raise FileNotFoundError("no weights in this repository")


def _brief(error: Exception) -> str:
    """Return the type and the message of an error, in one line of at most 160 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]
