"""Input images, their decoding, and their rows."""

import io
import json
import os
import signal
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pictures import picture, png, saved
from PIL import Image

from mldec.data.transforms import EvalTransform, to_tensor
from mldec.data.types import Classes
from mldec.errors import DataError, Stopped, UserError
from mldec.runtime.signals import DataTimeout, StopRequest
from mldec.tools.predict import answers as answers_module
from mldec.tools.predict import decode as decode_module
from mldec.tools.predict.answers import Predictor, Rule
from mldec.tools.predict.decode import Decoder, Item, decoded, read_item
from mldec.tools.predict.engine import Answers
from mldec.tools.predict.inputs import Inputs


def names(inputs):
    return [item.name for item in inputs]


def pack(path, members, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_folders_are_sorted_by_path(tmp_path):
    folder = tmp_path / "photos"
    images = ("a/z.png", "a.png", "a-b/x.png", "b/c/d.webp", "b/c.JPG", "Z.png")
    for name in (*images, "notes.txt", "d.eps", "e.svg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "empty").mkdir()
    (folder / "back").symlink_to(folder)

    inputs = Inputs([str(folder / "notes.txt"), f"{folder}//", str(folder / "a.png")])
    expected = [folder / "notes.txt", *sorted(folder / name for name in images), folder / "a.png"]
    assert names(inputs) == names(inputs) == [str(path) for path in expected]


def test_unsupported_files_are_counted(tmp_path):
    for name in ("a.jpg", "b.JXL", "in/c.jxl", "in/d.nef"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    pack(tmp_path / "e.tar", {"1.jxl": b"photo", "2.jpg": b"photo"})
    inputs = Inputs([str(tmp_path)])
    for _ in range(2):
        assert len(names(inputs)) == 2
        assert inputs.skipped.counts == {".jxl": 3, ".nef": 1}
        examples = {".jxl": tmp_path / "b.JXL", ".nef": tmp_path / "in" / "d.nef"}
        assert inputs.skipped.examples == {kind: str(path) for kind, path in examples.items()}


def test_items_of_tar_files_have_the_place_of_their_bytes(tmp_path):
    members = {"000.jpg": b"first", "000.txt": b"label", "in/001.PNG": b"second image"}
    path = pack(tmp_path / "shard.tar", members)
    items = list(Inputs([str(tmp_path)]))
    assert [item.name for item in items] == [f"{path}/000.jpg", f"{path}/in/001.PNG"]
    content = path.read_bytes()
    for item, expected in zip(items, (b"first", b"second image"), strict=True):
        assert (item.path, item.size) == (str(path), len(expected))
        assert content[item.offset : item.offset + len(expected)] == expected
    assert list(Inputs([str(path)])) == items

    # Links are skipped.
    with tarfile.open(path, "w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            member = tarfile.TarInfo(f"{kind!r}.png")
            member.type = kind
            member.linkname = "/etc/passwd"
            tar.addfile(member)
    assert list(Inputs([str(path)])) == []


def damaged_tar(kind):
    """Return a tar file with a damaged header or end."""
    member = tarfile.TarInfo("a.png")
    member.size = {"size": 10**12, "truncated": 2000}[kind]
    return member.tobuf(tarfile.GNU_FORMAT) + b"x" * 1024


@pytest.mark.parametrize("kind", ["size", "truncated"])
def test_damaged_tar_file_is_a_fault(tmp_path, kind):
    path = tmp_path / "x.tar"
    path.write_bytes(damaged_tar(kind))
    *images, last = Inputs([str(path)])
    assert (last.name, last.fault.partition(": ")[0]) == (str(path), str(path))
    for item in images:
        with pytest.raises(DataError, match=r"x\.tar"):
            read_item(item)


@pytest.mark.parametrize("name", ["x.tar.gz", "X.TGZ"])
def test_compressed_tar_file_is_a_stream(tmp_path, name):
    members = {f"{number}.png": png() for number in range(3)}
    path = pack(tmp_path / name, members, "w:gz")
    items = list(Inputs([str(tmp_path)]))
    assert [item.name for item in items] == [f"{path}/{name}" for name in members]
    assert read_item(items[2]).tobytes() == picture(40, 30).tobytes()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    *_, last = Inputs([str(path)])
    assert str(path) in last.fault


def test_list_has_a_path_per_line_or_a_column(tmp_path, monkeypatch):
    listing = tmp_path / "list.txt"
    listing.write_bytes(b"\xef\xbb\xbfa.png\r\n\n  b c.png\n\xff.png\n/c.png\nlast.png")
    inputs = Inputs([], str(listing), root=str(tmp_path))
    assert names(inputs) == ["a.png", "  b c.png", os.fsdecode(b"\xff.png"), "/c.png", "last.png"]
    paths = [item.path for item in inputs]
    assert paths[:2] == [f"{tmp_path}/a.png", f"{tmp_path}/  b c.png"]
    assert paths[3] == "/c.png"

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"a.png\nb.png\n")))
    assert list(Inputs([], "-")) == [Item("a.png", "a.png"), Item("b.png", "b.png")]

    listing = tmp_path / "list.csv"
    listing.write_bytes(b'\xef\xbb\xbflabels,path\r\ncat,"a,b.png"\r\n\r\n,\xff.png\r\n')
    assert names(Inputs([], str(listing))) == ["a,b.png", os.fsdecode(b"\xff.png")]
    assert names(Inputs([], str(listing), column="labels")) == ["cat", f"{listing}/1"]


@pytest.mark.parametrize("line", ["in\\1.jpg", '"in/1.jpg"', "in/1.jpg \t", "in/1", " in/1.jpg"])
def test_listed_paths_are_read_as_in_tables(tmp_path, line):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.jpg").touch()
    for name, text in (("list.txt", line), ("list.jsonl", json.dumps({"path": line}))):
        (tmp_path / name).write_text(text + "\n")
        [item] = Inputs([], str(tmp_path / name), root=str(tmp_path))
        assert item == Item("in/1.jpg", str(tmp_path / "in" / "1.jpg"))


def test_missing_and_ambiguous_paths_are_faults_of_their_rows(tmp_path):
    for name in ("a.jpg", "b.jpg", "b.png"):
        (tmp_path / name).touch()
    listing = tmp_path / "list.jsonl"
    listing.write_text('{"image": "a.jpg"}\n{"image": null}\n{"x": 1}\n{"image": "b"}\n')
    items = list(Inputs([], str(listing), root=str(tmp_path)))
    assert [item.fault is not None for item in items] == [False, True, True, True]
    assert "b.png" in items[3].fault


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("list.csv", "Filename;label\na.png;x\nb.png;y\n"),
        ("list.csv", "\ufeffsep=;\r\nimage path;label\r\na.png;x\r\nb.png;y\r\n"),
        ("list.csv", "label,file_name\nx,a.png\ny,b.png\n".encode("utf-16")),
        ("list.tsv", "label\tpath\nx\ta.png\ny\tb.png\n"),
        ("list.jsonl", '{"file_name": "a.png"}\n{"file_name": "b.png"}\n'),
        ("list.json", '[{"file_name": "a.png"},\n{"file_name": "b.png"}]'),
        ("list.txt", "a.png\r\nb.png\r\n".encode("utf-16")),
    ],
)
def test_lists_of_other_programs(tmp_path, name, content):
    listing = tmp_path / name
    listing.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert names(Inputs([], str(listing))) == ["a.png", "b.png"]


def test_parquet_list_has_paths_or_bytes(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    listing = tmp_path / "list.parquet"
    nested = [{"bytes": b"one", "path": "1.png"}, {"bytes": None, "path": "2.png"}, None]
    table = {"path": ["a.png", None, "c.png"], "bytes": [b"a", b"b", None], "nested": nested}
    parquet.write_table(pyarrow.table(table), listing)

    a, b, c = Inputs([], str(listing), root=str(tmp_path))
    assert (a.name, a.path, c.path) == ("a.png", f"{tmp_path}/a.png", f"{tmp_path}/c.png")
    assert "list.parquet/1" in b.fault
    a, b, c = Inputs([], str(listing), column="bytes")
    assert (a.name, a.content) == ("a.png", b"a")
    assert (b.name, b.content) == (f"{listing}/1", b"b")
    assert c.fault
    a, b, c = Inputs([], str(listing), column="nested")
    assert (a.name, a.content, b.name, b.path) == ("1.png", b"one", "2.png", "2.png")
    assert c.fault


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"listing": "list.csv"}, "list.csv.*--column"),
        ({"listing": "list.parquet"}, "list.parquet"),
        ({"listing": "missing.csv"}, "missing.csv"),
        ({}, "--list"),
        ({"paths": ["missing.png"]}, "missing.png"),
        ({"paths": ["in"]}, r"^in: .*\.jxl"),
    ],
)
def test_unusable_inputs_raise_an_error(here, words, name):
    Path("list.csv").write_text("x,y\n1,2\n")
    Path("list.parquet").write_text("no table")
    Path("in").mkdir()
    Path("in/a.jxl").touch()
    with pytest.raises(UserError, match=name):
        Inputs(**{"paths": [], **words})


# Decoding

TRANSFORM = EvalTransform(image_size=24)


def items_of(folder, count):
    """Write images and return their items. Images with the last digit 7 cannot be read."""
    for number in range(count):
        path = folder / f"{number:03}.png"
        if number % 10 == 7:
            path.write_text("no image")
        else:
            saved(picture(30, 20, seed=number), path)
    return list(Inputs([str(folder)]))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_in_the_order_of_the_input(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(decode_module, "FEW", 3)
    items = items_of(tmp_path, 23)
    batches = list(decoded(items, Decoder(TRANSFORM), batch_size=4, workers=workers))
    assert [len(batch.items) for batch in batches] == [4, 4, 4, 4, 4, 3]
    assert [item for batch in batches for item in batch.items] == items

    for batch in batches:
        images = iter(batch.images)
        for index, item in enumerate(batch.items):
            if index in batch.faults:
                assert item.path in batch.faults[index].message
                assert not batch.faults[index].retry
            else:
                with Image.open(item.path) as image:
                    assert torch.equal(next(images), TRANSFORM(image))
        assert next(images, None) is None
    assert sum(len(batch.faults) for batch in batches) == 2


def test_image_in_a_tar_file_is_decoded(tmp_path):
    pack(tmp_path / "x.tar", {"a.png": png()})
    [item] = Inputs([str(tmp_path)])
    assert read_item(item).tobytes() == picture(40, 30).tobytes()
    assert torch.equal(Decoder(to_tensor)[item], to_tensor(picture(40, 30)))
    for damage in (lambda: os.truncate(item.path, item.offset + 10), Path(item.path).unlink):
        damage()
        fault = Decoder(to_tensor)[item]
        assert "x.tar/a.png" in fault.message
        assert fault.retry


def test_draft_is_decoded_smaller_and_similar(tmp_path):
    path = saved(picture(900, 600).resize((1800, 1200)), tmp_path / "x.jpg", quality=95)
    item = Item(str(path), str(path))
    sizes = []

    def transform(image):
        sizes.append(image.size)
        return EvalTransform(image_size=64)(image)

    whole = Decoder(transform)[item]
    draft = Decoder(transform, draft=64)[item]
    assert sizes == [(1800, 1200), (225, 150)]
    assert (whole.float() - draft.float()).abs().mean() < 4


# Rows


class MeanColors:
    """An engine whose scores are the mean colors."""

    classes = Classes(("r", "g", "b"))
    thresholds = None
    transform = EvalTransform(image_size=8)
    decoder = "pillow"
    min_side = None
    device = torch.device("cpu")
    image_size = shorter_side = 8

    def answer(self, images, *, features=False, size=0):
        scores = torch.stack([image.float().mean((1, 2)) / 255 for image in images])
        return Answers(scores, 2 * scores if features else None)


def predictor(**options):
    rule = Rule(classes=MeanColors.classes)
    return Predictor(MeanColors(), rule, workers=0, **options)


@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_rows_have_scores_or_an_error(tmp_path, batch_size):
    items = items_of(tmp_path, 9)
    rows = list(predictor(batch_size=batch_size, features=True).rows(iter(items), StopRequest()))
    assert [row.image for row in rows] == [item.name for item in items]
    for number, row in enumerate(rows):
        if number == 7:
            assert items[number].path in row.error
            assert (row.scores, row.features, row.predictions) == (None, None, ())
        else:
            with Image.open(items[number].path) as image:
                expected = MeanColors.transform(image).float().mean((1, 2)) / 255
            torch.testing.assert_close(row.scores, expected)
            torch.testing.assert_close(row.features, 2 * expected)
            scores = [item.score for item in row.predictions]
            assert scores == sorted(expected.tolist(), reverse=True)


def test_rows_before_an_error_are_yielded(tmp_path, monkeypatch):
    photos = items_of(tmp_path, 6)
    answer = MeanColors.answer
    batches = iter([None, None, DataError("the third batch")])

    def failing(*arguments, **options):
        if error := next(batches):
            raise error
        return answer(*arguments, **options)

    monkeypatch.setattr(MeanColors, "answer", failing)
    answered = []
    with pytest.raises(DataError, match="the third batch"):
        answered.extend(predictor(batch_size=2).rows(iter(photos), StopRequest()))
    assert [row.image for row in answered] == [item.name for item in photos[:4]]


def test_stop_request_ends_after_a_batch(tmp_path, monkeypatch):
    photos = items_of(tmp_path, 5)
    stop = StopRequest()
    rows = predictor(batch_size=2).rows(iter(photos), stop, hint="; the hint")
    answered = [next(rows)]
    stop.signal = signal.SIGTERM
    with pytest.raises(Stopped, match=r"SIGTERM after 4 images; the hint$") as error:
        answered.extend(rows)
    assert [row.image for row in answered] == [item.name for item in photos[:4]]
    assert error.value.status == 143

    # A decoder that hangs blocks neither the exit nor the rows before it.
    def hanging(*arguments, **options):
        yield next(decoded(*arguments, **options))
        stop.signal = signal.SIGINT
        raise DataTimeout

    stop = StopRequest()
    monkeypatch.setattr(answers_module, "decoded", hanging)
    rows = predictor(batch_size=2).rows(iter(photos), stop)
    assert [next(rows).image for _ in photos[:2]] == [item.name for item in photos[:2]]
    with pytest.raises(Stopped, match="SIGINT after 2 images") as error:
        next(rows)
    assert error.value.status == 130
