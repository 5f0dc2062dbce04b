"""Compare values from YAML with the annotations of arguments, and describe these in messages."""

import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

# The limit of whole numbers in torch; a number with a decimal point may be larger.
LARGEST_WHOLE = 2**63


def matches(value: Any, hint: Any) -> bool:
    """Tell whether a value from YAML fits an annotation.

    A whole number fits `float`; true and false fit only `bool`. Every number must be finite, also
    inside lists and mappings.

    Args:
        value: plain YAML: text, numbers, booleans, null, lists and mappings.
        hint: the annotation of an argument.
    """
    origin, arguments = get_origin(hint), get_args(hint)

    if isinstance(value, float) and not math.isfinite(value):
        return False
    if hint is Any:
        items = list(value.values()) if isinstance(value, Mapping) else value
        return not isinstance(items, list | tuple) or all(matches(item, Any) for item in items)

    if origin in (Union, types.UnionType):
        return any(matches(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if hint in (None, type(None)):
        return value is None

    # In Python a bool is an int, so booleans come before numbers.
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    if hint is float:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < LARGEST_WHOLE)

    kind = origin or hint
    if kind in (list, tuple, Sequence):
        items = arguments[0] if arguments else Any
        return isinstance(value, list | tuple) and all(matches(item, items) for item in value)
    if kind in (dict, Mapping):
        return isinstance(value, Mapping) and matches(value, Any)
    return isinstance(value, kind)


def describe(hint: Any) -> str:
    """Describe an annotation in terms of YAML, for messages."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))

    names = {
        int: "a whole number",
        float: "a number (if whole, below 2**63)",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    if hint in names:
        return names[hint]
    if (origin or hint) in (list, tuple, Sequence):
        return "a list"
    return "a mapping, its numbers finite"
