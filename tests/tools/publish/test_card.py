"""The model card: metadata, tables, and escaping."""

from dataclasses import replace

import networks
import pytest
import yaml
from huggingface_hub import ModelCard

from mldec.data.types import Classes
from mldec.tools.publish import MAX_CLASSES, UNDEFINED, CardMetrics, card

NASTY = "a|b`<img src=x>`[c](https://evil.example)*\\ "
CALIBRATION = replace(
    networks.CALIBRATION, thresholds=(0.25, 0.5, 0.125), slopes=(2.0,), offsets=(0.0,), images=40
)
GLOBAL = replace(CALIBRATION, scope="global", thresholds=(0.3,), slopes=(1.0, 2.0, 3.0))
READ = replace(CALIBRATION, images=0, file="mine.csv")


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
    return CardMetrics(source="from r.json", **{**values, **changes})


THREE = measured("zero", "one", "two")
NOTHING = CardMetrics(source="", images=None, metrics={})


@pytest.fixture
def known(saved, loaded):
    """Make the text of the card of a model with three classes."""

    def make(classes=None, calibration=None, measured=NOTHING, repository="me/mine", **changes):
        # The fixture of the checkpoint states no run, whose start weights are then unknown.
        checkpoint = replace(saved, fingerprint=None, calibration=calibration)
        checkpoint = replace(checkpoint, config=changes.pop("config", checkpoint.config))
        model = loaded if classes is None else replace(loaded, classes=classes)
        return str(card(repository, checkpoint, model, measured, **changes))

    return make


def section(text, heading):
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines]


def test_metadata_is_valid_for_the_hub(known):
    data = ModelCard(known(license="mit", measured=THREE)).data
    assert (data.license, data.library_name, data.model_name) == ("mit", "mldec", "mine")
    assert data.pipeline_tag == "image-classification"
    assert data.tags == ["mldec", "multi-label", "MLDecoder"]
    [result] = data.eval_results
    assert (result.metric_type, result.metric_value) == ("mAP", 81.2346)
    assert result.dataset_type == "digits"

    # Without a license the key is absent, because the hub reads null as a license.
    text = known()
    assert "license" not in yaml.safe_load(text.split("---")[1])
    assert ModelCard(text).data.eval_results is None


def test_card_has_tables_of_metrics_classes_and_thresholds(known):
    text = known(measured=THREE, calibration=CALIBRATION)
    table_of_metrics = rows(section(text, "Metrics"))
    assert table_of_metrics[2][:3] == ["mAP", "81.23", "70 to 90.13"]
    assert table_of_metrics[3][:3] == ["OP", UNDEFINED, "unknown"]
    assert table_of_metrics[4][:2] == ["classes\\_seen", "3"]
    assert rows(section(text, "Classes and thresholds")) == [
        ["Class", "threshold", "positives", "AP"],
        ["---", "---", "---", "---"],
        ["zero", "0.250", "0", "90"],
        ["one", "0.500", "1", "89"],
        ["two", "0.125", "2", "88"],
    ]
    # Without results, the classes of the checkpoint are listed.
    for calibration, expected in ((None, ["one"]), (CALIBRATION, ["one", "0.500"])):
        table_of_classes = rows(section(known(calibration=calibration), "Classes and thresholds"))
        assert table_of_classes[3] == expected


def test_card_has_the_validation_images_and_the_thresholds_of_its_metrics(known):
    of_run = CardMetrics(source="", images=1234, metrics={"OF1": 1.0}, thresholds="At 0.7_5")
    text = known(calibration=replace(CALIBRATION, images=1234), measured=of_run)
    assert "1,234 validation images" in section(text, "Metrics")
    assert "At 0.7\\_5." in section(text, "Metrics")
    # These metrics were not computed at the fitted thresholds.
    assert "optimistic" not in text


def test_card_states_stored_features_of_training_images(known, loaded, monkeypatch):
    assert "features" not in known()
    monkeypatch.setattr(loaded.model.head, "support", range(1234), raising=False)
    assert "features of 1,234 training images" in section(known(), "Data and licenses")


MANY = Classes(tuple(f"class {number}" for number in range(MAX_CLASSES + 7)))


@pytest.mark.parametrize(
    ("changes", "heading", "part"),
    [
        ({}, "Metrics", "Unknown"),
        ({}, "Classes and thresholds", "scores only these classes"),
        ({"config": {"data": {"threshold": 0.75}}}, "Classes and thresholds", "is 0.750."),
        ({"data_name": "Our birds"}, "Data and licenses", "Our birds"),
        ({"license": "mit"}, "Data and licenses", "model: mit"),
        ({"calibration": CALIBRATION}, "Classes and thresholds", "40 images"),
        ({"calibration": READ}, "Classes and thresholds", "mine.csv"),
        ({"calibration": GLOBAL}, "Classes and thresholds", "all classes is 0.300."),
        ({"calibration": CALIBRATION, "measured": THREE}, "Classes and thresholds", "optimistic"),
        ({"classes": MANY}, "Classes and thresholds", "7 more classes"),
        ({"plugins": ["patches"]}, "Use", "mldec.load(\"hf:me/mine\", plugin=['patches'])"),
    ],
)
def test_card_contains_known_and_unknown_facts(known, changes, heading, part):
    assert part in section(known(**changes), heading)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"_target_": "mldec.data.readers.voc", "root": ".../x", "year": 2007}, "Pascal VOC 2007"),
        ({"_target_": "mldec.data.readers.coco", "root": "data/x"}, "MS-COCO"),
        ({"_target_": "mldec.data.readers.csv_table", "root": ".../birds"}, "birds"),
        ({"_target_": "mldec.data.readers.folders"}, "folders"),
        ({"_target_": "mypkg.birds", "root": ".../photos"}, "photos"),
    ],
)
def test_dataset_has_the_name_that_its_user_knows(known, data, name):
    text = known(measured=THREE, config={"data": data})
    assert f"- Dataset: {name}\n" in text
    assert ModelCard(text).data.eval_results[0].dataset_name == name


def test_names_are_escaped_in_tables(known):
    names = (NASTY, "| x |", "# heading", "---", "&lt;b&gt;", "<!-- x", "\u202ehidden", "{{ 1 }}")
    text = known(Classes(names), measured=measured(*names), repository="me/_x_")
    table_of_classes = rows(section(text, "Classes and thresholds"))
    assert len(table_of_classes) == 2 + len(names)
    for cells in table_of_classes:
        assert len(cells) == 3, cells
    body = text.split("\n---\n", 1)[1]
    for raw in ("<img", "](http", "<!--", "&lt;", "\n# heading"):
        assert raw not in body.replace("\\<", "").replace("\\]", "").replace("\\&", ""), raw
