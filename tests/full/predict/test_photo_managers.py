"""Suggestions in a photo library, with exiftool and Exiv2 as other readers and writers."""

import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pyexiv2
import pytest
from pictures import picture

from mldec.files import xmp
from mldec.tools.predict.answers import Prediction, Row
from mldec.tools.predict.xmp import sidecar_of, undo, write_sidecar

pytestmark = pytest.mark.skipif(shutil.which("exiftool") is None, reason="needs exiftool")

LISTS = ("Subject", "TagsList", "HierarchicalSubject")
PHOTOS = 20  # in the library


def exiftool(*words):
    """Run exiftool; return the metadata of each file with `-json`."""
    command = ["exiftool", "-q", "-m", "-overwrite_original", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout) if "-json" in words else None


def lists_of(path):
    """Return the three lists of a sidecar, as exiftool reads them."""
    [tags] = exiftool("-json", "-XMP:all", path)
    found = [tags.get(name, []) for name in LISTS]
    return [item if isinstance(item, list) else [item] for item in found]


def exiv2_lists_of(path):
    pyexiv2.registerNs(xmp.NAMESPACE, "mldec")
    pyexiv2.registerNs(xmp.DIGIKAM[1], "digiKam")
    with pyexiv2.Image(str(path)) as image:
        tags = image.read_xmp()
    names = ("Xmp.dc.subject", "Xmp.digiKam.TagsList", "Xmp.lr.hierarchicalSubject")
    return [tags.get(name, []) for name in names]


def suggest(photo, *names, parent="Suggested"):
    predictions = [Prediction(index, name, 0.9) for index, name in enumerate(names)]
    write_sidecar(Row(photo.name, predictions, path=str(photo)), parent)
    path = sidecar_of(photo)
    return path if path.exists() else None


def content_of(folder):
    """Return the content of all files of a library."""
    return {path: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.jpg"
    picture(32, 32, seed=0).save(path)
    return path


def test_both_read_all_lists(photo):
    path = suggest(photo, "dog", "Places/Paris", "客厅 & <sofa>")
    expected = [
        ["dog", "Paris", "客厅 & <sofa>"],
        ["Suggested/dog", "Suggested/Places/Paris", "Suggested/客厅 & <sofa>"],
        ["Suggested|dog", "Suggested|Places|Paris", "Suggested|客厅 & <sofa>"],
    ]
    assert lists_of(path) == exiv2_lists_of(path) == expected
    validation = subprocess.run(["exiftool", "-validate", "-warning", "-a", path], text=True)
    assert validation.returncode == 0


def test_embedded_keywords_are_not_suggested_and_stay_visible(photo):
    exiftool("-IPTC:Keywords=cat", "-XMP-dc:Subject=sea", photo)
    exiftool("-XMP-lr:HierarchicalSubject=Places|Paris", photo)
    before = content_of(photo.parent)
    assert suggest(photo, "cat", "Sea", "Paris", "Places", "Places/Paris") is None
    path = suggest(photo, "cat", "dog")
    expected = [["Paris", "sea", "cat", "dog"]]
    expected.append(["Places/Paris", "sea", "cat", "Suggested/dog"])
    expected.append(["Places|Paris", "sea", "cat", "Suggested|dog"])
    assert lists_of(path) == exiv2_lists_of(path) == expected

    # Keywords that the user removes from the photo disappear from our lists, too.
    exiftool("-IPTC:Keywords=", photo)
    suggest(photo, "dog")
    assert lists_of(path)[0] == ["Paris", "sea", "dog"]
    exiftool("-IPTC:Keywords=cat", photo)
    assert undo([str(photo.parent)]) == 0
    assert content_of(photo.parent).keys() == before.keys()


@pytest.mark.parametrize("writer", ["exiftool", "exiv2"])
def test_sidecar_rewritten_by_another_program(photo, writer):
    path = suggest(photo, "dog", "tree")
    if writer == "exiftool":
        exiftool("-XMP:Rating=4", "-Subject+=sea", "-TagsList+=sea", path)
    else:
        exiv2_lists_of(path)  # registers the namespaces
        with pyexiv2.Image(str(path)) as image:
            tags = image.read_xmp()
            changes = {"Xmp.xmp.Rating": "4"}
            for name in ("Xmp.dc.subject", "Xmp.digiKam.TagsList"):
                changes[name] = tags[name] + ["sea"]
            image.modify_xmp(changes)

    # Keywords of the earlier run are replaced, and those of the user are kept.
    suggest(photo, "dog", "sky")
    subjects, tags, paths = lists_of(path)
    assert subjects == ["sea", "dog", "sky"]
    assert tags == ["sea", "Suggested/dog", "Suggested/sky"]
    assert {"Suggested|dog", "Suggested|sky"} <= set(paths)
    assert undo([str(photo)]) == 0
    assert lists_of(path) == exiv2_lists_of(path) == [["sea"], ["sea"], []]
    [tags] = exiftool("-json", "-XMP:all", path)
    assert tags["Rating"] == 4
    assert "<mldec:" not in path.read_text()


def test_sidecars_of_exiftool_are_restored(photo):
    sidecar = photo.with_name("photo.jpg.xmp")
    exiftool("-XMP:Rating=3", "-Subject=sea", "-Subject=Paris", "-TagsList=Places/Paris", sidecar)
    before = content_of(photo.parent)
    suggest(photo, "dog", "sea")
    assert lists_of(sidecar) == [
        ["sea", "Paris", "dog"],
        ["Places/Paris", "Suggested/dog"],
        ["Places|Paris", "sea", "Suggested|dog"],
    ]
    suggest(photo, "tree", parent=None)
    assert lists_of(sidecar)[1] == ["Places/Paris", "tree"]
    assert undo([str(photo.parent)]) == 0
    assert content_of(photo.parent) == before


@pytest.fixture
def library(tmp_path):
    """Photos with all kinds of metadata."""
    folder = tmp_path / "library"
    folder.mkdir()
    for number in range(PHOTOS):
        picture(32, 32, seed=number).save(folder / f"{number:02}.jpg")
    exiftool("-XMP-dc:Subject=sea", "-IPTC:Keywords=cat", *sorted(folder.glob("?[0-2].jpg")))
    sidecars = [f"{path}.xmp" for path in folder.glob("?[2-4].jpg")]
    exiftool("-Subject=Paris", "-TagsList=Places/Paris", *sidecars)
    sidecars = [path.with_suffix(".xmp") for path in folder.glob("?[5-6].jpg")]
    exiftool("-Subject=tree", "-XMP:Rating=2", *sidecars)
    return folder


def predict(best, library, parent):
    words = ["predict", best, library, "--plugin", "patches", "--device", "cpu"]
    words += ["--batch-size", "1", "--threshold", "0", "--top", "2"]
    words += ["--suggest", "--xmp", "--xmp-parent", parent]
    sys.argv[1:] = [str(word) for word in words]
    from mldec.__main__ import main

    with Path(os.devnull).open("w") as sys.stdout:
        main()


def run_and_kill(best, library, parent, after=None, seconds=0.0):
    """Run the command in a process; kill it after a number of changed files, and some seconds."""

    def written():
        return {(path, path.stat().st_mtime_ns) for path in library.glob("*.xmp")}

    before = written()
    arguments = (best, library, parent)
    process = multiprocessing.get_context("fork").Process(target=predict, args=arguments)
    process.start()
    if after is not None:
        while len(written() - before) < after and process.exitcode is None:
            time.sleep(0.001)
        time.sleep(seconds)
        process.kill()
    process.join()
    return process.exitcode


def test_killed_commands_leave_complete_sidecars(best, library):
    """Each sidecar is old or new. A complete run and an undo restore the library."""
    before = content_of(library)
    expected = {}
    for parent in ("A", "B"):
        assert run_and_kill(best, library, parent) == 0
        expected[parent] = content_of(library)
        assert undo([str(library)]) == 0
        assert content_of(library) == before
        changed = [path for path in expected[parent] if before.get(path) != expected[parent][path]]
        assert len(changed) == PHOTOS

    chance = random.Random(0)
    killed = 0
    for number in range(10):
        status = run_and_kill(
            best, library, "AB"[number % 2], chance.randrange(15), chance.uniform(0, 0.005)
        )
        killed += status == -9
        for path, content in content_of(library).items():
            if not path.name.endswith(".tmp"):
                states = [before.get(path), expected["A"].get(path), expected["B"].get(path)]
                assert content in states
    assert killed >= 3

    assert run_and_kill(best, library, "A") == 0
    after = content_of(library)
    assert {path: after[path] for path in expected["A"]} == expected["A"]
    assert undo([str(library)]) == 0
    assert content_of(library) == before


def at_the_same_time(*calls):
    """Run functions in processes of their own, and return the exit status of each."""
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(len(calls))

    def run(call):
        start.wait()
        sys.exit(call())

    processes = [fork.Process(target=run, args=(call,)) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def test_commands_can_write_and_undo_the_same_sidecars(best, library):
    before = content_of(library)
    expected = []
    for parent in ("A", "B"):
        assert run_and_kill(best, library, parent) == 0
        expected.append(content_of(library))
    assert undo([str(library)]) == 0

    commands = [partial(predict, best, library, parent) for parent in ("A", "B")]
    for _ in range(3):
        assert at_the_same_time(*commands) == [0, 0]
        after = content_of(library)
        assert after.keys() == expected[0].keys()
        assert all(content in (one[path] for one in expected) for path, content in after.items())
    assert at_the_same_time(*[partial(undo, [str(library)])] * 2) == [0, 0]
    assert content_of(library) == before


def test_processes_can_write_the_same_sidecar(photo):
    """Both write and remove it all the time, which a run on a library does rarely."""

    def write(name):
        for _ in range(75):
            suggest(photo, name)
            suggest(photo)

    assert at_the_same_time(partial(write, "dog"), partial(write, "tree")) == [0, 0]
    assert [path.name for path in photo.parent.iterdir()] == ["photo.jpg"]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs users")
def test_read_only_library_is_an_error_for_each_photo(cli, best, library, tmp_path):
    folder = Path(tmp_path, "mounted")
    shutil.copytree(library, folder)
    for path in [folder, *folder.iterdir()]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = content_of(folder)
    words = ["predict", best, folder, "--plugin", "patches", "--device", "cpu", "--threshold", "0"]
    command = [sys.executable, "-m", "mldec", *map(str, words), "--xmp", "--suggest"]
    if os.getuid() == 0:
        # Root may write everywhere, unless it drops this capability.
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert sum("mounted/" in line and "ermission" in line for line in lines) == PHOTOS, done.stderr
    assert content_of(folder) == before
