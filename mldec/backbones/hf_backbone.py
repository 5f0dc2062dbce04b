"""Backbones of transformers: their files, the config that a run records, and the network."""

import inspect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from timm.layers import DropPath
from timm.models import load_state_dict
from torch import Tensor, nn

from mldec.backbones.timm_backbone import (
    REMEDY,
    WEIGHTS,
    Backbone,
    check_drop_path,
    check_feature_norm,
    hub_file,
    no_checkpointing,
    no_pretrained_norm,
    weights_from_file,
    weights_misfit,
)
from mldec.backbones.tokens import freeze, misfit
from mldec.errors import ConfigError, brief, suggest

CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"


def published_weights(name: str) -> dict[str, Any]:
    """Return the weights of a repository or a folder.

    Raises:
        ConfigError: if they cannot be had.
    """
    try:
        return load_state_dict(_file(name, WEIGHTS), weights_only=True)
    except Exception as error:
        fault = f"the weights of {name} cannot be had from {_address(name)} ({brief(error)})"
        raise ConfigError(f"backbone.pretrained=true: {fault}; {REMEDY}") from error


def read_json(name: str, filename: str, setting: str) -> dict[str, Any]:
    """Read a JSON file of a repository or a folder.

    Args:
        name: repository or folder.
        filename: of the file in it.
        setting: that replaces the file, for messages.

    Raises:
        ConfigError: if the file cannot be had, or is not a JSON object.
    """
    try:
        content = json.loads(Path(_file(name, [filename])).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
    except Exception as error:
        replacement = {
            "config": "a folder that save_pretrained wrote as backbone.name",
            "mean": "backbone.mean=[R,G,B] backbone.std=[R,G,B]",
        }[setting]
        raise ConfigError(
            f"backbone.name={name}: {filename} cannot be had from {_address(name)} "
            f"({brief(error)}); give {replacement}"
        ) from error
    return content


def _file(name: str, filenames: Sequence[str]) -> str:
    """Return the local path of the first of these files that a folder or a repository holds."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return hub_file(name, filenames)

    for filename in filenames:
        if (folder / filename).is_file():
            return str(folder / filename)
    raise FileNotFoundError(f"no {' or '.join(filenames)} in this folder")


def _address(name: str) -> str:
    """Return where a repository or a folder is, for messages."""
    is_folder = Path(name).expanduser().is_dir()
    return name if is_folder else f"{huggingface_hub.constants.ENDPOINT}/{name}"


def normalisation(name: str, processor: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of the channels, for images in [0, 1].

    Args:
        name: of the network, for messages.
        processor: the content of preprocessor_config.json.

    Raises:
        ConfigError: if the images are not three channels in the order red, green and blue.
    """
    if processor.get("do_flip_channel_order"):
        raise ConfigError(
            f"backbone.name={name}: its weights take images in the order blue, green and red, "
            f"which is not supported; take another network"
        )
    if processor.get("do_normalize") is False:
        return [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]

    mean, std = processor.get("image_mean"), processor.get("image_std")
    if not isinstance(mean, list) or not isinstance(std, list):
        raise ConfigError(
            f"backbone.name={name}: its {PROCESSOR} names no image_mean and image_std; "
            f"give backbone.mean=[R,G,B] backbone.std=[R,G,B]"
        )
    return mean, std


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


# Any, here and below: what transformers has cannot be known to a type checker where it is missing.
def import_transformers() -> Any:
    """Import transformers.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "backbone: HFBackbone needs transformers, which is not installed: "
            "pip install 'mldec[hf]'"
        ) from error
    return transformers


def config_class_of(model_type: object) -> Any:
    """Return transformers' class for the configs of a model type.

    Raises:
        ConfigError: if transformers itself has no image classification network of this type, or
            one that is made of several networks, such as CLIP.
    """
    transformers = import_transformers()
    # `timm_wrapper` would build any network of timm, and read its files.
    types = {
        config_class.model_type: config_class
        for config_class in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        if not config_class.sub_configs and config_class.model_type != "timm_wrapper"
    }
    if model_type not in types:
        raise ConfigError(
            f"backbone.config.model_type={model_type}: transformers {transformers.__version__} has "
            f"no image classification network of this type that can be a backbone; "
            f"take another, such as {', '.join(list(types)[:8])}"
        )
    return types[model_type]


def _own_settings(config_class: Any) -> list[str]:
    """Return the settings of an architecture.

    Those of every config of transformers are not among them: classes, the kind of tensors, and
    code to be loaded for attention or quantisation.
    """
    shared = inspect.signature(import_transformers().PreTrainedConfig.__init__).parameters
    own = inspect.signature(config_class.__init__).parameters
    return [
        key for key, setting in own.items() if key not in shared and setting.kind not in VARIADIC
    ]


def recorded_config(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint records of a config.json: the type and all settings of its own.

    Raises:
        ConfigError: if it is of no supported network, or its settings are refused by transformers.
    """
    config_class = config_class_of(content.get("model_type"))
    keys = _own_settings(config_class)

    # A config may have an older name for a setting, which transformers translates.
    readable = {*keys, *config_class.attribute_map}
    config = _checked(config_class, {key: content[key] for key in readable & content.keys()})
    settings = {
        "model_type": config_class.model_type,
        **{key: getattr(config, key) for key in keys},
    }

    try:
        # Lists instead of tuples: as a checkpoint gives it back.
        return dict(json.loads(json.dumps(settings)))
    except TypeError as error:
        raise ConfigError(f"backbone.name={name}: its config is no plain data ({error})") from error


def network_config_of(config: Mapping[str, Any], drop_path: float) -> Any:
    """Return transformers' config object of a recorded config.

    Raises:
        ConfigError: for an unknown setting, or a value that transformers refuses.
    """
    config_class = config_class_of(config.get("model_type"))
    settings = {key: value for key, value in config.items() if key != "model_type"}
    known = _own_settings(config_class)
    for key in settings:
        if key not in known:
            raise ConfigError(
                f"backbone.config.{key}: {config_class.__name__} has no such setting"
                f"{suggest(key, known)}"
            )

    if drop_path and "drop_path_rate" not in known:
        raise ConfigError(
            f"backbone.drop_path={drop_path}: {config_class.model_type} takes no such setting; "
            f"leave it out"
        )

    network_config = _checked(config_class, settings)
    if getattr(network_config, "drop_path_rate", drop_path) == drop_path:
        return network_config

    # CvT has one rate per stage, and `_mend_cvt` adds ours.
    settings["drop_path_rate"] = drop_path
    if config_class.model_type == "cvt":
        settings["drop_path_rate"] = [0.0 for _ in network_config.depth]
    return _checked(config_class, settings)


def _checked(config_class: Any, settings: Mapping[str, Any]) -> Any:
    """Build a config object.

    Raises:
        ConfigError: if transformers refuses the settings.
    """
    try:
        return config_class(**settings)
    except Exception as error:
        raise ConfigError(
            f"backbone.config: transformers refuses these settings ({brief(error)})"
        ) from error


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
