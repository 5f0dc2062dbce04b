"""`mldec check-data` on near-duplicates, unusual files, and the table that --write writes."""

import json

import numpy as np
import pytest
from pictures import picture
from PIL import Image
from support import made, one_line

from mldec.data.readers import csv_table

NAMES = ("cat", "dog", "sea")


def frame(video, number):
    """Return a frame of a video, nearly equal to its other frames."""
    pixels = np.asarray(picture(64, 48, seed=video)).astype(int)
    changes = np.random.default_rng(100 * video + number).integers(-5, 6, pixels.shape)
    return Image.fromarray(np.clip(pixels + changes, 0, 255).astype(np.uint8))


@pytest.fixture
def own(cli, here):
    """Functions that write photos and a table, and that check them."""

    class Own:
        folder = here / "own photos"
        rows = ("path,labels",)

        def add(self, name, image, rest):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
            self.rows += (f"{name},{rest}",)
            return path

        def check(self, *args, data="csv"):
            (self.folder / "data.csv").write_text("\n".join(self.rows))
            words = [f"data={data}", f"data.root={self.folder}", "train.workers=0"]
            result = cli("check_data", *words, f"data.cache_dir={here}", *args, "--json", "r.json")
            return *result, json.loads((here / "r.json").read_text())

    return Own()


@pytest.fixture
def films(own):
    """Twenty videos of frames that are nearly equal, without a split."""
    own.rows = ("path,labels,video",)
    for video in range(20):
        for number in range(6):
            name = f"{video:02}-{number}.jpg"
            own.add(name, frame(video, number), f"{NAMES[video % 3]},film {video}")
    return own


def read(file, root, **settings):
    return made(csv_table, root=str(root), file=str(file), **settings)


def films_of(split):
    return {key.decode()[:2] for key in split.dataset.storage.keys}


def test_series_without_a_group_are_a_warning_by_default(films):
    status, out, _, report = films.check("--strict")
    assert status == 3
    assert "compared 120 of 120 images" in out
    assert (report["compared"], report["in_series"]) == (120, 120)
    assert len(report["similar"]) == report["val"]["images"] == 12
    warnings = [text for text in report["warnings"] if "group" in text]
    assert "12 images of val" in warnings[0]
    assert "20 series" in warnings[1]
    for setting in ("data.group_pattern", "--write"):
        assert all(setting in warning for warning in warnings)


def test_groups_end_the_warnings(films):
    status, _, _, report = films.check("--strict", "data.group_column=video")
    assert (status, report["similar"], report["warnings"]) == (0, [], [])


def test_sample_has_runs_of_neighbors(films, monkeypatch):
    films.rows = (films.rows[0], *films.rows[:0:-1])
    monkeypatch.setattr("mldec.tools.check_data.SIMILAR", 40)
    monkeypatch.setattr("mldec.tools.check_data.examine.RUN", 12)
    _, out, _, report = films.check()
    assert "compared 36 of 120 images in runs of 12 neighbors" in out
    assert report["compared"] == 36
    assert report["in_series"] >= 30
    assert films.check("--similar")[-1]["compared"] == 120
    assert films.check("--decode", "3")[-1]["compared"] == 6
    assert "compared" not in films.check("--decode", "0")[-1]


def test_unusual_files_are_counted(own):
    cut_out = picture(40, 30, seed=1).convert("RGBA")
    cut_out.putalpha(Image.linear_gradient("L").resize((40, 30)))
    own.add("cut-out.png", cut_out, "cat")
    own.add("opaque.png", picture(40, 30, seed=2).convert("RGBA"), "dog")
    ten_bits = np.random.default_rng(0).integers(7, 1001, (30, 40)).astype(np.uint16)
    ten_bits[0, :2] = 7, 1000
    own.add("ten bits.png", Image.fromarray(ten_bits), "cat")
    pages = [picture(40, 30, seed=seed) for seed in (3, 4, 5)]
    scan = own.add("scan.tif", pages[0], "cat")
    pages[0].save(scan, save_all=True, append_images=pages[1:])
    preview = own.add("preview.jpg", pages[1], "dog")
    pages[1].save(preview, "MPO", save_all=True, append_images=pages[2:])
    for number in range(10):
        own.add(f"{number}.jpg", picture(40, 30, seed=10 + number), NAMES[number % 2])
    own.rows = ("path,labels,split", *(f"{row},train" for row in own.rows[1:]))
    own.rows = (*own.rows[:-4], *(row[:-5] + "val" for row in own.rows[-4:]))
    status, out, err, report = own.check()
    assert status == 0, err
    train = report["train"]
    assert train["transparent"] == [str(own.folder / "cut-out.png")]
    assert train["deep"] == [f"{own.folder / 'ten bits.png'} (7 to 1,000)"]
    assert train["pages"] == [f"{scan} (3)"]
    assert "transparent" not in report["val"]
    for key in ("transparent", "deep", "pages"):
        assert out.count(train[key][0]) == 1


@pytest.mark.parametrize("held_out", ["0.1", "0"])
def test_written_table_has_groups_and_no_copies(held_out, films, here):
    copy = films.add("copy.jpg", frame(0, 0), "cat,")
    copy.write_bytes((films.folder / "00-0.jpg").read_bytes())
    films.add("broken.jpg", frame(1, 1), "dog,").write_bytes(b"no image")
    status, out, err, _ = films.check("--write", "clean.csv", f"data.val_fraction={held_out}")
    assert status == 0, err
    assert f"data.file={here / 'clean.csv'}" in out
    assert f"'data.root={films.folder}'" in out

    data = read(here / "clean.csv", films.folder)
    assert len(data.train.dataset) + len(data.val.dataset) == 120
    assert films_of(data.train).isdisjoint(films_of(data.val))
    assert len(films_of(data.val)) in (2, 3)
    for part in (data.train, data.val):
        assert len(np.unique(part.groups)) == len(films_of(part) - {"co"})
        for index, key in enumerate(part.dataset.storage.keys):
            name = key.decode()
            expected = NAMES[0 if name == "copy.jpg" else int(name[:2]) % 3]
            row = part.dataset.labels.row(index).tolist()
            assert row == [int(each == expected) for each in part.classes.names]


def test_written_table_keeps_splits_groups_and_absent_labels(own, here):
    """A training photo is a copy of a validation photo, and others are of one group."""
    own.rows = ("path,labels,negatives,split,group",)
    for number in range(8):
        split = "val" if number >= 5 else "train"
        group = "film" if number in (1, 3) else ""
        image = picture(64, 48, seed=number)
        own.add(f"{number}.png", image, f"{NAMES[number % 2]},{NAMES[2]},{split},{group}")
    own.add("copy.png", picture(64, 48, seed=6), f"{NAMES[2]},,train,")
    status, out, err, report = own.check("--write", "clean.csv")
    assert status == 0, err
    assert report["in_both_splits"]
    assert "without 0 unreadable images and 1 copies" in out

    before = read("data.csv", own.folder)
    after = read(here / "clean.csv", own.folder)
    assert after.val.dataset.storage.keys.tolist() == [b"5.png", b"6.png", b"7.png"]
    assert after.train.dataset.storage.keys.tolist() == [b"%d.png" % number for number in range(5)]
    assert len(np.unique(after.train.groups)) == 4
    assert after.train.groups[1] == after.train.groups[3]
    for part in ("train", "val"):
        old = getattr(before, part).dataset.labels
        new = getattr(after, part).dataset.labels
        assert (new.dense() == old.dense()[: len(new)]).all()
        assert new.default == old.default == -1


def test_written_table_of_class_folders(own, here):
    """Both splits have a folder, and the same relative paths."""
    for part in ("train", "val"):
        for number in range(4):
            image = picture(64, 48, seed=number + 10 * (part == "val"))
            own.add(f"{part}/{NAMES[number % 2]}/{number}.jpg", image, "")
    status, out, err, _ = own.check("--write", "clean.csv", data="folders")
    assert status == 0, err
    assert "data.exclusive=true" in out
    data = read(here / "clean.csv", own.folder, exclusive=True)
    for part, split in (("train", data.train), ("val", data.val)):
        assert split.classes.names == NAMES[:2]
        names = [f"{part}/{NAMES[number % 2]}/{number}.jpg".encode() for number in (0, 2, 1, 3)]
        assert split.dataset.storage.keys.tolist() == names
        assert split.dataset.labels.dense().argmax(1).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["data=digits", "--write", "a.csv"], "--write"),
        (["data=csv", "--write", "a.csv", "--decode", "3"], "--decode"),
        (["--checkpoint", "best.pt", "--write", "a.csv"], "--write"),
        (["data=csv", "--write", "nowhere/a.csv"], "nowhere"),
        (["data=csv", "--write", "best.pt"], "best.pt"),
    ],
)
def test_invalid_use_of_write_raises_an_error(cli, here, args, part):
    (here / "best.pt").write_text("existing")
    status, out, err = cli("check_data", *args)
    assert (status, out) == (1, "")
    one_line(err, part)
