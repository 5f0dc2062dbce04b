"""HEIC files, written by pillow-heif."""

import subprocess
import sys

import numpy as np
import pytest
from pictures import pixels
from PIL import Image, ImageOps

from mldec.data.images import read_image
from mldec.data.readers import folders
from mldec.errors import DataError

pillow_heif = pytest.importorskip("pillow_heif", reason="an extra")


def quarters():
    """Return an image with a color in each quarter, so that each orientation is different."""
    colors = np.uint8([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]])
    return Image.fromarray(colors.repeat(16, 0).repeat(32, 1))


def write(path, image, **options):
    pillow_heif.from_pillow(image).save(path, quality=-1, chroma=444, **options)
    return path


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_once(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = write(tmp_path / "a.HEIC", quarters(), exif=exif.tobytes())
    rotated = quarters()
    rotated.getexif()[0x0112] = orientation
    expected = np.asarray(ImageOps.exif_transpose(rotated)).astype(int)
    found = np.asarray(read_image(path)).astype(int)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 3


@pytest.mark.parametrize("bits", [10, 12])
def test_deep_colors_are_scaled_not_clipped(tmp_path, monkeypatch, bits):
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    values = np.stack([ramp, ramp.T, 65535 - ramp], -1)
    monkeypatch.setattr(pillow_heif.options, "SAVE_HDR_TO_12_BIT", bits == 12)
    image = pillow_heif.from_bytes(mode="RGB;16", size=(64, 64), data=values.tobytes())
    image.save(tmp_path / "a.heic", quality=-1, chroma=444)
    assert pillow_heif.open_heif(tmp_path / "a.heic").info["bit_depth"] == bits
    found = np.asarray(read_image(tmp_path / "a.heic"))
    assert np.abs(found - values / 257).max() <= 3


def test_folders_are_read_with_heic_files(tmp_path):
    for name in ("train/a/1.heic", "train/b/2.HEIF", "val/a/3.jpg", "val/b/4.HIF"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels(64, 64, 3))
        image.save(path, None if path.suffix == ".jpg" else "HEIF")
    images = folders(root=str(tmp_path)).load("train", str(tmp_path / "cache"))
    assert [read_image(images.name(index)).size for index in range(2)] == [(64, 64)] * 2


def test_damaged_file_is_named(tmp_path):
    content = write(tmp_path / "a.heic", quarters()).read_bytes()
    for size in (40, len(content) // 2, len(content) - 40):
        (tmp_path / "b.heic").write_bytes(content[:size])
        with pytest.raises(DataError, match=r"b\.heic"):
            read_image(tmp_path / "b.heic")


def test_without_the_package_the_error_has_the_command(tmp_path):
    path = write(tmp_path / "a.heic", quarters())
    program = (
        "import sys; sys.modules['pillow_heif'] = None\n"
        "from mldec.data.images import read_image\n"
        "from mldec.data.photos import SkippedFiles\n"
        "files = SkippedFiles(); files.accepts('a.HEIC'); print(files)\n"
        f"read_image({str(path)!r})"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "pip install -e '.[heic]'" in result.stdout
    assert "DataError" in result.stderr
    assert "pip install -e '.[heic]'" in result.stderr
