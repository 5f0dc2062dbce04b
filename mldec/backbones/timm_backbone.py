"""Backbones of timm, and the base class of all backbones."""

import copy
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from timm.models import load_state_dict
from timm.models._manipulate import group_with_matcher  # in its __all__, and exported nowhere else
from torch import Tensor, nn

from mldec.errors import ConfigError, naming_errors, suggest
from mldec.files.text import expand_user
from mldec.names import format_list
from mldec.runtime.environment import quick_hub
from mldec.tokens import (
    as_tokens,
    check_patches,
    classifier_paths,
    freeze,
    norm_behind_pooling,
    timm_tokens,
    try_out,
)

# Shapes: B batch, H and W image height and width in pixels, N tokens, C backbone width

FeatureNorm = Literal["auto", "none", "pretrained", "new"]

STAGES = 3  # earlier stages whose maps are pooled to blocks of features


class Normalize(nn.Module):
    """Normalize RGB images. This is the first layer of a backbone.

    Args:
        mean: Channel means for images in [0, 1].
        std: Channel standard deviations for images in [0, 1], above 0.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # Buffers, because checkpoints must contain the normalization of their weights.
        for setting, values in (("mean", mean), ("std", std)):
            if len(values) != 3 or (setting == "std" and min(values) <= 0):
                raise ConfigError(f"backbone.{setting} is {list(values)}: give 3 numbers in [0, 1]")
            channels = torch.tensor([float(value) for value in values])
            self.register_buffer(setting, channels.view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Normalize images [B, 3, H, W], uint8, or floating point in [0, 1].

        The result has the dtype of `mean`. Other dtypes raise ValueError.
        """
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        elif not images.is_floating_point():
            raise ValueError(f"images are {images.dtype}: give uint8, or floats in [0, 1]")

        # Autocast does not change the dtype of these operations.
        return (images.to(self.mean.dtype) - self.mean) / self.std


class Backbone(Normalize):
    """Base class of backbones, which normalize images and map them to tokens.

    It inherits from `Normalize` because `mean` and `std` are keys of checkpoints.
    """

    network: Any  # set by the subclass, without a common type
    norm: nn.Module
    num_features: int

    def __init__(self, name: str, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(mean, std)
        self.name = name
        self._norm_path: str | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Compute the tokens [B, N, C] of images [B, 3, H, W], row by row of the image."""
        return self.norm(self._tokens(super().forward(images)))

    def _tokens(self, images: Tensor) -> Tensor:
        """Return the tokens [B, N, C] of normalized images, before `norm`."""
        raise NotImplementedError

    def _try_out(self, height: int, width: int) -> tuple[Tensor, set[str]]:
        """Run one image through the network on the meta device; see `try_out`."""
        remedy = f"the input was {height} x {width} pixels; choose another network or size"
        with naming_errors(f"backbone.name={self.name}", ConfigError, remedy=remedy):
            tokens, unused = try_out(self, (3, height, width))
            check_patches(self.network, tokens)
        return tokens, unused

    def _set_norm(self, feature_norm: FeatureNorm, path: str | None) -> None:
        """Set the norm of the tokens. `path` is the path of the norm after the pooling, or None."""
        self.norm = nn.LayerNorm(self.num_features) if feature_norm == "new" else nn.Identity()
        if feature_norm in ("auto", "pretrained"):
            self._norm_path = path
        if feature_norm == "pretrained" and path is None:
            raise self._unsupported("feature_norm=pretrained")

    def _unsupported(self, setting: str) -> ConfigError:
        return ConfigError(f"backbone.{setting}: {self.name} does not support it; remove it")


def check_drop_path(drop_path: float | None) -> None:
    """Raise ConfigError unless the rate is None or in [0, 1)."""
    if drop_path is not None and not 0 <= drop_path < 1:
        raise ConfigError(f"backbone.drop_path is {drop_path}: it must lie in [0, 1)")


def read_weights(path: str) -> dict[str, Any]:
    """Read a state dict of plain tensors from a file."""
    state = load_state_dict(str(expand_user(path)), weights_only=True)
    # timm would ignore an empty state dict and download weights.
    assert state, "no tensors"
    return dict(state)


@contextmanager
def loading_weights(name: str, pretrained: bool | str) -> Iterator[None]:
    """Convert exceptions of loading weights to ConfigError, and restore the random state."""
    try:
        # Loading builds a second network. Its random numbers must not change the head.
        # torch prints download messages to stdout, which is reserved for results.
        with torch.random.fork_rng(devices=[]), redirect_stdout(sys.stderr), quick_hub():
            yield
    except Exception as error:
        value = "true" if pretrained is True else pretrained
        # The message of torch about mismatched tensors has several lines and hundreds of names.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        tensors = re.findall(r'"([\w.]+)"', str(error))
        if len(tensors) > 3:
            reason = f"{len(tensors)} missing or unexpected tensors: {format_list(tensors, 3)}"
        remedy = "backbone.pretrained=FILE"
        if isinstance(pretrained, str):
            # The default network of a recipe may differ from that of the user's file.
            remedy = "backbone=NAME or backbone.name=NAME of the network of this file"
        raise ConfigError(
            f"backbone.pretrained={value}: the weights of {name} cannot be used ({reason}); pass "
            f"{remedy}, or backbone.pretrained=false for random weights"
        ) from None  # the errors of a hub and of torch take several screens


# Arguments that are not allowed in `model_args`. Some of `create_model` read files or URLs.
_RESERVED = {"num_classes", "in_chans", "img_size", "drop_path_rate", "features_only"}
_RESERVED |= inspect.signature(timm.create_model).parameters.keys() - {"kwargs"}


class TimmBackbone(Backbone):
    """Map images to tokens with a network of timm's registry.

    Images are scaled to [0, 1] and normalized with the mean and standard deviation of the weights.
    Class and register tokens are dropped. The names of the attributes `network`, `norm`, `mean`
    and `std` are keys of checkpoints. `num_features` is C, the width of the tokens.

    With `blocks`, the output is one token [B, 1, D] of pooled features instead, and `num_features`
    is D. `block_sizes` has the names and widths of its parts, in order:

    - mean: The mean token.
    - s1, s2, s3: Mean and standard deviation over the positions of the last stages before the
      features, the last stage first. Networks without feature maps have none.
    - prob, top: Mean probability and highest logit over the positions of each class of the
      network's own classifier. They need pretrained weights with a classifier of the tokens.

    Args:
        name: Name of a timm network, optionally with a pretrained tag: `resnet50.a1_in1k`.
        pretrained: True for timm's weights, which are downloaded once, or the path of a file with
            weights of this network (.safetensors, .pth).
        image_size: Pixels per side, for networks with a fixed size (ViT, Swin, Mixer). None for
            timm's default.
        drop_path: Maximum rate of stochastic depth, in [0, 1). None for timm's default.
        checkpointing: Recompute activations in the backward pass to save memory.
        feature_norm: Norm of the tokens. `auto` uses the network's norm after the pooling, if any.
            `pretrained` requires this norm. `new` adds a new LayerNorm. `none` adds no norm.
        mean: Channel means for images in [0, 1]. None for the values of timm's weights.
        std: Channel standard deviations. None for the values of timm's weights.
        model_args: Further keyword arguments of the network's constructor in timm.
        blocks: Whether to return blocks of features. `build.model` sets it as the head requires.
    """

    class_weight: Tensor  # classifier of the pretrained weights [L, C]; L is 0 without one
    class_bias: Tensor

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
        model_args: dict[str, Any] | None = None,
        blocks: bool = False,
    ) -> None:
        check_drop_path(drop_path)
        arguments = dict(model_args or {})
        for key in arguments:
            if key in _RESERVED:
                raise ConfigError(f"backbone.model_args.{key}: not allowed; remove it")
        # Some networks do not have these arguments, so pass them only if they are set.
        if image_size is not None:
            arguments["img_size"] = image_size
        if drop_path is not None:
            arguments["drop_path_rate"] = drop_path

        network = _create(name, num_classes=0, **arguments)
        cfg = network.pretrained_cfg
        if mean is None:
            mean = cfg["mean"]
        if std is None:
            std = cfg["std"]
        super().__init__(name, mean, std)
        self.network = network
        self.num_features = network.num_features
        self._set_norm(feature_norm, norm_behind_pooling(network))
        side_lengths = (image_size, image_size) if image_size else cfg["input_size"][-2:]
        self.block_sizes: dict[str, int] = {}  # empty: the output is tokens
        _, unused = self._try_out(*side_lengths)
        freeze(self, unused)
        if blocks:
            self._stages = earlier_stages(network, (3, *side_lengths), STAGES)
            self._set_classifier(torch.empty(0, network.num_features), torch.empty(0))

        if checkpointing:
            try:
                network.set_grad_checkpointing(True)
            except (AttributeError, AssertionError) as error:
                raise self._unsupported("checkpointing=true") from error

        # Load weights last, so that downloads start only if all other settings are valid.
        if pretrained:
            with loading_weights(name, pretrained):
                classifier = _load_weights(network, name, pretrained, arguments)
            # Other layers precede the classifier if its width differs.
            fits = getattr(classifier, "in_features", None) == network.num_features
            if blocks and fits and self._stages:
                self._set_classifier(classifier.weight.detach(), classifier.bias.detach())

    def _set_classifier(self, weight: Tensor, bias: Tensor) -> None:
        self.register_buffer("class_weight", weight)
        self.register_buffer("class_bias", bias)
        self.block_sizes = {"mean": self.network.num_features}
        for number, width in enumerate(self._stages.values(), 1):
            self.block_sizes[f"s{number}"] = 2 * width
        if len(weight):
            self.block_sizes |= {"prob": len(weight), "top": len(weight)}
        self.num_features = sum(self.block_sizes.values())

    def allocate(self, tensors: Mapping[str, Tensor]) -> None:
        """Prepare for a state dict, in which the classifier may have another number of classes."""
        if self.block_sizes and "class_weight" in tensors:
            shape = (len(tensors["class_weight"]), self.network.num_features)
            self._set_classifier(torch.empty(shape), torch.empty(shape[0]))

    def forward(self, images: Tensor) -> Tensor:
        """Compute tokens [B, N, C], or blocks [B, 1, D], of images [B, 3, H, W]."""
        if not self.block_sizes:
            return super().forward(images)
        return self.pool(self.maps(images))

    def maps(self, images: Tensor) -> Tensor:
        """Return the tokens, with the blocks of earlier stages in more channels, [B, N, C + S]."""
        images = Normalize.forward(self, images)
        if not self._stages:
            return self.norm(self._tokens(images))

        features, stages = stage_maps(self.network, images, sorted(self._stages))
        tokens = self.norm(as_tokens(self.network, features, norm_path=self._norm_path))
        parts = []
        for stage in reversed(stages):
            values = stage.float().flatten(2)
            parts += [values.mean(2), values.std(2, correction=0)]
        # They are the same at each token, and heat maps are of the tokens only.
        blocks = torch.cat(parts, 1).detach()[:, None].expand(-1, tokens.shape[1], -1)
        return torch.cat([tokens.float(), blocks], 2)

    def pool(self, maps: Tensor) -> Tensor:
        """Pool `maps` to blocks [B, 1, D]."""
        tokens = maps[:, :, : self.network.num_features]
        parts = [tokens.float().mean(1), maps[:, 0, self.network.num_features :].detach()]
        if len(self.class_weight):
            tokens = tokens.to(self.class_weight.dtype)
            logits = F.linear(tokens, self.class_weight, self.class_bias).float()
            parts += [logits.softmax(2).mean(1), logits.amax(1)]
        return torch.cat(parts, 1)[:, None]

    def layers_below_head(self) -> dict[str, int]:
        """Return the number of layers between each parameter and the head, by parameter name.

        Layers are counted as in timm's layer decay. Parts of the classifier, such as a norm after
        the pooling, have depth 0, the last block has depth 1, and the stem has the maximum depth.

        Raises:
            ConfigError: If timm has no layer groups for this network.
        """
        if not hasattr(self.network, "group_matcher"):
            raise ConfigError(f"optim.layer_decay: {self.name} does not support it; remove it")

        # timm counts layers from the stem, and puts unknown names into the layer of the classifier.
        # This network has no classifier, so "classifier" is an unknown name.
        parameters = list(self.network.named_parameters())
        parameters.append(("classifier", None))
        matcher = self.network.group_matcher(coarse=False)
        layers = group_with_matcher(iter(parameters), matcher, reverse=True)

        # Parameters outside the network, such as a new norm, have depth 0.
        depths = {name: 0 for name, _ in self.named_parameters()}
        for name, _ in self.network.named_parameters():
            depths[f"network.{name}"] = layers["classifier"] - layers[name]
        return depths

    def _tokens(self, images: Tensor) -> Tensor:
        return timm_tokens(self.network, images, norm_path=self._norm_path)


# timm's networks have no common type, so they are annotated with Any.
def _create(name: str, **arguments: Any) -> Any:
    # timm would also accept a repository or a folder here, and read it.
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        hint = suggest(architecture, timm.list_models())
        raise ConfigError(f"backbone.name={name}: unknown in timm {timm.__version__}{hint}")

    remedy = f"the arguments were {arguments}"
    with naming_errors(f"backbone.name={name}", ConfigError, remedy=remedy):
        return timm.create_model(name, **arguments)


def stage_maps(network: Any, images: Tensor, stages: Sequence[int] | None) -> tuple[Any, list[Any]]:
    """Return the features of a timm network, and the maps [B, C_i, H_i, W_i] of its stages.

    `stages` are indices of `forward_intermediates`; None returns all stages.
    """
    options = {}
    # Without this option, EfficientNets return only the stages before a change of the resolution.
    if "extra_blocks" in inspect.signature(network.forward_intermediates).parameters:
        options["extra_blocks"] = True
    features, maps = network.forward_intermediates(images, indices=stages, **options)
    return features, maps


def earlier_stages(network: Any, image_shape: tuple[int, ...], count: int) -> dict[int, int]:
    """Return the indices and widths of the last stages before the features, the last one first.

    The result has at most `count` stages. It is empty for networks without feature maps.
    """
    if not hasattr(network, "forward_intermediates"):
        return {}
    meta = copy.deepcopy(network).to("meta").eval()
    with torch.no_grad():
        features, maps = stage_maps(meta, torch.empty(1, *image_shape, device="meta"), None)
    if not isinstance(features, Tensor) or features.ndim != 4:
        return {}
    widths: dict[int, int] = {}
    for index, stage in reversed(list(enumerate(maps))):
        # The last stage of a ResNet is its output, whose mean is a separate block.
        if stage is not features and len(widths) < count:
            widths[index] = stage.shape[1]
    return widths


def _load_weights(
    network: Any, name: str, pretrained: bool | str, arguments: dict[str, Any]
) -> Any:
    """Load timm's weights or a file into the network, strictly. Returns the classifier layer."""
    # timm loads strictly only if the number of classes is equal. Otherwise missing layers stay
    # random without a warning. Load into a second network with the number of classes of the
    # weights, and copy them from there.
    num_classes = network.pretrained_cfg["num_classes"]
    overlay = None
    if pretrained is not True:
        # timm then loads `state_dict` and does not download weights.
        state = _in_timm_names(read_weights(str(pretrained)), network)
        num_classes = _num_classes(state, network)
        overlay = {"state_dict": state, "num_classes": num_classes, "label_offset": 0}

    arguments = {**arguments, "num_classes": num_classes, "pretrained_cfg_overlay": overlay}
    filled: Any = timm.create_model(name, pretrained=True, **arguments)
    weights = filled.state_dict()
    network.load_state_dict({key: weights[key] for key in network.state_dict()})
    return filled.get_classifier()


def _in_timm_names(state: dict[str, Any], network: Any) -> dict[str, Any]:
    """Rename the weights of EfficientNet-PyTorch, such as `_conv_stem.weight`, to timm's names."""
    if "_conv_stem.weight" not in state:
        return state

    # Both packages define the layers in the order of the forward pass, and name their parameters
    # as torch does. Compare these names, because a sorted file would mix up layers of equal shapes.
    names = [*network.state_dict(), "classifier.weight", "classifier.bias"]
    if [name.split(".")[-1] for name in state] != [name.split(".")[-1] for name in names]:
        raise ValueError("the number or the order of the layers differs")
    return dict(zip(names, state.values(), strict=True))


def _num_classes(state: dict[str, Any], network: Any) -> int:
    for layer in classifier_paths(network) + ("head", "fc"):  # the last two in third-party files
        if f"{layer}.weight" in state:
            return len(state[f"{layer}.weight"])

    # The keys match a network without a classifier. Otherwise timm raises an error.
    if state.keys() == network.state_dict().keys():
        return 0
    return int(network.pretrained_cfg["num_classes"])
