"""Files of make_digits.py, read by the readers of the package, match the scenes."""

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from support import made

from mldec import build
from mldec.config.compose import compose
from mldec.data import readers
from mldec.data.loader import labels_of
from mldec.data.types import fixed_sample
from mldec.training.start import check_together
from mldec.words.digits import NAMES

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_digits.py"
spec = importlib.util.spec_from_file_location("make_digits", SCRIPT)
make_digits = importlib.util.module_from_spec(spec)
sys.modules["make_digits"] = make_digits  # dataclasses look their module up
spec.loader.exec_module(make_digits)

TRAIN = 30
VAL = 12

# The defaults of ImageNet crop the images.
WHOLE = {"crop": 1, "test_crop": None, "flip": False}
READERS = {
    "coco": (readers.coco, {}),
    "voc": (readers.voc, {"difficult_train": "ignore"}),
    "openimages": (readers.openimages_miil, {}),
    "imagenet": (readers.imagenet, {"class_map": "folders", **WHOLE}),
    "csv": (readers.csv_table, {}),
    "yolo": (readers.yolo, {}),
}


@pytest.fixture
def make(tmp_path, monkeypatch):
    def make(layout, *args, out="out"):
        counts = ["--train", str(TRAIN), "--val", str(VAL), "--size", "32"]
        words = ["make_digits.py", "--layout", layout, str(tmp_path / out), *counts, *args]
        monkeypatch.setattr(sys, "argv", words)
        make_digits.main()
        return tmp_path / out

    return make


def scenes(**least_and_most):
    args = argparse.Namespace(train=TRAIN, val=VAL, size=32, seed=0, layout="")
    return list(make_digits.scenes(args, **least_and_most))


@pytest.mark.parametrize("layout", READERS)
def test_readers_find_the_labels_of_each_scene(make, layout, tmp_path):
    reader, arguments = READERS[layout]
    plain = {"image_size": 32, "augment": "none", "cutout": 0.0, "cache_dir": str(tmp_path)}
    data = made(reader, root=str(make(layout)), **plain, **arguments)
    drawn = scenes(least=1, most=1) if layout == "imagenet" else scenes()

    unknown = 0
    for split, part in (("train", data.train), ("val", data.val)):
        dataset, names = part.dataset, part.classes.names
        own = [scene for scene in drawn if scene.split == split]
        # The reader of MS-COCO skips scenes without a digit.
        assert len(dataset) == sum(bool(scene.digits) or layout != "coco" for scene in own)

        for index in range(len(dataset)):
            image, target = fixed_sample(dataset, index)
            pixels = image.permute(1, 2, 0).numpy().astype(float)
            distances = [np.abs(pixels - np.asarray(scene.image, float)).mean() for scene in own]
            scene = own[int(np.argmin(distances))]
            assert min(distances) < 12

            for k, value in enumerate(target.tolist()):
                # VOC and ImageNet have other class names.
                digit = NAMES.index(names[k]) if names[k] in NAMES else k
                assert value in (-1, digit in scene.digits)
                unknown += value == -1

    # Difficult objects in VOC, and unverified labels in Open Images.
    assert (unknown > 0) == (layout in ("voc", "openimages"))


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("layout", sorted(make_digits.LAYOUTS))
def test_the_same_arguments_give_the_same_files(make, layout):
    one, two = make(layout, out="a"), make(layout, out="b")
    assert content(one) == content(two) != content(make(layout, "--seed", "1", out="c"))


@pytest.mark.parametrize("layout", sorted(make_digits.LAYOUTS))
def test_printed_command_trains_on_the_files(make, layout, capsys):
    # With fewer images, some classes of the zero-shot layout do not occur.
    folder = make(layout, "--train", "300", out="my digits")
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:2] == ["mldec", "train"]
    config = compose(words[2:])
    assert config.data["image_size"] == 64
    assert config.name == f"digits_{layout}"

    parts = build.check(config)
    data = build.data(parts)
    assert Path(data.train.dataset.name(0)).is_relative_to(folder)
    assert 200 < len(data.train.dataset) <= 300
    check_together(config, data, build.loss(parts, lambda: labels_of(data.train, 0), data.train))
    model = build.model(parts, data.val.classes)
    images = fixed_sample(data.val.dataset, 0)[0][None]
    vectors = data.val.classes.word_vectors
    logits = model(images) if vectors is None else model(images, vectors)
    assert logits.shape == (1, len(data.val.classes))


def test_existing_folder_is_not_changed(make, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(SystemExit):
        make("csv")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
