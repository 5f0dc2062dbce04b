"""Photo libraries: classes, excluded keywords, splits, and the cache."""

import ast
import logging
import os
import sys
from pathlib import Path

import pytest
from pictures import picture
from PIL import Image
from support import in_processes

from mldec.data.keywords import read_keywords
from mldec.data.readers import keywords
from mldec.data.readers.photo_library import looks_like_person, similar_words
from mldec.data.splits import HoldOut
from mldec.errors import DataError, UserError

XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/" xmlns:r="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<r:RDF><r:Description xmlns:lr="http://ns.adobe.com/lightroom/1.0/">'
    "<lr:hierarchicalSubject><r:Bag>{}</r:Bag></lr:hierarchicalSubject>"
    "</r:Description></r:RDF></x:xmpmeta>"
)
# Keywords of photo number n.
TAGS = [["Pets|dog"], ["Pets|dog", "sea"], ["Dog", "Rare"], ["Pets|cat", "sea"], ["Pets", "sky"]]


class Library:
    """A folder with photos, and the results of the reader."""

    def __init__(self, folder, cache):
        self.folder = folder
        self.cache = str(cache)

    def add(self, name, tags, image=None):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (image or picture(64, 48, seed=len(list(self.folder.rglob("*"))))).save(path)
        if tags:
            items = "".join(f"<r:li>{tag}</r:li>" for tag in tags)
            path.with_name(path.name + ".xmp").write_text(XMP.format(items))

    def source(self, **settings):
        settings = {"similar": "ignore", "min_photos": 4} | settings
        chosen = {key: settings.pop(key) for key in ("val_fraction", "split") if key in settings}
        return keywords(root=str(self.folder), division=HoldOut(**chosen), **settings)

    def splits(self, **settings):
        source = self.source(**settings)
        train = (source.load_train or source.load)("train", self.cache)
        return train, source.load("val", self.cache)

    def classes(self, **settings):
        return self.splits(**settings)[0].classes

    def labels(self, **settings):
        """Return the sorted classes of each photo, in any split."""
        found = {}
        for part in self.splits(**settings):
            for index in range(len(part)):
                row = part.labels.row(index)
                names = [part.classes[column] for column in (row == 1).nonzero().flatten()]
                found[os.path.relpath(part.name(index), self.folder)] = names
        return found


@pytest.fixture
def library(tmp_path):
    result = Library(tmp_path / "photos", tmp_path / "cache")
    for number in range(20):
        result.add(f"{number % 3}/{number:02}.png", TAGS[number % 5])
    for number in range(3):
        result.add(f"untagged {number}.png", [])
    return result


def test_levels_of_a_hierarchy(library):
    assert library.classes() == ("Pets", "Rare", "cat", "dog", "sea", "sky")
    assert library.labels()["0/00.png"] == ["Pets", "dog"]
    assert library.labels()["2/02.png"] == ["Rare", "dog"]
    assert library.classes(levels="paths") == (
        "Dog", "Pets", "Pets/cat", "Pets/dog", "Rare", "sea", "sky",
    )  # fmt: skip
    assert library.labels(levels="paths")["0/00.png"] == ["Pets", "Pets/dog"]
    assert library.classes(levels="all", min_photos=5) == ("Pets", "dog", "sea")


def test_photos_of_rare_or_no_keywords(library):
    assert len(library.labels()) == 20
    labels = library.labels(untagged=True)
    assert len(labels) == 23
    assert labels["untagged 0.png"] == []
    with pytest.raises(DataError, match=r"min_photos"):
        library.splits(min_photos=17)


def test_excluded_keywords_and_synonyms(library, tmp_path, caplog):
    assert library.classes(exclude=["pets", "Rare", "x"]) == ("Dog", "sea", "sky")
    assert "data.exclude" in caplog.text
    assert library.labels(exclude=["Pets/dog"], min_photos=1)["2/02.png"] == ["Dog", "Rare"]
    (tmp_path / "same.txt").write_text("animal;dog;cat;Pets\n")
    path = str(tmp_path / "same.txt")
    assert library.classes(synonyms=path) == ("Rare", "animal", "sea", "sky")


def test_absent_keywords(library):
    for missing, value in (("negative", 0), ("unknown", -1)):
        train, val = library.splits(missing=missing)
        assert set(train.labels.dense().flatten().tolist()) == {1, value}
        assert set(val.labels.dense().flatten().tolist()) == {1, 0}


def test_people_of_one_photo_are_people_of_all_ignoring_case(library, caplog):
    caplog.set_level(logging.INFO, logger="mldec")
    library.add("anna.png", ["PERSONEN|Anna Smith", "Albums|Garden", "sea"])
    for number in range(4):
        tags = ["anna smith", "garden", "New York", "sea", "darktable|exported", "GÃ¤rten"]
        library.add(f"{number}.png", tags)
    assert "anna smith" in library.classes(people=True)
    caplog.clear()
    classes = library.classes()
    assert {"garden", "Gärten", "New York"} <= set(classes)
    assert not {"anna smith", "exported"} & set(classes)

    # Ignored and repaired keywords are listed, and classes that may be people.
    listed = [text for text in caplog.messages if text.startswith("keywords: ")]
    assert any("data.people" in text and "Anna Smith, Garden" in text for text in listed)
    assert any("data.exclude" in text and "New York" in text for text in listed)
    assert any(text.endswith(": darktable/exported") for text in listed)
    assert any(text.endswith(": Gärten") for text in listed)


OTHERS = [["sea"], ["sea", "Lyon, France"], ["sea", "People|Anna"], ["sea", "geotagged"]]


@pytest.mark.parametrize("other", OTHERS)
def test_lists_with_commas(tmp_path, other):
    library = Library(tmp_path / "photos", tmp_path / "cache")
    library.add("1.png", ["dog, beach"])
    library.add("2.png", ["beach"])
    library.add("3.png", other)
    labels = library.labels(min_photos=1)
    # A photo with two keywords shows that a comma is a part of a name.
    if other == ["sea"]:
        assert labels == {"1.png": ["beach", "dog"], "2.png": ["beach"], "3.png": ["sea"]}
    else:
        assert labels["1.png"] == ["dog, beach"]


def test_names_in_groups_are_keywords_elsewhere(library, caplog):
    caplog.set_level(logging.INFO, logger="mldec")
    library.add("own.png", ["Familie|Anna", "Familie|Dog", "sea"])
    assert library.labels()["0/00.png"] == ["Pets", "dog"]
    assert library.labels()["own.png"] == ["sea"]
    assert any("data.people" in text and "Anna, Dog" in text for text in caplog.messages)


def test_names_that_look_like_people():
    people = ["Anna Smith", "Jörg O'Neill", "Élodie McDonald", "New York", "Family/Anna Smith"]
    others = ["Anna", "anna smith", "Red car", "Canon EOS", "Route 66", "Golden Gate Bridge", "USA"]
    assert [name for name in people + others if looks_like_person(name)] == people


def split_names(library, **arguments):
    """Return the names of the photos of both splits."""
    arguments = {"similar": "together", "val_fraction": 0.4, **arguments}
    splits = library.splits(**arguments)
    return [{Path(part.name(i)).name for i in range(len(part))} for part in splits]


def test_near_duplicates_are_in_one_split(library):
    for number in range(20):
        image = picture(256, 192, seed=1000 + number)
        library.add(f"burst/{number}a.png", ["burst"], image)
        library.add(f"burst/{number}b.jpg", ["burst"], image.resize((200, 150)))
    for method in ("stratified", "hash"):
        parts = split_names(library, split=method)
        train, val = ({name[:-5] for name in part if name[-5] in "ab"} for part in parts)
        assert val
        assert not train & val
        assert split_names(library, split=method) == parts


def test_bursts_by_capture_time_are_in_one_split(tmp_path):
    """Photos of camera A are 0.9 s apart. Photos of other cameras have the same times."""
    library = Library(tmp_path / "photos", tmp_path / "cache")

    def add(name, camera, number):
        library.add(name, ["sea"])
        exif = Image.Exif()
        exif[0x0110] = camera
        tenths = 9 * number
        exif.get_ifd(0x8769).update(
            {0x9003: f"2023:05:06 23:59:{tenths // 10:02}", 0x9291: f"{tenths % 10}0"}
        )
        with Image.open(library.folder / name) as image:
            image.save(library.folder / name, exif=exif)

    for number in range(6):
        add(f"burst{number}.jpg", "A", number)
        add(f"other{number}.jpg", f"B{number}", number)
    for method in ("stratified", "hash"):
        parts = split_names(library, split=method, burst_seconds=0.91)
        assert all(parts)
        bursts = [{name for name in names if "burst" in name} for names in parts]
        assert sorted(map(len, bursts)) == [0, 6]
    for seconds in (0, 0.8):
        parts = split_names(library, burst_seconds=seconds)
        assert all(any("burst" in name for name in names) for names in parts)


def _check_rank(rank, count, library, folder):
    """Count the photos that a rank reads. Rank 0 reads all, and the others none."""
    read = []

    def read_and_count(path):
        read.append(path)
        return read_keywords(path)

    sys.modules["mldec.data.readers.photo_library"].read_keywords = read_and_count
    names = split_names(library)
    (folder / str(rank)).write_text(repr((len(read), [sorted(part) for part in names])))


def test_one_rank_reads_the_library(library, tmp_path):
    in_processes(_check_rank, 2, library, tmp_path)
    results = [ast.literal_eval((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [count for count, _ in results] == [23, 0]
    assert results[0][1] == results[1][1]


def test_cache_is_read_and_follows_changes(library, monkeypatch):
    before = library.labels()
    read = []

    def read_and_count(path):
        read.append(path)
        return read_keywords(path)

    module = sys.modules["mldec.data.readers.photo_library"]
    monkeypatch.setattr(module, "read_keywords", read_and_count)
    assert library.labels() == before
    assert read == []
    library.add("0/00.png", ["sea", "sky", "dog"])
    assert library.labels()["0/00.png"] == ["dog", "sea", "sky"]
    assert [path.name for path in read] == ["00.png"]


def test_library_is_not_changed(library, tmp_path):
    def state():
        files = sorted(library.folder.rglob("*"))
        return [(file, file.stat().st_mtime_ns, file.stat().st_mode) for file in files]

    before = state()
    library.splits()
    assert state() == before
    assert any(Path(library.cache).iterdir())


def test_faults_are_counted(library, caplog):
    (library.folder / "gone.jpg.xmp").write_text("x")
    (library.folder / "movie.mp4").touch()
    (library.folder / "movie.mp4.xmp").write_text("x")
    (library.folder / "raw.CR3").touch()
    (library.folder / "raw.xmp").write_text("x")
    (library.folder / ".hidden.xmp").write_text("x")
    (library.folder / "0" / "00.png.xmp").write_text("<broken")
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        assert "0/00.png" not in library.labels()
        messages = [record.getMessage() for record in caplog.records]
        assert sum("1 photos are left out" in text and "00.png.xmp" in text for text in messages)
        assert sum("1 sidecars" in text and "gone.jpg.xmp" in text for text in messages)
        assert sum(".cr3" in text for text in messages)


def test_invalid_settings(library, tmp_path):
    for settings in ({"min_photos": 0}, {"val_fraction": 1.0}, {"threshold": 2.0}):
        with pytest.raises((UserError, ValueError), match=next(iter(settings))):
            library.source(**settings)
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    with pytest.raises(DataError, match=r"data\.root"):
        Library(tmp_path / "empty", tmp_path).splits()


def test_similar_words():
    counts = {
        "movie": 3,
        "movies": 3,
        "dog": 50,
        "dogs": 3,
        "Dog's": 2,
        "caf\u00e9": 9,
        "cafe": 4,
        "city": 5,
        "cities": 9,
    }
    counts |= {"horse": 40, "hrose": 1, "house": 39, "hors": 2, "cat": 9, "car": 1, "bus": 4}
    counts |= {"buses": 3, "red car": 5, "Red-Car": 2, "boxes": 1, "box": 8, "glass": 7}
    pairs = {frozenset(pair) for pair in similar_words(counts)}
    expected = ["dog dogs", "dog Dog's", "dogs Dog's", "caf\u00e9 cafe", "city cities"]
    expected += ["movie movies", "horse hrose", "bus buses", "box boxes"]
    same = {frozenset(pair.split()) for pair in expected} | {frozenset(("red car", "Red-Car"))}
    assert same <= pairs
    others = [("cat", "car"), ("horse", "house"), ("bus", "box"), ("glass", "bus")]
    assert not pairs & {frozenset(pair) for pair in others}
