"""Sentences with a place for the name of a class, which a text encoder is asked for instead of it.

Several of them are averaged: Radford et al., "Learning Transferable Visual Models From Natural
Language Supervision", arXiv 2103.00020, section 3.1.4.
"""

import importlib.util
import runpy
from collections.abc import Sequence
from pathlib import Path

from mldec.errors import ConfigError, suggest
from mldec.files.text import read_lines

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
