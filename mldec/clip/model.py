"""Open a model of open_clip that is named in one text, such as "clip:ViT-B-32:openai".

The library is an extra, and importing it takes seconds: it is imported where a model is opened.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mldec.errors import ConfigError, suggest
from mldec.files.torch_files import sha256_of

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
