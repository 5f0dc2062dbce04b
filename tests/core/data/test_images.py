import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import picture, pixels, saved
from PIL import Image

from mldec.data import transforms
from mldec.data.images import DECODERS, check_decoder, open_image, read_image
from mldec.errors import ConfigError, DataError


def test_rgb_is_unchanged(tmp_path):
    values = pixels(7, 9, 3)
    image = read_image(saved(Image.fromarray(values), tmp_path / "a.png"))
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), values)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "jpg"])
def test_grey_becomes_three_equal_channels(tmp_path, suffix):
    values = np.full((8, 8), 77, np.uint8)
    read = np.asarray(read_image(saved(Image.fromarray(values), tmp_path / f"a.{suffix}")))
    assert np.array_equal(read, np.repeat(values[..., None], 3, axis=2))


def test_grey_with_alpha_drops_the_alpha(tmp_path):
    values = pixels(6, 5, 2)
    read = np.asarray(read_image(saved(Image.fromarray(values, "LA"), tmp_path / "a.png")))
    assert np.array_equal(read, np.repeat(values[..., :1], 3, axis=2))


def test_rgba_drops_the_alpha(tmp_path):
    values = pixels(6, 5, 4)
    assert np.array_equal(
        np.asarray(read_image(saved(Image.fromarray(values), tmp_path / "a.png"))), values[..., :3]
    )


@pytest.mark.parametrize("transparency", [None, 1, bytes([0, 128, 255])])
def test_palette_gives_its_colours_without_a_warning(tmp_path, transparency):
    colours = np.array([[10, 20, 30], [200, 100, 0], [5, 250, 90]], np.uint8)
    indices = pixels(6, 5) % 3
    image = Image.fromarray(indices, "P")
    image.putpalette(colours.tobytes())
    options = {} if transparency is None else {"transparency": transparency}
    path = saved(image, tmp_path / "a.png", **options)
    with Image.open(path) as stored:
        assert stored.mode == "P"
        assert ("transparency" in stored.info) == (transparency is not None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = np.asarray(read_image(path))
    assert np.array_equal(read, colours[indices])


def test_cmyk(tmp_path):
    image = Image.new(
        "CMYK", (4, 4), (255, 0, 102, 51)
    )  # cyan in full, no magenta, 40 % yellow, 20 % black
    read = np.asarray(read_image(saved(image, tmp_path / "a.tif")))
    red, green, blue = (round(255 * (1 - ink) * 0.8) for ink in (1, 0, 0.4))
    assert np.abs(read.astype(int) - [red, green, blue]).max() <= 1


def test_cmyk_jpeg_is_not_inverted(tmp_path):
    read = np.asarray(
        read_image(saved(Image.new("CMYK", (16, 16), (0, 0, 0, 0)), tmp_path / "a.jpg"))
    )
    assert read.min() >= 253  # no ink is white


def test_one_bit(tmp_path):
    values = pixels(6, 5) > 127
    read = np.asarray(read_image(saved(Image.fromarray(values), tmp_path / "a.png")))
    assert np.array_equal(read, np.repeat(values[..., None], 3, axis=2) * np.uint8(255))


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
    with Image.open(path) as stored:
        assert stored.mode == {"32 bits": "I", "big endian": "I;16B"}.get(kind, "I;16")
    read = np.asarray(read_image(path))
    assert np.abs(read[..., 1].astype(float) - gradient / 257).max() <= 1
    assert len(np.unique(read)) == 256


def test_more_than_sixteen_bits_have_no_known_range(tmp_path):
    path = saved(Image.fromarray(np.array([[0, 70000]], np.int32)), tmp_path / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif.*70000"):
        read_image(path)
    path = saved(Image.fromarray(np.array([[0.5, 0.7]], np.float32)), tmp_path / "f.tif")
    with pytest.raises(DataError, match=r"f\.tif.*floating-point"):
        read_image(path)


UPRIGHT = np.arange(1, 7, dtype=np.uint8).reshape(2, 3) * 40  # three wide, two high
# How a camera that writes this orientation stores the upright picture (TIFF 6.0: where row 0 and
# column 0 are).
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.T,  # row 0 is the left side, column 0 the top
    6: np.rot90(UPRIGHT),  # row 0 is the right side, column 0 the top
    7: UPRIGHT[::-1, ::-1].T,  # row 0 is the right side, column 0 the bottom
    8: np.rot90(UPRIGHT, -1),  # row 0 is the left side, column 0 the bottom
}


@pytest.mark.parametrize("orientation", sorted(STORED))
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_exif_orientation(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(STORED[orientation]))
    read = np.asarray(read_image(saved(image, tmp_path / f"a.{suffix}", exif=exif)))
    assert np.array_equal(read[..., 0], UPRIGHT)


def test_exif_orientation_of_a_jpeg(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = saved(Image.new("RGB", (30, 20)), tmp_path / "a.jpg", exif=exif)
    assert read_image(path).size == (20, 30)


@pytest.mark.parametrize("value", [0, 9, 77])
def test_a_meaningless_orientation_is_ignored(tmp_path, value):
    exif = Image.Exif()
    exif[0x0112] = value
    assert read_image(saved(Image.new("RGB", (30, 20)), tmp_path / "a.jpg", exif=exif)).size == (
        30,
        20,
    )


def test_a_damaged_exif_block_does_not_cost_the_picture(tmp_path):
    path = saved(picture(), tmp_path / "a.jpg", exif=b"Exif\0\0" + b"nonsense" * 4)
    assert read_image(path).size == (40, 30)


def test_every_sample_image_can_be_read(sample_data):
    paths = sorted((sample_data / "coco2014_mini").rglob("*.jpg"))
    assert len(paths) == 100
    assert {read_image(path).mode for path in paths[::10]} == {"RGB"}


def one_line_about(path):
    with pytest.raises(DataError) as caught:
        read_image(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    assert message.endswith("restore the file or leave it out")
    return message


def test_missing_file(tmp_path):
    assert "no such file" in one_line_about(tmp_path / "a.jpg")
    assert "no such file" in one_line_about(saved(picture(), tmp_path / "b.png") / "a.jpg")


def test_folder(tmp_path):
    assert "a folder" in one_line_about(tmp_path)


def test_empty_file(tmp_path):
    path = tmp_path / "a.jpg"
    path.touch()
    assert "0 bytes" in one_line_about(path)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("kept", [0.5, 0.95])
def test_truncated_file(tmp_path, suffix, kept):
    path = saved(Image.fromarray(pixels(64, 64, 3)), tmp_path / f"a.{suffix}")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    one_line_about(path)


def test_truncated_jpeg_says_so(tmp_path):
    path = saved(Image.fromarray(pixels(64, 64, 3)), tmp_path / "a.jpg")
    path.write_bytes(path.read_bytes()[:-1000])
    assert "truncated" in one_line_about(path)


def test_text_in_place_of_an_image(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_text("404: Not Found\nsorry\n")
    assert "not an image" in one_line_about(path)


def test_decompression_bomb(tmp_path, monkeypatch):
    path = saved(picture(), tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    assert "too large" in one_line_about(path)


def test_unreadable_file(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.jpg").touch()
    monkeypatch.setattr(Path, "open", refuse)
    assert "no permission" in one_line_about(tmp_path / "a.jpg")


def test_running_out_of_memory_is_not_the_files_fault(tmp_path, monkeypatch):
    def exhaust(path, **_):
        raise MemoryError

    monkeypatch.setattr(Image, "open", exhaust)
    with pytest.raises(MemoryError):
        read_image(saved(picture(), tmp_path / "a.jpg"))


def test_damaged_bytes_give_an_image_or_one_line(tmp_path):
    random.seed(0)
    path = saved(picture(), tmp_path / "a.png")
    whole = path.read_bytes()
    outcomes = set()
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[random.randrange(100)] = random.randrange(256)
        path.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large sizes
            try:
                outcomes.add(read_image(path).mode)
            except DataError as error:
                outcomes.add("\n" in str(error))
    assert outcomes <= {"RGB", False}
    assert False in outcomes


def test_paths_may_be_strings(tmp_path):
    path = saved(picture(), tmp_path / "a.png")
    assert np.array_equal(np.asarray(read_image(str(path))), np.asarray(read_image(Path(path))))


def test_the_transforms_still_offer_it():
    assert transforms.read_image is read_image


def test_a_limit_of_pixels_is_seen_before_the_image_is_decoded(tmp_path):
    path = saved(picture(40, 30), tmp_path / "a.png")
    assert read_image(path, max_pixels=1200).size == (40, 30)
    # Cut short: to decode it would be another fault.
    content = path.read_bytes()[:100]
    with pytest.raises(DataError, match=r"a.png: .*40 x 30 pixels, above 0.001199 million"):
        read_image(path, content, max_pixels=1199)


def test_what_is_wrong_with_bytes_does_not_depend_on_a_file_of_their_name(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("folder", "absent"):
        with pytest.raises(DataError, match=r": not an image, or none of JPEG"):
            read_image(tmp_path / name, b"text")
        with pytest.raises(DataError, match=r": an empty file \(0 bytes\)"):
            read_image(tmp_path / name, b"")


# The other decoder


@pytest.fixture
def torchcodec() -> None:
    pytest.importorskip("torchcodec", reason="an extra")


def as_array(image: Image.Image | torch.Tensor) -> np.ndarray:
    if isinstance(image, torch.Tensor):
        image = image.permute(1, 2, 0).numpy()
    return np.asarray(image)


@pytest.mark.usefixtures("torchcodec")
@pytest.mark.parametrize(
    ("mode", "options", "by_torchcodec"),
    [
        ("RGB", {}, True),
        ("RGB", {"progressive": True, "subsampling": 0}, True),
        ("RGB", {"quality": 20, "subsampling": 1}, True),
        ("L", {}, True),
        ("CMYK", {}, False),
    ],
)
def test_torchcodec_has_the_pixels_of_pillow(
    tmp_path: Path, mode: str, options: dict[str, Any], by_torchcodec: bool
) -> None:
    for size in ((97, 63), (16, 16), (1, 1)):
        path = saved(picture(*size).convert(mode), tmp_path / "a.jpg", **options)
        image = open_image(path, decoder="torchcodec")
        assert isinstance(image, torch.Tensor) is by_torchcodec
        assert np.array_equal(as_array(image), read_image(path))


@pytest.mark.usefixtures("torchcodec")
@pytest.mark.parametrize("orientation", [0, *STORED, 77])
def test_torchcodec_turns_images_upright(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(picture(40, 30), tmp_path / "a.jpg", exif=exif)
    image = open_image(path, decoder="torchcodec")
    assert isinstance(image, torch.Tensor)
    assert np.array_equal(as_array(image), read_image(path))


@pytest.mark.usefixtures("torchcodec")
def test_torchcodec_has_the_pixels_of_pillow_on_photos(sample_data: Path) -> None:
    for path in sorted((sample_data / "coco2014_mini" / "val2014").glob("*.jpg"))[:10]:
        image = open_image(path, decoder="torchcodec")
        assert isinstance(image, torch.Tensor)
        assert np.array_equal(as_array(image), read_image(path))


@pytest.mark.usefixtures("torchcodec")
def test_pillow_reads_what_torchcodec_does_not_and_says_what_is_wrong(tmp_path: Path) -> None:
    path = saved(picture(40, 30), tmp_path / "a.png")
    assert np.array_equal(as_array(open_image(path, decoder="torchcodec")), read_image(path))

    # A shrunk image is Pillow's too.
    large = saved(picture(400, 300), tmp_path / "a.jpg")
    shrunk = open_image(large, draft=100, decoder="torchcodec")
    assert np.array_equal(as_array(shrunk), read_image(large, draft=100))

    content = large.read_bytes()
    for damaged in (b"", b"no image", content[:200], content[: len(content) // 2]):
        large.write_bytes(damaged)
        messages = []
        for decoder in DECODERS:
            with pytest.raises(DataError) as caught:
                open_image(large, decoder=decoder)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_too_large_an_image_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchcodec: None
) -> None:
    path = saved(picture(40, 30), tmp_path / "a.jpg")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 30 // 2 - 1)
    with pytest.raises(DataError, match="too large an image"):
        open_image(path, decoder="torchcodec")


def test_a_missing_decoder_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_decoder("pillow")
    with pytest.raises(ConfigError, match=r"^data.decoder: torchcodec .* 'mldec\[fast\]'"):
        check_decoder("torchcodec")
