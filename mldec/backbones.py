"""Backbones: every image network of timm behind one class, from raw images to tokens."""

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
from torch import Tensor, nn
from torch.func import functional_call

from mldec.errors import ConfigError, suggest

# B batch, H and W image height and width in pixels, N tokens, C backbone width

_FEATURE_NORMS = ["auto", "none", "pretrained", "new"]
# Arguments of timm that are not for model_args: a second way to say them would win or lose in silence, and
# `checkpoint_path` or `pretrained_cfg` in a config would read a file or an address that nobody asked for.
_RESERVED = {"num_classes", "in_chans", "img_size", "drop_path_rate", "features_only"} | {
    argument for argument in inspect.signature(timm.create_model).parameters if argument != "kwargs"
}
_SETTINGS = {
    "img_size": "image_size",
    "drop_path_rate": "drop_path",
}  # where our word is not timm's
_REMEDY = "give a file with backbone.pretrained=FILE, or backbone.pretrained=false to start from random weights"


class TimmBackbone(nn.Module):
    """Turn images into tokens with a network of timm's registry.

    Images are scaled to [0, 1] and normalised with the mean and standard deviation that the weights were trained with.
    Class and register tokens are dropped. The parts `network`, `norm`, `mean` and `std` have plain names because these
    are the keys of a checkpoint; `num_features` is C, the width of the tokens.

    Args:
        name: a network of timm, with the tag of its weights where there are several: `resnet50.a1_in1k`.
        pretrained: true for timm's weights (downloaded once), or a file of this network's weights (.safetensors, .pth).
        image_size: pixels a side, for a network that fixes it when built (ViT, Swin, Mixer); timm's own if unset.
        drop_path: highest rate of stochastic depth, in [0, 1).
        checkpointing: recompute activations in the backward pass: less memory, more time.
        feature_norm: the norm of the tokens. `auto`: the one that the network keeps behind its pooling, if any;
            `pretrained`: the same, and an error if there is none; `new`: a fresh LayerNorm; `none`: no further norm.
        mean: of the three channels, for images in [0, 1]; what timm says of the weights if unset.
        std: likewise.
        model_args: further keyword arguments of the network's constructor in timm.

    Raises:
        ConfigError: a setting does not fit the network, or the weights cannot be had.
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
        if pretrained:  # at the end: no download before every other setting is known to be good
            _load_weights(self.network, name, pretrained, arguments)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the tokens of a batch of images.

        Args:
            images: [B, 3, H, W], uint8 in 0..255, or floating point, taken as already in [0, 1].

        Returns:
            [B, N, C], row by row over the image.
        """
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        elif not images.is_floating_point():
            raise ValueError(
                f"images are {images.dtype}; give uint8 in 0..255 or floating point in [0, 1]"
            )
        # In the type of the parameters, under autocast too: neither operation is on autocast's list.
        images = (images.to(self.mean.dtype) - self.mean) / self.std
        return self.norm(self._tokens(self.network.forward_features(images)))

    def _tokens(self, features: Any) -> Tensor:
        """Bring a map [B, C, H, W] or [B, H, W, C] or a sequence [B, N, C] with class tokens into tokens [B, N, C]."""
        shape = features.shape if isinstance(features, Tensor) else ()
        channels_last = len(shape) == 3 or getattr(self.network, "output_fmt", "NCHW") == "NHWC"
        if len(shape) not in (3, 4) or shape[-1 if channels_last else 1] != self.num_features:
            raise self._misfit(f"{list(shape)}" if shape else f"a {type(features).__name__}")
        if (
            self._norm_path
        ):  # before the map is flattened: the module is made for the network's own layout
            features = self.network.get_submodule(self._norm_path)(features)
        if len(shape) == 3:
            return features[:, self._num_prefix :]
        return features.flatten(1, 2) if channels_last else features.flatten(2).transpose(1, 2)

    def _misfit(self, found: str) -> ConfigError:
        wanted = f"one map or sequence of {self.num_features} channels"
        return ConfigError(
            f"backbone.name={self._name}: its features are {found}, not {wanted}; take another network"
        )

    def _freeze_unused(self, height: int, width: int) -> None:
        """Check the layout with one image, and freeze the parameters that the tokens do not depend on.

        Layers behind the features (the last convolution of a MobileNetV3, a norm that is not wanted) stay, so that
        published weights fit; but DDP stops at a parameter without a gradient, and weight decay would eat it away.
        """
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        trainable = [key for key, parameter in self.named_parameters() if parameter.requires_grad]
        self.eval()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                # Tensors of the meta device have shapes but no values: no memory, little time, no random numbers.
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
    """Check the name and collect timm's keyword arguments; a setting that is left alone is not passed on."""
    architecture, _, tag = name.partition(".")
    # Only the registry: timm would also take the address of a repository or a folder here, and read it while building.
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


def _create(
    name: str, **arguments: Any
) -> Any:  # Any: timm's networks share no interface that a checker could know
    try:
        return timm.create_model(name, **arguments)
    except Exception as error:
        unknown = re.search(r"unexpected keyword argument\W+(?:s\W+)?(\w+)", str(error))
        if isinstance(error, TypeError) and unknown:
            setting = _SETTINGS.get(unknown[1], f"model_args.{unknown[1]}")
            message = f"backbone.{setting}={arguments.get(unknown[1])}: {name} takes no such setting; leave it out"
            raise ConfigError(message) from error
        settings = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise ConfigError(
            f"backbone: timm cannot build {name} with {settings}: {_brief(error)}"
        ) from error


def _norm_path(network: Any, name: str, feature_norm: str) -> str | None:
    """Find the last norm of a network that pools before it norms, such as `head.norm` of ConvNeXt."""
    if feature_norm not in _FEATURE_NORMS:
        raise ConfigError(
            f"backbone.feature_norm={feature_norm}: unknown{suggest(feature_norm, _FEATURE_NORMS)}"
        )
    if feature_norm in ("none", "new"):
        return None
    for path in ("head.norm", "fc_norm"):
        with suppress(AttributeError):
            # Only norms over the channels have this attribute; another width stands behind a further layer.
            if tuple(network.get_submodule(path).normalized_shape) == (network.num_features,):
                return path
    if feature_norm == "pretrained":
        raise ConfigError(
            f"backbone.feature_norm=pretrained: {name} has no norm behind its pooling; use auto or new"
        )
    return None


def _num_prefix_tokens(network: Any) -> int:
    """Count the class and register tokens ahead of the image's; None on a CNN, not told by volo, which has one."""
    return int(getattr(network, "num_prefix_tokens", hasattr(network, "cls_token")) or 0)


def _channels(setting: str, values: Sequence[float]) -> Tensor:
    if len(values) != 3 or (setting == "std" and min(values) <= 0):
        raise ConfigError(
            f"backbone.{setting}={list(values)}: give red, green and blue in [0, 1]; std is above 0"
        )
    return torch.tensor([float(value) for value in values]).view(3, 1, 1)


def _load_weights(
    network: Any, name: str, pretrained: bool | str, arguments: dict[str, Any]
) -> None:
    """Fill the network with weights, all of it.

    timm is not strict where the number of classes differs: what the weights lack stays random without a word. So they
    go into a second network with the classes that they have, strictly and in timm's way, and from there into ours.
    """
    state = _published(name) if pretrained is True else _from_file(str(pretrained))
    cfg, own = network.pretrained_cfg, network.state_dict()
    classifiers = (
        [cfg["classifier"]] if isinstance(cfg["classifier"], str) else list(cfg["classifier"] or ())
    )
    rows = [
        len(state[key])
        for key in (f"{layer}.weight" for layer in (*classifiers, "head", "fc"))
        if key in state
    ]
    num_classes = rows[0] if rows else 0 if state.keys() == own.keys() else cfg["num_classes"]
    overlay = {"state_dict": state, "num_classes": num_classes, "label_offset": 0}
    arguments = {**arguments, "num_classes": num_classes, "pretrained_cfg_overlay": overlay}
    try:
        with torch.random.fork_rng(devices=[]):  # the head starts alike with and without weights
            weights = timm.create_model(name, pretrained=True, **arguments).state_dict()
        network.load_state_dict({key: weights[key] for key in own})
    except Exception as error:
        value = "true" if pretrained is True else pretrained
        misfit = f"the weights do not fit {name} with these settings ({_brief(error)})"
        raise ConfigError(f"backbone.pretrained={value}: {misfit}; {_REMEDY}") from error


def _from_file(path: str) -> dict[str, Any]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"backbone.pretrained={path}: no such file; {_REMEDY}")
    try:
        state = load_state_dict(str(file), weights_only=True)
        if not state:  # timm takes an empty one for none, and would download
            raise ValueError("no tensors")
    except (
        Exception
    ) as error:  # what is said of a broken or hostile file is long and of no use to a user
        fault = "not a .safetensors or .pth file of plain tensors"
        raise ConfigError(f"backbone.pretrained={path}: {fault}; {_REMEDY}") from error
    return state


def _published(name: str) -> dict[str, Any]:
    cfg = get_pretrained_cfg(name)
    if not cfg or not cfg.has_weights:
        raise ConfigError(
            f"backbone.pretrained=true: timm publishes no weights of {name}; {_REMEDY}"
        )
    try:
        if cfg.hf_hub_id:
            return load_state_dict(_hub_file(cfg.hf_hub_id), weights_only=True)
        with redirect_stdout(sys.stderr):  # torch tells of its downloads there
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
    """Return the local path of a repository's weights, downloaded if they are not in the cache."""
    for offline in (True, False):
        if not offline:  # one request that fails at once where there is no network: the download tries for a minute
            get_session().head(huggingface_hub.constants.ENDPOINT, timeout=10)
        for filename in ("model.safetensors", "pytorch_model.bin"):
            with suppress(EntryNotFoundError):
                return huggingface_hub.hf_hub_download(
                    repository, filename, local_files_only=offline
                )
    raise FileNotFoundError("no weights in this repository")


def _brief(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]
