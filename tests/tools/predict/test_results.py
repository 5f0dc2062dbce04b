"""Result files: rows, their formats, parts that survive a stop, processes, streams."""

import csv
import errno
import io
import json
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from mldec.data.types import Classes
from mldec.errors import ConfigError, DataError, RunInUseError
from mldec.predict.answers import Content, Prediction, Row, Rule, chosen_rule, entries, named
from mldec.predict.inputs import Item
from mldec.predict.results import (
    BLOCK,
    Division,
    Features,
    Parquet,
    Parts,
    Record,
    Text,
    comma_separated,
    digest,
    json_lines,
    json_list,
    streaming,
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
        ({"content": Content.DECISIONS, "top": 1, "threshold": 0.5}, "bca"),
        ({"content": Content.DECISIONS, "classes": ONE_LABEL}, "b"),
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


OPTIONS = {"content": "top", "top": None, "threshold": None}


def test_the_options_make_the_rule():
    stored = [0.5] * 4
    rule = chosen_rule(ABCD, stored, **OPTIONS)
    assert (rule.top, rule.threshold, rule.stored) == (10, 0.0, stored)
    rule = chosen_rule(ABCD, stored, **{**OPTIONS, "threshold": 0.3, "top": 2})
    assert (rule.top, rule.threshold, rule.stored) == (2, 0.3, None)
    assert chosen_rule(ONE_LABEL, None, **{**OPTIONS, "content": "decisions"}).stored is None
    for options, classes, message in (
        ({"content": "scores", "threshold": 0.5}, ABCD, "--threshold has no effect with"),
        ({"content": "decisions", "threshold": 0.5}, ONE_LABEL, "of an image with one label"),
    ):
        with pytest.raises(ConfigError, match=message):
            chosen_rule(classes, None, **{**OPTIONS, **options})


def test_rows_in_json():
    predictions = [Prediction(1, "b", 0.75, 0.5), Prediction(2, "c", 0.5)]
    row = Row("x.png", predictions, SCORES, picture="x.jpg")

    def content(kind, row=row):
        return entries(Rule(classes=ABCD, content=Content(kind)), row)

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
    return Rule(classes=Classes(names), content=Content(content), threshold=0.3)


def rows_of(rule):
    rows = []
    for number in range(5):
        scores = torch.tensor([0.1 * number, 0.9 - 0.1 * number, 0.35])
        features = torch.full((4,), float(number))
        rows.append(Row(f"{number}\n.png", rule.chosen(scores), scores, features))
    rows[1] = Row("odd.png", error="odd.png: no image; restore it")
    return rows


def joined(file_format, rows, folder, sizes):
    """Return the file of rows that were written in parts of these sizes."""
    paths = []
    for number, size in enumerate(sizes):
        part, rows = rows[:size], rows[size:]
        paths.append(folder / f"part{number}")
        paths[-1].write_bytes(file_format.part(part))
    assert not rows
    file = io.BytesIO()
    file_format.join(paths, file)
    return file.getvalue()


@pytest.mark.parametrize("sizes", [(5,), (2, 2, 1)])
@pytest.mark.parametrize("content", ["top", "scores", "decisions"])
def test_every_format_of_parts_has_the_same_rows(tmp_path, sizes, content):
    parquet = pytest.importorskip("pyarrow.parquet")
    rule = rule_of(content)
    rows = rows_of(rule)
    expected = [entries(rule, row) for row in rows]
    lines = joined(json_lines(rule), rows, tmp_path, sizes).decode().splitlines()
    assert [json.loads(line) for line in lines] == expected
    text = joined(json_list(rule), rows, tmp_path, sizes).decode()
    assert text == json.dumps(expected, indent=1) + "\n"

    text = joined(comma_separated(rule), rows, tmp_path, sizes).decode()
    heading, *cells = csv.reader(io.StringIO(text, newline=""))
    columns = {"top": ["classes", "scores"], "scores": rule.classes.names, "decisions": ["classes"]}
    assert heading == ["image", "error", *columns[content]]
    table = parquet.read_table(io.BytesIO(joined(Parquet(rule), rows, tmp_path, sizes)))
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


def test_a_class_with_the_separator_makes_lists_of_json(tmp_path, monkeypatch):
    rule = rule_of(names=("x;y", "z"))
    rows = [Row("i", rule.chosen(torch.tensor([0.5, 0.35])))]
    [row] = csv.DictReader(
        io.StringIO(joined(comma_separated(rule), rows, tmp_path, (1,)).decode())
    )
    assert json.loads(row["classes"]) == ["x;y", "z"]

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"--parquet needs pyarrow.*pip install -e '\.\[parquet"):
        Parquet(rule)


@pytest.mark.parametrize("sizes", [(5,), (1, 1, 3)])
def test_features_are_an_array_with_nan_for_errors(tmp_path, sizes):
    content = joined(Features(), rows_of(rule_of()), tmp_path, sizes)
    array = np.load(io.BytesIO(content))
    assert (array.dtype, array.shape) == (np.float32, (5, 4))
    assert np.isnan(array[1]).all()
    assert array[[0, 2, 3, 4]].tolist() == [[float(number)] * 4 for number in (0, 2, 3, 4)]
    content = joined(Features(), [Row("a", error="e")] * 3, tmp_path, (2, 1))
    assert np.load(io.BytesIO(content)).shape == (3, 0)


# -------------------------------------------------------------------------------------------- parts

TEXT = Text(lambda row: f"{row.image} {row.error}\n", "begin\n", "", "end\n")
LIST = Text(lambda row: f'"{row.image}"', "[", ", ", "]")
MADE = {"the checkpoint": "abc", "--top": 10, "the images": ["a", "b"]}


def rows(*names):
    return [Row(name, error="no" if name == "x" else None) for name in names]


def begin(parts):
    for folder in parts._folders:
        folder.mkdir(exist_ok=True)
    return parts.existing(MADE) or parts.start(MADE)


def full(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def parts(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "list").symlink_to("real")
    return Parts({tmp_path / "out.txt": TEXT, tmp_path / "deep" / "list": LIST})


@pytest.mark.parametrize("content", ["", "[]", '{"made_with": 1, "format": 1, "finished": null}'])
def test_damaged_records_and_blocks_are_one_line(parts, tmp_path, content):
    (tmp_path / "out.txt.run.json").write_text(content)
    with pytest.raises(DataError, match=r"out.txt.run.json .*pass --overwrite to begin anew"):
        parts.existing(MADE)
    (tmp_path / "out.txt.run.json").unlink()
    record = begin(parts)
    assert parts.existing(MADE) == record

    for name in ("block.json", "0", "1"):
        parts.write(0, rows("a"))
        (parts.folder / "000000000" / name).write_text(content)
        with pytest.raises(DataError, match=r"000000000 cannot be used .*; delete it, and its"):
            parts.finish(record, 1)
        shutil.rmtree(parts.folder / "000000000")
        assert parts.done() == set()


def test_what_has_no_record_is_nobody_elses_to_remove(parts, tmp_path):
    begin(parts)
    parts.write(0, rows("a"))
    (parts.folder / "album").mkdir()
    (tmp_path / "out.txt.run.json").unlink()
    with pytest.raises(ConfigError, match=r"out\.txt\.parts exists, and nothing says how it was"):
        parts.existing(MADE)
    (parts.folder / ".0.1").mkdir()  # of a process that was killed
    parts.start(MADE)
    assert [entry.name for entry in parts.folder.iterdir()] == ["album"]

    (tmp_path / "link.parts").symlink_to(parts.folder)
    with (
        pytest.raises(ConfigError, match=r"link\.parts is a link: "),
        ExitStack() as stack,
    ):
        Parts({tmp_path / "link": TEXT}).lock(stack)
    for name in ("out.txt.run.json", "out.txt.parts"):
        with pytest.raises(ConfigError, match=f"{name} is the name of a record or of parts"):
            Parts({tmp_path / "out.txt": TEXT, tmp_path / name: LIST})


def test_two_commands_share_no_result_file(parts, tmp_path):
    other = Parts({tmp_path / "other": TEXT, tmp_path / "deep" / "list": LIST})
    with ExitStack() as one, ExitStack() as two:
        parts.lock(one)
        with pytest.raises(RunInUseError, match=r"list\.parts: another run .* name another file"):
            other.lock(two)
        two.close()
        parts.finish(parts.start(MADE), 0)
    assert not [*tmp_path.rglob("*.parts")]
    with pytest.raises(ConfigError, match=r"list was begun with --top 10, not 9"):
        other.existing({**MADE, "--top": 9})


@pytest.mark.parametrize("during", ["part", "rename", "mkdir"])
def test_a_full_disk_leaves_whole_blocks(parts, monkeypatch, tmp_path, during):
    record = begin(parts)
    parts.write(0, rows("a"))
    with monkeypatch.context() as patch:
        if during == "part":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr(Path, during, full)
        with pytest.raises(DataError, match="No space left on device; free space, and the same co"):
            parts.write(1, rows("b"))
    assert parts.done() == {0}
    assert [entry.name for entry in parts.folder.iterdir()] == ["000000000"]
    parts.write(1, rows("b"))

    # At the end too: the parts stay.
    with monkeypatch.context() as patch:
        patch.setattr(Text, "join", full)
        with pytest.raises(DataError, match=r"cannot write .*out.txt: No space left"):
            parts.finish(record, 2)
    assert not (tmp_path / "out.txt").exists()
    summary = parts.finish(begin(parts), 2)
    assert (tmp_path / "out.txt").read_text() == "begin\na None\nb None\nend\n"
    assert (tmp_path / "deep" / "list").is_symlink()
    assert (tmp_path / "deep" / "real").read_text() == '["a", "b"]'
    assert begin(parts).finished == summary

    # A result that was removed is made again.
    (tmp_path / "out.txt").unlink()
    assert begin(parts).finished is None


def test_changed_images_are_noticed(parts):
    record = begin(parts)
    names = [f"{number}.png" for number in range(2 * BLOCK + 5)]
    for number in range(3):
        parts.write(number, rows(*names[BLOCK * number : BLOCK * (number + 1)]))
    parts.check_names(1, names[BLOCK : 2 * BLOCK])
    with pytest.raises(DataError, match=rf"\(from number {BLOCK + 1} on\); pass --overwrite"):
        parts.check_names(1, [*names[BLOCK : 2 * BLOCK - 1], "other"])

    summary = parts.finish(record, 3)
    parts.check_all_names(summary, iter(names))
    with pytest.raises(DataError, match=rf"\({len(names)} images then, {len(names) + 1} now\)"):
        parts.check_all_names(summary, iter([*names, "new"]))
    assert len({digest(names) for names in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"])}) == 4


# ----------------------------------------------------------------------------------------- division


def items(count):
    return [Item(f"{number}.png", f"{number}.png") for number in range(count)]


def answer(division, most=10**9):
    """Answer images until so many are done, with a look-ahead as in decoding; return how many."""
    answered = 0
    waiting = []
    for item in division.to_do():
        waiting.append(item)
        if len(waiting) > 50:
            division.add(Row(waiting.pop(0).name))
            answered += 1
        if answered == most:
            return answered
    for item in waiting:
        division.add(Row(item.name))
    return answered + len(waiting)


def test_what_is_done_is_not_done_again(parts):
    begin(parts)
    count = 10 * BLOCK + 3
    total, done = 0, set()
    # Stopped after different numbers of images, and gone on with by other numbers of processes.
    for most, world_size in ((BLOCK + 5, 1), (3 * BLOCK, 2), (BLOCK - 1, 3), (10**9, 2)):
        done = parts.done()
        for rank in range(world_size):
            division = Division(items(count), parts, done, rank=rank, world_size=world_size)
            total += answer(division, most)
    assert total < count + 5 * BLOCK
    assert len(parts.done()) == division.blocks == 11
    parts.finish(Record(made_with={}), division.blocks)
    *_, target = parts._targets
    assert json.loads(target.read_text()) == [item.name for item in items(count)]


# ------------------------------------------------------------------------------------------ streams


def test_rows_are_there_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    lines = Text(lambda row: f"{row.image}\n")
    with streaming(str(tmp_path / "pipe"), lines) as add:
        for number in range(3):
            add(Row(str(number)))
            assert os.read(reader, 99) == f"{number}\n".encode()
    os.close(reader)

    message = "cannot write /dev/full: No space left on device; free space"
    with pytest.raises(DataError, match=message), streaming("/dev/full", lines) as add:
        add(Row("x" * 100_000))
