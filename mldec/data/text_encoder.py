"""Text encoders and image towers of open_clip, from a name or from local files."""

import importlib.util
import json
import logging
import runpy
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
from torch import Tensor, nn
from torch.nn.functional import normalize
from tqdm import tqdm

from mldec.data.cache import cache_folder, write_cached
from mldec.errors import ConfigError, brief, suggest
from mldec.files.text import read_lines
from mldec.files.torch_files import sha256_of
from mldec.runtime import distributed
from mldec.runtime.cli import on_terminal

PREFIX = "clip:"
LOCAL, HUB = "local-dir:", "hf-hub:"  # the schemes of open_clip itself
CONFIG = "open_clip_config.json"  # which makes a folder a model of open_clip
DEFAULT_WEIGHTS = "openai"
IMAGES = ("mean", "std", "interpolation", "resize_mode")  # how images are prepared

# File names of weights in a folder, in the order in which open_clip's own folders prefer them.
_WEIGHTS = ("open_clip_model", "open_clip_pytorch_model", "model", "pytorch_model")
_ENDINGS = (".safetensors", ".bin", ".pth", ".pt")
_LOCALLY = f"a folder that holds {CONFIG}, the weights and the tokenizer: clip:FOLDER"


@dataclass(frozen=True)
class ClipSource:
    """Which model is meant, and where its weights are."""

    # As the user wrote it, for messages.
    text: str

    # A name of open_clip, "local-dir:FOLDER" or "hf-hub:OWNER/NAME".
    model: str

    # A pretrained tag of open_clip or a file; None for a folder or a repository, which hold them.
    weights: str | None

    @classmethod
    def parse(cls, text: str) -> "ClipSource":
        """Read "clip:MODEL[:WEIGHTS]", "clip:FOLDER" or "clip:hf-hub:OWNER/NAME".

        Args:
            text: MODEL is a name of open_clip. WEIGHTS is one of its pretrained tags, by default
                "openai", or a file. FOLDER holds open_clip_config.json, the weights and the files
                of the tokenizer, so that nothing is downloaded; "local-dir:FOLDER" is the same.
        """
        name = text.removeprefix(PREFIX)
        folder = Path(name.removeprefix(LOCAL)).expanduser()
        if name.startswith(LOCAL) or (name and folder.is_dir()):
            return cls(text, f"{LOCAL}{folder.absolute()}", None)
        if name.startswith(HUB):
            return cls(text, name, None)

        model, _, weights = name.partition(":")
        path = Path(weights).expanduser()
        if not model or (len(path.parts) > 1 and not path.is_file()):
            missing = f"no file at {path}" if model else "it names no model"
            raise ConfigError(f"{text}: {missing}; write clip:MODEL:WEIGHTS or clip:FOLDER")
        if path.is_file():
            weights = str(path.absolute())
        return cls(text, model, weights or DEFAULT_WEIGHTS)

    @property
    def anywhere(self) -> str:
        """The text that names the same model in any working directory."""
        name = self.model.removeprefix(LOCAL)
        return f"{PREFIX}{name}" if self.weights is None else f"{PREFIX}{name}:{self.weights}"

    @property
    def folder(self) -> Path | None:
        """The folder that holds the whole model, if it is one."""
        return Path(self.model.removeprefix(LOCAL)) if self.model.startswith(LOCAL) else None

    @property
    def file(self) -> Path | None:
        """The local file of weights, if one was named."""
        path = Path(self.weights or "")
        return path if path.is_file() else None


@dataclass(frozen=True)
class ClipModel:
    """A model of open_clip in evaluation mode, float32, on the CPU."""

    source: ClipSource

    # With `encode_image`, `encode_text`, `logit_scale` and, for SigLIP, `logit_bias`.
    model: nn.Module

    # Texts -> int64 [N, L], padded or cut to the length of the model's context.
    tokenizer: Callable[[Sequence[str]], Tensor]

    # Its architecture in open_clip: `embed_dim`, `vision_cfg`, `text_cfg` and so on, with the
    # activation that the weights were trained with.
    config: dict[str, Any]

    # D, of the common space of images and texts.
    width: int

    # The file of its weights, downloaded or local.
    weights: Path

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How images are made its input: size, mean, std, interpolation, resize_mode."""
        visual: Any = self.model.visual
        return dict(visual.preprocess_cfg)

    @cached_property
    def sha256(self) -> str:
        """Of the file of weights, in hexadecimal: it tells one training from another."""
        return sha256_of(self.weights)


def open_model(source: str) -> ClipModel:
    """Open a model of open_clip: image tower, text tower, tokenizer and preprocessing.

    For the source see `ClipSource.parse`. The global random state is left as it was. Raises a
    `ConfigError` if open_clip is not installed, or anything of the model cannot be had.
    """
    parsed = ClipSource.parse(source)
    try:
        import open_clip as library
    except ImportError as error:
        raise ConfigError(f"{source} needs open_clip: pip install -e '.[text]'") from error

    with _quiet(), torch.random.fork_rng(devices=[]):
        with _cannot(f"{source}: {CONFIG} holds no architecture", "give another folder or name"):
            config = library.get_model_config(parsed.model)
            if config is None:
                near = get_close_matches(parsed.model, library.list_models(), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"{source}: there is no such folder or model of open_clip{hint}")
            width, text_config = int(config["embed_dim"]), config["text_cfg"]
        tag = _tag(library, parsed)
        with _cannot(f"{source}: its weights cannot be downloaded", f"give {_LOCALLY}"):
            weights = _weights(library, parsed, tag)

        # The weights come last and from the file whose hash is recorded. A tag says which
        # activation its weights were trained with; the model's name alone may mean another one.
        with _cannot(f"{source}: open_clip cannot build the model", "use another one"):
            model = library.create_model(
                parsed.model,
                load_weights=False,
                pretrained_text=False,
                force_quick_gelu=tag.get("quick_gelu", False),
                force_preprocess_cfg=tag or _shared_images(library, parsed),
            )
        fault = f"{source}: {weights} cannot be read or does not fit the model"
        with _cannot(fault, "give the weights of this model"):
            library.load_checkpoint(model, str(weights))

        # Its files may have to be downloaded. A tokenizer of transformers could run the code of a
        # stranger.
        with _cannot(f"{source}: its tokenizer cannot be had", f"give {_LOCALLY}"):
            settings = {}
            if text_config.get("hf_tokenizer_name"):
                settings["trust_remote_code"] = False
            tokenizer = library.get_tokenizer(parsed.model, **settings)

    config["quick_gelu"] = bool(tag.get("quick_gelu") or config.get("quick_gelu"))
    return ClipModel(parsed, model.eval(), tokenizer, config, width, weights)


@contextmanager
def _cannot(what: str, remedy: str) -> Iterator[None]:
    """Turn what open_clip raises, which may be anything, into one line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, ImportError):
            remedy = "pip install -e '.[text]'"
        raise ConfigError(f"{what} ({brief(error)}); {remedy}") from error


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
    """Return how images are prepared for all published weights of a model, for a file of others.

    The file says nothing of it, and open_clip would prepare them as for CLIP: wrong for a SigLIP.
    """
    tags = library.list_pretrained_tags_by_model(source.model) if source.file else []
    published = [library.get_pretrained_cfg(source.model, tag) for tag in tags]
    return {
        setting: published[0][setting]
        for setting in IMAGES
        if published and all(tag[setting] == published[0][setting] for tag in published)
    }


def _weights(library: ModuleType, source: ClipSource, tag: dict[str, Any]) -> Path:
    """Return the file of the weights, downloaded if it must be."""
    if source.file is not None:
        return source.file
    if tag:
        return Path(library.download_pretrained(tag))
    if source.folder is None:
        repository = source.model.removeprefix(HUB)
        return Path(library.pretrained.download_pretrained_from_hf(repository))

    # In a folder they have one of the usual names, or are the only ones.
    usual = [source.folder / f"{stem}{ending}" for ending in _ENDINGS for stem in _WEIGHTS]
    files = [path for path in usual if path.is_file()]
    files = files or [path for path in source.folder.iterdir() if path.suffix in _ENDINGS]
    if not files or (files[0] not in usual and len(files) > 1):
        raise ConfigError(
            f"{source.text}: {source.folder} holds {len(files)} files of weights, where one is "
            f"wanted; call it {usual[0].name}"
        )
    return files[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep open_clip from the root logger.

    It would give that a handler, which prints our own lines a second time, and warn of a model
    without weights before they are loaded.
    """
    root, handler = logging.getLogger(), logging.NullHandler()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


log = logging.getLogger("mldec")

FORMAT = 1  # of a cached file; raise it when the vectors of a name change


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

    The vectors of the templates, sentences with {} for the name, are averaged. `keep` writes those
    of new names to the cache.
    """
    key = json.dumps([FORMAT, _identity(ClipSource.parse(source)), list(templates)])
    path = cache_folder(cache_dir) / f"text-{sha256(key.encode()).hexdigest()[:16]}.npz"
    vectors, hash_of_weights = _load(path, key)

    missing = [name for name in names if name not in vectors]
    if missing:
        encoder = TextEncoder.open(source)
        # A tag or a repository may have got other weights since.
        if hash_of_weights != encoder.sha256:
            vectors, missing = {}, list(names)

        encoded = encoder.encode_names(missing, templates).numpy()
        vectors |= dict(zip(missing, encoded, strict=True))
        hash_of_weights = encoder.sha256
        if keep:
            arrays = {
                "key": key,
                "names": np.frombuffer(json.dumps(list(vectors)).encode(), np.uint8),
                "vectors": np.stack(list(vectors.values())),
                "sha256": hash_of_weights,
            }
            write_cached(path, arrays, "the names are encoded at every start")

    return torch.from_numpy(np.stack([vectors[name] for name in names])), hash_of_weights


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


def _load(path: Path, key: str) -> tuple[dict[str, np.ndarray], str]:
    """Return the vectors of a cached file by name, and the hash of the weights; none if damaged."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            if str(stored["key"]) != key:
                return {}, ""
            names = json.loads(stored["names"].tobytes())
            return dict(zip(names, stored["vectors"], strict=True)), str(stored["sha256"])
    except (FileNotFoundError, NotADirectoryError):
        return {}, ""
    except Exception as error:
        # zipfile and NumPy raise almost anything on damaged bytes.
        log.warning("%s is not used (%s): the names are encoded again", path, brief(error))
        return {}, ""


DEFAULT = "a photo of a {}."
PLACE = "{}"
# The lists of the paper's authors, by their names in open_clip.
LISTS = {"clip80": "OPENAI_IMAGENET_TEMPLATES", "simple7": "SIMPLE_IMAGENET_TEMPLATES"}

_SEE = "see DATASETS.md, section Word vectors"


def read_templates(prompts: str, folder: Path) -> tuple[str, ...]:
    """Return the templates that the setting `data.prompts` stands for.

    It is one template, which holds {}; "clip80", the 80 of CLIP for ImageNet, or "simple7", the 7
    best of them; or a file with one template per line, relative to the folder of the data set.
    """
    if prompts in LISTS:
        return _of_open_clip(prompts)

    templates: tuple[str, ...] = (prompts,)
    where = "data.prompts"
    path = folder / Path(prompts).expanduser()
    if PLACE not in prompts and prompts and path.is_file():
        templates, where = tuple(read_lines(path, _SEE)), f"data.prompts: {path}"
    if fault := templates_fault(templates):
        hint = suggest(prompts, [*LISTS])
        raise ConfigError(
            f"{where}: {fault}; write a sentence such as {DEFAULT!r}, or give a file or list{hint}"
        )
    return templates


def templates_fault(templates: Sequence[str]) -> str | None:
    """Return what is wrong with templates, such as "template 2, 'a cat', has no {}", or None."""
    for number, template in enumerate(templates, 1):
        if not isinstance(template, str) or PLACE not in template:
            return f"template {number}, {str(template)[:60]!r}, has no {PLACE} for the name"
    return None


def _of_open_clip(prompts: str) -> tuple[str, ...]:
    """Return one of the lists that open_clip holds, as functions of a name."""
    # Its file alone: importing the library takes seconds, and vectors from the cache need nothing
    # else of it.
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"data.prompts {prompts!r} is a list in open_clip: pip install -e '.[text]'"
        )
    module = runpy.run_path(str(Path(spec.submodule_search_locations[0], "zero_shot_metadata.py")))
    return tuple(template(PLACE) for template in module[LISTS[prompts]])


BATCH_SIZE = 256  # texts


class TextEncoder:
    """A text tower without the image tower, on the GPU if there is one.

    Its vectors have the width D. `sha256` is that of the file of its weights.
    """

    def __init__(self, opened: ClipModel) -> None:
        self.source = opened.source
        self.width = opened.width
        self.sha256 = opened.sha256
        self._device = distributed.pick_device("auto")
        self._tokenizer = opened.tokenizer

        # Half of the memory or more: vectors of texts need neither images nor captions.
        for tower in ("visual", "text_decoder"):
            if hasattr(opened.model, tower):
                delattr(opened.model, tower)
        self._model: Any = opened.model.to(self._device)

    @classmethod
    def open(cls, source: str) -> "TextEncoder":
        """Open the text tower that a source names; see `open_model`."""
        return cls(open_model(source))

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors of N texts, float32 [N, D] on the CPU, each of length 1.

        A text that is longer than the context of the model is cut.
        """
        vectors = torch.empty(len(texts), self.width)
        for start in range(0, len(texts), BATCH_SIZE):
            tokens = self._tokenizer(list(texts[start : start + BATCH_SIZE]))
            encoded = self._model.encode_text(tokens.to(self._device), normalize=True)
            vectors[start : start + BATCH_SIZE] = encoded.float().cpu()
        return vectors

    def encode_names(self, names: Sequence[str], templates: Sequence[str]) -> Tensor:
        """Return the vectors of K names, float32 [K, D] on the CPU, each of length 1.

        That of a name is the mean over the templates, made of length 1 again, as in CLIP.
        """
        per_batch = max(1, BATCH_SIZE // len(templates))
        batches = [names[start : start + per_batch] for start in range(0, len(names), per_batch)]

        rows = [torch.empty(0, self.width)]
        for batch in tqdm(batches, desc="word vectors", leave=False, disable=not on_terminal()):
            texts = [template.replace(PLACE, name) for name in batch for template in templates]
            encoded = self.encode(texts).unflatten(0, (len(batch), len(templates)))
            rows.append(normalize(encoded.mean(1), dim=1))
        return torch.cat(rows)
