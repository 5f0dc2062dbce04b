"""Junk of other programs behind every command and reader that lists a folder or an archive."""

import csv
import json
import logging
import tarfile
from io import StringIO

import pytest
from junk import plant
from pictures import picture
from readers import names, write_picture
from trees import tree

import mldec
from mldec.checkpoint import load_model
from mldec.data.readers import keywords
from mldec.tools.export import read_folder
from mldec.tools.predict.inputs import Inputs

OPTIONS = ["--plugin", "patches", "--device", "cpu"]
COUNT = "hidden files, folders of other programs"


@pytest.fixture
def library(tmp_path):
    """A folder of three photos. One is a link, and its folder has the name of a hidden file."""
    folder = tmp_path / ".photos"
    picture(64, 64, seed=0).save(tmp_path / "original.png")
    for name in ("1.png", "more/2.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        picture(64, 64, seed=len(name)).save(folder / name)
    (folder / "3.png").symlink_to(tmp_path / "original.png")
    return folder


PHOTOS = ["1.png", "3.png", "more/2.png"]


def listed(folder, name="folder"):
    """Return the images that `Inputs` lists in a folder or a tar file."""
    path = str(folder)
    if name == "tar":
        path = f"{folder}.tar"
        with tarfile.open(path, "w", dereference=False) as tar:
            for file in sorted(folder.rglob("*")):
                is_link = file.is_symlink() and file.exists() and not file.is_dir()
                source = file.resolve() if is_link else file
                tar.add(source, file.relative_to(folder), recursive=False)
    inputs = Inputs([path])
    images = sorted(item.name.removeprefix(f"{path}/") for item in inputs)
    return images, str(inputs.skipped)


@pytest.mark.parametrize("name", ["folder", "tar"])
def test_listing_skips_and_counts_junk(library, name):
    assert listed(library, name) == (PHOTOS, "")
    plant(library)
    plant(library / "more")
    images, skipped = listed(library, name)
    assert images == PHOTOS
    assert COUNT in skipped


# Commands


def predicted(cli, best, folder):
    outcome = cli("predict", best, folder, *OPTIONS, "--jsonl", "-")
    rows = [json.loads(line) for line in outcome.out.splitlines()]
    return outcome, [row["image"] for row in rows]


def with_sidecar(cli, best, folder):
    outcome = cli("predict", best, folder, *OPTIONS, "--xmp", "--threshold", "0.01")
    sidecars = [path for path in folder.rglob("*.xmp") if "back" not in path.parts]
    return outcome, [str(path)[: -len(".xmp")] for path in sidecars]


def chosen_next(cli, best, folder):
    outcome = cli("next", best, folder, *OPTIONS)
    return outcome, [row["image"] for row in csv.DictReader(StringIO(outcome.out))]


@pytest.mark.parametrize("command", [predicted, with_sidecar, chosen_next])
def test_command_skips_and_counts_junk(cli, best, library, command):
    plant(library)
    plant(library / "more")
    outcome, images = command(cli, best, library)
    assert outcome.status == 0, outcome.err
    assert sorted(images) == [f"{library}/{name}" for name in PHOTOS]
    assert COUNT in outcome.err


def test_python_skips_junk_in_folder_but_not_in_arguments(best, library, caplog):
    caplog.set_level(logging.INFO)
    plant(library)
    model = mldec.load(best, plugin="patches", device="cpu")
    assert sorted(row.image for row in model(library)) == [f"{library}/{name}" for name in PHOTOS]
    assert COUNT in caplog.text
    named = [str(library / ".hidden.jpg"), str(library / "@eaDir/1.jpg/SYNOPHOTO_THUMB_XL.jpg")]
    assert [(row.image, row.error) for row in model(named)] == [(name, None) for name in named]


@pytest.mark.parametrize("layout", ["photos", "folders", "table"])
def test_verification_of_exported_file_skips_junk(best, tmp_path, layout):
    loaded = load_model(best, plugins=["patches"])
    folder = tmp_path / "photos"
    first, second = loaded.classes.names[:2]
    for name in (first, second):
        write_picture(folder / (f"{name}/1.png" if layout == "folders" else f"{name}.png"))
    if layout == "table":
        table = f"path,labels,split\n{first}.png,{first},val\n{second}.png,{second},val\n"
        (folder / "data.csv").write_text(table)
    before = [labels for _, labels in read_folder(str(folder), loaded)]
    # Every folder, also a linked one, is a class folder.
    plant(folder, links=layout != "folders", nested=layout != "folders")
    after = [labels for _, labels in read_folder(str(folder), loaded)]
    assert len(after) == len(before) > 0
    assert [labels is None for labels in after] == [layout == "photos"] * len(before)


# Readers

READERS = ["coco", "csv_table", "cvat", "fiftyone", "folders", "imagenet", "label_studio"]
PICTURES = (".jpg", ".JPG", ".JPEG", ".png", ".PNG")
READERS += ["nuswide_official", "vg500", "voc", "yolo"]


@pytest.mark.parametrize("name", READERS)
def test_reader_skips_junk(tmp_path, name, caplog):
    caplog.set_level(logging.INFO)
    build = tree(name, tmp_path)
    data = build()
    expected = [(split.classes.names, names(split)) for split in (data.train, data.val)]
    image_folders = {path.parent for path in build.root.rglob("*") if path.suffix in PICTURES}
    for folder in {build.root, *(path.parent for path in image_folders), *image_folders}:
        plant(folder, links=False, nested=name not in ("folders", "imagenet"))
        (folder / "nowhere.jpg").symlink_to(folder / "missing.jpg")
    data = build()
    assert [(split.classes.names, names(split)) for split in (data.train, data.val)] == expected
    if name in ("folders", "nuswide_official", "yolo"):
        assert COUNT in caplog.text


def test_photo_library_skips_junk(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    sidecar = """<x:xmpmeta xmlns:x="adobe:ns:meta/"
        xmlns:r="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><r:RDF><r:Description
        xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:subject><r:Bag><r:li>dog</r:li></r:Bag>
        </dc:subject></r:Description></r:RDF></x:xmpmeta>"""
    folder = tmp_path / "photos"
    for number in range(4):
        write_picture(folder / f"{number}.jpg", number)
    plant(folder)
    for photo in list(folder.rglob("*.[jJ][pP][gG]")):
        if photo.parent.exists() and not photo.is_symlink():
            photo.with_name(f"{photo.name}.xmp").write_text(sidecar)
    source = keywords(root=str(folder), similar="ignore", min_photos=1)
    images = [source.load(part, str(tmp_path / "cache")) for part in ("train", "val")]
    files = [image.name(index) for image in images for index in range(len(image))]
    assert sorted(files) == [f"{folder}/{number}.jpg" for number in range(4)]
    assert COUNT in caplog.text


def test_row_of_table_may_name_hidden_file(tmp_path):
    build = tree("csv_table", tmp_path)
    (build.root / "data.csv").write_text(
        "path,labels,split\n.a/@eaDir/1.png,dog,train\n._b.png,dog,val\n"
    )
    for name in (".a/@eaDir/1.png", "._b.png"):
        write_picture(build.root / name)
    data = build()
    assert (names(data.train), names(data.val)) == (["1.png"], ["._b.png"])
