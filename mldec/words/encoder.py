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
from tqdm import tqdm

from mldec.errors import ConfigError, refusing, suggest
from mldec.files.cache import cache_folder, read_cached, write_cached
from mldec.files.text import read_lines
from mldec.files.torch_files import sha256_of
from mldec.runtime import distributed
from mldec.words.types import PREFIX, PROMPT

LOCAL, HUB = "local-dir:", "hf-hub:"  # the schemes of open_clip itself
CONFIG = "open_clip_config.json"  # which makes a folder a model of open_clip
DEFAULT_WEIGHTS = "openai"
IMAGES = ("mean", "std", "interpolation", "resize_mode")  # how images are prepared

_REMEDY = (
    f"give clip:FOLDER, which holds {CONFIG}, the weights and the tokenizer, and pip install "
    f"-e '.[text]'"
)

BATCH_SIZE = 256  # texts
FORMAT = 1  # of a cached file; raise it when the vectors of a name change
PLACE = "{}"  # of the name in a template
# The lists of the paper's authors, by their names in open_clip.
LISTS = {"clip80": "OPENAI_IMAGENET_TEMPLATES", "simple7": "SIMPLE_IMAGENET_TEMPLATES"}
_SEE = "see DATASETS.md, section Word vectors"


@dataclass(frozen=True)
class ClipSource:
    """Which model is meant, and where its weights are."""

    text: str  # as the user wrote it, for messages
    model: str  # a name of open_clip, "local-dir:FOLDER" or "hf-hub:OWNER/NAME"

    # A pretrained tag of open_clip or a file; None for a folder or a repository, which hold them.
    weights: str | None

    @classmethod
    def parse(cls, text: str) -> "ClipSource":
        """Read "clip:MODEL[:WEIGHTS]", "clip:FOLDER" or "clip:hf-hub:OWNER/NAME".

        MODEL is a name of open_clip, WEIGHTS one of its pretrained tags, by default "openai", or a
        file. FOLDER holds open_clip_config.json, the weights and the files of the tokenizer, so
        that nothing is downloaded; "local-dir:FOLDER" is the same.
        """
        name = text.removeprefix(PREFIX)
        folder = Path(name.removeprefix(LOCAL)).expanduser()
        if name.startswith(LOCAL) or (name and folder.is_dir()):
            return cls(text, f"{LOCAL}{folder.absolute()}", None)
        if name.startswith(HUB):
            return cls(text, name, None)

        model, _, weights = name.partition(":")
        path = Path(weights).expanduser()
        if path.is_file():
            weights = str(path.absolute())
        elif len(path.parts) > 1:
            raise ConfigError(f"{text}: no file at {path}; write clip:MODEL:WEIGHTS or clip:FOLDER")
        return cls(text, model, weights or DEFAULT_WEIGHTS)

    @property
    def anywhere(self) -> str:
        """The text that names the same model in any working directory."""
        text = PREFIX + self.model.removeprefix(LOCAL)
        return text if self.weights is None else f"{text}:{self.weights}"

    @property
    def folder(self) -> Path | None:
        """The folder that holds the whole model, if it is one."""
        if not self.model.startswith(LOCAL):
            return None
        return Path(self.model.removeprefix(LOCAL))

    @property
    def file(self) -> Path | None:
        """The local file of weights, if one was named."""
        path = Path(self.weights or "")
        return path if path.is_file() else None


@dataclass(frozen=True)
class ClipModel:
    """A model of open_clip in evaluation mode, float32."""

    source: ClipSource

    # A module with `encode_image`, `encode_text`, `logit_scale` and, for SigLIP, `logit_bias`.
    model: Any

    # Texts -> int64 [N, L], padded or cut to the length of the model's context.
    tokenizer: Callable[[Sequence[str]], Tensor]

    config: dict[str, Any]  # its architecture in open_clip, with the activation of its training
    width: int  # D, of the common space of images and texts
    weights: Path  # the file, downloaded or local

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How images are made its input: size, mean, std, interpolation, resize_mode."""
        return dict(self.model.visual.preprocess_cfg)

    @cached_property
    def sha256(self) -> str:
        """Of the file of weights, in hexadecimal: it tells one training from another."""
        return sha256_of(self.weights)

    @torch.no_grad()
    def encode_names(self, names: Sequence[str], templates: Sequence[str]) -> Tensor:
        """Return the vectors of K names, float32 [K, D] on the CPU, each of length 1.

        That of a name is the mean over the templates, made of length 1 again, as in CLIP. A text
        that is longer than the context of the model is cut.
        """
        per_batch = max(1, BATCH_SIZE // len(templates))
        batches = [names[start : start + per_batch] for start in range(0, len(names), per_batch)]
        device = self.model.logit_scale.device

        rows = [torch.empty(0, self.width)]
        for batch in tqdm(batches, desc="word vectors", leave=False, disable=None):
            texts: list[str] = []
            for name in batch:
                texts += [template.replace(PLACE, name) for template in templates]
            encoded = self.model.encode_text(self.tokenizer(texts).to(device), normalize=True)
            encoded = encoded.float().cpu().unflatten(0, (len(batch), len(templates)))
            rows.append(normalize(encoded.mean(1), dim=1))
        return torch.cat(rows)


def open_encoder(source: str) -> ClipModel:
    """Open a model of open_clip without its image tower, on the GPU if there is one."""
    encoder = open_model(source)

    # Half of the memory or more: vectors of texts need neither images nor captions.
    for tower in ("visual", "text_decoder"):
        if hasattr(encoder.model, tower):
            delattr(encoder.model, tower)
    encoder.model.to(distributed.pick_device("auto"))
    return encoder


def open_model(source: str) -> ClipModel:
    """Open a model of open_clip: image tower, text tower, tokenizer and preprocessing, on the CPU.

    For the source see `ClipSource.parse`. The global random state is left as it was. Raises a
    `ConfigError` if open_clip is not installed, or anything of the model cannot be had.
    """
    parsed, library = ClipSource.parse(source), _open_clip(source)
    with _quiet(), torch.random.fork_rng(devices=[]), refusing(source, ConfigError, remedy=_REMEDY):
        config = library.get_model_config(parsed.model)
        if config is None:
            near = get_close_matches(parsed.model, library.list_models(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{source}: there is no such folder or model of open_clip{hint}")
        width, text_config = int(config["embed_dim"]), config["text_cfg"]
        tag = _tag(library, parsed)
        weights = _weights(library, parsed, tag)

        # The weights come last and from the file whose hash is recorded. A tag says which
        # activation its weights were trained with; the model's name alone may mean another one.
        model = library.create_model(
            parsed.model,
            load_weights=False,
            pretrained_text=False,
            force_quick_gelu=tag.get("quick_gelu", False),
            force_preprocess_cfg=tag or _shared_images(library, parsed),
        )
        library.load_checkpoint(model, str(weights))

        # A tokenizer of transformers could run the code of a stranger.
        settings = {"trust_remote_code": False} if text_config.get("hf_tokenizer_name") else {}
        tokenizer = library.get_tokenizer(parsed.model, **settings)

    config["quick_gelu"] = bool(tag.get("quick_gelu") or config.get("quick_gelu"))
    return ClipModel(parsed, model.eval(), tokenizer, config, width, weights)


def _tag(library: ModuleType, source: ClipSource) -> dict[str, Any]:
    """Return what open_clip knows of a pretrained tag; nothing for weights from elsewhere."""
    if source.weights is None or source.file is not None:
        return {}

    tag: dict[str, Any] = library.get_pretrained_cfg(source.model, source.weights)
    if not tag:
        hint = suggest(source.weights, library.list_pretrained_tags_by_model(source.model))
        raise ConfigError(
            f"{source.text}: open_clip has no weights {source.weights!r} of {source.model}, and "
            f"there is no such file{hint}"
        )
    return tag


def _shared_images(library: ModuleType, source: ClipSource) -> dict[str, Any]:
    """Return how images are prepared for all published weights of the model of a file."""
    # open_clip would prepare them as for CLIP, which is wrong for a SigLIP.
    tags = library.list_pretrained_tags_by_model(source.model) if source.file else []
    published = [library.get_pretrained_cfg(source.model, tag) for tag in tags]
    if not published:
        return {}

    first, *others = published
    shared = {}
    for setting in IMAGES:
        if all(other[setting] == first[setting] for other in others):
            shared[setting] = first[setting]
    return shared


def _weights(library: ModuleType, source: ClipSource, tag: dict[str, Any]) -> Path:
    """Return the file of the weights, downloaded if it must be."""
    if source.file is not None:
        return source.file
    if tag:
        return Path(library.download_pretrained(tag))
    if source.folder is None:
        repository = source.model.removeprefix(HUB)
        return Path(library.pretrained.download_pretrained_from_hf(repository))

    file = library.factory._find_checkpoint_in_dir(source.folder)
    if file is None:
        fault = f"{source.folder} holds no weights; call them open_clip_model.safetensors"
        raise ConfigError(f"{source.text}: {fault}")
    return Path(file)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep open_clip from the root logger: its handler would print our lines a second time."""
    root, handler = logging.getLogger(), logging.NullHandler()
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
    """Return the vectors of K names, float32 [K, D] of length 1, and the hash of the weights.

    The cache holds a file per encoder and list of templates, with all names that were ever asked
    for. If it has all K, neither the model is opened nor open_clip imported. `keep` writes the
    vectors of new names to the cache.
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
        # A tag or a repository may have got other weights since.
        if hash_of_weights != encoder.sha256:
            vectors, missing = {}, list(names)

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
    """Return what changes with the encoder, without reading its weights."""
    files = [source.file] if source.file is not None else []
    if source.folder is not None:
        # The tokenizer counts too.
        files = sorted(path for path in source.folder.iterdir() if path.is_file())

    identity = [source.model, source.weights or ""]
    for path in files:
        stat = path.stat()
        identity.append(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    return identity


def read_templates(prompts: str, folder: Path) -> tuple[str, ...]:
    """Return the templates of the setting `data.prompts`.

    It is one, which holds {}; "clip80", the 80 of CLIP for ImageNet, or "simple7", the 7 best of
    them; or a file with one per line, relative to the folder of the data set.
    """
    if prompts in LISTS:
        library = _open_clip(f"data.prompts={prompts}")
        return tuple(template(PLACE) for template in getattr(library, LISTS[prompts]))

    templates: tuple[str, ...] = (prompts,)
    where = "data.prompts"
    path = folder / Path(prompts).expanduser()
    if PLACE not in prompts and prompts and path.is_file():
        templates, where = tuple(read_lines(path, _SEE)), f"data.prompts: {path}"

    for number, template in enumerate(templates, 1):
        if PLACE not in template:
            hint = suggest(prompts, [*LISTS])
            raise ConfigError(
                f"{where}: template {number}, {template[:60]!r}, has no {PLACE} for the name; "
                f"write a sentence such as {PROMPT!r}, or give a file or list{hint}"
            )
    return templates


def _open_clip(user: str) -> ModuleType:
    """Import open_clip, which takes seconds; `user` names what needs it."""
    try:
        import open_clip
    except ImportError as error:
        raise ConfigError(f"{user} needs open_clip: pip install -e '.[text]'") from error
    return open_clip
