"""Photo libraries and AVIF files of other programs: exiftool, Exiv2 (pyexiv2) and avifenc."""

import shutil
import subprocess

import numpy as np
import pytest
from pictures import picture, pixels
from PIL import Image
from support import one_line

from mldec.data.images import read_image
from mldec.data.keywords import read_keywords


def exiftool(*arguments):
    if shutil.which("exiftool") is None:
        pytest.skip("exiftool is not installed")
    subprocess.run(["exiftool", "-q", "-overwrite_original", *arguments], check=True)


LISTS = {
    "-XMP-dc:Subject": ["Paris", "\u00fcber", "AC/DC", "a, b; c", "Bob"],
    "-XMP-lr:HierarchicalSubject": ["Places", "Places|Paris", "Music|AC/DC"],
    "-XMP-digiKam:TagsList": ["People/Anna", "Trees/Oak"],
    "-XMP-microsoft:LastKeywordXMP": ["Win/Dows"],
}
REGIONS = [
    "-RegionInfo={RegionList=[{Name=Bob,Type=Face},{Name=Paris,Type=Focus}]}",
    "-XMP-MP:RegionInfoMP={Regions=[{PersonDisplayName=Carl}]}",
    "-XMP-iptcExt:PersonInImage=Dora",
]
CONTENT = {("Places", "Paris"), ("Music", "AC/DC"), ("Trees", "Oak"), ("Win", "Dows")}
CONTENT |= {("\u00fcber",), ("a, b; c",)}
PEOPLE = {("People", "Anna"), ("Bob",), ("Carl",), ("Dora",)}


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif", "xmp"])
def test_metadata_of_exiftool(tmp_path, suffix):
    photo = tmp_path / "a.jpg"
    picture().save(photo)
    target = tmp_path / f"a.{suffix}"
    if suffix != "xmp":
        picture().save(target)
        photo = target
    arguments = [f"{name}={text}" for name, texts in LISTS.items() for text in texts]
    exiftool(*arguments, *REGIONS, str(target))
    keywords = read_keywords(photo)
    assert set(keywords.content) == CONTENT
    assert set(keywords.people) == PEOPLE


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_capture_time_of_exiftool(tmp_path, suffix):
    photo = tmp_path / f"a.{suffix}"
    picture().save(photo)
    assert read_keywords(photo).taken is None
    exiftool("-EXIF:DateTimeOriginal=2023:05:06 07:08:09", "-XMP-dc:Subject=sea", str(photo))
    assert read_keywords(photo).taken is None  # no camera
    exiftool("-EXIF:Model=A 1", "-EXIF:SubSecTimeOriginal=25", str(photo))
    camera, seconds = read_keywords(photo).taken
    exiftool("-EXIF:DateTimeOriginal=2023:05:06 07:08:10", str(photo))
    assert (camera, seconds % 1) == ("A 1", 0.25)
    assert read_keywords(photo).taken == (camera, seconds + 1)

    # Neither an invalid time nor damaged EXIF data affects the keywords.
    exiftool("-n", "-EXIF:DateTimeOriginal=0000:00:00 00:00:00", str(photo))
    assert read_keywords(photo).taken is None
    assert read_keywords(photo).content == (("sea",),)
    if suffix != "png":  # it has a checksum
        content = photo.read_bytes().replace(b"0000:00:", b"\xff\xfe\0\1:00:")
        photo.write_bytes(content.replace(b"A 1\0", b"A\xff1\0"))
        assert read_keywords(photo).content == (("sea",),)


@pytest.mark.parametrize("charset", ["UTF8", "Latin"])
def test_iptc_of_exiftool(tmp_path, charset):
    for suffix in ("jpg", "tif"):
        photo = tmp_path / f"a.{suffix}"
        picture().save(photo)
        exiftool(
            "-IPTC:Keywords=sea", "-IPTC:Keywords=caf\u00e9", "-charset", "iptc=Latin", str(photo)
        )
        if charset == "UTF8":
            exiftool("-CodedCharacterSet=UTF8", "-IPTC:Keywords=caf\u00e9", str(photo))
            assert set(read_keywords(photo).content) == {("caf\u00e9",)}
        else:
            assert set(read_keywords(photo).content) == {("sea",), ("caf\u00e9",)}


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_metadata_of_exiv2(tmp_path, suffix):
    pyexiv2 = pytest.importorskip("pyexiv2")
    photo = tmp_path / f"a.{suffix}"
    picture().save(photo)
    image = pyexiv2.Image(str(photo))
    image.modify_xmp(
        {
            "Xmp.dc.subject": ["Paris", "dog & cat"],
            "Xmp.lr.hierarchicalSubject": ["Places|France|Paris"],
            "Xmp.digiKam.TagsList": ["Places/France/Paris", "People/Anna"],
            "Xmp.MicrosoftPhoto.LastKeywordXMP": ["Win/Dows"],
        }
    )
    if suffix in ("jpg", "tif"):
        image.modify_iptc({"Iptc.Application2.Keywords": ["Paris", "iptc"]})
    image.close()
    expected = {("Places", "France", "Paris"), ("Win", "Dows"), ("dog & cat",)}
    if suffix in ("jpg", "tif"):
        expected.add(("iptc",))
    keywords = read_keywords(photo)
    assert set(keywords.content) == expected
    assert keywords.people == (("People", "Anna"),)


@pytest.mark.parametrize("depth", [8, 10, 12])
def test_avif_of_another_writer(tmp_path, depth):
    if shutil.which("avifenc") is None:
        pytest.skip("avifenc is not installed")
    image = picture(64, 48)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.png", exif=exif)
    command = ["avifenc", "--depth", str(depth), "--min", "0", "--max", "4", "--yuv", "444"]
    command += ["a.png", "a.avif"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    found = np.asarray(read_image(tmp_path / "a.avif")).astype(int)
    expected = np.asarray(image.transpose(Image.Transpose.ROTATE_270)).astype(int)
    assert found.shape == expected.shape
    assert np.abs(found - expected).mean() < 2


def test_training_on_a_library(cli, here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder = here / "Pictures"
    folder.mkdir()
    for number in range(24):
        path = folder / f"{number:02}.jpg"
        Image.fromarray(pixels(32, 32, 3, seed=number) // (1 + number % 2)).save(path)
    dark = [str(path) for path in sorted(folder.iterdir())[1::2]]
    exiftool("-XMP-dc:Subject=dark", "-XMP-dc:Subject=Dark photos", *dark[:10])
    exiftool(
        "-XMP-dc:Subject=light", *[path for path in map(str, folder.iterdir()) if path not in dark]
    )
    settings = ["+experiment=finetune_frozen", "data=keywords", "data.root=~/Pictures"]
    checked = cli("check-data", *settings, "--similar", "--json", "report.json")
    assert checked.status == 0, checked.err
    assert "dark (10)" in checked.out
    trained = cli(
        "train",
        *settings,
        "backbone=tiny",
        "data.image_size=32",
        "train.workers=0",
    )
    assert trained.status == 0, trained.err
    assert not list(folder.glob("*.npz"))
    missing = cli("train", *settings, "data.min_photos=99", "name=other")
    assert missing.status == 1
    one_line(missing.err, "data.min_photos")
