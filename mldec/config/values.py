"""Conversion of settings from the text that users type.

Hydra's grammar would reject paths with accents or parentheses, and convert the class name 1.10 to a
number. Text is therefore literal if the annotation of a setting permits text. Only the values of
other settings are parsed.
"""

import os
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString

from mldec.errors import ConfigError

# An item of a list of texts, and of a sweep. It ends at the next comma outside quotes, and in a
# sweep also outside brackets and braces.
LIST_ITEM = re.compile(r"""("[^"]*"|'[^']*'|[^,]*)\s*,\s*""")
SWEEP_ITEM = re.compile(r"""("[^"]*"|'[^']*'|\[[^]]*\]|\{[^}]*\}|[^,]*)\s*,\s*""")
# Functions of Hydra that generate the values of a sweep.
SWEEP_FUNCTION = re.compile(r"(choice|glob|interval|range|shuffle|sort|tag)\(.*\)")


def literal(text: str, hint: Any) -> str | list[str] | None:
    """Return the value of a setting if it is text or a list of texts, or None if it must be parsed.

    Surrounding quotes are removed from the text, and from each item of a list.

    Args:
        text: Value on the command line, after the equals sign.
        hint: Annotation of the setting. The value is text if it includes `str`, except for null,
            true, false, a list in brackets and a mapping in braces if the annotation includes their
            types, too.
    """
    is_union = get_origin(hint) in (Union, types.UnionType)
    kinds = get_args(hint) if is_union else (hint,)

    # The brackets decide for `str | list[str]`, such as data.classes.
    ends = text[:1] + text[-1:]
    for kind in kinds:
        if ends == "[]" and get_origin(kind) in (list, tuple, Sequence):
            # Numbers in a list need the parser.
            if get_args(kind)[0] is not str:
                return None
            inner = text[1:-1].lstrip()
            items = LIST_ITEM.findall(f"{inner},") if inner else []
            return [_unquoted(item.strip()) for item in items]

    # null is the text "null" for a setting that cannot be None.
    other_types = {"null": type(None), "true": bool, "false": bool}
    other_type = dict if ends == "{}" else other_types.get(text)
    if str not in kinds or other_type in kinds:
        return None
    return _unquoted(text)


def parsed(word: str) -> Any:
    """Parse the value of a word such as optim.lr=1e-3 with Hydra's grammar.

    Raises:
        ConfigError: If it has several values, as in a sweep.
    """
    [override] = OverridesParser.create().parse_overrides([word])
    if override.is_sweep_override():
        raise ConfigError(f"{word.lstrip('+')}: only mldec train --multirun accepts several values")
    return override.value()


def hydra_value(key: str, text: str, hint: Any, *, is_sweep: bool) -> str:
    """Return the value of a setting in Hydra's syntax, in which text is quoted.

    Args:
        key: Full key of the setting.
        text: Value on the command line.
        hint: Annotation of the setting. None quotes all values, so that `literal` can convert them
            when the annotation is known.
        is_sweep: Whether commas separate the values of several runs (--multirun).

    Raises:
        ConfigError: If the value of a sweep is the path of an existing file with commas.
    """
    # Hydra evaluates these functions, so they must not be quoted.
    if is_sweep and SWEEP_FUNCTION.fullmatch(text):
        return text

    # A sweep over the halves of a path would fail for each run, with an error that is hard to
    # understand.
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
    """Escape `${` in all texts of dictionaries and lists, which OmegaConf would interpolate.

    Dataclasses become dictionaries. The values of a config are final: a folder may be named "${x}".
    """
    if isinstance(value, str):
        # OmegaConf reads a backslash before `${` as an escape, so existing backslashes are doubled.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: escaped(item) for key, item in value.items()}
    return value


def _quoted(value: str | list[str]) -> str:
    """Return a text or a list of texts in Hydra's syntax, without interpolations."""
    if isinstance(value, list):
        return f"[{','.join(map(_quoted, value))}]"
    return QuotedString(escaped(value), Quote.single).with_quotes()


def _unquoted(text: str) -> str:
    """Remove a pair of quotes around a text."""
    has_quotes = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if has_quotes else text
