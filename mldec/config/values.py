"""Text of users -> values of settings. Only numbers, lists and mappings are parsed."""

import os
import re
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from mldec.errors import ConfigError

# Items in front of a comma, of a list of texts and of a sweep.
LIST_ITEM = re.compile(r"""("[^"]*"|'[^']*'|[^,]*)\s*,\s*""")
SWEEP_ITEM = re.compile(r"""("[^"]*"|'[^']*'|\[[^]]*\]|\{[^}]*\}|[^,]*)\s*,\s*""")
# Functions of Hydra that generate the values of a sweep.
SWEEP_FUNCTION = re.compile(r"(choice|glob|interval|range|shuffle|sort|tag)\(.*\)")


def literal(text: str, hint: Any) -> str | list[str] | None:
    """Return the value of a setting whose annotation permits text, or None if it is parsed.

    One pair of surrounding quotes is removed from a text, and from each item of a list of texts.
    If the annotation also permits other types, null, true, false, a list in brackets and a mapping
    in braces are no text.
    """
    is_union = get_origin(hint) in (Union, types.UnionType)
    kinds = get_args(hint) if is_union else (hint,)
    origins = {get_origin(kind) or kind for kind in kinds}
    is_list = text[:1] + text[-1:] == "[]" and not origins.isdisjoint((list, tuple, Sequence))

    if is_list and any(get_args(kind)[:1] == (str,) for kind in kinds):
        return [_unquoted(item) for item in _items(text[1:-1].strip(), LIST_ITEM)]
    if str not in kinds or is_list or int in kinds or float in kinds:
        return None
    is_mapping = text[:1] + text[-1:] == "{}" and dict in origins
    is_null = text == "null" and type(None) in kinds
    is_bool = text in ("true", "false") and bool in kinds
    return None if is_mapping or is_null or is_bool else _unquoted(text)


def parsed(key: str, text: str) -> Any:
    """Parse a value with Hydra's grammar. A value that is not valid or not unique stays text."""
    with suppress(HydraException):
        override = OverridesParser.create().parse_override(f"{key}={text}")
        if not override.is_sweep_override():
            return override.value()
    return text


def hydra_value(key: str, text: str, hint: Any, *, is_sweep: bool) -> str:
    """Return a value in Hydra's syntax, in which a text is quoted.

    `hint` is the annotation of the setting. All values are quoted if it is None, because it is not
    known yet. With `is_sweep`, commas separate several values.

    Raises:
        ConfigError: If a sweep would divide a path.
    """
    if is_sweep and SWEEP_FUNCTION.fullmatch(text):
        return text
    values = _items(text, SWEEP_ITEM) if is_sweep else [text]
    if len(values) > 1 and os.path.exists(text):  # noqa: PTH110
        raise ConfigError(
            f"{key}: with --multirun a comma separates values, but {text} is one path; quote it: "
            f"""'{key}="{text}"'"""
        )

    words = []
    for value in values:
        content = value if hint is None else literal(value, hint)
        if content is None:
            words.append(value)
        elif isinstance(content, list):
            words.append(f"[{','.join(map(_quoted, content))}]")
        else:
            words.append(_quoted(content))
    return ",".join(words)


def escaped(value: Any) -> Any:
    """Return dictionaries and lists in which OmegaConf does not interpolate `${`."""
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    if isinstance(value, str):
        # A backslash escapes, so backslashes in front of it are doubled.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def _items(text: str, item: re.Pattern[str]) -> list[str]:
    return [found.strip() for found in item.findall(f"{text},")] if text else []


def _quoted(text: str) -> str:
    return QuotedString(escaped(text), Quote.single).with_quotes()


def _unquoted(text: str) -> str:
    has_quotes = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if has_quotes else text
