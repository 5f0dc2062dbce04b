"""The charts of `mldec check-data --out`, which need matplotlib."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image
from support import write_coco

from mldec.tools.check_data import examine
from mldec.tools.check_data.examine import bar_chart
from mldec.tools.pages import NAME_LENGTH, save


@pytest.fixture
def words(tmp_path):
    root = tmp_path / "coco"
    write_coco(root)
    for number, path in enumerate(sorted(root.rglob("*.jpg"))):
        rng = np.random.default_rng(number)
        Image.fromarray(rng.integers(0, 255, (30, 40, 3), np.uint8)).save(path)
    return ["data=coco", f"data.root={root}", f"data.cache_dir={tmp_path}", "train.workers=0"]


def test_bar_chart_names_the_largest_counts_first(tmp_path):
    names = ["$x^2$", "two\nlines" * 30, "dog"]
    figure = bar_chart(np.array([3, 0, 1200]), names, r"train: $\frac{$")
    save(figure, tmp_path / "bars.png")
    [axes] = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [1200, 3, 0]
    assert [text.get_text() for text in axes.texts] == ["1,200", "3", "0"]
    labels = axes.get_yticklabels()
    assert [label.get_text() for label in labels][:2] == ["dog", "$x^2$"]
    assert not labels[1].get_parse_math()
    assert len(labels[2].get_text()) <= NAME_LENGTH

    # The chart of many classes has one outline without names.
    many = bar_chart(np.arange(9_605), [str(index) for index in range(9_605)], "title")
    [outline] = many.axes[0].patches
    assert outline.get_data().values.tolist() == list(range(9_605))[::-1]


def test_missing_glyphs_of_a_chart_are_named(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="mldec")
    for names, expected in ((["caf\u00e9", "dog"], 0), (["\u732b", "\u72ac\u732b"], 1)):
        caplog.clear()
        save(bar_chart(np.array([3, 1]), names, "title"), tmp_path / "bars.png")
        notes = [text for text in caplog.messages if "bars.png" in text and "font.family" in text]
        assert len(notes) == expected
        assert all("\u732b, \u72ac" in text or "\u72ac, \u732b" in text for text in notes)


def test_sample_sheet_shows_the_settings_of_training(cli, words, tmp_path, monkeypatch):
    sheets = []
    sample_sheet = examine.sample_sheet

    def collect(batches, classes):
        sheets.append(batches)
        return sample_sheet(batches, classes)

    monkeypatch.setattr(examine, "sample_sheet", collect)
    recipe = [*words, "+experiment=finetune_frozen", "train.epochs=3", "--decode", "0"]
    for more in ([], ["train.cache_features=false", "mix.mixup=1"]):
        cli.out("check_data", *recipe, *more, "--out", tmp_path / "charts")

    # The recipe has no augmentation.
    plain, mixed = sheets
    assert torch.equal(plain["as in training"].images, plain[""].images)
    assert not torch.equal(mixed["as in training"].images, plain[""].images)

    files = {path.name for path in (tmp_path / "charts").iterdir()}
    assert files == {"samples.png", "train_classes.png", "val_classes.png"}
    with Image.open(tmp_path / "charts" / "samples.png") as samples:
        assert samples.size == (1200, 960)  # four rows of six images
        assert len(samples.getcolors(1 << 24)) > 1_000
