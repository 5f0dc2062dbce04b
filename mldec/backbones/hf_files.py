"""Files that transformers writes, of a folder or a repository on the hub, read as plain data."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from timm.models import load_state_dict

from mldec.backbones.common import REMEDY, WEIGHTS, hub_file
from mldec.errors import ConfigError, brief

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
