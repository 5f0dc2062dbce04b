"""The example of a plugin in docs/extending.md, as a user would write it."""

import re
import sys
from pathlib import Path

import pytest
from pictures import picture

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"
TINY = ["data.train_images=16", "data.val_images=8", "train.batch_size=8", "train.epochs=1"]
TINY += ["train.workers=0", "head.embed_dim=16", "head.mlp_dim=16", "device=cpu"]


@pytest.fixture
def example(here, monkeypatch):
    """Write the files of the example to the working folder."""
    text = PAGE.read_text(encoding="utf-8")
    files = dict(re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert sorted(files) == ["configs/backbone/conv.yaml", "myparts/__init__.py"]
    for name, content in files.items():
        path = here / name
        path.parent.mkdir(parents=True)
        path.write_text(content, encoding="utf-8")
    # `python -m` finds packages in the working folder.
    monkeypatch.syspath_prepend(here)
    yield
    sys.modules.pop("myparts", None)


def test_example_trains_and_predicts(cli, here, example):
    words = ["+experiment=digits", "plugins=[myparts]", "--config-dir=configs", "backbone=conv"]
    trained = cli("train", *words, "name=digits_conv", *TINY)
    assert trained.status == 0, trained.err

    picture(64, 64).save(here / "photo.jpg")
    answered = cli("predict", "outputs/digits_conv", "photo.jpg", "--plugin", "myparts")
    assert answered.status == 0, answered.err
    assert answered.out.splitlines()[-1].startswith("photo.jpg: ")
