"""Image files of every kind and fault, and the other decoders against Pillow."""

import warnings

import numpy as np
import pytest
import torch
from pictures import picture, pixels, saved
from PIL import Image

from mldec.data.images import (
    DECODERS,
    FORMATS,
    NOT_READ,
    READ,
    UnsupportedFiles,
    check_decoder,
    open_image,
    read_image,
)
from mldec.data.transforms import as_pillow
from mldec.errors import ConfigError, DataError


def as_array(image):
    if isinstance(image, torch.Tensor):
        image = image[:3].permute(1, 2, 0).numpy()
    return np.asarray(image)


def in_grey(values):
    return np.repeat(values[..., None], 3, axis=2)


# Kinds of pixels


GREY, ALPHA = pixels(6, 5), pixels(6, 5, 4)
KINDS = {
    "rgb": (Image.fromarray(ALPHA[..., :3]), "png", ALPHA[..., :3]),
    "grey png": (Image.fromarray(GREY), "png", in_grey(GREY)),
    "grey bmp": (Image.fromarray(GREY), "bmp", in_grey(GREY)),
    "grey and alpha": (Image.fromarray(ALPHA[..., :2], "LA"), "png", in_grey(ALPHA[..., 0])),
    "alpha": (Image.fromarray(ALPHA), "png", ALPHA[..., :3]),
    "one bit": (Image.fromarray(GREY > 127), "png", in_grey((GREY > 127) * np.uint8(255))),
    "grey jpg": (Image.new("L", (8, 8), 77), "jpg", np.full((8, 8, 3), 77)),
    # Of a CMYK file, no ink is white.
    "cmyk jpg": (Image.new("CMYK", (16, 16)), "jpg", np.full((16, 16, 3), 255)),
    # Cyan in full, no magenta, 40 % yellow, 20 % black.
    "cmyk": (Image.new("CMYK", (4, 4), (255, 0, 102, 51)), "tif", [0, 204, 122]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_pixels_becomes_rgb(tmp_path, kind):
    image, suffix, expected = KINDS[kind]
    read = read_image(str(saved(image, tmp_path / f"a.{suffix}")))
    assert read.mode == "RGB"
    tolerance = 2 if "cmyk" in kind else 0
    assert np.abs(as_array(read).astype(int) - expected).max() <= tolerance


@pytest.mark.parametrize("transparency", [None, 1, bytes([0, 128, 255])])
def test_palette_gives_its_colours_without_a_warning(tmp_path, transparency):
    colours = np.array([[10, 20, 30], [200, 100, 0], [5, 250, 90]], np.uint8)
    image = Image.fromarray(GREY % 3, "P")
    image.putpalette(colours.tobytes())
    options = {} if transparency is None else {"transparency": transparency}
    path = saved(image, tmp_path / "a.png", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(as_array(read_image(path)), colours[GREY % 3])


@pytest.mark.parametrize("kind", ["png", "tif", "32 bits", "big endian"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path, kind):
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


def test_more_than_sixteen_bits_have_no_known_range(tmp_path):
    path = saved(Image.fromarray(np.array([[0, 70000]], np.int32)), tmp_path / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif.*70000"):
        read_image(path)
    path = saved(Image.fromarray(np.array([[0.5, 0.7]], np.float32)), tmp_path / "f.tif")
    with pytest.raises(DataError, match=r"f\.tif.*floating-point"):
        read_image(path)


# Orientation


UPRIGHT = np.arange(1, 7, dtype=np.uint8).reshape(2, 3) * 40  # three wide, two high
# How a camera that writes this orientation stores the upright picture (TIFF 6.0: where row 0 and
# column 0 are). Other values mean nothing.
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.T,  # row 0 is the left side, column 0 the top
    6: np.rot90(UPRIGHT),  # row 0 is the right side, column 0 the top
    7: UPRIGHT[::-1, ::-1].T,  # row 0 is the right side, column 0 the bottom
    8: np.rot90(UPRIGHT, -1),  # row 0 is the left side, column 0 the bottom
    0: UPRIGHT,
    77: UPRIGHT,
}


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_exif_orientation(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(STORED[orientation]))
    read = as_array(read_image(saved(image, tmp_path / f"a.{suffix}", exif=exif)))
    assert np.array_equal(read[..., 0], UPRIGHT)


def test_a_damaged_exif_block_does_not_cost_the_picture(tmp_path):
    path = saved(picture(), tmp_path / "a.jpg", exif=b"Exif\0\0" + b"nonsense" * 4)
    assert read_image(path).size == (40, 30)


# Faults


def one_line_about(path, content=None):
    with pytest.raises(DataError) as caught:
        read_image(path, content)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    assert message.endswith("restore the file or leave it out")
    return message


def test_faults_of_a_file_are_named(tmp_path, monkeypatch):
    path = saved(picture(), tmp_path / "a.png")
    assert "(No such file or directory)" in one_line_about(tmp_path / "absent.jpg")
    assert "(Is a directory)" in one_line_about(tmp_path)

    # What is wrong with bytes does not depend on a file of their name.
    for name in ("a.png", "absent.jpg"):
        assert "an empty file (0 bytes)" in one_line_about(tmp_path / name, b"")
        assert "not an image, or none of JPEG" in one_line_about(tmp_path / name, b"404: Not Found")

    with monkeypatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
        assert "too large" in one_line_about(path)
    denied = PermissionError(13, "no")
    monkeypatch.setattr("mldec.files.text.open_binary", lambda _: (_ for _ in ()).throw(denied))
    assert "cannot be read (no)" in one_line_about(path)


def test_image_files_that_are_not_read_are_counted_by_suffix(tmp_path):
    unsupported = UnsupportedFiles()
    for name in ("a/1.HEIC", "a/2.heic", "b/3.CR3", "b/4.jpg", "notes.txt"):
        unsupported.add(name)
    assert unsupported.to_dict() == {
        ".heic": {"files": 2, "example": "a/1.HEIC"},
        ".cr3": {"files": 1, "example": "b/3.CR3"},
    }
    assert "2 .heic (such as a/1.HEIC), 1 .cr3 (such as b/3.CR3)" in str(unsupported)
    assert not UnsupportedFiles()

    assert not READ & NOT_READ
    suffixes = Image.registered_extensions()
    assert all(suffixes[suffix] in FORMATS for suffix in READ)
    assert not any(suffixes.get(suffix) in FORMATS for suffix in NOT_READ - {".pfm"})


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("kept", [0.5, 0.95])
def test_a_truncated_file(tmp_path, suffix, kept):
    path = saved(Image.fromarray(pixels(64, 64, 3)), tmp_path / f"a.{suffix}")
    whole = path.read_bytes()
    message = one_line_about(path, whole[: int(kept * len(whole))])
    assert suffix != "jpg" or "truncated" in message


def test_running_out_of_memory_is_not_the_files_fault(tmp_path, monkeypatch):
    def exhaust(path, **_):
        raise MemoryError

    path = saved(picture(), tmp_path / "a.jpg")
    monkeypatch.setattr(Image, "open", exhaust)
    with pytest.raises(MemoryError):
        read_image(path)


def test_a_limit_of_pixels_is_seen_before_the_image_is_decoded(tmp_path):
    path = saved(picture(40, 30), tmp_path / "a.png")
    assert read_image(path, max_pixels=1200).size == (40, 30)
    # Cut short: to decode it would be another fault.
    with pytest.raises(DataError, match=r"a.png: .*40 x 30 pixels, above 0.001199 million"):
        read_image(path, path.read_bytes()[:100], max_pixels=1199)


# The other decoders


@pytest.fixture(params=DECODERS[1:])
def decoder(request):
    pytest.importorskip(request.param, reason="an extra")
    return request.param


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
def test_every_decoder_has_the_pixels_of_pillow(tmp_path, decoder, mode, options):
    for size in ((97, 63), (1, 1)):
        for orientation in (1, 6, 77):
            exif = Image.Exif()
            exif[0x0112] = orientation
            image = picture(*size).convert(mode)
            path = saved(image, tmp_path / "a.jpg", exif=exif, **options)
            read = open_image(path, decoder=decoder)
            assert np.array_equal(as_array(read), read_image(path))
            assert np.array_equal(as_pillow(read), read_image(path))
            # An image of Pillow's is one of its decoder, or one that it has turned.
            turned = decoder == "simplejpeg" and orientation == 6
            assert isinstance(read, Image.Image) is (mode == "CMYK" or turned)


def test_pillow_reads_what_others_do_not_and_says_what_is_wrong(tmp_path, decoder, monkeypatch):
    path = saved(picture(40, 30), tmp_path / "a.png")
    assert np.array_equal(as_array(open_image(path, decoder=decoder)), read_image(path))

    large = saved(picture(400, 300), tmp_path / "a.jpg")
    content = large.read_bytes()
    for damaged in (b"", b"no image", content[:200], content[: len(content) // 2]):
        messages = []
        for name in ("pillow", decoder):
            with pytest.raises(DataError) as caught:
                open_image(large, damaged, decoder=name)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(DataError, match="too large an image"):
        open_image(large, decoder=decoder)


def test_a_missing_decoder_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_decoder("pillow")
    for name in DECODERS[1:]:
        with pytest.raises(ConfigError, match=rf"^data.decoder: {name} .* -e '\.\[fast\]'"):
            check_decoder(name)


@pytest.mark.parametrize(
    ("name", "content", "format_name"),
    [
        ("a.HEIC", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        ("a.jpg", b"\0\0\0\x18ftypheix\0\0\0\0mif1heic", "HEIC"),
        ("a.avif", b"\0\0\0\x18ftypavif\0\0\0\0avifmif1", "AVIF"),
        ("a.raf", b"FUJIFILMCCD-RAW 0201", "RAF"),
    ],
)
def test_a_format_that_is_not_supported_is_named(tmp_path, name, content, format_name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_image(tmp_path / name)
    expected = f"a file in the format {format_name}, which is not supported; convert it"
    assert expected in str(caught.value)
