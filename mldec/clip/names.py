"""Vectors of names by a text encoder, each encoded once and then kept in the cache."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mldec.clip.model import ClipSource
from mldec.clip.text_encoder import TextEncoder
from mldec.files.arrays import read_npz
from mldec.files.cached import cache_folder, write_cached

log = logging.getLogger("mldec")

FORMAT = 1  # of a cached file; raise it when the vectors of a name change


@dataclass(frozen=True)
class Encoded:
    """Vectors of names, and the weights that made them.

    Attributes:
        vectors: float32 [D] by name, of length 1.
        sha256: of the file of the encoder's weights.
    """

    vectors: Mapping[str, np.ndarray]
    sha256: str


def encode_names(
    source: str,
    names: Sequence[str],
    templates: Sequence[str],
    cache_dir: str | None = None,
    *,
    keep: bool = True,
) -> tuple[Tensor, str]:
    """Return the vectors of K names, float32 [K, D] of length 1, and the hash of the weights.

    The cache holds a file per encoder and list of templates, with all names that were ever asked
    for. If it has all K, neither the model is opened nor open_clip imported.

    Args:
        source: of the text encoder, see `ClipSource.parse`.
        names: of the classes.
        templates: sentences with {} for the name, whose vectors are averaged.
        cache_dir: see `cache_folder`.
        keep: write the vectors of new names to the cache.

    Raises:
        ConfigError: if the text encoder is needed and cannot be had.
    """
    key = json.dumps([FORMAT, _identity(ClipSource.parse(source)), list(templates)])
    path = cache_folder(cache_dir) / f"text-{sha256(key.encode()).hexdigest()[:16]}.npz"
    cached = _load(path, key) or Encoded({}, "")

    missing = [name for name in names if name not in cached.vectors]
    if missing:
        encoder = TextEncoder.open(source)
        # A tag or a repository may have got other weights since.
        if cached.sha256 != encoder.sha256:
            cached, missing = Encoded({}, encoder.sha256), list(names)

        encoded = encoder.encode_names(missing, templates).numpy()
        new = dict(zip(missing, encoded, strict=True))
        cached = Encoded({**cached.vectors, **new}, encoder.sha256)
        if keep:
            _store(path, key, cached)

    vectors = np.stack([cached.vectors[name] for name in names])
    return torch.from_numpy(vectors), cached.sha256


def _identity(source: ClipSource) -> list[str]:
    """Return what changes with the encoder, without reading its weights."""
    files: list[Path] = []
    if source.file is not None:
        files = [source.file]
    elif source.folder is not None:
        # The tokenizer counts too.
        files = sorted(path for path in source.folder.iterdir() if path.is_file())

    identity = [source.model, source.weights or ""]
    for path in files:
        stat = path.stat()
        identity.append(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    return identity


def _load(path: Path, key: str) -> Encoded | None:
    """Return the content of a cached file; None if there is none, or it is damaged.

    The content is checked like that of any file, because others may be able to write to the cache.
    """
    try:
        stored = read_npz(path, ("key", "names", "vectors", "sha256"))
        if str(stored["key"]) != key:
            return None
        names = json.loads(stored["names"].tobytes())
        fault = _fault(names, stored["vectors"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        fault = " ".join(str(error).split())

    if fault:
        log.warning("%s is not used (%s): the names are encoded again", path, fault)
        return None
    return Encoded(dict(zip(names, stored["vectors"], strict=True)), str(stored["sha256"]))


def _fault(names: object, vectors: np.ndarray) -> str | None:
    """Return what is wrong with cached names and their vectors, or None."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return "its names are no list of texts"
    if vectors.dtype != np.float32 or vectors.ndim != 2 or len(vectors) != len(names):
        return "its vectors are not one for each name"
    if not np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3):
        return "a vector has not the length 1"
    return None


def _store(path: Path, key: str, encoded: Encoded) -> None:
    """Write vectors to the cache."""
    arrays = {
        "key": key,
        "names": np.frombuffer(json.dumps(list(encoded.vectors)).encode(), np.uint8),
        "vectors": np.stack(list(encoded.vectors.values())),
        "sha256": encoded.sha256,
    }
    write_cached(path, arrays, "the names are encoded at every start")
