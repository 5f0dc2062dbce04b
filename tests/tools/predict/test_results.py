"""Result files: rows, their formats, rows that survive a stop, parts, streams."""

import csv
import errno
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mldec.data.images import UnsupportedFiles
from mldec.data.types import Classes
from mldec.errors import ConfigError, DataError, RunInUseError
from mldec.files.atomic import named
from mldec.files.run_folder import locked
from mldec.tools.predict import results
from mldec.tools.predict.answers import Prediction, Row, Rule, chosen_rule, entries
from mldec.tools.predict.decode import Item
from mldec.tools.predict.inputs import Inputs
from mldec.tools.predict.results import (
    Journal,
    Outputs,
    Record,
    cells_of,
    joined,
    line_of,
    lines_in,
    part_of,
    parts_in,
    publish,
    row_of,
    stream,
    summed,
    write,
    write_chunk,
)

ABCD = Classes(tuple("abcd"))
ONE_LABEL = Classes(tuple("abcd"), exclusive=True)
SCORES = torch.tensor([0.5, 0.75, 0.51, 0.25])

# --------------------------------------------------------------------------------------------- rows


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
def test_the_classes_in_an_answer(rule, names):
    scores = rule.pop("scores", SCORES)
    predictions = Rule(**{"classes": ABCD, **rule}).chosen(scores)
    assert "".join(item.name for item in predictions) == names
    assert [item.index for item in predictions] == ["abcd".index(name) for name in names]
    assert [item.score for item in predictions] == [scores["abcd".index(n)].item() for n in names]
    stored = rule.get("stored")
    expected = [stored and stored["abcd".index(name)] for name in names]
    assert [item.threshold for item in predictions] == expected


def test_the_options_make_the_rule():
    def rule_of(classes=ABCD, stored=None, content="top", **options):
        engine = SimpleNamespace(classes=classes, thresholds=stored)
        return chosen_rule(engine, content=content, **options)

    stored = [0.5] * 4
    rule = rule_of(stored=stored)
    assert (rule.top, rule.threshold, rule.stored) == (10, 0.0, stored)
    rule = rule_of(stored=stored, threshold=0.3, top=2)
    assert (rule.top, rule.threshold, rule.stored) == (2, 0.3, None)
    assert rule_of(ONE_LABEL, content="decisions").stored is None


def test_rows_in_json():
    predictions = [Prediction(1, "b", 0.75, 0.5), Prediction(2, "c", 0.5)]
    row = Row("x.png", predictions, SCORES, picture="x.jpg")

    def content(kind, row=row):
        return entries(Rule(classes=ABCD, content=kind), row)

    shown = [{"name": "b", "score": 0.75, "threshold": 0.5}, {"name": "c", "score": 0.5}]
    assert content("top") == {"image": "x.png", "predictions": shown, "picture": "x.jpg"}
    assert content("decisions") == {"image": "x.png", "classes": ["b", "c"], "picture": "x.jpg"}
    assert content("scores")["scores"] == dict(zip("abcd", SCORES.tolist(), strict=True))
    failed = Row("x.png", error="two\nlines\x1b")
    assert content("top", failed) == {"image": "x.png", "error": "two lines?"}

    # A path that is not UTF-8 is named in hexadecimal too.
    assert named("a/\u65e5.png") == {"image": "a/\u65e5.png"}
    odd = os.fsdecode(b"a/\xff.png")
    assert named(odd) == {"image": "a/\\xff.png", "image_bytes": b"a/\xff.png".hex()}


# ------------------------------------------------------------------------------------------ formats


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


def made(kind, rows, rule=None):
    """Return the file of a format."""
    file = io.BytesIO()
    rule = rule or rule_of()
    lines = [line_of(rule, row) for row in rows]
    write(kind, rule, lambda: lines, file)
    return file.getvalue()


@pytest.mark.parametrize("content", ["top", "scores", "decisions"])
def test_every_format_has_the_same_rows(content):
    parquet = pytest.importorskip("pyarrow.parquet")
    rule = rule_of(content)
    rows = rows_of(rule)
    expected = [entries(rule, row) for row in rows]
    lines = made("jsonl", rows, rule).decode().splitlines()
    assert [json.loads(line) for line in lines] == expected
    text = made("json", rows, rule).decode()
    assert text == json.dumps(expected, indent=1) + "\n"

    text = made("csv", rows, rule).decode()
    heading, *cells = csv.reader(io.StringIO(text, newline=""))
    columns = {"top": ["classes", "scores"], "scores": rule.classes.names, "decisions": ["classes"]}
    assert heading == ["image", "error", *columns[content]]
    table = parquet.read_table(io.BytesIO(made("parquet", rows, rule)))
    assert json.loads(table.schema.metadata[b"classes"]) == [*rule.classes.names]
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


def test_a_class_with_the_separator_makes_lists_of_json():
    rule = rule_of(names=("x;y", "z"))
    rows = [Row("i", rule.chosen(torch.tensor([0.5, 0.35])))]
    [row] = csv.DictReader(io.StringIO(made("csv", rows, rule).decode()))
    assert json.loads(row["classes"]) == ["x;y", "z"]


@pytest.mark.parametrize("first", [0, 1])
def test_features_are_an_array_with_nan_for_errors(first):
    rows = rows_of(rule_of())[first:]
    array = np.load(io.BytesIO(made("features", rows)))
    assert (array.dtype, array.shape) == (np.float32, (5 - first, 4))
    assert [row.tolist() for row in array if not np.isnan(row).any()] == [
        [float(number)] * 4 for number in (0, 2, 3, 4) if number >= first
    ]
    assert np.isnan(array[1 - first]).all()
    content = made("features", [Row("a", error="e")] * 3)
    assert np.load(io.BytesIO(content)).shape == (3, 0)
    whole = np.arange(8, dtype=np.float32).reshape(2, 4)
    file = io.BytesIO()
    np.save(file, whole)
    assert made("features", [Row("a", features=torch.tensor(row)) for row in whole]) == (
        file.getvalue()
    )


# ------------------------------------------------------------------------------------------ journal

NO_INPUTS = SimpleNamespace(unsupported=UnsupportedFiles())
MADE = {"the checkpoint": "abc", "--top": 10, "the images": ["a", "b"]}


def items(count):
    return [Item(f"{number}.png", f"{number}.png") for number in range(count)]


def lines(*numbers):
    return [f'{{"image": "{number}.png"}}'.encode() for number in numbers]


def full(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def outputs(targets, folder):
    return Outputs([*targets.values()], folder / "work")


def begun(folder, count=9, batch=1, **options):
    """Return a journal, and the names of the images that are left."""
    journal = Journal(folder, "out", {**MADE, **options})
    left = journal.begin(iter(items(count)), batch, overwrite=False)
    return journal, [item.name for item in left]


def test_a_journal_goes_on_after_its_last_whole_row(tmp_path):
    journal, left = begun(tmp_path)
    assert left == [f"{number}.png" for number in range(9)]
    for line in lines(0, 1, 2):
        journal.add(line)
    assert list(lines_in(str(journal.rows))) == []
    journal.flush()
    whole = journal.rows.read_bytes()
    assert whole.splitlines() == lines(0, 1, 2)

    # A row that was cut short, and blocks of a disk that lost its power.
    for torn in (b'{"image": "3.p', b'{"image": "3.png"}', bytes(100), b"\0\n" + whole, b"7\n"):
        journal.rows.write_bytes(whole + torn)
        journal, left = begun(tmp_path)
        assert (journal.images, left) == (3, [f"{number}.png" for number in range(3, 9)])
        assert journal.rows.read_bytes() == whole

    # A batch that is not whole is answered again, but at the end of the images.
    journal, left = begun(tmp_path, batch=2)
    assert (journal.images, left) == (2, [f"{number}.png" for number in range(2, 9)])
    assert journal.rows.read_bytes() == b"\n".join(lines(0, 1)) + b"\n"
    journal.add(*lines(2))
    journal.flush()
    journal.finish()
    assert begun(tmp_path, count=3, batch=2)[1] == []

    with pytest.raises(ConfigError, match=r"^out was begun with --top 10, not 9: name"):
        begun(tmp_path, **{"--top": 9})
    with pytest.raises(DataError, match=r"^out: the images are not .* \(number 3 is another one\)"):
        begun(tmp_path, count=2)
    journal.rows.write_bytes(b"\n".join(lines(0, 5)) + b"\n")
    with pytest.raises(DataError, match=r"\(number 2 is another one\); pass --overwrite"):
        begun(tmp_path)
    damaged = ("made_with", '"x"'), ("images", '"x"'), ("files", "[]"), ("format", "2")
    records = [f'{{"made_with": {{}}, "{key}": {value}}}' for key, value in damaged]
    for content in ("", "[]", "[" * 10**5, *records):
        (tmp_path / "record.json").write_text(content)
        with pytest.raises(DataError, match=r"record\.json .*pass --overwrite to begin anew"):
            begun(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [b"{}\n", b'{"image": 5}\n', b'["image"]\n', b'{"image": "1.png"}\tAA{"\n', b"\xff{\n"],
)
def test_a_damaged_row_is_answered_again(tmp_path, damage):
    journal, _ = begun(tmp_path)
    for line in lines(0, 1, 2):
        journal.add(line)
    journal.flush()
    journal.finish()
    first, _, last = journal.rows.read_bytes().splitlines(keepends=True)
    journal.rows.write_bytes(first + damage + last)
    journal, left = begun(tmp_path)
    assert (journal.images, left) == (1, [f"{number}.png" for number in range(1, 9)])


def test_rows_are_flushed_by_their_number_or_after_a_while(tmp_path, monkeypatch):
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


def test_a_full_disk_leaves_whole_rows(tmp_path, monkeypatch):
    journal, _ = begun(tmp_path / "r")
    journal.add(*lines(0))
    journal.flush()
    journal.add(*lines(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"cannot write .*r: No space left on device; "):
            journal.flush()
    journal, left = begun(tmp_path / "r")
    assert journal.images + len(left) == 9

    # At the end too: no file is half-written, and no record says that it is complete.
    targets = {"jsonl": str(tmp_path / "out.jsonl"), "json": str(tmp_path / "out.json")}
    with monkeypatch.context() as patch:
        patch.setattr(results, "write", full)
        with pytest.raises(DataError, match=r"cannot write .*out\.jsonl: No space left"):
            publish(
                outputs(targets, tmp_path),
                targets,
                rule_of(),
                lambda: lines(0, 1),
                MADE,
                NO_INPUTS,
            )
    assert [path.name for path in tmp_path.iterdir()] == ["r"]

    (tmp_path / "out.jsonl").symlink_to("real")
    given = outputs(targets, tmp_path)
    record = publish(given, targets, rule_of(), lambda: lines(0, 1), MADE, NO_INPUTS)
    assert (tmp_path / "out.jsonl").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"\n".join(lines(0, 1)) + b"\n"
    assert Record.read(targets["jsonl"] + ".run.json") == record
    assert (record.images, record.errors) == (2, 0)
    digests = {summed(names)[1] for names in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"])}
    assert len(digests) == 4


def test_two_commands_share_no_journal(tmp_path):
    with locked(tmp_path / "r"):
        with (
            pytest.raises(RunInUseError, match=r"r: another run .* name another file"),
            locked(tmp_path / "r"),
        ):
            pass
        assert (tmp_path / "r").exists()
    assert not (tmp_path / "r").exists()


def test_a_kill_before_a_file_has_its_name_is_no_foreign_file(tmp_path, monkeypatch):
    targets = {"jsonl": str(tmp_path / "out.jsonl")}

    def written(*numbers):
        made = outputs(targets, tmp_path)
        publish(made, targets, rule_of(), lambda: lines(*numbers), MADE, NO_INPUTS)

    written(0, 1)
    rename = Path.replace
    for name in ("out.jsonl", "out.jsonl.run.json"):

        def killed(source, target, name=name):
            if target.name == name:
                raise KeyboardInterrupt
            rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", killed)
            with pytest.raises(KeyboardInterrupt):
                written(0, 2)
        written(0, 3)
        assert (tmp_path / "out.jsonl").read_bytes() == b"\n".join(lines(0, 3)) + b"\n"


@pytest.mark.parametrize("count", [0, 3, 6, 7])
def test_a_part_is_files_of_as_many_rows_and_the_rest(tmp_path, monkeypatch, count):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(results, "CHUNK", 3)
    rule = rule_of()
    rows = (rows_of(rule) * 2)[:count]
    given = [line_of(rule, row) for row in rows]
    part = part_of(f"{tmp_path}/", "parquet", 1, 2)
    assert part == f"{tmp_path}/part-00001-of-00002.parquet"
    # The first one was written on the way.
    made = outputs({"parquet": part}, tmp_path)
    if count > 3:
        write_chunk(made, part, rule, lambda: given, 0)
    publish(made, {"parquet": part}, rule, lambda: given, MADE, NO_INPUTS)
    files = sorted(tmp_path.glob("*.parquet"))
    lengths = [parquet.read_metadata(file).num_rows for file in files]
    assert lengths == {0: [0], 3: [3], 6: [3, 3], 7: [3, 3, 1]}[count]
    assert Record.read(f"{tmp_path}/_mldec/part-00001-of-00002.parquet.run.json").images == count

    expected = [{**cells_of(row_of(line))} for line in given]
    read = [row_of(line) for line in lines_in(part)]
    assert [row["image"] for row in read] == [row["image"] for row in expected]
    again, whole = io.BytesIO(), io.BytesIO()
    write("parquet", rule, lambda: lines_in(part), again)
    write("parquet", rule, lambda: given, whole)
    assert parquet.read_table(again) == parquet.read_table(whole)
    assert parts_in(str(tmp_path)) == [part_of(str(tmp_path), "parquet", n, 2) for n in (0, 1)]
    (tmp_path / "part-00000-of-00003.parquet").touch()
    with pytest.raises(ConfigError, match="holds parts of several kinds"):
        parts_in(str(tmp_path))


def test_parts_are_joined_in_the_order_of_the_images(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.png").touch()
    inputs = Inputs([str(tmp_path)])
    parts = [str(tmp_path / f"{number}.jsonl") for number in range(2)]
    for number, part in enumerate(parts):
        rows = [json.dumps({"image": item.name}) + "\n" for item in inputs.of(number, 2)]
        assert len(rows) > 1
        Path(part).write_text("".join(rows))
    names = [row_of(line)["image"] for line in joined(parts, inputs)]
    assert names == [str(tmp_path / f"{number}.png") for number in range(6)]

    # Another name at the same place, whose hash belongs to the same shard.
    owners = [owner for owner, _ in inputs.divided(2)]
    file = tmp_path / "3.png"
    for letter in "abcdefgh":
        file = file.rename(tmp_path / f"3{letter}.png")
        if [owner for owner, _ in inputs.divided(2)] == owners:
            break
    with pytest.raises(DataError, match=r"\(number 4 is another one\)"):
        list(joined(parts, inputs))

    file.rename(tmp_path / "3.png")
    (tmp_path / "5.png").unlink()
    with pytest.raises(DataError, match=r"\(they were more than 5\)"):
        list(joined(parts, inputs))


# ------------------------------------------------------------------------------------------ streams


def test_rows_are_there_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    rule = rule_of()
    given = [line_of(rule, replace(row, features=None)) for row in rows_of(rule)]
    for kind in ("csv", "json"):
        pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        parts = []

        def noted(pipe=pipe, parts=parts):
            for line in given:
                yield line
                parts.append(os.read(pipe, 9999))
                assert b".png" in parts[-1]
            raise KeyboardInterrupt

        # A list is completed before the error goes on.
        with pytest.raises(KeyboardInterrupt):
            stream(kind, str(tmp_path / "pipe"), rule, noted())
        end = os.read(pipe, 99) if kind == "json" else b""
        assert b"".join(parts) + end == made(kind, rows_of(rule))
        os.close(pipe)

    message = "cannot write /dev/full: No space left on device; free space"
    with pytest.raises(DataError, match=message):
        stream("jsonl", "/dev/full", rule, [b"x" * 100_000])
