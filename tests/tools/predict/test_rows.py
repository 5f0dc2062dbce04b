import os
from typing import Any

import pytest
import torch

from mldec.data.types import Classes
from mldec.errors import ConfigError
from mldec.predict.answers import Content, Prediction, Row, Rule, chosen_rule, entries, named

CLASSES = Classes(tuple("abcd"))
SCORES = torch.tensor([0.5, 0.75, 0.51, 0.25])


def chosen(**rule: Any) -> str:
    scores = rule.pop("scores", SCORES)
    classes = rule.pop("classes", Classes(tuple("abcdefgh"[: len(scores)])))
    return "".join(item.name for item in Rule(classes=classes, **rule).chosen(scores))


@pytest.mark.parametrize(
    ("top", "threshold", "names"),
    [
        (3, 0.0, "bca"),
        (10**30, 0.0, "bcad"),
        (1, 0.0, "b"),
        (4, 0.5, "bca"),
        (4, 0.6, "b"),
        (4, 1.0, ""),
    ],
)
def test_the_best_classes(top: int, threshold: float, names: str) -> None:
    predictions = Rule(classes=CLASSES, top=top, threshold=threshold).chosen(SCORES)
    assert "".join(item.name for item in predictions) == names
    assert [item.index for item in predictions] == ["abcd".index(name) for name in names]
    assert [item.score for item in predictions] == [SCORES["abcd".index(n)].item() for n in names]


def test_of_equal_scores_the_lower_class_comes_first() -> None:
    assert chosen(scores=torch.full((5,), 0.5), top=3, threshold=0.5) == "abc"


def test_each_class_has_its_stored_threshold() -> None:
    rule = Rule(classes=CLASSES, stored=[0.5, 0.8, 0.1, 0.25])
    assert [(item.name, item.threshold) for item in rule.chosen(SCORES)] == [
        ("c", 0.1),
        ("a", 0.5),
        ("d", 0.25),
    ]


def test_decisions_are_not_limited_but_for_one_label() -> None:
    scores = torch.full((8,), 0.5)
    assert chosen(scores=scores, content=Content.DECISIONS, top=3, threshold=0.5) == "abcdefgh"
    one_label = Classes(tuple("abcdefgh"), exclusive=True)
    assert chosen(scores=scores / 8, content=Content.DECISIONS, classes=one_label) == "a"


OPTIONS: dict[str, Any] = {"content": "top", "top": None, "threshold": None}


def test_the_options_make_the_rule() -> None:
    stored = [0.5] * 4
    rule = chosen_rule(CLASSES, stored, **OPTIONS)
    assert (rule.top, rule.threshold, rule.stored) == (10, 0.0, stored)
    rule = chosen_rule(CLASSES, stored, **{**OPTIONS, "threshold": 0.3, "top": 2})
    assert (rule.top, rule.threshold, rule.stored) == (2, 0.3, None)
    one_label = Classes(tuple("abcd"), exclusive=True)
    assert chosen_rule(one_label, None, **{**OPTIONS, "content": "decisions"}).stored is None


@pytest.mark.parametrize(
    ("options", "exclusive", "message"),
    [
        ({"content": "scores", "top": 3}, False, "--top has no effect with --content scores"),
        ({"content": "scores", "threshold": 0.5}, False, "--threshold has no effect with"),
        ({"content": "decisions", "threshold": 0.5}, True, "of an image with one label"),
        ({"content": "decisions"}, False, "the checkpoint has no thresholds; pass --threshold"),
    ],
)
def test_options_without_a_meaning_are_refused(
    options: dict[str, Any], exclusive: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_rule(Classes(tuple("abcd"), exclusive=exclusive), None, **{**OPTIONS, **options})


def test_a_path_that_is_not_utf8_is_named_in_hexadecimal_too() -> None:
    assert named("a/\u65e5.png") == {"image": "a/\u65e5.png"}
    odd = os.fsdecode(b"a/\xff.png")
    assert named(odd) == {"image": "a/\\xff.png", "image_bytes": b"a/\xff.png".hex()}


def test_rows_in_json() -> None:
    predictions = [Prediction(1, "b", 0.75, 0.5), Prediction(2, "c", 0.5)]
    row = Row("x.png", predictions, SCORES, picture="x.jpg")

    def content(kind: str) -> dict[str, Any]:
        return entries(Rule(classes=CLASSES, content=Content(kind)))(row)

    assert content("top") == {
        "image": "x.png",
        "predictions": [
            {"name": "b", "score": 0.75, "threshold": 0.5},
            {"name": "c", "score": 0.5},
        ],
        "picture": "x.jpg",
    }
    assert content("decisions") == {"image": "x.png", "classes": ["b", "c"], "picture": "x.jpg"}
    assert content("scores")["scores"] == dict(zip("abcd", SCORES.tolist(), strict=True))
    failed = Row("x.png", error="two\nlines\x1b")
    assert entries(Rule(classes=CLASSES))(failed) == {"image": "x.png", "error": "two lines?"}
