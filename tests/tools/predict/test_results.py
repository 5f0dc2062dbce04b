"""Rows, result formats, the journal and the record."""

import csv
import errno
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mldec.data.images import UnsupportedFiles
from mldec.data.types import Classes
from mldec.errors import ConfigError, DataError
from mldec.evaluation.run import as_limits, decided
from mldec.files.atomic import named
from mldec.tools.predict import results
from mldec.tools.predict.answers import Prediction, Row, Rule, chosen_rule, entries
from mldec.tools.predict.decode import Item
from mldec.tools.predict.formats import image_of, line_of, row_of, write
from mldec.tools.predict.inputs import Inputs
from mldec.tools.predict.results import Journal, Outputs, Record, count_and_hash, joined

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


@pytest.mark.parametrize(
    "line",
    [b"{}\n", b'{"image": 5}\n', b'["image"]\n', b'{"image": "a"}\tA{"\n', b'{"image": "a"}'],
)
def test_damaged_line_has_no_image(line):
    assert image_of(line) is None
    assert image_of(b'{"image": "a"}\n') == "a"
    assert image_of(line_of(rule_of(), Row("a", error="e", retry=True)) + b"\n") == "a"


# Journal and record

NO_INPUTS = SimpleNamespace(unsupported=UnsupportedFiles())
MADE = {"the checkpoint": "abc", "--top": 10, "the images": ["a", "b"]}


def items(*numbers):
    return [Item(f"{number}.png", f"{number}.png") for number in numbers]


def lines(*numbers):
    return [f'{{"image": "{number}.png"}}'.encode() for number in numbers]


def text(*numbers):
    return b"".join(line + b"\n" for line in lines(*numbers))


def full(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def outputs(targets, folder):
    return Outputs(targets, MADE, folder / "work", overwrite=False)


def begun(folder, count=9, batch=1, **settings):
    """Return a journal and the remaining images."""
    journal = Journal(folder, "out", {**MADE, **settings})
    return journal, list(journal.begin(iter(items(*range(count))), batch, overwrite=False))


def journal_of(folder, *numbers):
    """Return a journal with some rows."""
    journal, remaining = begun(folder)
    assert remaining == items(*range(9))
    for line in lines(*numbers):
        journal.add(line)
    journal.flush()
    return journal


@pytest.mark.parametrize(
    "torn",
    [b"", b'{"image": "3.p', b'{"image": "3.png"}', bytes(100), b"\0\n" + text(0), b"7\n"],
)
def test_journal_continues_after_the_last_complete_row(tmp_path, torn):
    rows = journal_of(tmp_path, 0, 1, 2).rows
    assert rows.read_bytes() == text(0, 1, 2)
    rows.write_bytes(text(0, 1, 2) + torn)
    journal, remaining = begun(tmp_path)
    assert (journal.images, remaining) == (3, items(*range(3, 9)))
    assert rows.read_bytes() == text(0, 1, 2)


def test_damaged_row_of_a_complete_journal_is_predicted_again(tmp_path):
    journal = journal_of(tmp_path, *range(9))
    journal.finish()
    assert begun(tmp_path)[1] == []
    journal.rows.write_bytes(text(0) + b"{}\n" + text(*range(2, 9)))
    assert begun(tmp_path)[1] == items(*range(1, 9))


def test_incomplete_batch_is_predicted_again_except_the_last(tmp_path):
    journal_of(tmp_path, 0, 1, 2)
    journal, remaining = begun(tmp_path, batch=2)
    assert (journal.images, remaining) == (2, items(*range(2, 9)))
    assert journal.rows.read_bytes() == text(0, 1)
    journal.add(*lines(2))
    journal.flush()
    journal.finish()
    assert begun(tmp_path, count=3, batch=2)[1] == []
    with pytest.raises(DataError, match="out: "):
        begun(tmp_path, count=4, batch=2)


def test_changed_settings_or_images_raise_an_error(tmp_path):
    journal = journal_of(tmp_path, 0, 1, 2)
    with pytest.raises(ConfigError, match=r"out .*--top 10, not 9"):
        begun(tmp_path, **{"--top": 9})
    with pytest.raises(DataError, match=r"out: .*image 3"):
        begun(tmp_path, count=2)
    journal.rows.write_bytes(text(0, 5))
    with pytest.raises(DataError, match=r"out: .*image 2"):
        begun(tmp_path)
    for content in ("", "[]", '{"made_with": {}, "format": 2}'):
        (tmp_path / "record.json").write_text(content)
        with pytest.raises(DataError, match=r"record\.json"):
            begun(tmp_path)


def test_rows_are_flushed_by_number_or_time(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FLUSHED_ROWS", 3)
    journal, _ = begun(tmp_path)
    sizes = []
    for line in lines(*range(6)):
        journal.add(line)
        sizes.append(len(journal.rows.read_bytes().splitlines()))
    assert sizes == [0, 0, 3, 3, 3, 6]
    monkeypatch.setattr(results, "FLUSHED_SECONDS", -1.0)
    journal.add(*lines(6))
    assert len(journal.rows.read_bytes().splitlines()) == 7


def test_full_disk_leaves_complete_files(tmp_path, monkeypatch):
    journal = journal_of(tmp_path / "r", 0)
    journal.add(*lines(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match="No space left"):
            journal.flush()
    journal, remaining = begun(tmp_path / "r")
    assert journal.images + len(remaining) == 9

    targets = {"jsonl": str(tmp_path / "out.jsonl"), "json": str(tmp_path / "out.json")}
    with monkeypatch.context() as patch:
        patch.setattr(results, "write", full)
        with pytest.raises(DataError, match=r"out\.jsonl"):
            outputs(targets, tmp_path).publish(rule_of(), lambda: lines(0, 1), NO_INPUTS)
    assert not list(tmp_path.glob("out.json*[!n]"))

    (tmp_path / "out.jsonl").symlink_to("real")
    record = outputs(targets, tmp_path).publish(rule_of(), lambda: lines(0, 1), NO_INPUTS)
    assert (tmp_path / "out.jsonl").is_symlink()
    assert (tmp_path / "real").read_bytes() == text(0, 1)
    assert Record.read(targets["jsonl"] + ".run.json") == record
    assert (record.images, record.errors) == (2, 0)


def test_hash_of_names_depends_on_their_order_and_limits():
    names = (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"])
    assert len({count_and_hash(own)[1] for own in names}) == 4


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.run.json"])
def test_result_is_written_again_after_a_kill(tmp_path, monkeypatch, name):
    targets = {"jsonl": str(tmp_path / "out.jsonl")}

    def publish(*numbers):
        outputs(targets, tmp_path).publish(rule_of(), lambda: lines(*numbers), NO_INPUTS)

    publish(0, 1)
    rename = Path.replace
    renamed = []

    def killed(source, target):
        renamed.append(target.name)
        if target.name == name and len(renamed) > 1:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            publish(0, 2)
    publish(0, 3)
    assert (tmp_path / "out.jsonl").read_bytes() == text(0, 3)


def test_parts_are_joined_in_the_order_of_the_images(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.png").touch()
    inputs = Inputs([str(tmp_path)])
    parts = [[str(tmp_path / f"{number}.jsonl")] for number in range(2)]
    for number, [part] in enumerate(parts):
        rows = [json.dumps({"image": item.name}) + "\n" for item in inputs.of(number, 2)]
        assert len(rows) > 1
        Path(part).write_text("".join(rows))
    names = [row_of(line)["image"] for line in joined(parts, inputs, "out")]
    assert names == [str(tmp_path / f"{number}.png") for number in range(6)]

    # Rename an image so that its hash belongs to the same shard.
    owners = [owner for owner, _ in inputs.divided(2)]
    file = tmp_path / "3.png"
    for letter in "abcdefgh":
        file = file.rename(tmp_path / f"3{letter}.png")
        if [owner for owner, _ in inputs.divided(2)] == owners:
            break
    with pytest.raises(DataError, match="image 4"):
        list(joined(parts, inputs, "out"))
    file.rename(tmp_path / "3.png")
    (tmp_path / "5.png").unlink()
    with pytest.raises(DataError, match="more than 5"):
        list(joined(parts, inputs, "out"))
