"""Backbones of timm, and what all backbones share."""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import timm
import torch
from timm.models import load_state_dict
from timm.models._manipulate import group_with_matcher  # in its __all__, and exported nowhere else
from torch import Tensor, nn

from mldec.backbones.tokens import check_patches, freeze, norm_behind_pooling, timm_tokens, try_out
from mldec.errors import ConfigError, refusing

# B batch, H and W image height and width in pixels, N tokens, C backbone width

FeatureNorm = Literal["auto", "none", "pretrained", "new"]


class Normalize(nn.Module):
    """Normalize RGB images, the first layer of a backbone.

    Args:
        mean: of the three channels, for images in [0, 1].
        std: likewise.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # Buffers, because the normalisation belongs to the weights: a checkpoint must hold it.
        for setting, values in (("mean", mean), ("std", std)):
            if len(values) != 3 or (setting == "std" and min(values) <= 0):
                raise ConfigError(
                    f"backbone.{setting}={list(values)}: "
                    f"give red, green and blue in [0, 1]; std is above 0"
                )
            channels = torch.tensor([float(value) for value in values])
            self.register_buffer(setting, channels.view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W], uint8 or floating point in [0, 1], to the type of `mean`."""
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        elif not images.is_floating_point():
            raise ValueError(
                f"images are {images.dtype}; give uint8 in 0..255 or floating point in [0, 1]"
            )

        # Autocast leaves both operations alone, so the images are normalised in the parameters'
        # type.
        return (images.to(self.mean.dtype) - self.mean) / self.std


class Backbone(Normalize):
    """Turn images into tokens: scale and normalise the images, and run a network.

    It inherits the normalization because `mean` and `std` are keys of a checkpoint.
    """

    norm: nn.Module
    num_features: int

    def __init__(self, name: str, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(mean, std)
        self._name = name
        self._norm_path: str | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Compute the tokens [B, N, C] of a batch of images, row by row over the image.

        Images [B, 3, H, W] are uint8 in 0..255, or floating point that is in [0, 1] already.
        """
        return self.norm(self._tokens(super().forward(images)))

    def _tokens(self, images: Tensor) -> Tensor:
        """Return the tokens [B, N, C] of normalised images, before `norm`."""
        raise NotImplementedError

    def _check_tokens(self, tokens: Tensor) -> None:
        """Raise a `ValueError` unless the tokens [1, N, C] are all of the image."""

    def _try_out(self, height: int, width: int) -> tuple[Tensor, set[str]]:
        """Run one image through the network without memory: see `try_out`."""
        remedy = f"tried with {height} x {width} pixels; take another network or size"
        with refusing(f"backbone.name={self._name}", ConfigError, remedy=remedy):
            tokens, unused = try_out(self, (3, height, width))
            self._check_tokens(tokens)
        return tokens, unused

    def _set_norm(self, feature_norm: FeatureNorm, path: str | None) -> None:
        """Choose the norm of the tokens; `path` is that of the one behind the pooling, if any."""
        self.norm = nn.LayerNorm(self.num_features) if feature_norm == "new" else nn.Identity()
        if feature_norm in ("auto", "pretrained"):
            self._norm_path = path
        if feature_norm == "pretrained" and path is None:
            raise self._refusal("feature_norm=pretrained", "has no norm behind its pooling")

    def _refusal(self, setting: str, fault: str) -> ConfigError:
        """Return the error for a setting that the network does not have."""
        return ConfigError(f"backbone.{setting}: {self._name} {fault}; leave it out")


def check_drop_path(drop_path: float | None) -> None:
    """Raise a `ConfigError` unless the rate is in [0, 1)."""
    if drop_path is not None and not 0 <= drop_path < 1:
        raise ConfigError(f"backbone.drop_path={drop_path}: give a rate in [0, 1)")


def read_weights(path: str) -> dict[str, Any]:
    """Read a file of plain tensors."""
    state = load_state_dict(str(Path(path).expanduser()), weights_only=True)
    # timm would treat an empty dictionary as none, and download weights.
    assert state, "no tensors"
    return dict(state)


@contextmanager
def loading(name: str, pretrained: bool | str) -> Iterator[None]:
    """Turn whatever happens while weights are loaded into one line that names them."""
    try:
        # The network from which they are copied draws random numbers; the head's stay the same.
        # torch reports a download on standard output, which is for results.
        with torch.random.fork_rng(devices=[]), redirect_stdout(sys.stderr), quick_hub():
            yield
    except Exception as error:
        value = "true" if pretrained is True else pretrained
        # torch names the tensors that do not fit in further lines.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        raise ConfigError(
            f"backbone.pretrained={value}: the weights of {name} cannot be used ({reason}); "
            f"give a file with backbone.pretrained=FILE, "
            f"or backbone.pretrained=false to start from random weights"
        ) from error


@contextmanager
def quick_hub() -> Iterator[None]:
    """Use only the cache where the hub does not answer: each download would be retried."""
    constants = huggingface_hub.constants
    before = constants.HF_HUB_OFFLINE
    try:
        if not before:
            huggingface_hub.get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:
        constants.HF_HUB_OFFLINE = True

    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


# Arguments of timm that model_args must not hold: settings of the backbone, and those that would
# read a file or an address that nobody asked for.
_RESERVED = {"num_classes", "in_chans", "img_size", "drop_path_rate", "features_only"} | {
    argument for argument in inspect.signature(timm.create_model).parameters if argument != "kwargs"
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
        drop_path: highest rate of stochastic depth, in [0, 1); None for the network's own.
        checkpointing: recompute activations in the backward pass, to save memory.
        feature_norm: the norm of the tokens. `auto`: the one that the network has behind its
            pooling, if any; `pretrained`: the same, and an error if there is none; `new`: a fresh
            LayerNorm; `none`: no further norm.
        mean: of the three channels, for images in [0, 1]; None for that of timm's weights.
        std: likewise.
        model_args: further keyword arguments of the network's constructor in timm.
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
        model_args: dict[str, Any] | None = None,
    ) -> None:
        check_drop_path(drop_path)
        # Not every network takes these two, so they are passed on only if they are set.
        arguments = dict(model_args or {})
        if clash := sorted(_RESERVED & arguments.keys()):
            raise ConfigError(
                f"backbone.model_args.{clash[0]}: not to be set here; use the settings of the "
                f"backbone"
            )
        if image_size is not None:
            arguments["img_size"] = image_size
        if drop_path is not None:
            arguments["drop_path_rate"] = drop_path

        network = _create(name, num_classes=0, **arguments)
        cfg = network.pretrained_cfg
        super().__init__(
            name, cfg["mean"] if mean is None else mean, cfg["std"] if std is None else std
        )
        self.network = network
        self.num_features = network.num_features
        self._set_norm(feature_norm, norm_behind_pooling(network))
        side_lengths = (image_size, image_size) if image_size else cfg["input_size"][-2:]
        _, unused = self._try_out(*side_lengths)
        freeze(self, unused)

        if checkpointing:
            try:
                network.set_grad_checkpointing(True)
            except (AttributeError, AssertionError) as error:
                raise self._refusal("checkpointing=true", "does not support it") from error

        # At the end, so that nothing is downloaded before all other settings are known to be good.
        if pretrained:
            with loading(name, pretrained):
                _load_weights(network, name, pretrained, arguments)

    def layers_below_head(self) -> dict[str, int]:
        """Return how many layers each parameter is below the head of the model, by its name.

        The layers are those of timm's layer decay: 1 for the last block, the most for the stem, and
        0 for what timm counts as part of the classifier, such as a norm behind the pooling.
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


# Any: timm's networks have no common interface that a type checker could know.
def _create(name: str, **arguments: Any) -> Any:
    """Build a network of timm's registry without weights."""
    # timm would also take the address of a repository or a folder here, and read it.
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() names all"
        raise ConfigError(
            f"backbone.name={name}: timm {timm.__version__} has no such network; {hint}"
        )

    settings = ", ".join(f"{key}={value}" for key, value in arguments.items())
    what = f"backbone.name={name} with {settings}"
    with refusing(what, ConfigError, remedy="use other settings"):
        return timm.create_model(name, **arguments)


def _load_weights(
    network: Any, name: str, pretrained: bool | str, arguments: dict[str, Any]
) -> None:
    """Fill the whole network with the weights that timm publishes, or those of a file."""
    # timm does not load strictly if the number of classes differs: layers that the weights lack
    # stay random without a warning. So the weights go into a second network with their own number
    # of classes, which timm fills strictly, and from there into ours.
    num_classes, overlay = network.pretrained_cfg["num_classes"], None
    if pretrained is not True:
        # With an overlay, timm takes the weights from `state_dict` and downloads nothing.
        state = read_weights(str(pretrained))
        num_classes = _num_classes(state, network)
        overlay = {"state_dict": state, "num_classes": num_classes, "label_offset": 0}

    filled = timm.create_model(
        name,
        pretrained=True,
        num_classes=num_classes,
        pretrained_cfg_overlay=overlay,
        **arguments,
    )
    weights = filled.state_dict()
    network.load_state_dict({key: weights[key] for key in network.state_dict()})


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
