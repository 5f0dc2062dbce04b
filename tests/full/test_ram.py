"""Commands with a small file in the layout of RAM++."""

import csv
import json
from xml.dom import minidom

import numpy as np
import pytest
import ram_files
import torch
from pictures import picture

from mldec.checkpoint import load_model
from mldec.checkpoint.loading import load
from mldec.checkpoint.sources import TAG_LIST, TAG_THRESHOLDS
from mldec.evaluation.run import scores

TAGS = ("dog", "living room", "sofa", "tree", "Set")
CLASSES = ("tree", "couch", "puppy")  # of other data
SYNONYMS = "tree\ncouch; sofa\npuppy; dog; Living-Room\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Six photos with one class each, and a file of RAM++."""
    root = tmp_path_factory.mktemp("ram")
    data = root / "data"
    data.mkdir()
    rows = []
    for number in range(6):
        picture(60, 50, seed=number).save(data / f"{number}.png")
        rows.append([f"{number}.png", CLASSES[number % 3], "train" if number < 3 else "val"])
    with (data / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "labels", "split"], *rows])
    (root / TAG_LIST).write_text("\n".join(TAGS))

    # Half of the tags of the first photo are above their thresholds.
    path = ram_files.write(root / "ram_plus_swin_large_14m.pth", len(TAGS))
    (root / "classes.txt").write_text(SYNONYMS)
    values = answers(root)[0]
    level = [f"{value - 0.001 * (-1) ** k:.6f}" for k, value in enumerate(values.tolist())]
    (root / TAG_THRESHOLDS).write_text("\n".join(level[:-1]) + "\n1\n")
    return path.parent


def file(root):
    return root / "ram_plus_swin_large_14m.pth"


def answers(root):
    """Return the scores of all photos [6, K]."""
    loaded = load_model(file(root))
    images = [picture(60, 50, seed=number) for number in range(6)]
    return scores(loaded, torch.stack([loaded.transform(image) for image in images]))


def decided(root):
    """Return the tags of the first photo by the rule of the authors."""
    limits = np.array((root / TAG_THRESHOLDS).read_text().split(), np.float32)
    return [tag for tag, one in zip(TAGS, answers(root)[0].numpy() > limits, strict=True) if one]


def test_predict_tags(cli, root):
    words = ["predict", file(root), root / "data" / "0.png"]
    status, out, err = cli(*words, "--content", "decisions", "--jsonl", "-")
    assert (status, err) == (0, "")
    assert sorted(json.loads(out)["classes"]) == sorted(decided(root))
    assert "Set" not in decided(root)
    assert 0 < len(decided(root)) < 4

    # The same tags as keywords of the photo.
    cli.out(*words, "--content", "decisions", "--xmp")
    items = minidom.parse(str(root / "data" / "0.png.xmp")).getElementsByTagName("dc:subject")
    keywords = [item.firstChild.data for item in items[0].getElementsByTagName("rdf:li")]
    assert sorted(keywords) == sorted(decided(root))


def test_exported_file_gives_same_scores(cli, root):
    out = root / "tagger.onnx"
    text = cli.out("export", file(root), out)
    assert TAG_THRESHOLDS in text
    status, text, err = cli("predict", out, root / "data", "--content", "scores", "--jsonl", "-")
    assert (status, err) == (0, "")
    rows = sorted((json.loads(line) for line in text.splitlines()), key=lambda row: row["image"])
    exported = [[row["scores"][tag] for tag in TAGS] for row in rows]
    np.testing.assert_allclose(exported, answers(root), rtol=0, atol=1e-4)


def test_evaluate_by_names_and_synonyms(cli, root):
    settings = ["data=csv", f"data.root={root / 'data'}", "train.workers=0"]
    words = ["--class-list", root / "classes.txt", "--json", root / "e.json"]
    out = cli.out("evaluate", file(root), *settings, *words)
    assert "4 known names" in out
    content = json.loads((root / "e.json").read_text())
    assert content["images"] == 3

    # Each class has one positive among three photos: its AP is one over the rank of this one.
    values = answers(root)[3:].numpy()
    columns = {"tree": [3], "couch": [2], "puppy": [0, 1]}
    for number, (name, own) in enumerate(columns.items()):
        best = values[:, own].max(1)
        rank = 1 + int((best > best[number]).sum())
        assert content["per_class"][name]["AP"] == pytest.approx(100 / rank)
    assert content["metrics"]["mAP"] > 0


def test_init_by_name_copies_rows_of_tags(cli, root, here):
    out = cli.out(
        "train",
        "+experiment=finetune_frozen",
        "name=mine",
        f"data.root={root / 'data'}",
        "data.image_size=224",
        "backbone=timm",
        f"backbone.name={ram_files.SWIN}",
        "backbone.pretrained=false",
        "backbone.image_size=224",
        "head=ram",
        "head.descriptions=51",
        *(f"head.{name}={value}" for name, value in ram_files.HEAD.items()),
        f"init.path={file(root)}",
        "init.classes=by_name",
        f"init.synonyms={root / 'classes.txt'}",
        "train.start_at_frequency=false",
        "train.epochs=1",
        "train.min_steps=1",
        "train.batch_size=1",
        "train.workers=0",
        "optim.lr=1e-9",
        f"data.cache_dir={root / 'cache'}",
        "device=cpu",
    )
    assert "(couch, puppy, tree)" in out
    rows = load(here / "outputs/mine/checkpoints/last.pt").model["head.label_embed"]
    released = load_model(file(root)).model.head.label_embed.detach()
    names = load(here / "outputs/mine/checkpoints/last.pt").classes.names
    for name, tag in (("tree", 3), ("couch", 2), ("puppy", 0)):
        row = names.index(name)
        mine, theirs = rows[51 * row : 51 * (row + 1)], released[51 * tag : 51 * (tag + 1)]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
