"""Rows, result formats, and files that survive a kill."""

import csv
import errno
import io
import json
import os
import sqlite3
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mldec.data.types import Classes
from mldec.errors import ConfigError, DataError
from mldec.evaluation.run import as_limits, decided
from mldec.files.atomic import named
from mldec.tools.predict import results
from mldec.tools.predict.answers import Prediction, Row, Rule, chosen_rule, entries
from mldec.tools.predict.decode import Item
from mldec.tools.predict.formats import Line, line_of, write
from mldec.tools.predict.results import Results, count_and_hash

ABCD = Classes(tuple("abcd"))
ONE_LABEL = Classes(tuple("abcd"), exclusive=True)
SCORES = torch.tensor([0.5, 0.75, 0.51, 0.25])


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ({"top": 3}, "bca"),
        ({"top": 10**30}, "bcad"),
        ({"top": 4, "threshold": 0.5}, "bca"),
        ({"threshold": 1.0}, ""),
        ({"scores": torch.full((4,), 0.5), "top": 3, "threshold": 0.5}, "abc"),
        ({"stored": [0.5, 0.8, 0.1, 0.25]}, "cad"),
        ({"content": "decisions", "top": 1, "threshold": 0.5}, "bca"),
        ({"content": "decisions", "classes": ONE_LABEL}, "b"),
    ],
)
def test_rule_selects_classes(rule, names):
    scores = rule.pop("scores", SCORES)
    predictions = Rule(**{"classes": ABCD, **rule}).chosen(scores)
    assert "".join(item.name for item in predictions) == names
    assert [item.index for item in predictions] == ["abcd".index(name) for name in names]
    assert [item.score for item in predictions] == [scores["abcd".index(n)].item() for n in names]
    stored = rule.get("stored")
    expected = [stored and stored["abcd".index(name)] for name in names]
    assert [item.threshold for item in predictions] == expected


def test_threshold_option_replaces_stored_thresholds():
    stored = [0.5] * 4
    engine = SimpleNamespace(classes=ABCD, thresholds=stored)
    rule = chosen_rule(engine, content="top")
    assert (rule.top, rule.threshold, rule.stored) == (None, None, stored)
    rule = chosen_rule(engine, content="top", threshold=0.3, top=2)
    assert (rule.top, rule.threshold, rule.stored) == (2, 0.3, None)
    engine = SimpleNamespace(classes=ONE_LABEL, thresholds=None)
    assert chosen_rule(engine, content="decisions").stored is None


@pytest.mark.parametrize(
    ("rule", "count"),
    [
        ({}, 10),
        ({"top": 3}, 3),
        ({"threshold": 0.0}, 20),
        ({"stored": [0.0] * 20}, 20),
        ({"stored": [0.0] * 20, "top": 12}, 12),
        ({"exclusive": True}, 10),
        ({"exclusive": True, "threshold": 0.0}, 10),
        ({"exclusive": True, "top": 15}, 15),
        ({"exclusive": True, "content": "decisions"}, 1),
    ],
)
def test_only_rankings_have_a_default_maximum(rule, count):
    names = tuple(map(str, range(20)))
    classes = Classes(names, exclusive=rule.pop("exclusive", False))
    predictions = Rule(classes=classes, **rule).chosen(torch.rand(20))
    assert len(predictions) == count


def test_float32_limits_decide_like_exact_thresholds():
    scores = torch.rand(1000)
    exact = scores.double()
    # Most float64 numbers next to a float32 score are rounded to this score.
    for thresholds in (exact, exact * (1 + 1e-12), exact * (1 - 1e-12), torch.ones_like(exact)):
        limits = as_limits(thresholds.tolist())
        assert limits.dtype == torch.float32
        assert torch.equal(decided(scores[None], limits)[0], exact >= thresholds)


def test_json_of_a_row():
    predictions = [Prediction(1, "b", 0.75, 0.5), Prediction(2, "c", 0.5)]
    row = Row("x.png", predictions, SCORES, picture="x.jpg")

    def content(kind, row=row):
        return entries(Rule(classes=ABCD, content=kind), row)

    top = [{"name": "b", "score": 0.75, "threshold": 0.5}, {"name": "c", "score": 0.5}]
    assert content("top") == {"image": "x.png", "predictions": top, "picture": "x.jpg"}
    assert content("decisions") == {"image": "x.png", "classes": ["b", "c"], "picture": "x.jpg"}
    assert content("scores")["scores"] == dict(zip("abcd", SCORES.tolist(), strict=True))
    failed = Row("x.png", error="two\nlines\x1b")
    assert content("top", failed) == {"image": "x.png", "error": "two lines?"}

    assert named("a/\u65e5.png") == {"image": "a/\u65e5.png"}
    odd = os.fsdecode(b"a/\xff.png")
    assert named(odd) == {"image": "a/\\xff.png", "image_bytes": b"a/\xff.png".hex()}


# Formats


def rule_of(content="top", names=("a", "b, c", "d")):
    return Rule(classes=Classes(names), content=content, threshold=0.3)


def rows_of(rule):
    rows = []
    for number in range(5):
        scores = torch.tensor([0.1 * number, 0.9 - 0.1 * number, 0.35])
        features = torch.full((4,), float(number))
        rows.append(Row(f"{number}\n.png", rule.chosen(scores), scores, features))
    rows[1] = Row("odd.png", error="odd.png: no image; restore it")
    return rows


def written(kind, rows, rule=None):
    """Return the content of a result file."""
    file = io.BytesIO()
    rule = rule or rule_of()
    lines = [line_of(rule, row) for row in rows]
    write(kind, rule, lambda: lines, file)
    return file.getvalue()


@pytest.mark.parametrize("content", ["top", "scores", "decisions"])
def test_formats_have_the_same_rows(content):
    parquet = pytest.importorskip("pyarrow.parquet")
    rule = rule_of(content)
    rows = rows_of(rule)
    expected = [entries(rule, row) for row in rows]
    lines = written("jsonl", rows, rule).decode().splitlines()
    assert [json.loads(line) for line in lines] == expected
    assert written("json", rows, rule).decode() == json.dumps(expected, indent=1) + "\n"

    text = written("csv", rows, rule).decode()
    heading, *cells = csv.reader(io.StringIO(text, newline=""))
    columns = {"top": ["classes", "scores"], "scores": rule.classes.names, "decisions": ["classes"]}
    assert heading == ["image", "error", *columns[content]]
    table = parquet.read_table(io.BytesIO(written("parquet", rows, rule)))
    assert json.loads(table.schema.metadata[b"classes"]) == list(rule.classes.names)
    for row, fields, values in zip(rows, cells, table.to_pylist(), strict=True):
        assert fields[:2] == [row.image, row.error or ""]
        assert (values["image"], values["error"]) == (row.image, row.error)
        if row.error:
            assert not any(fields[2:])
            assert not values.get("classes")
            continue
        names = [item.name for item in row.predictions]
        scores = [item.score for item in row.predictions]
        if content == "scores":
            assert [float(field) for field in fields[2:]] == row.scores.tolist()
            assert values["scores"] == row.scores.tolist()
            continue
        assert fields[2] == ";".join(names)
        assert values["classes"] == names
        if content == "top":
            assert [float(score) for score in fields[3].split(";")] == scores
            assert values["scores"] == scores


def test_csv_quotes_class_names_with_the_separator_as_json():
    rule = rule_of(names=("x;y", "z"))
    rows = [Row("i", rule.chosen(torch.tensor([0.5, 0.35])))]
    [row] = csv.DictReader(io.StringIO(written("csv", rows, rule).decode()))
    assert json.loads(row["classes"]) == ["x;y", "z"]


@pytest.mark.parametrize("first", [0, 1])
def test_features_of_errors_are_nan(first):
    array = np.load(io.BytesIO(written("features", rows_of(rule_of())[first:])))
    assert (array.dtype, array.shape) == (np.float32, (5 - first, 4))
    expected = np.repeat(np.float32([0, np.nan, 2, 3, 4])[first:, None], 4, 1)
    np.testing.assert_array_equal(array, expected)
    content = written("features", [Row("a", error="e")] * 3)
    assert np.load(io.BytesIO(content)).shape == (3, 0)

    whole = np.arange(8, dtype=np.float32).reshape(2, 4)
    file = io.BytesIO()
    np.save(file, whole)
    rows = [Row("a", features=torch.tensor(row)) for row in whole]
    assert written("features", rows) == file.getvalue()


# Rows and record

MADE = {"the checkpoint": "abc", "--top": 10, "the images": ["a", "b"]}


def items(*numbers):
    return [Item(f"{number}.png", f"{number}.png") for number in numbers]


def lines(*numbers, retry=()):
    for number in numbers:
        text = f'{{"image": "{number}.png"}}'
        yield Line(f"{number}.png", text, None, number in retry)


def text(*numbers):
    return "".join(f"{line.text}\n" for line in lines(*numbers))


def full(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def begun(here):
    """Return the results of a command, and its remaining images."""

    def begin(count=9, batch=1, targets=("jsonl",), **settings):
        Path("out.jsonl.progress").mkdir(exist_ok=True)
        files = {kind: f"out.{kind}" for kind in targets}
        files = Results(files, {**MADE, **settings})
        return files, list(files.begin(iter(items(*range(count))), batch))

    return begin


def test_incomplete_batch_is_predicted_again_except_the_last(begun):
    files, _ = begun()
    files.write(lines(0, 1, 2))
    files, remaining = begun(batch=2)
    assert (files.images, remaining) == (2, items(*range(2, 9)))
    assert list(files.lines()) == list(lines(0, 1))

    # A row for each image, one of which is to be retried.
    files, _ = begun(count=3, batch=2)
    files.write(lines(2, retry=[2]))
    files.publish(rule_of())
    assert begun(count=3, batch=2)[1] == items(2)
    with pytest.raises(DataError, match=r"out\.jsonl: "):
        begun(count=4, batch=2)


def test_changed_settings_or_images_raise_an_error(begun):
    files, _ = begun()
    files.write(lines(0, 1, 2))
    with pytest.raises(ConfigError, match=r"out\.jsonl .*--top 10, not 9"):
        begun(**{"--top": 9})
    with pytest.raises(DataError, match=r"out\.jsonl: .*image 3"):
        begun(count=2)
    files.write(lines(5))
    with pytest.raises(DataError, match=r"out\.jsonl: .*image 4"):
        begun()
    Path("out.jsonl.progress/rows.sqlite").write_text("no database" * 100)
    with pytest.raises(DataError, match=r"rows\.sqlite"):
        begun()
    for content in ("", "[]", '{"made_with": {}, "format": 2}'):
        Path("out.jsonl.run.json").write_text(content)
        with pytest.raises(DataError, match=r"run\.json"):
            begun()


def test_rows_are_flushed_by_number_or_time(begun, monkeypatch):
    monkeypatch.setattr(results, "FLUSHED_ROWS", 3)
    files, _ = begun()
    sizes = []

    def observed(*numbers):
        for line in lines(*numbers):
            sizes.append(len(list(files.lines())))
            yield line

    files.write(observed(*range(7)))
    assert sizes == [0, 0, 0, 3, 3, 3, 6]
    assert len(list(files.lines())) == 7
    monkeypatch.setattr(results, "FLUSHED_SECONDS", -1.0)
    files.write(observed(7, 8))
    assert sizes[-2:] == [7, 8]


def test_full_disk_leaves_complete_files(begun, monkeypatch):
    files, _ = begun(targets=["jsonl", "json"])
    files.write(lines(0))
    connect = sqlite3.connect

    def limited(*arguments, **options):
        rows = connect(*arguments, **options)
        rows.execute("PRAGMA max_page_count = 2")
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", limited)
        with pytest.raises(DataError, match=r"rows.sqlite.*full"):
            files.write(Line("1.png", "x" * 10_000, None, False) for _ in range(1))
    files, remaining = begun(count=2, targets=["jsonl", "json"])
    assert remaining == items(1)
    files.write(lines(1))

    with monkeypatch.context() as patch:
        patch.setattr(results, "write", full)
        with pytest.raises(DataError, match=r"out\.jsonl"):
            files.publish(rule_of())
    assert not list(Path().glob("out.json*[!ns]"))

    Path("out.jsonl").symlink_to("real")
    files.publish(rule_of())
    assert Path("out.jsonl").is_symlink()
    assert Path("real").read_text() == text(0, 1)
    record = json.loads(Path("out.jsonl.run.json").read_text())
    assert record == asdict(files.record)
    assert (record["images"], record["errors"]) == (2, 0)


def test_hash_of_names_depends_on_their_order_and_limits():
    names = (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"])
    assert len({count_and_hash(own)[1] for own in names}) == 4


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.run.json"])
def test_result_is_written_again_after_a_kill(begun, monkeypatch, name):
    files, _ = begun(count=2)
    files.write(lines(0, 1, retry=[1]))
    files.publish(rule_of())
    rename = Path.replace
    renamed = []

    def killed(source, target):
        renamed.append(target.name)
        if target.name == name and len(renamed) > 1:
            raise KeyboardInterrupt
        rename(source, target)

    files, _ = begun(count=2)
    files.write([Line("1.png", '{"image": "1.png", "classes": []}', None, True)])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            files.publish(rule_of())
    files, remaining = begun(count=2)
    assert remaining == items(1)
    files.write(lines(1))
    files.publish(rule_of())
    assert Path("out.jsonl").read_text() == text(0, 1)
