"""Which values of YAML fit an annotation, and how messages name it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Optional, Union

import pytest

from mldec.config.schema import describe, matches


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (3, int, True),
        (3, float, True),
        (1e20, float, True),
        (10**20, float, False),
        (3.5, int, False),
        (True, int, False),
        (True, float, False),
        (math.nan, float, False),
        (-math.inf, float, False),
        ([0.5, math.nan], list[float], False),
        ({"a": [math.inf]}, dict[str, Any], False),
        ({"a": [1.0, None]}, dict[str, Any], True),
        (math.nan, Any, False),
        (10**400, float, False),
        (True, bool, True),
        (1, bool, False),
        ("a", str, True),
        (None, int | None, True),
        (None, int, False),
        ("x", bool | str, True),
        ([1, 2], list[int], True),
        ([1, "a"], list[int], False),
        ({"a": 1}, dict[str, Any], True),
        ("sum", Literal["sum", "mean"], True),
        ("max", Literal["sum", "mean"], False),
        (object(), Any, True),
    ],
)
def test_values_are_held_to_the_annotation(value: Any, hint: Any, fits: bool) -> None:
    assert matches(value, hint) is fits


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (2**63 - 1, float, True),
        (2**63, float, False),
        (-(2**63), float, False),
        (2**63, int, True),
        (2.0**70, float, True),
        ([1, True], list[int], False),
        ([1, 2], Sequence[float], True),
        ((1, 2), tuple[int, ...], True),
        ("ab", Sequence[str], False),  # a text is no list of letters
        ([[1], [2]], list[list[int]], True),
        ([[1], 2], list[list[int]], False),
        ({}, Mapping[str, float], True),
        ([], dict[str, Any], False),
        ([math.inf], list, False),
        ([{"a": [math.nan]}], Any, False),
        ([{"a": ["nan"]}], Any, True),
        ("3", int, False),
        (None, Optional[str], True),  # noqa: UP045
        (3, Union[str, int], True),  # noqa: UP007
        (3.5, int | str, False),
        (False, Literal["sum", False], True),
        ("none", None, False),
    ],
)
def test_limits_containers_and_unions(value: Any, hint: Any, fits: bool) -> None:
    assert matches(value, hint) is fits


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (int, "a whole number"),
        (float, "a number (if whole, below 2**63)"),
        (bool, "true or false"),
        (str, "text"),
        (int | None, "a whole number or null"),
        (Union[str, float, None], "text or a number (if whole, below 2**63) or null"),  # noqa: UP007
        (Literal["sum", "mean"], "one of sum, mean"),
        (Literal["sum"] | None, "one of sum or null"),
        (list[int], "a list"),
        (Sequence[str], "a list"),
        (tuple[float, float], "a list"),
        (dict[str, Any], "a mapping, its numbers finite"),
    ],
)
def test_an_annotation_is_described_as_in_yaml(hint: Any, said: str) -> None:
    assert describe(hint) == said


def test_every_annotation_of_a_part_is_described() -> None:
    """No hint of a part may reach the last line of `describe` unless it is a mapping."""
    import inspect

    from mldec import build
    from mldec.backbones import TimmBackbone
    from mldec.heads.ml_decoder import MLDecoder
    from mldec.losses.asymmetric import AsymmetricLoss

    # What the caller passes is no YAML.
    runtime = {name for names in build.RUNTIME_ARGUMENTS.values() for name in names}
    for part in (TimmBackbone, MLDecoder, AsymmetricLoss):
        for name, parameter in inspect.signature(part, eval_str=True).parameters.items():
            if name in runtime:
                continue
            hint = parameter.annotation
            if describe(hint).startswith("a mapping"):
                assert matches({}, hint)
            if parameter.default is not inspect.Parameter.empty:
                assert matches(parameter.default, hint), parameter
