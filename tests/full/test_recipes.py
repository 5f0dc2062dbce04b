"""Recipes: each trains two steps; those of the papers with a small network of the family."""

import json
from pathlib import Path

import pytest
import torch
import trees
from readers import write_picture
from support import write_coco

from mldec.config.compose import compose, options
from mldec.files.torch_files import read_torch

RECIPES = [name for name in options("experiment") if name.startswith(("q2l_", "asl_"))]
# A small network of the same family, whose parameters have the same names.
NETWORKS = {
    "resnet101": ["backbone.name=resnet10t", "backbone.model_args={channels:[8,16,24,32]}"],
    "tresnet": ["backbone.name=tresnet_m", "backbone.model_args={layers:[1,1,1,1]}"],
    "swin_l": [
        "backbone.name=swin_tiny_patch4_window7_224",
        "backbone.model_args={embed_dim:16,depths:[1,1,1,1],num_heads:[1,1,1,1]}",
    ],
}
SMALL = ["backbone.pretrained=false", "data.image_size=64", "train.workers=0", "device=cpu"]
# Two batches of one epoch, which is fewer than the recipes need to end early.
SHORT = [
    "train.epochs=1",
    "train.stop_epoch=null",
    "train.patience=null",
    "train.batch_size=4",
    "train.log_every=1",
    "train.precision=fp32",
]
SMALL_HEAD = ["head.embed_dim=32", "head.mlp_dim=32"]

# Eight images per split.
SPLITS = {"train": range(8), "val": range(8, 16)}


def write_voc(root):
    """Write both years, each image with one object."""
    numbers = {**SPLITS, "trainval": SPLITS["train"], "test": SPLITS["val"]}
    splits = {
        split: {f"{number:06}": [(["cat", "dog"][number % 2], 0)] for number in numbers[split]}
        for split in numbers
    }
    for year in (2007, 2012):
        trees.write_voc(root / "VOCdevkit" / f"VOC{year}", splits)


def write_nuswide(root):
    """Write both forms; val shows the unseen class too."""
    rows = []
    for split, numbers in SPLITS.items():
        for number in numbers:
            write_picture(root / "images" / f"{number}.jpg", red=16 * number)
            labels = f"['{['sky', 'cat', 'dog'][number % 3]}', 'sea']"
            rows.append((f"images/{number}.jpg", labels, split))
    for name in ("data.csv", "nus_wid_data.csv"):
        (root / name).write_text(trees.nuswide_csv(rows))
    roles = {"train class": ["cat", "sea", "sky"], "test class": ["dog"]}
    (root / "benchmark_81_v0.json").write_text(json.dumps(roles))


def write_vg500(root):
    for split, file in (("train", "train_list_500.txt"), ("val", "test_list_500.txt")):
        names = [f"{number}.jpg" for number in SPLITS[split]]
        for number, name in enumerate(names):
            write_picture(root / "VG_100K" / name, red=number)
        (root / file).write_text("\n".join(names))
    labels = {f"{number}.jpg": [number % 2] for number in range(16)}
    (root / "vg_category_500_labels_index.json").write_text(json.dumps(labels))


def write_own(root):
    """Write a table for `data=csv`."""
    lines = ["path,labels,split"]
    for split, numbers in SPLITS.items():
        for number in numbers:
            write_picture(root / f"{number}.jpg", red=16 * number)
            lines.append(f"{number}.jpg,{['cat', 'cat;dog', 'dog', ''][number % 4]},{split}")
    (root / "data.csv").write_text("\n".join(lines) + "\n")


# The reader that an experiment names, and the writer of its small tree.
DATA = {
    "coco": lambda root: write_coco(root, images=8),
    "voc": write_voc,
    "nuswide81": write_nuswide,
    "nuswide_zsl": write_nuswide,
    "vg500": write_vg500,
    "csv_table": write_own,
}


@pytest.fixture
def train(cli, here, monkeypatch):
    """Train an experiment for two steps on data of its form; return the checkpoint."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))

    def train(name, *words):
        reader = compose([f"+experiment={name}"]).data["_target_"].rpartition(".")[2]
        DATA[reader](here / "data")
        settings = [f"+experiment={name}", "data.root=data", *SMALL, *SHORT, *words]
        cli.out("train", *settings)

        state = read_torch(Path("outputs", name, "checkpoints", "last.pt"))
        assert (state["step"], state["epoch"]) == (2, 1)
        return state

    return train


@pytest.mark.parametrize("name", [name for name in RECIPES if "cvt" not in name])
def test_a_recipe_trains_two_steps(name, train):
    network = next(settings for family, settings in NETWORKS.items() if family in name)
    head = [*SMALL_HEAD, "head.input_proj=true"] if name.startswith("q2l") else []
    state = train(name, *network, *head)

    # What a recipe freezes is there.
    for prefix in compose([f"+experiment={name}"]).train.freeze:
        assert any(key.startswith(prefix) for key in state["model"]), prefix


def test_the_recipe_with_cvt_trains_two_steps(train, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    small = transformers.CvtConfig(embed_dim=[8, 8, 16], num_heads=[1, 1, 2], depth=[1, 2, 3])
    small.save_pretrained(tmp_path / "cvt")
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "cvt" / "preprocessor_config.json").write_text(json.dumps(processor))
    train("q2l_coco_cvt_w24_384", *SMALL_HEAD, "head.input_proj=true", "backbone.name=cvt")


def test_recipes_are_those_of_the_official_commands():
    config = compose(["+experiment=q2l_coco_resnet101_448"])
    assert config.head == {"_target_": "mldec.heads.Query2Label"}
    assert config.data["annotated_only"] is False
    loss = config.loss
    assert (loss["gamma_neg"], loss["clip"], loss["eps"], loss["reduction"]) == (2, 0, 1e-5, "mean")
    assert (config.train.epochs, config.train.batch_size) == (80, 128)
    optim = config.optim
    assert (optim.name, optim.lr, optim.weight_decay) == ("adamw", 1e-4, 1e-2)

    asl = compose(["+experiment=asl_coco_tresnet_l_448"]).train
    assert (asl.epochs, asl.stop_epoch, asl.batch_size) == (80, 41, 128)


# Encoders of images, with a small network of their kind.
SHALLOW = "backbone.model_args={embed_dim:32,depth:2,num_heads:2}"
ENCODERS = {
    "coco_dinov3_l_frozen": ["data.image_size=64", SHALLOW],
    "coco_dinov3_b": ["data.image_size=64", SHALLOW],
    "coco_dinov2_b": ["data.image_size=56", SHALLOW],
    "coco_clip_l_336": ["data.image_size=56", SHALLOW, "data.vectors=words.txt"],
    "nuswide_zsl_clip_b16": ["data.image_size=64", SHALLOW, "data.vectors=words.txt"],
    "tags_tresnet_l": ["data.image_size=64", *NETWORKS["tresnet"]],
}


@pytest.mark.parametrize("name", ENCODERS)
def test_a_recipe_for_a_later_network_trains_two_steps(name, train, tmp_path):
    # The text encoder is not here: a file has vectors of its width.
    config = compose([f"+experiment={name}"])
    width = config.head.get("word_dim", 1)
    words = ["thing", "0", "1", "2", "sky", "cat", "dog", "sea"]
    rows = torch.randn(len(words), width).tolist()
    lines = [" ".join([word, *map(str, row)]) for word, row in zip(words, rows, strict=True)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "words.txt").write_text("\n".join(lines))

    state = train(name, *SMALL_HEAD, *ENCODERS[name], "train.ema_decay=0.9")

    # Only the weights of a frozen backbone stay as they were: their average does not move.
    tensors = {key: value for key, value in state["model"].items() if value.is_floating_point()}
    moved = [key for key, value in tensors.items() if not torch.equal(value, state["ema"][key])]
    assert any(key.startswith("head.") for key in moved)
    is_frozen = "backbone" in config.train.freeze
    assert any(key.startswith("backbone.") for key in moved) is not is_frozen
    assert (state["classes"]["queries"] is not None) is ("word_dim" in config.head)


# The recipes for photos of one's own, with what makes their network small.
OWN_PHOTOS = {"": [], "_dinov2": ["data.image_size=56", SHALLOW], "_siglip2": [SHALLOW]}


@pytest.mark.parametrize("network", OWN_PHOTOS)
@pytest.mark.parametrize("whole", [True, False])
def test_a_recipe_for_own_photos_trains_two_steps(network, whole, train):
    name = f"finetune{network}" if whole else f"finetune{network}_frozen"
    settings = ["train.ema_decay=0.9", "train.min_steps=null", *OWN_PHOTOS[network]]
    state = train(name, *settings)

    # The average of the weights moves where they do.
    backbone = [key for key in state["model"] if key.startswith("backbone.")]
    moved = [key for key in backbone if not torch.equal(state["model"][key], state["ema"][key])]
    assert bool(moved) is whole
    if not whole:
        assert list(Path("cache").rglob("*tokens*")), "its tokens are kept"
