"""A backbone that turns images into tokens with an image network of transformers.

transformers is optional. It is used for its networks alone: their configs and weights are read
here, as plain data, so that no code of a repository is ever run.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from mldec.backbones.common import (
    Backbone,
    check_drop_path,
    check_feature_norm,
    no_checkpointing,
    no_pretrained_norm,
    weights_from_file,
    weights_misfit,
)
from mldec.backbones.hf_config import import_transformers, network_config_of, recorded_config
from mldec.backbones.hf_files import (
    CONFIG,
    PROCESSOR,
    normalisation,
    published_weights,
    read_json,
)
from mldec.errors import ConfigError, brief
from mldec.tokens import freeze, misfit

# B batch, H and W image height and width in pixels, N tokens, C backbone width

# The parameters that hold tokens in front of the image's tokens.
PREFIX_TOKENS = ("cls_token", "distillation_token", "register_tokens")
USUAL_SIZE = 224  # pixels per side of the trial image for a network that names no size


class HFBackbone(Backbone):
    """Turn images into tokens with an image classification network of transformers.

    Its last hidden state must be one map [B, C, H, W] or one sequence [B, N, C]. The classifier is
    left out; class, distillation and register tokens are dropped. Images are scaled to [0, 1] and
    normalised with the mean and standard deviation that the weights were trained with. Position
    embeddings are interpolated, so that most networks take images of any size. The attributes
    `network`, `norm`, `mean` and `std` are public because their names are keys of a checkpoint;
    `num_features` is C, the width of the tokens.

    transformers' CvT differs from the code that its weights were trained with in two ways, which
    are mended here: the activation is x * sigmoid(1.702 x), and stochastic depth drops the two
    branches of a layer, at a rate that rises over the last stage, not the whole stream. Source:
    microsoft/CvT lib/models/cls_cvt.py.

    Args:
        name: a repository on the hub (`microsoft/cvt-13`), or a folder that `save_pretrained`
            wrote. It is read by `complete` and for weights, never otherwise.
        pretrained: true for the weights of `name`, or the path of a file with weights of this
            network under the names of transformers (.safetensors, .bin).
        image_size: pixels per side of the images, for a network that does not take every size
            (Swin, PVT): it is tried out when built. None for the size in the config.
        drop_path: highest rate of stochastic depth, in [0, 1); it replaces that of the config.
        checkpointing: recompute activations in the backward pass, which saves memory and costs
            time.
        feature_norm: the norm of the tokens. `auto`: the one that the network has behind its
            pooling, if any; `pretrained`: the same, and an error if there is none; `new`: a fresh
            LayerNorm; `none`: no further norm.
        mean: of the three channels, for images in [0, 1]; None: to be read by `complete`.
        std: likewise.
        config: the architecture as transformers' config names it, with `model_type`; None: to be
            read by `complete`. A checkpoint holds all three, so that it needs no network.

    Raises:
        ConfigError: if transformers is not installed, a setting does not fit the network, or the
            weights are not available.
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
        config: dict[str, Any] | None = None,
    ) -> None:
        # Reading them here would let a stranger's checkpoint choose what is read and asked for.
        if config is None or mean is None or std is None:
            raise ConfigError(
                f"backbone.config=null: HFBackbone needs config, mean and std; "
                f"HFBackbone.complete reads those of {name}"
            )
        check_drop_path(drop_path)
        check_feature_norm(feature_norm)

        super().__init__(name, mean, std)
        network_config = network_config_of(config, drop_path)
        self.network = _create(name, network_config, drop_path)
        self._num_prefix = _num_prefix_tokens(self.network)
        self._norm_path: str | None = None
        self.norm = nn.Identity()

        tokens, unused = self._try_out(*_trial_size(network_config, image_size))
        self.num_features = tokens.shape[2]

        if feature_norm == "new":
            self.norm = nn.LayerNorm(self.num_features)
        elif feature_norm != "none":
            self._norm_path = _norm_path(self.network, self.num_features, unused)
            if self._norm_path is None and feature_norm == "pretrained":
                raise no_pretrained_norm(name)
        freeze(self, {key for key in unused if not key.startswith(f"network.{self._norm_path}.")})

        if checkpointing:
            if not self.network.supports_gradient_checkpointing:
                raise no_checkpointing(name)
            self.network.gradient_checkpointing_enable()

        # At the end, so that nothing is downloaded before all other settings are known to be good.
        if pretrained:
            _load_weights(self.network, name, pretrained, network_config)

    def _check_tokens(self, tokens: Tensor) -> None:
        # Class tokens of an unknown name would leave more tokens than the rows of a square map.
        if not tokens.shape[1] or math.isqrt(tokens.shape[1]) ** 2 != tokens.shape[1]:
            raise misfit(f"{tokens.shape[1]} tokens of a square image")

    @staticmethod
    def complete(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in the arguments that are None and belong to the weights: config, mean and std.

        Args:
            arguments: of the constructor; `name` is read from the hub, its cache, or a folder.

        Returns:
            All arguments, as plain data that a checkpoint can hold.

        Raises:
            ConfigError: if transformers is not installed or does not have such a network, or the
                files cannot be read.
        """
        import_transformers()
        arguments = dict(arguments)
        name = arguments["name"]

        if arguments.get("config") is None:
            arguments["config"] = recorded_config(name, read_json(name, CONFIG, "config"))

        if arguments.get("mean") is None or arguments.get("std") is None:
            processor = read_json(name, PROCESSOR, "mean")
            mean, std = normalisation(name, processor)
            arguments["mean"] = arguments.get("mean") or mean
            arguments["std"] = arguments.get("std") or std
        return arguments

    def _tokens(self, images: Tensor) -> Tensor:
        network = self.network.base_model

        # Without it, a network refuses images of another size than its position embeddings have.
        takes = inspect.signature(network.forward).parameters
        options = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in takes else {}
        output = network(images, **options)
        features = getattr(output, "last_hidden_state", None)
        if not isinstance(features, Tensor) or features.ndim not in (3, 4):
            shape = list(features.shape) if isinstance(features, Tensor) else "no tensor"
            raise misfit(f"{shape}")

        tokens = features[:, self._num_prefix :]
        if features.ndim == 4:
            tokens = features.flatten(2).transpose(1, 2)
        return self.network.get_submodule(self._norm_path)(tokens) if self._norm_path else tokens


class _QuickGELU(nn.Module):
    """The activation x * sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to each element."""
        return x * torch.sigmoid(1.702 * x)


def _network_class(config: Any) -> Any:
    """Return the class of a config's image classification network."""
    network_class = import_transformers().MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[type(config)]
    # DeiT and LeViT have two, without and with a second classifier for distillation.
    return network_class[0] if isinstance(network_class, tuple) else network_class


def _create(name: str, config: Any, drop_path: float) -> Any:
    """Build a network without weights and without its classifier.

    Raises:
        ConfigError: if transformers cannot build it.
    """
    try:
        network = _network_class(config)(config)
    except Exception as error:
        raise ConfigError(
            f"backbone: transformers cannot build {name} with its config: {brief(error)}"
        ) from error
    if config.model_type == "cvt":
        _mend_cvt(network, drop_path)

    # A network that is not made of a base model and a classifier cannot be taken apart.
    if network.base_model is network:
        raise ConfigError(
            f"backbone.name={name}: its features are not one map or sequence; take another network"
        )

    # Norms stay, because one of them may belong to the tokens.
    for child, module in list(network.named_children()):
        if module is not network.base_model and not isinstance(module, nn.LayerNorm):
            delattr(network, child)
    return network


def _mend_cvt(network: Any, drop_path: float) -> None:
    """Give transformers' CvT the activation and the stochastic depth of its authors' code.

    Args:
        network: without stochastic depth.
        drop_path: highest rate; as published, only the last stage has it.
    """
    stages = network.base_model.encoder.stages
    for stage in stages:
        for layer in stage.layers:
            layer.intermediate.activation = _QuickGELU()

    # The last operation of either branch before it is added to the stream is a dropout.
    if drop_path:
        layers = stages[-1].layers
        rates = torch.linspace(0, drop_path, len(layers), device="cpu").tolist()
        for layer, rate in zip(layers, rates, strict=True):
            for branch in (layer.attention.output, layer.output):
                branch.dropout = nn.Sequential(branch.dropout, DropPath(rate))


def _num_prefix_tokens(network: nn.Module) -> int:
    """Return the number of class, distillation and register tokens in front of a sequence."""
    return sum(
        parameter.shape[1]
        for key, parameter in network.named_parameters()
        if key.rpartition(".")[2] in PREFIX_TOKENS
    )


def _trial_size(config: Any, image_size: int | None) -> tuple[int, int]:
    """Return height and width of a square trial image, in pixels."""
    size = image_size or getattr(config, "image_size", None)
    size = size if isinstance(size, int) else USUAL_SIZE
    return size, size


def _norm_path(network: nn.Module, num_features: int, unused: set[str]) -> str | None:
    """Return the path of the norm behind the pooling, such as `layernorm` of CvT, if there is one.

    It is the LayerNorm of C channels that the tokens do not depend on.

    Args:
        network: to search.
        num_features: C.
        unused: names of parameters that the tokens do not depend on.
    """
    paths = [
        path
        for path, module in network.named_modules()
        if isinstance(module, nn.LayerNorm)
        and tuple(module.normalized_shape) == (num_features,)
        and f"network.{path}.weight" in unused
    ]
    return paths[0] if len(paths) == 1 else None


def _load_weights(network: Any, name: str, pretrained: bool | str, config: Any) -> None:
    """Fill the network with the weights of its repository or folder, or those of a file.

    transformers fills a second network with its classifier, translating older names, and reports
    what was missing; from there the weights go into ours.

    Raises:
        ConfigError: if the weights are not available, or do not fit the network.
    """
    state = published_weights(name) if pretrained is True else weights_from_file(str(pretrained))

    try:
        # The second network draws random numbers, but the head must start alike with and without
        # pretrained weights.
        with torch.random.fork_rng(devices=[]), _quiet():
            filled, report = _network_class(config).from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=torch.float32,
                output_loading_info=True,
            )
        weights = filled.state_dict()
        wanted = network.state_dict().keys()
        if missing := sorted(wanted & set(report["missing_keys"])):
            raise ValueError(f"{len(missing)} missing, such as {missing[0]}")
        network.load_state_dict({key: weights[key] for key in wanted})
    except Exception as error:
        raise weights_misfit(name, pretrained, brief(error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers: it would report the classifier that the weights have or lack."""
    logging = import_transformers().utils.logging
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()

    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()
