"""Round trips with label-studio-sdk and datumaro.

Their versions of numpy and Pillow are older than ours, so they run in another environment, whose
Python is MLDEC_LABELING_PYTHON. `.ci/run full` creates it, with the versions of the packages. The
tests are skipped without this variable.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from pictures import picture
from readers import Reader, names, targets

from mldec.data import readers
from mldec.data.types import Classes
from mldec.tools.predict import formats
from mldec.tools.predict.answers import Prediction, Row, Rule

PYTHON = os.environ.get("MLDEC_LABELING_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="MLDEC_LABELING_PYTHON is not set")
CONFIG = (
    '<View><Image name="image" value="$image"/><Choices name="choice" toName="image" '
    'choice="multiple"><Choice value="cat"/><Choice value="dog &amp; co"/></Choices></View>'
)
LABELS = {"a.png": ["cat", "dog & co"], "b.png": ["cat"], "c.png": ["dog & co"], "d.png": ["cat"]}

VALIDATE = """
import json, sys
from label_studio_sdk.converter import Converter
from label_studio_sdk.label_interface import LabelInterface
config, file, folder = sys.argv[1:]
tasks = json.load(open(file))
interface = LabelInterface(config)
for number, task in enumerate(tasks):
    for prediction in task["predictions"]:
        assert interface.validate_prediction(prediction), prediction
    # What a person does who accepts all predictions.
    result = task["predictions"][0]["result"]
    annotation = {"id": number, "completed_by": 1, "was_cancelled": False, "result": result}
    task |= {"id": number, "annotations": [annotation]}
json.dump(tasks, open(file, "w"))
Converter(config, folder, download_resources=False).convert_to_json_min(file, folder, is_dir=False)
"""
DATUMARO = """
import json, sys
from datumaro.components.dataset import Dataset
source, target = sys.argv[1:]
data = Dataset.import_from(source, "cvat")
names = [item.name for item in data.categories()[next(iter(data.categories()))].items]
found = {item.id: sorted(names[label.label] for label in item.annotations) for item in data}
print(json.dumps([names, found]))
data.export(target, "cvat", save_media=True)
"""


def run_tool(script: str, *words: str) -> str:
    """Run a script in the environment of the tools."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [PYTHON, "-c", script, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in LABELS:
        picture(64, 64, seed=ord(name[0])).save(folder / name)
    return folder


def by_name(data) -> dict[str, list[str]]:
    """Return the class names of all images of both splits."""
    found = {}
    for split in (data.train, data.val):
        for name, target in zip(names(split), targets(split), strict=True):
            pairs = zip(data.train.classes.names, target, strict=True)
            found[name] = [class_name for class_name, value in pairs if value == 1]
    return found


def write_prelabels(option: str, out: Path) -> None:
    """Write pre-labels, with labels from `LABELS` in place of the model's predictions."""
    classes = ("cat", "dog & co")
    rule = Rule(classes=Classes(classes), image_prefix="/data/local-files/?d=photos/")
    lines = []
    for name, labels in LABELS.items():
        found = [Prediction(classes.index(label), label, 0.9) for label in labels]
        lines.append(formats.line_of(rule, Row(name, found)))
    out.write_text("".join(formats.TEXTS[option](rule, lines)))


def test_label_studio(photos, tmp_path):
    file = photos / "export.json"
    write_prelabels("label_studio", file)
    run_tool(VALIDATE, CONFIG, str(file), str(tmp_path / "min"))

    # The accepted predictions, as exported by its converter and as read by our reader.
    [converted] = (tmp_path / "min").glob("*.json")
    exported = {}
    for task in json.loads(converted.read_text()):
        choice = task["choice"]
        names_of_task = choice["choices"] if isinstance(choice, dict) else [choice]
        exported[task["image"].rpartition("/")[2]] = names_of_task
    assert exported == LABELS
    assert by_name(Reader(readers.label_studio, photos)(val_fraction=0.5)) == LABELS


def test_cvat(photos, tmp_path):
    write_prelabels("cvat", photos / "annotations.xml")
    (photos / "images").mkdir()
    for name in LABELS:
        (photos / name).rename(photos / "images" / name)
    out = run_tool(DATUMARO, str(photos), str(tmp_path / "cvat"))
    class_names, found = json.loads(out.splitlines()[-1])
    assert class_names == ["cat", "dog & co"]
    assert {f"{name}.png": labels for name, labels in found.items()} == LABELS

    # The file that datumaro writes, and ours.
    [export] = (tmp_path / "cvat").rglob("*.xml")
    file = str(export.relative_to(tmp_path / "cvat"))
    for root, name in ((photos, "annotations.xml"), (tmp_path / "cvat", file)):
        assert by_name(Reader(readers.cvat, root)(file=name, val_fraction=0.5)) == LABELS
