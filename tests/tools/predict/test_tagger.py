"""The columns of `Tagger` equal the rows of the command."""

import json
import pickle

import numpy as np
import pytest
from pictures import picture

from mldec.tools.predict import Tagger, tagger

OPTIONS = {"plugin": ["patches"], "device": "cpu", "threshold": 0.0}


def test_paths_bytes_and_images_have_the_same_predictions(cli, best, tmp_path, monkeypatch):
    paths = [str(tmp_path / f"{seed}.png") for seed in range(5)]
    for seed, path in enumerate(paths):
        picture(64, 64, seed=seed).save(path)
    (tmp_path / "3.png").write_bytes(b"no image")
    words = [*paths, "--plugin", "patches", "--device", "cpu", "--threshold", "0", "--top", "3"]
    rows = json.loads(cli("predict", best, *words, "--json", "-").out)

    opened = tagger.open_engine
    loads = []
    monkeypatch.setattr(tagger, "open_engine", lambda given: loads.append(given) or opened(given))
    tag = pickle.loads(pickle.dumps(Tagger(best, top=3, batch_size=2, **OPTIONS)))
    contents = [(tmp_path / f"{seed}.png").read_bytes() for seed in range(5)]
    for batch in (
        {"path": np.array(paths, object)},
        {"bytes": contents, "label": [*"abcde"], "path": paths},
    ):
        columns = tag(batch)
        assert columns.keys() == (batch.keys() - {"bytes"}) | {"error", "classes", "scores"}
        assert columns["error"] == [row.get("error") for row in rows]
        for name, key in (("classes", "name"), ("scores", "score")):
            for values, row in zip(columns[name], rows, strict=True):
                expected = [one[key] for one in row.get("predictions", [])]
                assert values == (expected if key == "name" else pytest.approx(expected, abs=1e-5))

    del contents[3], rows[3]
    images = [picture(64, 64, seed=seed) for seed in (0, 1, 2, 4)]
    for values in (images, np.stack([np.asarray(image) for image in images])):
        classes = tag({"image": values})["classes"]
        assert classes == [[one["name"] for one in row["predictions"]] for row in rows]
    assert len(loads) == 1, "a process loads the checkpoint once"
    assert Tagger(best, top=3, batch_size=2, **OPTIONS)({"image": []})["classes"] == []


def test_array_that_is_no_photo_is_an_error_of_its_row(best):
    good = np.asarray(picture(64, 64))
    tag = Tagger(best, **OPTIONS)
    columns = tag({"image": [good, np.zeros((8, 8, 2), np.uint8), good], "path": [*"abc"]})
    assert columns["error"][0] is columns["error"][2] is None
    assert columns["error"][1].startswith("b: ")
    expected = tag({"image": [good, good]})["scores"]
    assert columns["scores"] == [expected[0], [], expected[1]]


def test_columns_depend_on_the_content(best):
    images = [np.asarray(picture(64, 64))]
    for content, keys in (("scores", {"scores"}), ("decisions", {"classes"})):
        options = {**OPTIONS, "threshold": None if content == "scores" else 0.5}
        columns = Tagger(best, content=content, **options)({"image": images})
        assert columns.keys() == keys | {"error"}
        lengths = [len(columns[name][0]) for name in keys]
        assert lengths == [10] or content == "decisions"
