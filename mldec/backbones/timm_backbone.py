"""Backbones of timm, and what all backbones share."""

import inspect
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

from mldec.backbones.tokens import (
    MisfitError,
    check_patches,
    freeze,
    norm_behind_pooling,
    timm_tokens,
    try_out,
)
from mldec.errors import ConfigError, brief, suggest

# B batch, H and W image height and width in pixels, N tokens, C backbone width

FEATURE_NORMS = ["auto", "none", "pretrained", "new"]
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the names of weights in a repository
REMEDY = (
    "give a file with backbone.pretrained=FILE, "
    "or backbone.pretrained=false to start from random weights"
)


class Backbone(nn.Module):
    """Turn images into tokens: scale and normalise the images, and run a network.

    Args:
        name: of the network, for messages.
        mean: of the three channels, for images in [0, 1].
        std: likewise.

    Raises:
        ConfigError: unless mean and std are three numbers each, and std is positive.
    """

    mean: Tensor
    std: Tensor
    norm: nn.Module
    num_features: int

    def __init__(self, name: str, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self._name = name

        # Buffers, because the normalisation belongs to the weights: a checkpoint must hold it.
        self.register_buffer("mean", _channels("mean", mean))
        self.register_buffer("std", _channels("std", std))

    def forward(self, images: Tensor) -> Tensor:
        """Compute the tokens of a batch of images.

        Args:
            images: [B, 3, H, W], uint8 in 0..255, or floating point that is in [0, 1] already.

        Returns:
            [B, N, C], row by row over the image.

        Raises:
            ValueError: for images of another type.
            MisfitError: if the features of the network are neither a map nor a sequence of C
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
        return self.norm(self._tokens(images))

    def _tokens(self, images: Tensor) -> Tensor:
        """Return the tokens [B, N, C] of normalised images, before `norm`."""
        raise NotImplementedError

    def _check_tokens(self, tokens: Tensor) -> None:
        """Raise a `MisfitError` unless the tokens [1, N, C] are all of the image."""
        raise NotImplementedError

    def _try_out(self, height: int, width: int) -> tuple[Tensor, set[str]]:
        """Run one image through the network, on the meta device.

        Args:
            height: of the image, in pixels.
            width: of the image, in pixels.

        Returns:
            The tokens [1, N, C], without values, and the names of the parameters that they do not
            depend on.

        Raises:
            ConfigError: if the network fails on such an image, or its features are not supported.
        """
        try:
            tokens, unused = try_out(self, (3, height, width))
            self._check_tokens(tokens)
        except MisfitError as error:
            raise ConfigError(
                f"backbone.name={self._name}: {error}; take another network or size"
            ) from error
        return tokens, unused


def check_feature_norm(feature_norm: str) -> None:
    """Check the setting `feature_norm`.

    Raises:
        ConfigError: if it is none of `FEATURE_NORMS`.
    """
    if feature_norm not in FEATURE_NORMS:
        raise ConfigError(
            f"backbone.feature_norm={feature_norm}: unknown{suggest(feature_norm, FEATURE_NORMS)}"
        )


def no_pretrained_norm(name: str) -> ConfigError:
    """Return the error for feature_norm=pretrained where a network has no such norm."""
    return ConfigError(
        f"backbone.feature_norm=pretrained: {name} has no norm behind its pooling; use auto or new"
    )


def check_drop_path(drop_path: float) -> None:
    """Check the setting `drop_path`.

    Raises:
        ConfigError: unless it is in [0, 1).
    """
    if not 0 <= drop_path < 1:
        raise ConfigError(f"backbone.drop_path={drop_path}: give a rate in [0, 1)")


def _channels(setting: str, values: Sequence[float]) -> Tensor:
    """Return three values, one per channel, as a tensor [3, 1, 1]."""
    if len(values) != 3 or (setting == "std" and min(values) <= 0):
        raise ConfigError(
            f"backbone.{setting}={list(values)}: give red, green and blue in [0, 1]; std is above 0"
        )

    return torch.tensor([float(value) for value in values]).view(3, 1, 1)


def no_checkpointing(name: str) -> ConfigError:
    """Return the error for checkpointing=true where a network does not support it."""
    return ConfigError(f"backbone.checkpointing=true: {name} does not support it; leave it out")


def weights_misfit(name: str, pretrained: bool | str, reason: str) -> ConfigError:
    """Return the error for weights that do not fit the network.

    Args:
        name: of the network.
        pretrained: True for published weights, or the path of a file.
        reason: what does not fit.
    """
    value = "true" if pretrained is True else pretrained
    misfit = f"the weights do not fit {name} with these settings ({reason})"
    return ConfigError(f"backbone.pretrained={value}: {misfit}; {REMEDY}")


def weights_from_file(path: str) -> dict[str, Any]:
    """Read the weights in a file of plain tensors.

    Raises:
        ConfigError: if the file is missing, or is not a .safetensors or .pth file of plain tensors.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"backbone.pretrained={path}: no such file; {REMEDY}")

    try:
        state = load_state_dict(str(file), weights_only=True)
        # timm would treat an empty dictionary as none, and download weights.
        if not state:
            raise ValueError("no tensors")
    except Exception as error:
        # The messages about a broken or hostile file are long and do not help a user.
        fault = "not a .safetensors or .pth file of plain tensors"
        raise ConfigError(f"backbone.pretrained={path}: {fault}; {REMEDY}") from error
    return state


def hub_file(repository: str, filenames: Sequence[str]) -> str:
    """Return the local path of a repository's file, downloaded if it is not in the cache.

    Args:
        repository: on the hub, OWNER/NAME.
        filenames: the first one that the repository holds is taken.

    Raises:
        FileNotFoundError: if the repository holds none of the files.
        Exception: any of huggingface_hub, if the download fails.
    """
    for offline in (True, False):
        # Without a network, this request fails at once, whereas a download retries for a minute.
        if not offline:
            get_session().head(huggingface_hub.constants.ENDPOINT, timeout=10)
        for filename in filenames:
            with suppress(EntryNotFoundError):
                return huggingface_hub.hf_hub_download(
                    repository, filename, local_files_only=offline
                )

    raise FileNotFoundError(f"no {' or '.join(filenames)} in this repository")


# B batch, H and W image height and width in pixels, N tokens, C backbone width

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


class TimmBackbone(Backbone):
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
        arguments = _arguments(name, image_size, drop_path, model_args or {})
        network = _create(name, num_classes=0, **arguments)
        cfg = network.pretrained_cfg
        super().__init__(
            name, cfg["mean"] if mean is None else mean, cfg["std"] if std is None else std
        )

        self.network = network
        self.num_features = network.num_features
        self.norm = nn.LayerNorm(self.num_features) if feature_norm == "new" else nn.Identity()

        self._norm_path = _norm_path(self.network, name, feature_norm)
        side_lengths = (image_size, image_size) if image_size else cfg["input_size"][-2:]
        _, unused = self._try_out(*side_lengths)
        freeze(self, unused)

        if checkpointing:
            try:
                self.network.set_grad_checkpointing(True)
            except (AttributeError, AssertionError) as error:
                raise no_checkpointing(name) from error

        # At the end, so that nothing is downloaded before all other settings are known to be good.
        if pretrained:
            _load_weights(self.network, name, pretrained, arguments)

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
        layers = group_with_matcher(iter(named), matcher, reverse=True)
        depth = {f"network.{name}": layers["classifier"] - layer for name, layer in layers.items()}
        return {name: depth.get(name, 0) for name, _ in self.named_parameters()}

    def _tokens(self, images: Tensor) -> Tensor:
        return timm_tokens(self.network, images, norm_path=self._norm_path)

    def _check_tokens(self, tokens: Tensor) -> None:
        check_patches(self.network, tokens)


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

    check_drop_path(drop_path)
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
            f"backbone: timm cannot build {name} with {settings}: {brief(error)}"
        ) from error


def _norm_path(network: Any, name: str, feature_norm: str) -> str | None:
    """Return the path of the norm behind the pooling of a network, such as `head.norm` of ConvNeXt.

    None if there is no such norm, or `feature_norm` does not use it.

    Raises:
        ConfigError: for an unknown `feature_norm`, or `pretrained` for a network without such a
            norm.
    """
    check_feature_norm(feature_norm)
    if feature_norm in ("none", "new"):
        return None

    path = norm_behind_pooling(network)
    if path is None and feature_norm == "pretrained":
        raise no_pretrained_norm(name)
    return path


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
    state = _published(name) if pretrained is True else weights_from_file(str(pretrained))
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
        # torch names the tensors in further lines.
        reason = " ".join(str(error).split())[:160]
        raise weights_misfit(name, pretrained, reason) from error


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


def _published(name: str) -> dict[str, Any]:
    """Return the weights that timm publishes for a network; they are downloaded only once.

    Raises:
        ConfigError: if there are none, or they cannot be downloaded.
    """
    cfg = get_pretrained_cfg(name)
    if not cfg or not cfg.has_weights:
        raise ConfigError(
            f"backbone.pretrained=true: timm publishes no weights of {name}; {REMEDY}"
        )

    try:
        if cfg.hf_hub_id:
            return load_state_dict(hub_file(cfg.hf_hub_id, WEIGHTS), weights_only=True)

        # torch reports a download on standard output, which is for results.
        with redirect_stdout(sys.stderr):
            return torch.hub.load_state_dict_from_url(
                str(cfg.url), map_location="cpu", weights_only=True
            )
    except Exception as error:
        address = (
            f"{huggingface_hub.constants.ENDPOINT}/{cfg.hf_hub_id}" if cfg.hf_hub_id else cfg.url
        )
        fault = f"the weights of {name} cannot be had from {address} ({brief(error)})"
        raise ConfigError(f"backbone.pretrained=true: {fault}; {REMEDY}") from error
