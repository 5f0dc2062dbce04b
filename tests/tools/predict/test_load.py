"""`mldec.load`: forms of photos and errors."""

import numpy as np
import pytest
import torch
from patches import Patches
from pictures import picture
from PIL import Image

import mldec
from mldec.errors import DataError
from mldec.tools.predict.photos import items

OPTIONS = {"plugin": ["patches"], "device": "cpu", "threshold": 0.0, "top": 2}


@pytest.fixture(scope="module")
def model(best):
    return mldec.load(best, batch_size=4, **OPTIONS)


@pytest.fixture
def folder(tmp_path):
    for seed in range(3):
        picture(64, 48, seed=seed).save(tmp_path / f"{seed}.png")
    return tmp_path


def pairs(row):
    return [(name, pytest.approx(score, abs=1e-6)) for name, score in row]


def test_all_forms_of_a_photo_have_the_same_predictions(model, folder):
    path = folder / "1.png"
    image = Image.open(path).convert("RGB")
    pixels = np.asarray(image)
    channels_first = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    expected = pairs(model(path))
    assert len(expected) == 2

    alpha = np.dstack([pixels, np.full((48, 64), 7, np.uint8)])
    for photo in (str(path), path.read_bytes(), image, pixels, channels_first, alpha):
        assert list(model(photo)) == expected, type(photo)

    gray = image.convert("L")
    of_gray = pairs(model(gray))
    values = np.asarray(gray)
    for photo in (values, values[..., None], torch.from_numpy(values.copy())[None]):
        assert list(model(photo)) == of_gray, photo.shape


def test_folders_generators_and_batches_give_lists(model, folder):
    paths = sorted(folder.glob("*.png"))
    expected = [pairs(model(path)) for path in paths]
    arrays = np.stack([np.asarray(Image.open(path)) for path in paths])
    tensors = torch.from_numpy(arrays).permute(0, 3, 1, 2)
    for photos in (folder, str(folder), paths, (path for path in paths), arrays, tensors):
        assert [list(row) for row in model(photos)] == expected

    assert [row.image for row in model([folder, arrays[0]])] == [*map(str, paths), "image 1"]
    row = model(paths[0])
    assert row.scores.shape == (10,)
    assert row[0] == (row.predictions[0].name, row.predictions[0].score)


def test_list_is_scored_in_batches(model, folder, monkeypatch):
    sizes = []
    forward = Patches.forward

    def counting(self, images):
        sizes.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(Patches, "forward", counting)
    state = torch.random.get_rng_state()
    assert len(model([folder / "0.png"] * 6)) == 6
    assert sizes == [4, 2]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_unreadable_photo_keeps_the_other_rows(model, folder):
    (folder / "bad.png").write_bytes(b"no image")
    cut = folder / "cut.png"
    cut.write_bytes((folder / "0.png").read_bytes()[:200])
    no_range = Image.new("F", (8, 8))
    photos = [folder / "bad.png", Image.open(cut), folder / "absent.png", b"", no_range]
    *failed, last = model([*photos, folder / "0.png"])
    assert list(last) == pairs(model(folder / "0.png"))
    names = ("bad.png", "cut.png", "absent.png", "image 3", "image 4")
    for row, name in zip(failed, names, strict=True):
        assert name in row.error
        assert name in row.image
        assert row.scores is None
        assert list(row) == []

    for photo, name in zip(photos, ("bad", "cut", "absent", "image 0", "image 0"), strict=True):
        with pytest.raises(DataError, match=name):
            model(photo)


@pytest.mark.parametrize(
    ("photo", "named"),
    [
        (None, "NoneType"),
        (np.zeros((8, 8, 3)), "float64"),
        (np.zeros((8, 8, 2), np.uint8), r"\[8, 8, 2\]"),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), r"Tensor \[8, 8, 3\]"),
    ],
)
def test_unsupported_value_raises_an_error(photo, named):
    with pytest.raises(DataError, match=named):
        list(items(photo))
