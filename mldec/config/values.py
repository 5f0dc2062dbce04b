"""Values of settings from the text that users type. Only numbers, lists and mappings are parsed."""

import os
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString

from mldec.errors import ConfigError

# Items of a list of texts, and of a sweep: up to the next comma outside quotes or brackets.
LIST_ITEM = re.compile(r"""("[^"]*"|'[^']*'|[^,]*)\s*,\s*""")
SWEEP_ITEM = re.compile(r"""("[^"]*"|'[^']*'|\[[^]]*\]|\{[^}]*\}|[^,]*)\s*,\s*""")
# Functions of Hydra that generate the values of a sweep.
SWEEP_FUNCTION = re.compile(r"(choice|glob|interval|range|shuffle|sort|tag)\(.*\)")


def literal(text: str, hint: Any) -> str | list[str] | None:
    """Return the value of a setting that is text by its annotation, or None if it is parsed.

    A pair of surrounding quotes is removed from a text, and from each item of a list of texts. If
    the annotation also permits other types, null, true, false, a list in brackets and a mapping in
    braces are not text.
    """
    is_union = get_origin(hint) in (Union, types.UnionType)
    kinds = get_args(hint) if is_union else (hint,)
    ends = text[:1] + text[-1:]
    for kind in kinds:
        if ends == "[]" and get_origin(kind) in (list, tuple, Sequence):
            return _items(text[1:-1], LIST_ITEM) if get_args(kind)[0] is str else None

    other_types = {"null": type(None), "true": bool, "false": bool}
    other_type = dict if ends == "{}" else other_types.get(text)
    return None if str not in kinds or other_type in kinds else _unquoted(text)


def parsed(word: str) -> Any:
    """Parse the value of a word such as optim.lr=1e-3 with Hydra's grammar."""
    [override] = OverridesParser.create().parse_overrides([word])
    if override.is_sweep_override():
        raise ConfigError(f"{word.lstrip('+')}: only mldec train --multirun accepts several values")
    return override.value()


def hydra_value(key: str, text: str, hint: Any, *, is_sweep: bool) -> str:
    """Return the value of a setting in Hydra's syntax, in which a text is quoted.

    The annotation `hint` is None if it is not known yet. All values are quoted then.

    Raises:
        ConfigError: If commas, which separate the values of a sweep, are in a path.
    """
    if is_sweep and SWEEP_FUNCTION.fullmatch(text):
        return text
    values = SWEEP_ITEM.findall(f"{text},") if is_sweep else [text]
    if len(values) > 1 and os.path.exists(text):  # noqa: PTH110
        fault = f"with --multirun a comma separates values, but {text} is one path"
        raise ConfigError(f"""{key}: {fault}; quote it: '{key}="{text}"'""")

    words = []
    for value in values:
        content = value if hint is None else literal(value, hint)
        words.append(value if content is None else _quoted(content))
    return ",".join(words)


def escaped(value: Any) -> Any:
    """Return dictionaries and lists in which OmegaConf does not interpolate `${`."""
    if isinstance(value, str):
        # A backslash escapes `${`, so backslashes in front of it are doubled.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: escaped(item) for key, item in value.items()}
    return value


def _items(text: str, item: re.Pattern[str]) -> list[str]:
    items = item.findall(f"{text.lstrip()},") if text.strip() else []
    return [_unquoted(found.strip()) for found in items]


def _quoted(value: str | list[str]) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_quoted, value))}]"
    return QuotedString(escaped(value), Quote.single).with_quotes()


def _unquoted(text: str) -> str:
    has_quotes = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if has_quotes else text
