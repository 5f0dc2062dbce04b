"""Cached tables are used while they are valid."""

import os

import numpy as np
import pytest

from mldec.data.cache import cached_table
from mldec.data.labels import from_entries
from mldec.data.table import Table, encode_paths


def make_table():
    labels = from_entries([{0: 1, 1: 1}, {}, {2: 1}, {1: 2}], num_classes=3, default=-1)
    return Table(
        encode_paths(["a/1.jpg", "b", "\udce9.jpg", "c/d.jpg"]), labels, ("x", "\u72ac", "z")
    )


class Cache:
    """A cache of one table."""

    def __init__(self, folder):
        self.folder = folder / "cache"
        self.source = folder / "source"
        self.parsed = 0
        self.source.touch()

    def read(self, name="test"):
        """Check the table. Returns True if it was parsed."""
        before = self.parsed
        found = cached_table(name, [self.source], self._parse, str(self.folder))
        expected = make_table()
        assert np.array_equal(found.labels.dense(), expected.labels.dense())
        assert found.files.tolist() == expected.files.tolist()
        assert (found.classes, found.labels.default) == (expected.classes, -1)
        assert found.labels.row(0).dtype == expected.labels.row(0).dtype
        return self.parsed > before

    def _parse(self):
        self.parsed += 1
        return make_table()


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path)


def test_table_is_parsed_once_per_settings_and_files(cache):
    assert [cache.read(), cache.read()] == [True, False]
    assert [cache.read("test 2"), cache.read("test 2"), cache.read()] == [True, False, False]

    os.utime(cache.source, ns=(0, 10**18))
    assert [cache.read(), cache.read()] == [True, False]
    cache.source.write_text("more")
    assert [cache.read(), cache.read()] == [True, False]
    assert len(list(cache.folder.iterdir())) == 2  # a newer table replaces the old one


def test_damaged_cache_is_parsed_again(cache):
    cache.read()
    (file,) = cache.folder.iterdir()
    content = file.read_bytes()
    np.savez(file.with_suffix(""), key=np.array([{}], object))
    for damaged in (b"", content[:-30], file.read_bytes()):
        file.write_bytes(damaged)
        assert [cache.read(), cache.read()] == [True, False]

    # Any changed byte is either noticed or irrelevant, such as the dates of the archive.
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        cache.read()
