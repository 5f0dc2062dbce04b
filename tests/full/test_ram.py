"""Commands with a small file in the layout of RAM++."""

import json
from xml.dom import minidom

import numpy as np
import pytest
import ram_files
from pictures import picture

from mldec.checkpoint import load_model
from mldec.checkpoint.sources import TAG_LIST, TAG_THRESHOLDS
from mldec.evaluation.run import scores

TAGS = ("dog", "living room", "sofa", "tree", "Set")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A photo, and a file of RAM++ with its two lists."""
    root = tmp_path_factory.mktemp("ram")
    picture(60, 50).save(root / "0.png")
    (root / TAG_LIST).write_text("\n".join(TAGS))

    # Half of the tags are above their thresholds.
    path = ram_files.write(root / "ram_plus_swin_large_14m.pth", len(TAGS))
    values = answer(root).tolist()
    level = [f"{value - 0.001 * (-1) ** k:.6f}" for k, value in enumerate(values)]
    (root / TAG_THRESHOLDS).write_text("\n".join(level[:-1]) + "\n1\n")
    return path.parent


def file(root):
    return root / "ram_plus_swin_large_14m.pth"


def answer(root):
    """Return the scores of the photo [K]."""
    loaded = load_model(file(root))
    return scores(loaded, loaded.transform(picture(60, 50))[None])[0]


def decided(root):
    """Return the tags of the photo by the rule of the authors."""
    limits = np.array((root / TAG_THRESHOLDS).read_text().split(), np.float32)
    return [tag for tag, one in zip(TAGS, answer(root).numpy() > limits, strict=True) if one]


def test_predict_tags(cli, root):
    words = ["predict", file(root), root / "0.png"]
    out = cli.out(*words, "--content", "decisions", "--jsonl", "-")
    assert sorted(json.loads(out)["classes"]) == sorted(decided(root))
    assert "Set" not in decided(root)
    assert 0 < len(decided(root)) < 4

    # The same tags as keywords of the photo.
    cli.out(*words, "--content", "decisions", "--xmp")
    items = minidom.parse(str(root / "0.png.xmp")).getElementsByTagName("dc:subject")
    keywords = [item.firstChild.data for item in items[0].getElementsByTagName("rdf:li")]
    assert sorted(keywords) == sorted(decided(root))
