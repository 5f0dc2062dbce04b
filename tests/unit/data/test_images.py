"""Image files of all modes, damaged files, and the fast decoder."""

import struct
import warnings

import numpy as np
import pytest
import torch
from pictures import picture, pixels, saved
from PIL import Image, PngImagePlugin

from mldec.data.images import (
    FORMATS,
    NOT_READ,
    READ,
    check_decoder,
    load_image,
    read_image,
)
from mldec.data.photos import SkippedFiles
from mldec.data.transforms import as_pillow
from mldec.errors import ConfigError, DataError


def as_array(image):
    if isinstance(image, torch.Tensor):
        image = image[:3].permute(1, 2, 0).numpy()
    return np.asarray(image)


def as_gray(values):
    return np.repeat(values[..., None], 3, axis=2)


GRAY, ALPHA = pixels(6, 5), pixels(6, 5, 4)
MODES = {
    "rgb": (Image.fromarray(ALPHA[..., :3]), "png", ALPHA[..., :3]),
    "gray png": (Image.fromarray(GRAY), "png", as_gray(GRAY)),
    "gray bmp": (Image.fromarray(GRAY), "bmp", as_gray(GRAY)),
    "gray and alpha": (Image.fromarray(ALPHA[..., :2], "LA"), "png", as_gray(ALPHA[..., 0])),
    "alpha": (Image.fromarray(ALPHA), "png", ALPHA[..., :3]),
    "one bit": (Image.fromarray(GRAY > 127), "png", as_gray((GRAY > 127) * np.uint8(255))),
    "gray jpg": (Image.new("L", (8, 8), 77), "jpg", np.full((8, 8, 3), 77)),
    # CMYK without ink is white.
    "cmyk jpg": (Image.new("CMYK", (16, 16)), "jpg", np.full((16, 16, 3), 255)),
    # 100 % cyan, 0 % magenta, 40 % yellow, 20 % black.
    "cmyk": (Image.new("CMYK", (4, 4), (255, 0, 102, 51)), "tif", [0, 204, 122]),
}


@pytest.mark.parametrize("mode", MODES)
def test_image_of_any_mode_becomes_rgb(tmp_path, mode):
    image, suffix, expected = MODES[mode]
    read = read_image(str(saved(image, tmp_path / f"a.{suffix}")))
    assert read.mode == "RGB"
    tolerance = 2 if "cmyk" in mode else 0
    assert np.abs(as_array(read).astype(int) - expected).max() <= tolerance


@pytest.mark.parametrize("transparency", [None, 1, bytes([0, 128, 255])])
def test_palette_keeps_its_colors(tmp_path, transparency):
    colors = np.array([[10, 20, 30], [200, 100, 0], [5, 250, 90]], np.uint8)
    image = Image.fromarray(GRAY % 3, "P")
    image.putpalette(colors.tobytes())
    options = {} if transparency is None else {"transparency": transparency}
    path = saved(image, tmp_path / "a.png", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(as_array(read_image(path)), colors[GRAY % 3])


@pytest.mark.parametrize("kind", ["png", "tif", "32 bits", "big endian"])
def test_sixteen_bits_are_scaled(tmp_path, kind):
    gradient = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    path = tmp_path / ("a.png" if kind == "png" else "a.tif")
    if kind == "32 bits":
        Image.fromarray(gradient.astype(np.int32)).save(path)
    elif kind == "big endian":
        Image.frombytes("I;16B", (32, 32), gradient.astype(">u2").tobytes()).save(path)
    else:
        Image.fromarray(gradient).save(path)
    read = as_array(read_image(path))
    assert np.abs(read[..., 1].astype(float) - gradient / 257).max() <= 1
    assert len(np.unique(read)) == 256


# Orientation


UPRIGHT = np.arange(1, 7, dtype=np.uint8).reshape(2, 3) * 40
# Stored pixels of the upright image by EXIF orientation (TIFF 6.0). Other values have no meaning.
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.T,  # row 0 is the left side, column 0 the top
    6: np.rot90(UPRIGHT),  # row 0 is the right side, column 0 the top
    7: UPRIGHT[::-1, ::-1].T,  # row 0 is the right side, column 0 the bottom
    8: np.rot90(UPRIGHT, -1),  # row 0 is the left side, column 0 the bottom
    77: UPRIGHT,
}


@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation_is_applied(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(STORED[orientation]))
    read = as_array(read_image(saved(image, tmp_path / "a.png", exif=exif)))
    assert np.array_equal(read[..., 0], UPRIGHT)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_avif_orientation_is_applied(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    colors = np.repeat(np.ascontiguousarray(STORED[orientation]), 32, 0).repeat(32, 1)
    image = Image.fromarray(as_gray(colors))
    read = as_array(read_image(saved(image, tmp_path / "a.avif", exif=exif, quality=100)))
    assert np.abs(read[16::32, 16::32, 0].astype(int) - UPRIGHT).max() <= 2


@pytest.mark.parametrize(("mode", "dtype"), [("I;16", np.uint16), ("I", np.int32)])
@pytest.mark.parametrize(("bits", "highest"), [(8, 255), (10, 1023), (12, 4000), (16, 60000)])
def test_small_range_in_a_large_type_is_scaled(tmp_path, mode, dtype, bits, highest):
    values = np.linspace(0, highest, 60).astype(dtype).reshape(6, 10)
    path = tmp_path / "a.tif"
    Image.fromarray(values).save(path)
    with Image.open(path) as image:
        assert image.mode == mode
    expected = np.floor(values / 2 ** (bits - 8))
    assert np.array_equal(as_array(read_image(path)), as_gray(expected))


@pytest.mark.parametrize("chunk", ["text", "profile"])
def test_png_with_a_large_chunk_is_read(tmp_path, chunk):
    text = PngImagePlugin.PngInfo()
    options = {}
    if chunk == "text":
        text.add_text("prompt", "a" * 3_000_000, zip=True)
    else:
        options["icc_profile"] = bytes(3_000_000)
    path = saved(picture(), tmp_path / "a.png", pnginfo=text, **options)
    assert np.array_equal(as_array(read_image(path)), np.asarray(picture()))


def test_damaged_exif_is_ignored(tmp_path):
    path = saved(picture(), tmp_path / "a.jpg", exif=b"Exif\0\0" + b"nonsense" * 4)
    assert read_image(path).size == (40, 30)


# Faults


def tiff_of_five_bands():
    """Return a TIFF file of 1 x 1 pixel: its directory, the bits of each band, the pixel."""
    short, long = 3, 4
    bits_at = 8 + 2 + 6 * 12 + 4
    entries = [(256, short, 1, 1), (257, short, 1, 1), (258, short, 5, bits_at)]
    entries += [(262, short, 1, 1), (273, long, 1, bits_at + 10), (277, short, 1, 5)]
    directory = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    start = struct.pack("<2sHIH", b"II", 42, 8, len(entries))
    return start + directory + bytes(4) + struct.pack("<5H", *[8] * 5) + bytes(5)


FAULTS = [
    ("a.png", b"", ""),
    ("a.tif", b"404: Not Found", ""),
    ("a.jpg", b"\0\0\0\x18ftypheix\0\0\0\0mif1heic", ""),
    ("a.avif", b"\0\0\0\x18ftypavif\0\0\0\0avifmif1", ""),
    ("a.jpg", b"\0\0\0\x18ftypcrx \0\0\0\0crx isom", "CR3"),
    ("a.raf", b"FUJIFILMCCD-RAW 0201", "RAF"),
    ("a.jpg", None, ""),
    ("a.tif", Image.fromarray(np.array([[0, 70000]], np.int32)), ""),
    ("a.tif", Image.fromarray(np.float32([[0.5, 0.7]])), ""),
    ("a.tif", tiff_of_five_bands(), "5 bands"),
    ("a.zip", b"PK\3\4", "unpack"),
]
# Truncated files.
for suffix in ("jpg", "png", "tif", "webp", "avif"):
    FAULTS += [(f"a.{suffix}", share, "") for share in (0.5, 0.95)]


@pytest.mark.parametrize("decoder", ["pillow", "simplejpeg"])
@pytest.mark.parametrize(("file", "content", "name"), FAULTS)
def test_faulty_file_is_named(tmp_path, file, content, name, decoder):
    if decoder == "simplejpeg":
        pytest.importorskip(decoder, reason="an extra")
    path = tmp_path / file
    if isinstance(content, Image.Image):
        content.save(path)
    elif isinstance(content, float):
        whole = saved(Image.fromarray(pixels(64, 64, 3)), path).read_bytes()
        path.write_bytes(whole[: int(content * len(whole))])
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{path}.*{name}"):
        load_image(path, lambda image: image, decoder=decoder)


def test_unsupported_files_are_counted_by_suffix():
    unsupported = SkippedFiles()
    for name in ("a/1.NEF", "a/2.nef", "b/3.CR3", "b/4.jpg", "notes.txt"):
        unsupported.accepts(name)
    assert unsupported.counts == {".nef": 2, ".cr3": 1}
    assert unsupported.examples == {".nef": "a/1.NEF", ".cr3": "b/3.CR3"}
    assert "2 .nef (such as a/1.NEF), 1 .cr3 (such as b/3.CR3)" in str(unsupported)
    assert not SkippedFiles()

    assert not READ & NOT_READ
    # Pillow reads the first image of an MPO file as JPEG.
    suffixes = {**Image.registered_extensions(), ".mpo": "JPEG"}
    assert all(suffixes[suffix] in FORMATS for suffix in READ)
    assert not any(suffixes.get(suffix) in FORMATS for suffix in NOT_READ - {".pfm"})


def test_pixels_are_limited_before_decoding(tmp_path, monkeypatch):
    path = saved(picture(40, 30), tmp_path / "a.png")
    assert read_image(path, max_pixels=1200).size == (40, 30)
    # Decoding the truncated file would be another fault.
    with pytest.raises(DataError, match=f"^{path}: .*40 x 30"):
        read_image(path, path.read_bytes()[:100], max_pixels=1199)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(DataError, match="MAX_IMAGE_PIXELS"):
        read_image(path)


# The fast decoder


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {}),
        ("RGB", {"subsampling": 1}),
        ("RGB", {"progressive": True, "subsampling": 0}),
        ("L", {"quality": 20}),
        ("CMYK", {}),
    ],
)
def test_simplejpeg_has_pixels_of_pillow(tmp_path, mode, options):
    pytest.importorskip("simplejpeg", reason="an extra")
    for size in ((97, 63), (1, 1)):
        for orientation in (1, 6, 77):
            exif = Image.Exif()
            exif[0x0112] = orientation
            image = picture(*size).convert(mode)
            path = saved(image, tmp_path / "a.jpg", exif=exif, **options)
            read = load_image(path, lambda image: image, decoder="simplejpeg")
            assert np.array_equal(as_array(read), read_image(path))
            assert np.array_equal(as_pillow(read), read_image(path))
            # Pillow decodes CMYK and rotates images.
            assert isinstance(read, Image.Image) is (mode == "CMYK" or orientation == 6)


def test_missing_decoder_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_decoder("pillow")
    with pytest.raises(ConfigError, match=r"^data\.decoder: simplejpeg"):
        check_decoder("simplejpeg")
