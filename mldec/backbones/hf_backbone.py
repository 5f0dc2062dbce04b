"""Backbones of transformers."""

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.layers import DropPath, QuickGELU
from torch import Tensor, nn

from mldec.backbones.timm_backbone import (
    Backbone,
    FeatureNorm,
    check_drop_path,
    loading,
    quick_hub,
    read_weights,
)
from mldec.backbones.tokens import freeze
from mldec.errors import ConfigError, refusing, suggest

# B batch, H and W image height and width in pixels, N tokens, C backbone width

# The parameters that hold tokens in front of the image's tokens.
PREFIX_TOKENS = ("cls_token", "distillation_token", "register_tokens")
USUAL_SIZE = 224  # pixels per side of the trial image for a network that names no size
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class HFBackbone(Backbone):
    """Turn images into tokens with an image classification network of transformers.

    Its last hidden state must be one map [B, C, H, W] or one sequence [B, N, C]; class,
    distillation and register tokens are dropped. Position embeddings are interpolated, so that most
    networks take images of any size. For the rest see `TimmBackbone`.

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
        drop_path: highest rate of stochastic depth, in [0, 1); None for that of the config.
        checkpointing: recompute activations in the backward pass, to save memory.
        feature_norm: the norm of the tokens, as in `TimmBackbone`.
        mean: of the three channels, for images in [0, 1]; None: to be read by `complete`.
        std: likewise.
        config: the architecture as transformers' config names it, with `model_type`; None: to be
            read by `complete`. A checkpoint holds all three, so that it needs no network.
    """

    def __init__(
        self,
        name: str,
        *,
        pretrained: bool | str = False,
        image_size: int | None = None,
        drop_path: float | None = None,
        checkpointing: bool = False,
        feature_norm: FeatureNorm = "auto",
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
        super().__init__(name, mean, std)

        self.network = self._create(config, drop_path)
        self.norm = nn.Identity()
        self._num_prefix = sum(
            parameter.shape[1]
            for key, parameter in self.network.named_parameters()
            if key.rpartition(".")[2] in PREFIX_TOKENS
        )

        size = image_size or getattr(self.network.config, "image_size", None)
        side = size if isinstance(size, int) else USUAL_SIZE
        tokens, unused = self._try_out(side, side)
        self.num_features = tokens.shape[2]

        self._set_norm(feature_norm, self._norm_behind_pooling(unused))
        freeze(self, {key for key in unused if not key.startswith(f"network.{self._norm_path}.")})

        if checkpointing:
            if not self.network.supports_gradient_checkpointing:
                raise self._refusal("checkpointing=true", "does not support it")
            self.network.gradient_checkpointing_enable()

        # At the end, so that nothing is downloaded before all other settings are known to be good.
        if pretrained:
            with loading(name, pretrained):
                _load_weights(self.network, name, pretrained)

    @staticmethod
    def complete(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in config, mean and std where they are None, from the hub, its cache or a folder.

        The arguments are those of the constructor, and plain data that a checkpoint can hold.
        """
        transformers = _import_transformers()
        arguments = dict(arguments)
        name = arguments["name"]
        source = str(Path(name).expanduser())

        if arguments.get("config") is None:
            where = f"backbone.name={name}: its config"
            remedy = "give a folder that save_pretrained wrote as backbone.name"
            with quick_hub(), refusing(where, ConfigError, remedy=remedy):
                config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
            arguments["config"] = _recorded(config)

        if arguments.get("mean") is None or arguments.get("std") is None:
            where = f"backbone.name={name}: its normalisation"
            remedy = "give backbone.mean=[R,G,B] backbone.std=[R,G,B]"
            with quick_hub(), refusing(where, ConfigError, remedy=remedy):
                processor, _ = transformers.BaseImageProcessor.get_image_processor_dict(source)
                mean, std = _normalisation(processor)
            arguments["mean"] = arguments.get("mean") or mean
            arguments["std"] = arguments.get("std") or std
        return arguments

    def _create(self, config: Mapping[str, Any], drop_path: float | None) -> Any:
        """Build the network of a recorded config, without weights and without its classifier."""
        transformers = _import_transformers()
        config_class = _config_class(config.get("model_type"))
        settings = {key: value for key, value in config.items() if key != "model_type"}

        known = _own_settings(config_class)
        if unknown := sorted(settings.keys() - set(known)):
            raise ConfigError(
                f"backbone.config.{unknown[0]}: {config_class.__name__} has no such setting"
                f"{suggest(unknown[0], known)}"
            )
        if drop_path and "drop_path_rate" not in known:
            raise self._refusal(f"drop_path={drop_path}", "takes no such setting")

        with refusing(f"backbone.config: {self._name}", ConfigError, remedy="use other settings"):
            network_config = config_class(**settings)
            is_cvt = config_class.model_type == "cvt"
            if is_cvt:
                # It has one rate per stage, of which the last counts; `_mend_cvt` sets it.
                if drop_path is None:
                    drop_path = network_config.drop_path_rate[-1]
                network_config.drop_path_rate = [0.0 for _ in network_config.depth]
            elif drop_path is not None and "drop_path_rate" in known:
                network_config.drop_path_rate = float(drop_path)
            network_class = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[config_class]
            # DeiT and LeViT have two, without and with a second classifier for distillation.
            if isinstance(network_class, tuple):
                network_class = network_class[0]
            network = network_class(network_config)
        if is_cvt:
            _mend_cvt(network, drop_path or 0.0)

        # Norms stay, because one of them may belong to the tokens.
        for child, module in list(network.named_children()):
            if module is not network.base_model and not isinstance(module, nn.LayerNorm):
                delattr(network, child)
        return network

    def _tokens(self, images: Tensor) -> Tensor:
        network = self.network.base_model

        # Without it, a network refuses images of another size than its position embeddings have.
        takes = inspect.signature(network.forward).parameters
        options = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in takes else {}
        features = getattr(network(images, **options), "last_hidden_state", None)
        if not isinstance(features, Tensor) or features.ndim not in (3, 4):
            raise ValueError("its last hidden state is not one map or sequence")

        tokens = features[:, self._num_prefix :]
        if features.ndim == 4:
            tokens = features.flatten(2).transpose(1, 2)
        return self.network.get_submodule(self._norm_path)(tokens) if self._norm_path else tokens

    def _check_tokens(self, tokens: Tensor) -> None:
        # Class tokens of an unknown name would leave more tokens than the rows of a square map.
        count = tokens.shape[1]
        if count == 0 or math.isqrt(count) ** 2 != count:
            raise ValueError(f"it gives {count} tokens of a square image")

    def _norm_behind_pooling(self, unused: set[str]) -> str | None:
        """Return the path of the one LayerNorm of C channels that the tokens do not depend on."""
        paths = [
            path
            for path, module in self.network.named_modules()
            if isinstance(module, nn.LayerNorm)
            and tuple(module.normalized_shape) == (self.num_features,)
            and f"network.{path}.weight" in unused
        ]
        return paths[0] if len(paths) == 1 else None


# Any, here and below: what transformers has cannot be known to a type checker where it is missing.
def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "backbone: HFBackbone needs transformers, which is not installed: "
            "pip install -e '.[hf]'"
        ) from error
    return transformers


def _config_class(model_type: Any) -> Any:
    """Return transformers' class for the configs of an image classification network."""
    transformers = _import_transformers()
    # A network made of several, such as CLIP, hides their settings; `timm_wrapper` would build any
    # network of timm, and read its files.
    types = {
        config_class.model_type: config_class
        for config_class in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        if not config_class.sub_configs and config_class.model_type != "timm_wrapper"
    }
    if model_type not in types:
        raise ConfigError(
            f"backbone.config.model_type={model_type}: transformers {transformers.__version__} has "
            f"no image classification network of this type that can be a backbone; take another"
        )
    return types[model_type]


def _own_settings(config_class: Any) -> list[str]:
    """Return the settings of an architecture but those of all: some load code for attention."""
    shared = inspect.signature(_import_transformers().PreTrainedConfig.__init__).parameters
    own = inspect.signature(config_class.__init__).parameters
    return [
        key for key, setting in own.items() if key not in shared and setting.kind not in VARIADIC
    ]


def _recorded(config: Any) -> dict[str, Any]:
    """Return what a checkpoint records of a config: the type and all settings of its own."""
    keys = _own_settings(_config_class(config.model_type))
    settings = {"model_type": config.model_type, **{key: getattr(config, key) for key in keys}}
    # Lists instead of tuples: as a checkpoint gives it back.
    return dict(json.loads(json.dumps(settings)))


def _normalisation(processor: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return mean and deviation of the channels, from the content of preprocessor_config.json."""
    if processor.get("do_flip_channel_order"):
        raise ValueError("images in the order blue, green and red, which is not supported")
    if processor.get("do_normalize") is False:
        return [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]

    mean, std = processor["image_mean"], processor["image_std"]
    return list(mean), list(std)


def _mend_cvt(network: Any, drop_path: float) -> None:
    """Give transformers' CvT the activation and the stochastic depth of its authors' code."""
    stages = network.base_model.encoder.stages
    for stage in stages:
        for layer in stage.layers:
            layer.intermediate.activation = QuickGELU()

    # Only the last stage has it. The last operation of either branch before it is added to the
    # stream is a dropout.
    if drop_path:
        layers = stages[-1].layers
        rates = torch.linspace(0, drop_path, len(layers), device="cpu").tolist()
        for layer, rate in zip(layers, rates, strict=True):
            for branch in (layer.attention.output, layer.output):
                branch.dropout = nn.Sequential(branch.dropout, DropPath(rate))


def _load_weights(network: Any, name: str, pretrained: bool | str) -> None:
    """Fill the network with the weights of its repository or folder, or those of a file."""
    # transformers fills a second network with its classifier, translating older names. It would
    # also report the classifier that the weights have or lack.
    logging = _import_transformers().utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    is_file = pretrained is not True
    filled, report = type(network).from_pretrained(
        None if is_file else str(Path(name).expanduser()),
        config=network.config,
        state_dict=read_weights(str(pretrained)) if is_file else None,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # the classifier may have any number of classes
        output_loading_info=True,
    )

    weights, wanted = filled.state_dict(), network.state_dict().keys()
    unfilled = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if unfilled := wanted & unfilled:
        raise ValueError(f"{len(unfilled)} do not fit, such as {min(unfilled)}")
    network.load_state_dict({key: weights[key] for key in wanted})
