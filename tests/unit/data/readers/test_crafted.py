"""Files with one changed value: each is read, or its error names the file in plain words."""

import copy
import json
import re

import pytest
import yaml
from trees import TASKS, YOLO_YAML, choices, coco_content, tree

from mldec.errors import DataError

# Texts of Python's exceptions and names of its types.
PYTHON = re.compile(
    r"\b[A-Z]\w+(Error|Exception)\b|object (has|is) no|subscriptable|unpack|NoneType"
    r"|invalid literal|unhashable|not supported between|unexpected keyword|surrogates not allowed"
)
VALUES = (None, True, -1, "x", [[]], {})

STUDIO = [
    *TASKS[:1],
    {"data": {"image": "d.jpg"}, "annotations": [choices(["a"], kind="taxonomy")]},
]
FIFTYONE = {"classes": ["dog", "cat"], "labels": {"a": [0, "cat"], "c": {"label": "dog"}}}
CONTENTS = {
    ("coco", "annotations/instances_val2014.json"): coco_content("val2014", {8: [7], 6: [90]}),
    ("fiftyone", "train/labels.json"): FIFTYONE,
    ("label_studio", "export.json"): STUDIO,
    ("vg500", "vg_category_500_labels_index.json"): {"4.jpg": [7, 3]},
    ("yolo", "data.yaml"): yaml.safe_load(YOLO_YAML),
}


def variants(content):
    """Yield copies of a JSON value in which one inner value is replaced or removed."""
    places = [()]
    for place in places:
        value = content
        for key in place:
            value = value[key]
        if isinstance(value, dict | list):
            places += [
                (*place, key) for key in (value if isinstance(value, dict) else range(len(value)))
            ]
    for place in places:
        for value in VALUES:
            if not place:
                yield place, value
                continue
            changed = copy.deepcopy(content)
            parent = changed
            for key in place[:-1]:
                parent = parent[key]
            parent[place[-1]] = value
            yield place, changed
        if place:
            del parent[place[-1]]
            yield place, changed


@pytest.mark.parametrize(("reader", "file"), CONTENTS)
def test_error_of_changed_value_is_in_plain_words(tmp_path, reader, file):
    build = tree(reader, tmp_path)
    path = build.root / file
    faults = 0
    for number, (place, content) in enumerate(variants(CONTENTS[reader, file])):
        path.write_text(json.dumps(content))
        try:
            source = build.function(root=str(build.root))
            source.load(source.val, str(tmp_path / f"cache{number}"))
        except DataError as error:
            faults += 1
            message = str(error)
            assert str(build.root) in message, (place, message)
            assert not PYTHON.search(message), (place, message)
            assert "\n" not in message
    assert faults
