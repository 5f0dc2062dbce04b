"""With thresholds, all outputs list exactly the present classes.

`tests/extras/test_decisions.py` compares the outputs that need optional packages.
"""

import csv
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import many_classes
import numpy as np
import pytest

import mldec
from mldec.tools.predict import Tagger, answers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return many_classes.write(tmp_path_factory.mktemp("many"))


def test_outputs_list_exactly_the_present_classes(cli, model, here, monkeypatch):
    expected = model.present(model.thresholds)
    assert [len(row) > 10 for row in expected] == [True, True, False]
    assert expected[2] == []

    found = {}
    words = [model.checkpoint, *model.photos]
    found["console"] = []
    for line in cli.out("predict", *words).splitlines():
        if line.startswith(tuple(map(str, model.photos))):
            names = [cell.rpartition(" ")[0] for cell in line.split(": ")[1].split(", ")]
            found["console"].append([] if line.endswith(": nothing") else names)

    drawn = []
    draw = answers.draw
    monkeypatch.setattr(answers, "draw", lambda *args: drawn.append(args[2]) or draw(*args))
    files = ["--jsonl=r.jsonl", "--json=r.json", "--csv=r.csv", "--label-studio=tasks.json"]
    cli.out("predict", *words, *files, "--cvat=r.xml", "--pictures=drawn", "--xmp")
    found["pictures"] = [[name for (name, _), _ in findings] for findings in drawn]
    found["XMP"] = [many_classes.keywords(photo) for photo in model.photos]

    lines = Path("r.jsonl").read_text().splitlines()
    for name, text in (
        ("JSON Lines", f"[{','.join(lines)}]"),
        ("JSON", Path("r.json").read_text()),
    ):
        found[name] = [[item["name"] for item in row["predictions"]] for row in json.loads(text)]
    with Path("r.csv").open(newline="") as file:
        cells = [row["classes"] for row in csv.DictReader(file)]
    found["CSV"] = [cell.split(";") if cell else [] for cell in cells]
    found["Label Studio"] = []
    for task in json.loads(Path("tasks.json").read_text()):
        results = task["predictions"][0]["result"]
        found["Label Studio"].append(results[0]["value"]["choices"] if results else [])
    images = ElementTree.parse("r.xml").getroot().iterfind("image")
    found["CVAT"] = [[tag.get("label") for tag in image.iterfind("tag")] for image in images]

    loaded = mldec.load(model.checkpoint)
    found["Python"] = [[name for name, _ in row] for row in loaded(model.photos)]
    batch = {"path": [str(photo) for photo in model.photos]}
    found["Tagger"] = Tagger(model.checkpoint)(batch)["classes"]
    found["decisions"] = Tagger(model.checkpoint, content="decisions")(batch)["classes"]
    assert found == dict.fromkeys(found, expected)
    # A maximum of the user is kept.
    assert [len(row) for row in loaded.predict(model.photos, top=3)] == [3, 3, 0]


def test_thresholds_of_the_user_replace_those_of_the_checkpoint(model, here):
    assert len(model.present(0.4)[0]) > 10
    loaded = mldec.load(model.checkpoint, threshold=0.4)
    assert [[name for name, _ in row] for row in loaded(model.photos)] == model.present(0.4)

    # A class is present if its score is above a threshold of a file.
    limits = np.float32(model.scores[1])
    (here / "t.txt").write_text("\n".join(map(repr, limits.tolist())))
    loaded = mldec.load(model.checkpoint, thresholds="t.txt")
    expected = model.present(np.nextafter(limits, np.float32(2)))
    assert [[name for name, _ in row] for row in loaded(model.photos[::2])] == expected[::2]
