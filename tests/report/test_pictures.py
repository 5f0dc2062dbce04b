import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mldec.data.base import ImageDataset, LabelledImages, StoredImages
from mldec.data.labels import from_dense
from mldec.data.storage.image_files import ImageFiles
from mldec.data.transforms import EvalTransform
from mldec.report.pictures import SIDE, Album, sees_all, thumbnail

LABELS = np.array([[1, 0], [1, 1], [-1, 0]], np.int8)


def stored(folder: Path, **settings: float) -> ImageDataset:
    """Return three stripes of 400 x 200 pixels: red, green and blue thirds from left to right."""
    pixels = np.zeros((200, 400, 3), np.uint8)
    for third in range(3):
        pixels[:, 400 * third // 3 : 400 * (third + 1) // 3, third] = 255
    for number in range(3):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    files = np.array([b"0.png", b"1.png", b"2.png"])
    images = LabelledImages(ImageFiles(folder, files, "see"), from_dense(LABELS), ("a", "b"))
    return StoredImages(images, EvalTransform(image_size=64, **settings))


def test_a_small_copy_shows_what_the_model_sees(tmp_path: Path) -> None:
    whole = stored(tmp_path)
    assert sees_all(whole)
    assert thumbnail(whole, 0).size == (SIDE, SIDE // 2)

    centre = stored(tmp_path, crop=0.5)
    assert not sees_all(centre)
    shown = thumbnail(centre, 0)
    assert shown.size == (64, 64)
    assert np.asarray(shown)[..., 1].min() > 200  # the green third alone


def test_each_image_is_in_the_album_once(tmp_path: Path) -> None:
    album = Album(stored(tmp_path), np.array([0, 2]), LABELS[[0, 2]], ("a", "b"))
    assert [album.add(row) for row in (1, 0, 1)] == [0, 1, 0]
    names = [Path(picture.name).name for picture in album.pictures]
    assert names == ["2.png", "0.png"]
    assert [picture.labels for picture in album.pictures] == [(), ("a",)]
    with Image.open(io.BytesIO(album.pictures[0].jpeg)) as image:
        assert (image.format, image.size) == ("JPEG", (SIDE, SIDE // 2))


@pytest.mark.parametrize(("budget", "count"), [(1, 1), (10_000, 3)])
def test_the_album_takes_no_more_than_its_budget(tmp_path: Path, budget: int, count: int) -> None:
    album = Album(stored(tmp_path), np.arange(3), LABELS, ("a", "b"), budget=budget)
    numbers = [album.add(row) for row in range(3)]
    assert numbers == [*range(count), *[None] * (3 - count)]
    assert len(album.pictures) == count
    assert album.add(0) == 0
