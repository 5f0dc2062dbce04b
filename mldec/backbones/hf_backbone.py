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
    loading_weights,
    read_weights,
)
from mldec.backbones.tokens import freeze
from mldec.errors import ConfigError, naming_errors, suggest
from mldec.runtime.environment import quick_hub

# Shapes: B batch, H and W image height and width in pixels, N tokens, C backbone width

# Parameters of the prefix tokens, which precede the patch tokens.
PREFIX_TOKENS = ("cls_token", "distillation_token", "register_tokens")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class HFBackbone(Backbone):
    """Map images to tokens with an image classification network of transformers.

    The last hidden state must be a map [B, C, H, W] or a sequence [B, N, C]. Class, distillation
    and register tokens are dropped. Position embeddings are interpolated, so that most networks
    support any image size. See also `TimmBackbone`.

    transformers' CvT differs from its original code, which trained the weights, in two ways. Both
    are corrected here. The activation is x * sigmoid(1.702 x). Stochastic depth drops the two
    branches of a layer and not the residual stream, with rates that increase over the last stage.
    Source: microsoft/CvT lib/models/cls_cvt.py.

    Args:
        name: A repository on the hub (`microsoft/cvt-13`), or a folder of `save_pretrained`. Only
            `complete` and `pretrained=True` read it.
        pretrained: True for the weights of `name`, or the path of a file with weights of this
            network under the names of transformers (.safetensors, .bin).
        image_size: Pixels per side. None for the size in the config. Sizes that the network does
            not support raise ConfigError (Swin, PVT).
        drop_path: Maximum rate of stochastic depth, in [0, 1). None for the rate in the config.
        checkpointing: Recompute activations in the backward pass to save memory.
        feature_norm: Norm of the tokens, as in `TimmBackbone`.
        mean: Channel means for images in [0, 1]. `complete` replaces None.
        std: Channel standard deviations. `complete` replaces None.
        config: The architecture: settings of transformers' config and `model_type`. `complete`
            replaces None. Checkpoints contain mean, std and config, so that they load offline.
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
        # The constructor must not read the repository: it also builds networks of untrusted
        # checkpoints, which could then name any file.
        if config is None or mean is None or std is None:
            raise ConfigError(
                f"backbone.config: config, mean and std are required; "
                f"HFBackbone.complete reads them from {name}"
            )
        check_drop_path(drop_path)
        super().__init__(name, mean, std)

        self.network = self._create(config, drop_path)
        self.norm = nn.Identity()
        self._num_prefix = 0
        for key, parameter in self.network.named_parameters():
            if key.rpartition(".")[2] in PREFIX_TOKENS:
                self._num_prefix += parameter.shape[1]

        size = image_size or getattr(self.network.config, "image_size", None)
        side = size if isinstance(size, int) else 224
        tokens, unused = self._try_out(side, side)
        self.num_features = tokens.shape[2]

        self._set_norm(feature_norm, self._norm_behind_pooling(unused))
        applied_norm = f"network.{self._norm_path}."
        freeze(self, {key for key in unused if not key.startswith(applied_norm)})

        if checkpointing:
            if not self.network.supports_gradient_checkpointing:
                raise self._unsupported("checkpointing=true")
            self.network.gradient_checkpointing_enable()

        # Load weights last, so that downloads start only if all other settings are valid.
        if pretrained:
            with loading_weights(name, pretrained):
                _load_weights(self.network, name, pretrained)

    @staticmethod
    def complete(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Read config, mean and std from the hub, its cache or a folder if they are None.

        The arguments of the constructor are plain data for a checkpoint.
        """
        transformers = _import_transformers()
        required = ("config", "mean", "std")
        arguments = {**dict.fromkeys(required), **arguments}
        if all(arguments[key] is not None for key in required):
            return arguments

        name = arguments["name"]
        source = str(Path(name).expanduser())
        remedy = "give a repository or folder of transformers, or pass backbone.mean and .std"
        with quick_hub(), naming_errors(f"backbone.name={name}", ConfigError, remedy=remedy):
            if arguments["config"] is None:
                config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
                arguments["config"] = _recorded(config)
            if arguments["mean"] is None or arguments["std"] is None:
                processor, _ = transformers.BaseImageProcessor.get_image_processor_dict(source)
                if processor.get("do_flip_channel_order"):
                    raise ValueError("do_flip_channel_order is not supported")
                is_scaled = processor.get("do_normalize") is not False
                mean = processor["image_mean"] if is_scaled else [0.0, 0.0, 0.0]
                std = processor["image_std"] if is_scaled else [1.0, 1.0, 1.0]
                arguments["mean"] = arguments["mean"] or list(mean)
                arguments["std"] = arguments["std"] or list(std)
        return arguments

    def _create(self, config: Mapping[str, Any], drop_path: float | None) -> Any:
        """Build the network of a config, without pretrained weights and without a classifier."""
        transformers = _import_transformers()
        config_class = _config_class(config.get("model_type"))
        settings = dict(config)
        del settings["model_type"]

        known = _own_settings(config_class)
        for key in settings:
            if key not in known:
                raise ConfigError(
                    f"backbone.config.{key}: unknown in {config_class.__name__}"
                    f"{suggest(key, known)}"
                )
        if drop_path and "drop_path_rate" not in known:
            raise self._unsupported(f"drop_path={drop_path}")

        network_class = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[config_class]
        # DeiT and LeViT have two classes. The second one has a distillation classifier.
        if isinstance(network_class, tuple):
            network_class = network_class[0]

        with naming_errors(f"backbone.config: {self._name}", ConfigError, remedy="change it"):
            network_config = config_class(**settings)
            if config_class.model_type == "cvt":
                network = _create_cvt(network_class, network_config, drop_path)
            else:
                if drop_path is not None and "drop_path_rate" in known:
                    network_config.drop_path_rate = float(drop_path)
                network = network_class(network_config)

        # Keep norms, because `_set_norm` may apply one to the tokens.
        for child, module in list(network.named_children()):
            if module is not network.base_model and not isinstance(module, nn.LayerNorm):
                delattr(network, child)
        return network

    def _tokens(self, images: Tensor) -> Tensor:
        network = self.network.base_model

        # Networks with position embeddings support other image sizes only with this option.
        options = {}
        if "interpolate_pos_encoding" in inspect.signature(network.forward).parameters:
            options["interpolate_pos_encoding"] = True
        features = getattr(network(images, **options), "last_hidden_state", None)
        if not isinstance(features, Tensor) or features.ndim not in (3, 4):
            raise ValueError("the last hidden state is not one map or sequence")

        tokens = features[:, self._num_prefix :]
        if features.ndim == 4:
            tokens = features.flatten(2).transpose(1, 2)
        if self._norm_path:
            tokens = self.network.get_submodule(self._norm_path)(tokens)
        return tokens

    def _check_tokens(self, tokens: Tensor) -> None:
        # Unknown prefix tokens would result in a token count that is not a square number.
        count = tokens.shape[1]
        if count == 0 or math.isqrt(count) ** 2 != count:
            raise ValueError(f"a square image has {count} tokens")

    def _norm_behind_pooling(self, unused: set[str]) -> str | None:
        """Return the path of the only unused LayerNorm of C channels, or None."""
        paths = []
        for path, module in self.network.named_modules():
            if not isinstance(module, nn.LayerNorm) or f"network.{path}.weight" not in unused:
                continue
            if tuple(module.normalized_shape) == (self.num_features,):
                paths.append(str(path))
        return paths[0] if len(paths) == 1 else None


# transformers is optional, so its objects are annotated with Any.
def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("backbone: transformers is missing; pip install -e '.[hf]'") from error
    return transformers


def _config_class(model_type: Any) -> Any:
    transformers = _import_transformers()
    # Composite networks, such as CLIP, have nested configs. `timm_wrapper` would build any timm
    # network and read its files.
    types = {}
    for config_class in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        if not config_class.sub_configs and config_class.model_type != "timm_wrapper":
            types[config_class.model_type] = config_class
    if model_type not in types:
        raise ConfigError(
            f"backbone.config.model_type={model_type}: not a supported image classification "
            f"network of transformers {transformers.__version__}; choose another one"
        )
    return types[model_type]


def _own_settings(config_class: Any) -> list[str]:
    """Return the settings of a config class. Settings of its base class may load code."""
    shared = inspect.signature(_import_transformers().PreTrainedConfig.__init__).parameters
    own = inspect.signature(config_class.__init__).parameters
    return [name for name, p in own.items() if name not in shared and p.kind not in VARIADIC]


def _recorded(config: Any) -> dict[str, Any]:
    """Return the plain data of a config for a checkpoint: its type and its settings."""
    settings = {"model_type": config.model_type}
    for key in _own_settings(_config_class(config.model_type)):
        settings[key] = getattr(config, key)
    return dict(json.loads(json.dumps(settings)))


def _create_cvt(network_class: Any, config: Any, drop_path: float | None) -> Any:
    """Build transformers' CvT with the activation and stochastic depth of the original code."""
    # The config has one rate per stage. Only the last one is used.
    if drop_path is None:
        drop_path = config.drop_path_rate[-1]
    config.drop_path_rate = [0.0] * len(config.depth)
    network = network_class(config)

    stages = network.base_model.encoder.stages
    for stage in stages:
        for layer in stage.layers:
            layer.intermediate.activation = QuickGELU()

    # Only the last stage has stochastic depth. Both branches end with a dropout before the
    # residual addition.
    if drop_path:
        layers = stages[-1].layers
        rates = torch.linspace(0, drop_path, len(layers), device="cpu").tolist()
        for layer, rate in zip(layers, rates, strict=True):
            for branch in (layer.attention.output, layer.output):
                branch.dropout = nn.Sequential(branch.dropout, DropPath(rate))
    return network


def _load_weights(network: Any, name: str, pretrained: bool | str) -> None:
    # `from_pretrained` builds a second network with a classifier, and converts legacy names.
    # Disable its messages about the classifier.
    logging = _import_transformers().utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    source: str | None = str(Path(name).expanduser())
    state = None
    if pretrained is not True:
        source = None
        state = read_weights(str(pretrained))
    filled, report = type(network).from_pretrained(
        source,
        config=network.config,
        state_dict=state,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # for any number of classes
        output_loading_info=True,
    )

    weights = filled.state_dict()
    wanted = network.state_dict().keys()
    unfilled = set(report["missing_keys"])
    for key, *_ in report["mismatched_keys"]:
        unfilled.add(key)
    unfilled = wanted & unfilled
    if unfilled:
        raise ValueError(f"{len(unfilled)} tensors do not match, such as {min(unfilled)}")
    network.load_state_dict({key: weights[key] for key in wanted})
