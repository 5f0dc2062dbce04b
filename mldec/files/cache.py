"""The cache folder, and cached arrays."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mldec.errors import DataError, brief, log
from mldec.files.atomic import replacing, to_json, write_file
from mldec.files.text import expand_user

if TYPE_CHECKING:
    from torch import nn

FORMAT = 6  # version of cached tables; increase it when the meaning of an array changes


def cache_folder(cache_dir: str | None) -> Path:
    """Return the cache folder: the setting, else $XDG_CACHE_HOME/mldec, else ~/.cache/mldec."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mldec")
    return expand_user(cache_dir or default)


def network_hash(network: "nn.Module", *facts: object) -> str:
    """Return a hash of the tensors of a network and of other facts, as a name in the cache."""
    import torch

    digest = hashlib.sha256(repr(facts).encode())
    for name, value in network.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        # As bytes, because NumPy has no bfloat16.
        digest.update(value.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def describe_entry(folder: Path, content: str, data: str, files: Sequence[str]) -> None:
    """Write what the files in a folder of the cache are, for `mldec cache`.

    `content` names the kind of the files and the network, `data` the data set.
    """
    text = to_json({"content": content, "data": data, "files": files})
    # Another run may describe other files in the same folder.
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    write_file(folder / f"{name}.json", text.encode())


def write_cached(path: Path, key: str, arrays: Mapping[str, Any]) -> None:
    """Write arrays and their key to a cache file atomically. A failure is logged as a warning."""
    try:
        with replacing(path) as file:
            # The key is the last array: a truncated archive loses its last arrays first.
            np.savez(file, **arrays, key=key)
    except DataError as error:
        log.warning(f"{error}; the cache is not used")


def read_cached(path: Path, key: str) -> dict[str, Any] | None:
    """Return the arrays of a cache file, or None if it has another key or cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            if str(stored["key"]) != key:
                return None
            return dict(stored)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:
        # zipfile and NumPy raise various exceptions for damaged files.
        log.warning(f"{path}: the cache file is damaged ({brief(error)}); it will be replaced")
        return None
