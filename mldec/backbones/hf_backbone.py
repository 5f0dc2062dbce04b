"""The CvT of transformers, which timm does not have."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import DropPath, QuickGELU
from torch import Tensor, nn

from mldec.backbones.timm_backbone import (
    Backbone,
    FeatureNorm,
    check_drop_path,
    loading_weights,
    read_weights,
)
from mldec.errors import ConfigError, naming_errors, suggest
from mldec.files.text import expand_user
from mldec.tokens import freeze

# Shapes: B batch, H and W image height and width in pixels, N tokens, C backbone width

NORM = "layernorm"  # path of the norm after the pooling


class HFBackbone(Backbone):
    """Map images to tokens with the CvT of transformers. See also `TimmBackbone`.

    transformers' CvT differs from its original code, which trained the weights, in two ways. Both
    are corrected here. The activation is x * sigmoid(1.702 x). Stochastic depth drops the two
    branches of a layer and not the residual stream, with rates that increase over the last stage.
    Source: microsoft/CvT lib/models/cls_cvt.py.

    Args:
        name: A repository on the Hub (`microsoft/cvt-13`). Only `pretrained=True` reads it.
        pretrained: True for the weights of `name`, or the path of a file with weights of this
            network under the names of transformers (.safetensors, .bin).
        image_size: Pixels per side of the image with which the constructor runs the network once.
            The network accepts images of any size.
        drop_path: Maximum rate of stochastic depth, in [0, 1). None for the rate in the config.
        checkpointing: Not supported by this network: True raises ConfigError.
        feature_norm: Norm of the tokens, as in `TimmBackbone`.
        mean: Channel means for images in [0, 1].
        std: Channel standard deviations.
        config: The architecture: settings of transformers' `CvtConfig`, and `model_type`, which is
            "cvt". A checkpoint contains them, so that it loads offline.
    """

    def __init__(
        self,
        name: str,
        *,
        config: dict[str, Any],
        pretrained: bool | str = False,
        image_size: int | None = None,
        drop_path: float | None = None,
        checkpointing: bool = False,
        feature_norm: FeatureNorm = "auto",
        mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
        std: Sequence[float] = IMAGENET_DEFAULT_STD,
    ) -> None:
        check_drop_path(drop_path)
        super().__init__(name, mean, std)
        if checkpointing:
            raise self._unsupported("checkpointing=true")

        self.network = _create(config, drop_path)
        self.norm = nn.Identity()
        side = image_size or 224
        tokens, unused = self._try_out(side, side)
        self.num_features = tokens.shape[2]

        self._set_norm(feature_norm, NORM)
        applied_norm = f"network.{self._norm_path}."
        freeze(self, {key for key in unused if not key.startswith(applied_norm)})

        # Load weights last, so that downloads start only if all other settings are valid.
        if pretrained:
            with loading_weights(name, pretrained):
                _load_weights(self.network, name, pretrained)

    def _tokens(self, images: Tensor) -> Tensor:
        maps = self.network.base_model(images).last_hidden_state  # [B, C, H, W]
        tokens: Tensor = maps.flatten(2).transpose(1, 2)
        if self._norm_path:
            tokens = self.network.get_submodule(self._norm_path)(tokens)
        return tokens


# transformers is optional, so its objects are annotated with Any.
def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("backbone: transformers is missing; pip install -e '.[hf]'") from error
    return transformers


def _create(settings: Mapping[str, Any], drop_path: float | None) -> Any:
    """Build CvT without weights and classifier, with the activation and stochastic depth above."""
    transformers = _import_transformers()
    settings = dict(settings)
    model_type = settings.pop("model_type", None)
    if model_type != "cvt":
        raise ConfigError(
            f"backbone.config.model_type={model_type}: only cvt is supported; pass backbone=timm "
            f"for other networks, and use their checkpoints with commit 5852d40b"
        )

    # The config may be that of an untrusted checkpoint, and settings of the base class of all
    # configs may load code.
    shared = inspect.signature(transformers.PreTrainedConfig.__init__).parameters
    own = inspect.signature(transformers.CvtConfig.__init__).parameters
    known = [name for name in own if name not in shared]
    for key in settings:
        if key not in known:
            raise ConfigError(f"backbone.config.{key}: unknown in CvtConfig{suggest(key, known)}")

    with naming_errors("backbone.config", ConfigError, remedy="change it"):
        config = transformers.CvtConfig(**settings)
        # The config has one rate per stage. Only the last one is used.
        if drop_path is None:
            drop_path = config.drop_path_rate[-1]
        config.drop_path_rate = [0.0] * len(config.depth)
        network = transformers.CvtForImageClassification(config)
    del network.classifier

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

    source: str | None = str(expand_user(name))
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
    mismatched = {key for key, *_ in report["mismatched_keys"]}
    unfilled = wanted & (mismatched | set(report["missing_keys"]))
    if unfilled:
        raise ValueError(f"{len(unfilled)} tensors do not match, such as {min(unfilled)}")
    network.load_state_dict({key: weights[key] for key in wanted})
