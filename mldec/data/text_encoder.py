"""Text encoders and image towers of open_clip, from a name or from local files."""

import importlib.util
import json
import logging
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from mldec.errors import ConfigError, suggest
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
_REASON = 200  # characters of a library's message


@dataclass(frozen=True)
class ClipSource:
    """Which model is meant, and where its weights are.

    Attributes:
        text: as the user wrote it, for messages.
        model: a name of open_clip, "local-dir:FOLDER" or "hf-hub:OWNER/NAME".
        weights: a pretrained tag of open_clip or a file; None for a folder or a repository, which
            hold their weights.
    """

    text: str
    model: str
    weights: str | None

    @classmethod
    def parse(cls, text: str) -> "ClipSource":
        """Read "clip:MODEL[:WEIGHTS]", "clip:FOLDER" or "clip:hf-hub:OWNER/NAME".

        Args:
            text: MODEL is a name of open_clip. WEIGHTS is one of its pretrained tags, by default
                "openai", or a file. FOLDER holds open_clip_config.json, the weights and the files
                of the tokenizer, so that nothing is downloaded; "local-dir:FOLDER" is the same.

        Raises:
            ConfigError: if there is no model, the folder or the file does not exist, or a folder
                has no open_clip_config.json.
        """
        name = text.removeprefix(PREFIX)
        if not name:
            raise ConfigError(f"{text}: it names no model; write clip:MODEL:WEIGHTS or clip:FOLDER")

        folder = Path(name.removeprefix(LOCAL)).expanduser()
        if name.startswith(LOCAL) or folder.is_dir():
            if not (folder / CONFIG).is_file():
                raise ConfigError(f"{text}: {folder} holds no {CONFIG}; give a folder that has one")
            return cls(text, f"{LOCAL}{folder.absolute()}", None)
        if name.startswith(HUB):
            return cls(text, name, None)

        model, _, weights = name.partition(":")
        path = Path(weights).expanduser()
        if weights and path.is_dir():
            raise ConfigError(
                f"{text}: {path} is a folder, whose {CONFIG} says which model it is: "
                f"write clip:{path}"
            )
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
    """A model of open_clip in evaluation mode, float32, on the CPU.

    Attributes:
        source: what it was opened from.
        model: with `encode_image`, `encode_text`, `logit_scale` and, for SigLIP, `logit_bias`.
        tokenizer: texts -> int64 [N, L], padded or cut to the length of the model's context.
        config: its architecture in open_clip: `embed_dim`, `vision_cfg`, `text_cfg` and so on, with
            the activation that the weights were trained with.
        width: D, of the common space of images and texts.
        weights: the file of its weights, downloaded or local.
    """

    source: ClipSource
    model: nn.Module
    tokenizer: Callable[[Sequence[str]], Tensor]
    config: dict[str, Any]
    width: int
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

    The global random state is left as it was.

    Args:
        source: see `ClipSource.parse`.

    Raises:
        ConfigError: if open_clip is not installed, the model or its weights are unknown, cannot be
            downloaded or read or do not fit each other, or the tokenizer cannot be had.
    """
    parsed = ClipSource.parse(source)
    with _quiet(), torch.random.fork_rng(devices=[]):
        library = _library(source)
        config = _config(library, parsed)
        tag = _tag(library, parsed)
        weights = _weights(library, parsed, tag)

        # The weights come last and from the file whose hash is recorded. A tag says which
        # activation its weights were trained with; the model's name alone may mean another one.
        try:
            model = library.create_model(
                parsed.model,
                load_weights=False,
                pretrained_text=False,
                force_quick_gelu=tag.get("quick_gelu", False),
                force_preprocess_cfg=tag or _shared_images(library, parsed),
            )
        except Exception as error:
            raise ConfigError(
                f"{source}: open_clip cannot build the model ({_reason(error)}); use another one"
            ) from error
        try:
            library.load_checkpoint(model, str(weights))
        except Exception as error:
            raise ConfigError(
                f"{source}: {weights} cannot be read or does not fit the model "
                f"({_reason(error)}); give the weights of this model"
            ) from error

        # Its files may have to be downloaded, and the library may raise anything. A tokenizer of
        # transformers could run the code of a stranger.
        settings = {}
        if config["text_cfg"].get("hf_tokenizer_name"):
            settings["trust_remote_code"] = False
        try:
            tokenizer = library.get_tokenizer(parsed.model, **settings)
        except ImportError as error:
            raise ConfigError(
                f"{source}: its tokenizer needs {error.name}: pip install 'mldec[text]'"
            ) from error
        except Exception as error:
            raise ConfigError(
                f"{source}: its tokenizer cannot be had ({_reason(error)}); without network give "
                f"a folder that holds {CONFIG}, the weights and the tokenizer: clip:FOLDER"
            ) from error
    config["quick_gelu"] = bool(tag.get("quick_gelu") or config.get("quick_gelu"))
    width = int(config["embed_dim"])
    return ClipModel(parsed, model.eval(), tokenizer, config, width, weights)


def _library(source: str) -> ModuleType:
    """Return open_clip."""
    try:
        import open_clip
    except ImportError as error:
        raise ConfigError(f"{source} needs open_clip: pip install 'mldec[text]'") from error
    module: ModuleType = open_clip
    return module


def _config(library: ModuleType, source: ClipSource) -> dict[str, Any]:
    """Return the architecture of the model."""
    try:
        config = library.get_model_config(source.model)
    except Exception as error:
        raise ConfigError(
            f"{source.text}: the architecture of the model cannot be had ({_reason(error)}); check "
            f"the name, or give a local folder: clip:FOLDER"
        ) from error

    if config is None:
        near = get_close_matches(source.model, library.list_models(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "open_clip.list_models() names all"
        raise ConfigError(
            f"{source.text}: open_clip has no model {source.model!r}, and there is no such folder; "
            f"{hint}"
        )
    is_whole = isinstance(config, dict) and isinstance(config.get("text_cfg"), dict)
    if not is_whole or type(config.get("embed_dim")) is not int:
        raise ConfigError(f"{source.text}: {CONFIG} holds no architecture; give another folder")

    return config


def _tag(library: ModuleType, source: ClipSource) -> dict[str, Any]:
    """Return what open_clip knows of a pretrained tag; nothing for weights from elsewhere."""
    if source.weights is None or source.file is not None:
        return {}

    tag: dict[str, Any] = library.get_pretrained_cfg(source.model, source.weights)
    if not tag:
        known = library.list_pretrained_tags_by_model(source.model)
        hint = suggest(source.weights, known)
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
    if source.folder is not None:
        return _in_folder(source.folder, source.text)

    try:
        if tag:
            return Path(library.download_pretrained(tag))
        repository = source.model.removeprefix(HUB)
        return Path(library.pretrained.download_pretrained_from_hf(repository))
    except Exception as error:
        raise ConfigError(
            f"{source.text}: its weights cannot be downloaded ({_reason(error)}); give a local "
            f"file or folder: clip:MODEL:FILE or clip:FOLDER"
        ) from error


def _in_folder(folder: Path, text: str) -> Path:
    """Return the file of weights in a folder: one of the usual names, or the only one."""
    for ending in _ENDINGS:
        for stem in _WEIGHTS:
            if (path := folder / f"{stem}{ending}").is_file():
                return path

    files = sorted(path for path in folder.iterdir() if path.suffix in _ENDINGS)
    if len(files) != 1:
        raise ConfigError(
            f"{text}: {folder} holds {len(files)} files of weights, where one is wanted; "
            f"call it {_WEIGHTS[0]}{_ENDINGS[0]}"
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


def _reason(error: Exception) -> str:
    """Return a library's message as one short line."""
    return " ".join(str(error).split())[:_REASON] or type(error).__name__


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
        with np.load(path, allow_pickle=False) as file:
            stored = {name: file[name] for name in ("key", "names", "vectors", "sha256")}
        if str(stored["key"]) != key:
            return None
        names = json.loads(stored["names"].tobytes())
        fault = _fault(names, stored["vectors"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:
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


DEFAULT = "a photo of a {}."
PLACE = "{}"
# The lists of the paper's authors, by their names in open_clip.
LISTS = {"clip80": "OPENAI_IMAGENET_TEMPLATES", "simple7": "SIMPLE_IMAGENET_TEMPLATES"}
MAX_TEMPLATES = 1_000
MAX_LENGTH = 1_000  # characters of a template

_SEE = "see DATASETS.md, section Word vectors"


def read_templates(prompts: str, folder: Path) -> tuple[str, ...]:
    """Return the templates that the setting `data.prompts` stands for.

    Args:
        prompts: one template, which holds {}; "clip80", the 80 of CLIP for ImageNet, or "simple7",
            the 7 best of them; or a file with one template per line.
        folder: of the data set; a relative file is relative to it.

    Raises:
        ConfigError: if it is none of these, a template lacks {}, or open_clip, which holds the two
            lists, is not installed.
        DataError: if the file cannot be read or is empty.
    """
    if prompts in LISTS:
        return _of_open_clip(prompts)
    if PLACE in prompts:
        return _checked((prompts,), "data.prompts")

    path = folder / Path(prompts).expanduser()
    if not prompts or not path.is_file():
        hint = suggest(prompts, [*LISTS]) if prompts else ""
        raise ConfigError(
            f"data.prompts {prompts!r} has no {PLACE} for the name, and is neither a file nor a "
            f"list of CLIP{hint}; write a sentence such as {DEFAULT!r}"
        )
    return _checked(tuple(read_lines(path, _SEE)), f"data.prompts: {path}")


def templates_fault(templates: Sequence[str]) -> str | None:
    """Return what is wrong with templates, such as "template 2, 'a cat', has no {}", or None."""
    if len(templates) > MAX_TEMPLATES:
        return f"{len(templates):,} templates are more than {MAX_TEMPLATES:,}"

    for number, template in enumerate(templates, 1):
        if not isinstance(template, str):
            return f"template {number} is no text"
        if PLACE not in template:
            return f"template {number}, {template[:60]!r}, has no {PLACE} for the name"
        if len(template) > MAX_LENGTH:
            return f"template {number} has {len(template):,} characters, more than {MAX_LENGTH:,}"
    return None


def _checked(templates: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return the templates unchanged; raise a `ConfigError` for a fault of them."""
    if fault := templates_fault(templates):
        raise ConfigError(f"{where}: {fault}; see {DEFAULT!r}")
    return templates


def _of_open_clip(prompts: str) -> tuple[str, ...]:
    """Return one of the lists that open_clip holds, as functions of a name."""
    # Its file alone: importing the library takes seconds, and vectors from the cache need nothing
    # else of it.
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"data.prompts {prompts!r} is a list in open_clip: pip install 'mldec[text]'"
        )
    module = runpy.run_path(str(Path(spec.submodule_search_locations[0], "zero_shot_metadata.py")))
    return tuple(template(PLACE) for template in module[LISTS[prompts]])


BATCH_SIZE = 256  # texts


class TextEncoder:
    """A text tower, with its tokenizer and without the image tower; on the GPU if there is one.

    Attributes:
        source: what it was opened from.
        width: D, of its vectors.
        sha256: of the file of its weights.

    Args:
        source: likewise.
        model: has `encode_text`, tokens [N, L] -> [N, D].
        tokenizer: texts -> int64 [N, L].
        width: likewise.
        sha256: likewise.
    """

    def __init__(
        self,
        source: ClipSource,
        model: nn.Module,
        tokenizer: Callable[[Sequence[str]], Tensor],
        *,
        width: int,
        sha256: str,
    ) -> None:
        self.source = source
        self.width = width
        self.sha256 = sha256
        self._device = distributed.pick_device("auto")
        self._model: Any = model.to(self._device)
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, source: str) -> "TextEncoder":
        """Open the text tower that a source names; see `mldec.data.text_encoder.open_model`.

        Raises:
            ConfigError: if it cannot be had.
        """
        opened = open_model(source)
        # Half of the memory or more: vectors of texts need neither images nor captions.
        for tower in ("visual", "text_decoder"):
            if hasattr(opened.model, tower):
                delattr(opened.model, tower)

        return cls(
            opened.source,
            opened.model,
            opened.tokenizer,
            width=opened.width,
            sha256=opened.sha256,
        )

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors of N texts, float32 [N, D] on the CPU, each of length 1.

        Args:
            texts: one longer than the context of the model is cut.
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

        Args:
            names: of the classes.
            templates: sentences with {} for the name.
        """
        per_batch = max(1, BATCH_SIZE // len(templates))
        batches = [names[start : start + per_batch] for start in range(0, len(names), per_batch)]

        rows = [torch.empty(0, self.width)]
        for batch in tqdm(batches, desc="word vectors", leave=False, disable=not on_terminal()):
            texts = [template.replace(PLACE, name) for name in batch for template in templates]
            encoded = self.encode(texts).unflatten(0, (len(batch), len(templates)))
            rows.append(normalize(encoded.mean(1), dim=1))
        return torch.cat(rows)
