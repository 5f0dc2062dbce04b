"""What all backbones share: the input, the trial of a network, and files with its weights."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.utils import EntryNotFoundError, get_session
from timm.models import load_state_dict
from torch import Tensor, nn

from mldec.errors import ConfigError, suggest
from mldec.tokens import MisfitError, try_out

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
