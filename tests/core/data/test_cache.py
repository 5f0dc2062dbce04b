"""The cache of tables: what was changed in it is parsed again, and never believed."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mldec.data.cache import TableCache, _files_fault
from mldec.data.table import Table, encode_paths, from_entries

FILES = ["a/1.jpg", "a/..2.jpg", "b..", "..c/d.jpg"]


def table() -> Table:
    return Table(
        encode_paths(FILES),
        from_entries([{0: 1, 1: 1}, {}, {2: 1}, {1: 1}], num_classes=3),
        ("x", "y", "z"),
    )


class Cache:
    """A cache of one table."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self.parsed = folder / "cache", folder / "source", 0
        self.source.touch()
        self.read()
        (self.file,) = self.folder.iterdir()
        self.whole = self.file.read_bytes()
        with np.load(self.file) as stored:
            self.arrays: dict[str, Any] = dict(stored)

    def read(self) -> tuple[Table, bool]:
        """Return the table, and whether it was parsed."""
        before = self.parsed
        found = TableCache(str(self.folder), "").table("test", [self.source], self._parse)
        return found, self.parsed > before

    def _parse(self) -> Table:
        self.parsed += 1
        return table()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def same(one: Table, two: Table) -> bool:
    arrays = [
        (one.files, two.files),
        (one.labels.starts, two.labels.starts),
        (one.labels.classes, two.labels.classes),
    ]
    arrays.append((one.labels.values, two.labels.values))
    equal = all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in arrays)
    return equal and one.classes == two.classes and one.labels.default == two.labels.default


def test_a_whole_cache_is_believed(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    found, parsed = cache.read()
    assert not parsed
    assert same(found, table())
    assert not caplog.records


@pytest.mark.parametrize(
    "change",
    [
        lambda byte: byte ^ 1,
        pytest.param(lambda byte: byte ^ 255, marks=pytest.mark.slow),
        pytest.param(lambda _: 0, marks=pytest.mark.slow),
    ],
)
def test_no_changed_byte_changes_the_table(cache: Cache, change: Callable[[int], int]) -> None:
    parsed_again = 0
    for place in range(len(cache.whole)):
        content = bytearray(cache.whole)
        content[place] = change(content[place])
        cache.file.write_bytes(content)
        found, parsed = cache.read()
        assert same(found, table()), place
        parsed_again += parsed
    assert parsed_again > len(cache.whole) / 4  # the others are dates, and zeros that stayed zeros


FORGED = {
    "a path elsewhere": {"files": encode_paths(["a", "b", "../../etc/passwd", "d"])},
    "a path that ends elsewhere": {"files": encode_paths(["a", "b", "c", "d/.."])},
    "two dots across the end of a path": {"files": encode_paths(["..", "abc", "c", "d"])},
    "an absolute path": {"files": encode_paths(["a", "/etc/passwd", "c", "d"])},
    "an empty path": {"files": encode_paths(["a", "", "c", "d"])},
    "paths as text": {"files": np.array(FILES)},
    "too few paths": {"files": encode_paths(FILES[:3])},
    "a negative class": {"label_classes": np.array([0, 1, -1, 1], np.int32)},
    "a class too many": {"label_classes": np.array([0, 1, 3, 1], np.int32)},
    "classes as floats": {"label_classes": np.array([0, 1, 2, 1], np.float32)},
    "starts as floats": {"starts": np.array([0.0, 2, 2, 3, 4])},
    "starts that fall": {"starts": np.array([0, 3, 2, 3, 4])},
    "starts beyond": {"starts": np.array([0, 2, 2, 3, 5])},
    "starts below": {"starts": np.array([-1, 2, 2, 3, 4])},
    "no starts": {"starts": np.zeros(0, np.int64)},
    "starts in a matrix": {"starts": np.array([[0, 2, 2, 3, 4]])},
    "an unknown value": {"values": np.array([1, 1, 2, 1], np.int8)},
    "a negative value": {"values": np.array([1, 1, -2, 1], np.int8)},
    "values of another type": {"values": np.array([1, 1, 1, 1], np.int64)},
    "another rest": {"rest": np.int64(10**9)},
    "a rest in between": {"rest": np.float64(-0.5)},
    "several rests": {"rest": np.array([0, 0])},
    "classes that are no JSON": {"classes": np.frombuffer(b'["x"', np.uint8)},
    "classes that are no list": {"classes": np.frombuffer(b"3", np.uint8)},
    "classes that are no text": {"classes": np.frombuffer(b'["x", [], 3]', np.uint8)},
    "classes twice": {"classes": np.frombuffer(b'["x", "y", "x"]', np.uint8)},
    "classes with an escape sequence": {
        "classes": np.frombuffer(b'["x", "y", "\\u001b"]', np.uint8)
    },
    "deep classes": {"classes": np.frombuffer(b"[" * 10**5, np.uint8)},
    "objects": {"files": np.array([{}], object)},
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_cache_is_parsed_again(
    cache: Cache, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with cache.file.open("wb") as file:
        np.savez(file, **{**cache.arrays, **FORGED[name]})
    found, parsed = cache.read()
    assert parsed
    assert same(found, table())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{cache.file} is not used (" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert not cache.read()[1]  # the file was replaced


def test_a_cache_of_another_form_is_parsed_again(cache: Cache) -> None:
    for spoil in (
        lambda: cache.file.write_bytes(b""),
        lambda: cache.file.write_bytes(cache.whole[:-30]),
    ):
        spoil()
        found, parsed = cache.read()
        assert parsed
        assert same(found, table())


def test_millions_of_paths_are_checked_in_a_moment() -> None:
    from time import process_time

    many = np.array([b"train/%07d.jpg" % number for number in range(500_000)])
    start = process_time()
    assert _files_fault(many, len(many)) is None
    assert process_time() - start < 0.5
    many[123_456] = b"../abc.jpg"
    assert _files_fault(many, len(many)) == "a path leads out of the folder"
