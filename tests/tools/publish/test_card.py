"""The model card: its metadata, its tables, and names that try to break out of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from mldec.checkpoint import Calibration, Checkpoint, Loaded
from mldec.data.fingerprint import Fingerprint
from mldec.data.types import Classes
from mldec.publish import MOST_CLASSES, UNDEFINED, Known, Measured, Start, card, escaped, number

NASTY = "a|b`<img src=x>`[c](https://evil.example)*\\ "
CALIBRATION = Calibration(
    weights="raw",
    objective="f1",
    scope="class",
    thresholds=(0.25, 0.5, 0.125),
    slopes=(2.0,),
    offsets=(0.0,),
    images=40,
    data={},
    fingerprint=Fingerprint(40, "a", "b", "c"),
    date="2026-11-22T01:20:14+00:00",
)


@pytest.fixture
def known(saved: Checkpoint, loaded: Loaded) -> Known:
    """What is known of a model of three classes; tests replace some of it."""
    return Known(
        repository="me/mine",
        checkpoint=replace(saved, fingerprint=None, git=None),
        loaded=loaded,
        measured=Measured(source="from r.json", images=None, metrics={}),
        start=Start("random weights", "none", None),
        cost=[("Parameters", "12")],
        command=None,
        license=None,
        plugins=[],
    )


def measured(*names: str) -> Measured:
    return Measured(
        source="from r.json",
        images=40,
        metrics={"mAP": 81.23456, "OP": None, "classes_seen": 3},
        intervals={"mAP": (70.0, 90.126)},
        per_class={
            name: {"positives": place, "AP": 90.0 - place, "AP_low": 1.5, "AP_high": 99.0}
            for place, name in enumerate(names)
        },
    )


def section(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines]


def test_the_metadata_is_what_the_hub_reads(known: Known) -> None:
    start = Start("timm's weights of x", "apache-2.0", "timm/x")
    full = replace(known, license="mit", start=start, measured=measured("zero", "one", "two"))
    text = card(full)
    data = ModelCard(text).data
    assert data.license == "mit"
    assert data.model_name == "mine"
    assert data.library_name == "mldec"
    assert data.pipeline_tag == "image-classification"
    assert data.tags == ["mldec", "multi-label", "MLDecoder"]
    assert data.base_model == "timm/x"
    [result] = data.eval_results
    assert (result.metric_type, result.metric_value) == ("mAP", 81.2346)
    assert result.dataset_type == "digits"

    # Without a licence the key is not there: the Hub takes null for a licence.
    assert "license" not in yaml.safe_load(card(known).split("---")[1])
    assert ModelCard(card(known)).data.eval_results is None


def test_metrics_have_intervals_and_classes_a_table(known: Known) -> None:
    text = card(replace(known, measured=measured("zero", "one", "two")))
    table_of_metrics = rows(section(text, "Metrics"))
    assert table_of_metrics[2][:3] == ["mAP", "81.23", "70 to 90.13"]
    assert table_of_metrics[3][:3] == ["OP", UNDEFINED, UNDEFINED]
    assert table_of_metrics[4][:2] == ["classes\\_seen", "3"]
    assert rows(section(text, "Classes")) == [
        ["Class", "positives", "AP"],
        ["---", "---", "---"],
        ["zero", "0", "90 (1.50 to 99)"],
        ["one", "1", "89 (1.50 to 99)"],
        ["two", "2", "88 (1.50 to 99)"],
    ]
    assert "two (88), one (89), zero (90)" in section(text, "Limitations")
    assert "Validation images: 40" in section(text, "Data")


def test_what_is_unknown_is_said_to_be(known: Known) -> None:
    text = card(known)
    assert "Unknown: the checkpoint holds none." in section(text, "Metrics")
    assert "How well each is recognised is unknown" in section(text, "Classes")
    assert "Training images: unknown" in section(text, "Data")
    assert "Validation images: unknown" in section(text, "Data")
    assert "The command is unknown" in section(text, "Recipe")
    assert "Commit of mldec: unknown" in section(text, "Recipe")
    assert "This model: not stated" in section(text, "Licences")
    assert "its scores are no probabilities" in section(text, "Thresholds")
    no_intervals = replace(measured("zero", "one", "two"), intervals={})
    text = card(replace(known, measured=no_intervals))
    assert "The intervals are unknown" in section(text, "Metrics")


def with_calibration(known: Known, calibration: Calibration) -> Known:
    return replace(known, checkpoint=replace(known.checkpoint, calibration=calibration))


def test_thresholds_are_those_of_the_calibration(known: Known) -> None:
    text = section(card(with_calibration(known, CALIBRATION)), "Thresholds")
    assert "40 images on 2026-11-22T01:20:14+00:00, for f1" in text
    assert "divided by the temperature 0.500" in text
    assert rows(text)[2:] == [["zero", "0.250"], ["one", "0.500"], ["two", "0.125"]]

    shared = replace(CALIBRATION, scope="global", thresholds=(0.3,), slopes=(1.0, 2.0, 3.0))
    text = section(card(with_calibration(known, shared)), "Thresholds")
    assert "One threshold for all classes: 0.300." in text
    assert "Platt scaling" in text

    both = replace(with_calibration(known, CALIBRATION), measured=measured("zero", "one", "two"))
    assert "too good" in section(card(both), "Limitations")
    assert "too good" not in section(card(with_calibration(known, CALIBRATION)), "Limitations")


def test_kinds_of_models_are_named(known: Known) -> None:
    def of(classes: Classes) -> str:
        return card(replace(known, loaded=replace(known.loaded, classes=classes)))

    assert "A single-label image classifier of 2 classes" in of(Classes(("a", "b"), exclusive=True))
    text = of(Classes(("a", "b"), queries=torch.zeros(2, 4)))
    assert "A zero-shot image classifier" in text
    assert "It scores any classes that have word vectors" in text


def test_nasty_names_stay_in_their_cells(known: Known) -> None:
    names = (NASTY, "| x |", "# heading", "---", "&lt;b&gt;", "<!-- x", "\u202ehidden")
    loaded = replace(known.loaded, classes=Classes(names))
    text = card(replace(known, loaded=loaded, measured=measured(*names), repository="me/_x_"))
    table_of_classes = rows(section(text, "Classes"))
    assert len(table_of_classes) == 2 + len(names)
    for cells in table_of_classes:
        assert len(cells) == 3, cells
    body = text.split("\n---\n", 1)[1]
    for raw in ("<img", "](http", "<!--", "&lt;", "\n# heading"):
        assert raw not in body.replace("\\<", "").replace("\\]", "").replace("\\&", ""), raw


def test_settings_cannot_end_their_block(known: Known) -> None:
    config = {**known.checkpoint.config, "name": "x\n```\n# out\n````", "data": {"root": "a```b"}}
    text = card(replace(known, checkpoint=replace(known.checkpoint, config=config)))
    lines = section(text, "Recipe").splitlines()
    first, last = (number for number, line in enumerate(lines) if line.startswith("`````"))
    assert (lines[first], lines[last]) == ("`````yaml", "`````")
    assert yaml.safe_load("\n".join(lines[first + 1 : last])) == config


def test_many_classes_are_cut_and_counted(known: Known) -> None:
    names = tuple(f"class {number}" for number in range(MOST_CLASSES + 7))
    loaded = replace(known.loaded, classes=Classes(names))
    text = section(card(replace(known, loaded=loaded)), "Classes")
    assert text.count("\n- ") == MOST_CLASSES
    assert "7 more classes" in text


def test_a_plugin_is_named_where_it_is_needed(known: Known) -> None:
    text = section(card(replace(known, plugins=["patches"])), "Use")
    assert "python -m mldec.predict hf:me/mine photo.jpg --plugin patches" in text
    assert "load_model(\"hf:me/mine\", plugins=['patches'])" in text
    assert "It needs the package patches" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, UNDEFINED), (float("nan"), UNDEFINED), (3, "3"), (1234.0, "1,234"), (0.126, "0.13")],
)
def test_numbers_are_short(value: Any, text: str) -> None:
    assert number(value) == text


def test_text_is_shown_as_it_is() -> None:
    assert escaped("a_b*c") == "a\\_b\\*c"
    assert escaped("line\nbreak\x1b[2J") == "line break?\\[2J"
    assert escaped("12:30") == "12:30"
