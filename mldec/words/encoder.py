"""Text encoders and image towers of open_clip, from a name or from local files."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mldec.errors import ConfigError, naming_errors, suggest
from mldec.files.cache import cache_folder, read_cached, write_cached
from mldec.files.text import expand_user, read_lines
from mldec.files.torch_files import sha256_of
from mldec.runtime import distributed
from mldec.runtime.console import progress_bar
from mldec.words.types import PREFIX, PROMPT

# Prefixes of model names in open_clip.
LOCAL = "local-dir:"
HUB = "hf-hub:"
CONFIG = "open_clip_config.json"  # required in the folder of an open_clip model
DEFAULT_WEIGHTS = "openai"
PREPROCESSING = ("mean", "std", "interpolation", "resize_mode")  # settings in open_clip

_REMEDY = f"pass clip:FOLDER with {CONFIG}, the weights and the tokenizer"

BATCH_SIZE = 256  # texts
FORMAT = 1  # version of cached files; increase it when the vectors of a name change
PLACE = "{}"  # placeholder of the name in a template
# Template lists of the CLIP authors, by their names in open_clip.
LISTS = {"clip80": "OPENAI_IMAGENET_TEMPLATES", "simple7": "SIMPLE_IMAGENET_TEMPLATES"}


@dataclass(frozen=True)
class ClipSource:
    """The name of a model and the location of its weights."""

    text: str  # user input, for messages
    model: str  # a name of open_clip, "local-dir:FOLDER" or "hf-hub:OWNER/NAME"
    weights: str | None  # pretrained tag or file; None for a folder or repository with weights
    folder: Path | None = None  # folder of the model; None for other sources
    file: Path | None = None  # local file of the weights; None for other sources

    @classmethod
    def parse(cls, text: str) -> "ClipSource":
        """Parse "clip:MODEL[:WEIGHTS]", "clip:FOLDER" or "clip:hf-hub:OWNER/NAME".

        MODEL is a name of open_clip. WEIGHTS is a file or a pretrained tag of the model, by default
        "openai". FOLDER contains open_clip_config.json, the weights and the files of the tokenizer.
        It may have the prefix "local-dir:".
        """
        name = text.removeprefix(PREFIX)
        folder = expand_user(name.removeprefix(LOCAL)).absolute()
        if name.startswith(LOCAL) or (name and folder.is_dir()):
            return cls(text, f"{LOCAL}{folder}", None, folder=folder)
        if name.startswith(HUB):
            return cls(text, name, None)

        model, _, weights = name.partition(":")
        path = expand_user(weights)
        if path.is_file():
            path = path.absolute()
            return cls(text, model, str(path), file=path)
        if len(path.parts) > 1:
            raise ConfigError(f"{text}: {path} not found; write clip:MODEL:WEIGHTS or clip:FOLDER")
        return cls(text, model, weights or DEFAULT_WEIGHTS)

    @property
    def absolute(self) -> str:
        """The source with absolute paths, which is valid in any working directory."""
        weights = "" if self.weights is None else f":{self.weights}"
        return PREFIX + self.model.removeprefix(LOCAL) + weights


@dataclass(frozen=True)
class ClipModel:
    """A model of open_clip in evaluation mode, float32."""

    source: ClipSource
    model: Any  # with `encode_image`, `encode_text`, `logit_scale` and, for SigLIP, `logit_bias`
    # Maps texts to int64 [N, L], padded or truncated to the context length L of the model.
    tokenizer: Callable[[Sequence[str]], Tensor]
    config: dict[str, Any]  # architecture in open_clip, with the activation of its weights
    width: int  # D, width of the joint embedding space
    weights: Path  # downloaded or local file

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Image preprocessing: size, mean, std, interpolation, resize_mode."""
        return dict(self.model.visual.preprocess_cfg)

    @cached_property
    def sha256(self) -> str:
        """Hash of the weights file, in hexadecimal."""
        return sha256_of(self.weights)

    @torch.no_grad()
    def encode_names(self, names: Sequence[str], templates: Sequence[str]) -> Tensor:
        """Return the vectors of names, float32 [K, D] of length 1 each, on the CPU.

        A vector is the normalized mean of the normalized vectors of all templates, as in CLIP.
        Texts are truncated to the context length of the model.
        """
        per_batch = max(1, BATCH_SIZE // len(templates))
        device = self.model.logit_scale.device

        rows = [torch.empty(0, self.width)]
        starts = range(0, len(names), per_batch)
        for start in progress_bar(starts, desc="word vectors"):
            batch = names[start : start + per_batch]
            texts: list[str] = []
            for name in batch:
                texts += [template.replace(PLACE, name) for template in templates]
            encoded = self.model.encode_text(self.tokenizer(texts).to(device), normalize=True)
            encoded = encoded.float().cpu().unflatten(0, (len(batch), len(templates)))
            rows.append(normalize(encoded.mean(1), dim=1))
        return torch.cat(rows)


def open_encoder(source: str) -> ClipModel:
    """Open an open_clip model without its image tower, on the default device."""
    encoder = open_model(source)

    # Remove unused towers, which take at least half of the memory.
    for tower in ("visual", "text_decoder"):
        if hasattr(encoder.model, tower):
            delattr(encoder.model, tower)
    encoder.model.to(distributed.pick_device("auto"))
    return encoder


def open_model(source: str) -> ClipModel:
    """Open an open_clip model on the CPU, with both towers, tokenizer and preprocessing.

    For `source` see `ClipSource.parse`. Raises ConfigError if open_clip is not installed, or the
    model is not available.
    """
    parsed = ClipSource.parse(source)
    library = _open_clip(source)
    with (
        _quiet(),
        torch.random.fork_rng(devices=[]),
        naming_errors(source, ConfigError, remedy=_REMEDY),
    ):
        config = library.get_model_config(parsed.model)
        if config is None:
            near = get_close_matches(parsed.model, library.list_models(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{source}: neither a folder nor a model of open_clip{hint}")
        width = int(config["embed_dim"])
        text_config = config["text_cfg"]
        tag = _tag(library, parsed)
        weights = _weights(library, parsed, tag)

        # Load the weights last, from the file with the recorded hash. The activation is a property
        # of the pretrained tag, because a model name may have weights with different activations.
        model = library.create_model(
            parsed.model,
            load_weights=False,
            pretrained_text=False,
            force_quick_gelu=tag.get("quick_gelu", False),
            force_preprocess_cfg=tag or _shared_preprocessing(library, parsed),
        )
        library.load_checkpoint(model, str(weights))

        # Tokenizers of transformers could run remote code.
        settings = {"trust_remote_code": False} if text_config.get("hf_tokenizer_name") else {}
        tokenizer = library.get_tokenizer(parsed.model, **settings)

    config["quick_gelu"] = bool(tag.get("quick_gelu") or config.get("quick_gelu"))
    return ClipModel(parsed, model.eval(), tokenizer, config, width, weights)


def _tag(library: ModuleType, source: ClipSource) -> dict[str, Any]:
    if source.weights is None or source.file is not None:
        return {}

    tag: dict[str, Any] = library.get_pretrained_cfg(source.model, source.weights)
    if not tag:
        hint = suggest(source.weights, library.list_pretrained_tags_by_model(source.model))
        raise ConfigError(
            f"{source.text}: {source.weights!r} is neither a file nor a pretrained tag of "
            f"{source.model}{hint}"
        )
    return tag


def _shared_preprocessing(library: ModuleType, source: ClipSource) -> dict[str, Any]:
    """Return the preprocessing that all pretrained tags of a model share, for local weights."""
    # open_clip would use the preprocessing of CLIP, which is wrong for SigLIP.
    if not source.file:
        return {}
    tags = library.list_pretrained_tags_by_model(source.model)
    configs = [library.get_pretrained_cfg(source.model, tag) for tag in tags]
    shared = {}
    for setting in PREPROCESSING:
        values = {config[setting] for config in configs}
        if len(values) == 1:
            shared[setting] = values.pop()
    return shared


def _weights(library: ModuleType, source: ClipSource, tag: dict[str, Any]) -> Path:
    if source.file is not None:
        return source.file
    if tag:
        return Path(library.download_pretrained(tag))
    if source.folder is None:
        repository = source.model.removeprefix(HUB)
        return Path(library.pretrained.download_pretrained_from_hf(repository))

    file = library.factory._find_checkpoint_in_dir(source.folder)
    if file is None:
        raise ConfigError(f"{source.text}: the folder has no open_clip_model.safetensors; add it")
    return Path(file)


@contextmanager
def _quiet() -> Iterator[None]:
    """Prevent open_clip from adding a handler to the root logger, which would repeat log lines."""
    root = logging.getLogger()
    handler = logging.NullHandler()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


def encode_names(
    source: str,
    names: Sequence[str],
    templates: Sequence[str],
    cache_dir: str | None = None,
    *,
    keep: bool = True,
) -> tuple[Tensor, str]:
    """Return the vectors of names by a text encoder, and the hash of its weights.

    The vectors are float32 [K, D] of length 1. The cache has one file per encoder and list of
    templates, and gets new names with `keep`. open_clip is only imported for new names. For
    `source` see `ClipSource.parse`, for `cache_dir` see `cache_folder`.
    """
    key = json.dumps([FORMAT, _identity(ClipSource.parse(source)), list(templates)])
    digest = sha256(key.encode()).hexdigest()[:16]
    path = cache_folder(cache_dir) / f"text-{digest}.npz"

    vectors: dict[str, np.ndarray] = {}
    hash_of_weights = ""
    if stored := read_cached(path, key):
        known = json.loads(stored["names"].tobytes())
        vectors = dict(zip(known, stored["vectors"], strict=True))
        hash_of_weights = str(stored["sha256"])

    missing = [name for name in names if name not in vectors]
    if missing:
        encoder = open_encoder(source)
        # The weights of a tag or a repository may have changed.
        if hash_of_weights != encoder.sha256:
            vectors = {}
            missing = list(names)

        encoded = encoder.encode_names(missing, templates).numpy()
        vectors |= dict(zip(missing, encoded, strict=True))
        hash_of_weights = encoder.sha256
        if keep:
            arrays = {
                "names": np.frombuffer(json.dumps(list(vectors)).encode(), np.uint8),
                "vectors": np.stack(list(vectors.values())),
                "sha256": hash_of_weights,
            }
            write_cached(path, key, arrays)

    return torch.from_numpy(np.stack([vectors[name] for name in names])), hash_of_weights


def _identity(source: ClipSource) -> list[str]:
    """Return a cache key of the encoder without reading its weights."""
    files = []
    if source.file is not None:
        files = [source.file]
    if source.folder is not None:
        files = sorted(path for path in source.folder.iterdir() if path.is_file())

    identity = [source.model, source.weights or ""]
    for path in files:
        stat = path.stat()
        identity.append(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    return identity


def read_templates(prompts: str, folder: Path) -> tuple[str, ...]:
    """Return the templates of the setting `data.prompts`.

    `prompts` is a template with {}, or "clip80" (the 80 templates of CLIP for ImageNet), or
    "simple7" (the 7 best of these), or the path, relative to `folder`, of a file with one per line.
    """
    if prompts in LISTS:
        library = _open_clip(f"data.prompts={prompts}")
        return tuple(template(PLACE) for template in getattr(library, LISTS[prompts]))

    templates: tuple[str, ...] = (prompts,)
    where = "data.prompts"
    path = folder / expand_user(prompts)
    if PLACE not in prompts and prompts and path.is_file():
        templates = tuple(read_lines(path))
        where = f"data.prompts: {path}"

    for template in templates:
        if PLACE not in template:
            hint = suggest(prompts, list(LISTS))
            raise ConfigError(
                f"{where}: the template {template[:60]!r} has no {PLACE} for the name; write a "
                f"sentence such as {PROMPT!r}, or pass a file or list{hint}"
            )
    return templates


def _open_clip(user: str) -> ModuleType:
    """Import open_clip, which takes seconds. `user` is the setting that needs it."""
    try:
        import open_clip
    except ImportError as error:
        raise ConfigError(f"{user}: open_clip is missing; pip install -e '.[text]'") from error
    return open_clip
