"""The model card: its metadata, its tables, and names that try to break out of them."""

from dataclasses import replace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from mldec.checkpoint.state import Calibration
from mldec.data.fingerprint import Fingerprint
from mldec.data.types import Classes
from mldec.tools.publish import MOST_CLASSES, UNDEFINED, Known, Measured, Start, card

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
GLOBAL = replace(CALIBRATION, scope="global", thresholds=(0.3,), slopes=(1.0, 2.0, 3.0))


def measured(*names, **changes):
    values = {
        "images": 40,
        "metrics": {"mAP": 81.23456, "OP": None, "classes_seen": 3},
        "intervals": {"mAP": (70.0, 90.126)},
        "per_class": {
            name: {"positives": place, "AP": 90.0 - place, "AP_low": 1.5, "AP_high": 99.0}
            for place, name in enumerate(names)
        },
    }
    return Measured(source="from r.json", **{**values, **changes})


THREE = measured("zero", "one", "two")


@pytest.fixture
def known(saved, loaded):
    """What is known of a model of three classes, but for changes."""

    def make(classes=None, calibration=None, **changes):
        values = {
            "repository": "me/mine",
            "checkpoint": replace(saved, fingerprint=None, git=None, calibration=calibration),
            "loaded": loaded if classes is None else replace(loaded, classes=classes),
            "measured": Measured(source="", images=None, metrics={}),
            "start": Start("random weights", "none"),
            "cost": [("Parameters", "12")],
            "command": None,
            "license": None,
            "plugins": [],
        }
        return Known(**{**values, **changes})

    return make


def section(text, heading):
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines]


def test_the_metadata_is_what_the_hub_reads(known):
    start = Start("timm's weights of x", "apache-2.0", "timm/x")
    data = ModelCard(card(known(license="mit", start=start, measured=THREE))).data
    assert (data.license, data.library_name, data.model_name) == ("mit", "mldec", "mine")
    assert data.pipeline_tag == "image-classification"
    assert data.tags == ["mldec", "multi-label", "MLDecoder"]
    assert data.base_model == "timm/x"
    [result] = data.eval_results
    assert (result.metric_type, result.metric_value) == ("mAP", 81.2346)
    assert result.dataset_type == "digits"

    # Without a licence the key is not there: the Hub takes null for a licence.
    text = card(known())
    assert "license" not in yaml.safe_load(text.split("---")[1])
    assert ModelCard(text).data.eval_results is None


def test_metrics_have_intervals_and_classes_a_table(known):
    text = card(known(measured=THREE))
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
    thresholds = section(card(known(calibration=CALIBRATION)), "Thresholds")
    assert rows(thresholds)[2:] == [["zero", "0.250"], ["one", "0.500"], ["two", "0.125"]]


MANY = Classes(tuple(f"class {number}" for number in range(MOST_CLASSES + 7)))
ZERO_SHOT = Classes(("a", "b"), word_vectors=torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("changes", "heading", "sentence"),
    [
        ({}, "Metrics", "Unknown: the checkpoint holds none."),
        ({}, "Use", "which is not on PyPI: run `pip install -e .` in a checkout"),
        ({"data_name": "Our birds"}, "Data", "Data set: Our birds"),
        ({}, "Recipe", "The command is unknown"),
        ({}, "Thresholds", "its scores are no probabilities"),
        ({"measured": THREE}, "Data", "Validation images: 40"),
        ({"measured": THREE}, "Limitations", "two (88), one (89), zero (90)"),
        (
            {"calibration": CALIBRATION},
            "Thresholds",
            "40 images on 2026-11-22T01:20:14+00:00, for f1. "
            "Calibrated logit: the logit divided by the temperature 0.500.",
        ),
        ({"calibration": GLOBAL}, "Thresholds", "One threshold for all classes: 0.300."),
        (
            {"calibration": replace(CALIBRATION, offsets=(-20.0,), error=1.5)},
            "Thresholds",
            "2 times the logit, plus -20. Calibration error on images outside the fit: 1.50 %.",
        ),
        ({"calibration": CALIBRATION, "measured": THREE}, "Limitations", "F1 are optimistic"),
        ({"classes": ZERO_SHOT}, "Limitations", "It scores any classes that have word vectors"),
        ({"classes": MANY}, "Classes", "7 more classes"),
        ({"plugins": ["patches"]}, "Use", "mldec.load(\"hf:me/mine\", plugin=['patches'])"),
    ],
)
def test_what_is_known_and_what_is_not_is_said(known, changes, heading, sentence):
    assert sentence in section(card(known(**changes)), heading)


def test_nasty_names_stay_in_their_cells(known):
    names = (NASTY, "| x |", "# heading", "---", "&lt;b&gt;", "<!-- x", "\u202ehidden", "{{ 1 }}")
    text = card(known(Classes(names), measured=measured(*names), repository="me/_x_"))
    table_of_classes = rows(section(text, "Classes"))
    assert len(table_of_classes) == 2 + len(names)
    for cells in table_of_classes:
        assert len(cells) == 3, cells
    body = text.split("\n---\n", 1)[1]
    for raw in ("<img", "](http", "<!--", "&lt;", "\n# heading"):
        assert raw not in body.replace("\\<", "").replace("\\]", "").replace("\\&", ""), raw


def test_settings_cannot_end_their_block(known, saved):
    config = {**saved.config, "name": "x\n```\n# out\n````", "data": {"root": "a```b"}}
    text = card(known(checkpoint=replace(saved, config=config)))
    lines = section(text, "Recipe").splitlines()
    first, last = (number for number, line in enumerate(lines) if line.startswith("`````"))
    assert (lines[first], lines[last]) == ("`````yaml", "`````")
    assert yaml.safe_load("\n".join(lines[first + 1 : last])) == config
