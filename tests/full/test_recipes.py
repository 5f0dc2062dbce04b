"""Recipes of papers and for the user's images train two steps with a small network."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import trees
from readers import write_picture
from support import header_commands, write_coco

from mldec import build
from mldec.config.compose import compose, options
from mldec.config.schema import Decay, Schedule, ScheduleName
from mldec.files.torch_files import read_torch

# Small networks of each family, whose parameters have the same names.
RESNET = ["backbone.name=resnet10t", "backbone.model_args={channels:[8,16,24,32]}"]
TRESNET = ["backbone.name=tresnet_m", "backbone.model_args={layers:[1,1,1,1]}"]
SWIN = [
    "backbone.name=swin_tiny_patch4_window7_224",
    "backbone.model_args={embed_dim:16,depths:[1,1,1,1],num_heads:[1,1,1,1]}",
]
SMALL_CVT = ["backbone.config={model_type:cvt,embed_dim:[8,8,16],num_heads:[1,1,2],depth:[1,2,3]}"]
VIT = ["backbone.model_args={embed_dim:32,depth:2,num_heads:2}"]

SMALL_HEAD = ["head.embed_dim=32", "head.mlp_dim=32"]
QUERY2LABEL = SMALL_HEAD + ["head.input_proj=true"]
WORDS = ["data.vectors=words.txt"]
PIXELS_56 = ["data.image_size=56"]  # a multiple of the patch size 14

RECIPES = {
    "asl_coco_tresnet_l_448": TRESNET,
    "coco_lt": RESNET + ["data.train=train2014", "data.val=val2014"],
    "cxr_lt": ["backbone.model_args={depths:[1,1,1,1],dims:[8,8,16,16]}"],
    "q2l_coco_resnet101_448": QUERY2LABEL + RESNET,
    "q2l_coco_swin_l_384": QUERY2LABEL + SWIN,
    "q2l_coco_cvt_w24_384": QUERY2LABEL + SMALL_CVT,
    "q2l_vg500_resnet101_576": QUERY2LABEL + RESNET,
    "q2l_voc2007_tresnet_l_448": QUERY2LABEL + TRESNET,
    "coco_dinov3_l_frozen": SMALL_HEAD + VIT,
    "coco_dinov3_b": SMALL_HEAD + VIT,
    "coco_clip_l_336": SMALL_HEAD + VIT + PIXELS_56 + WORDS,
    "nuswide_zsl_clip_b16": SMALL_HEAD + VIT + WORDS,
    "cub_single_positive": RESNET + ["data.fold=null"],
    "nuswide_single_positive": RESNET + ["data.fold=null", "data.images=."],
    "tags_tresnet_l": SMALL_HEAD + TRESNET,
    "csra_coco": RESNET,
    "csra_voc2007": RESNET,
    "hill_coco": RESNET,
    "finetune": [],
    "finetune_frozen": ["head=csra"],
    "finetune_dinov2": VIT + PIXELS_56,
    "finetune_dinov2_frozen": VIT + PIXELS_56,
}

# Two batches of one epoch on a CPU.
SHORT = [
    "data.root=data",
    "data.image_size=64",
    "backbone.pretrained=false",
    "train.epochs=1",
    "train.min_steps=null",
    "train.stop_epoch=null",
    "train.patience=null",
    "train.batch_size=4",
    "train.log_every=1",
    "train.precision=fp32",
    "train.ema_decay=0.9",
    "train.workers=0",
    "device=cpu",
]

# Eight images per split.
SPLITS = {"train": range(8), "val": range(8, 16)}


def write_voc(root):
    """Write both years with one object per image."""
    numbers = {**SPLITS, "trainval": SPLITS["train"], "test": SPLITS["val"]}
    splits = {split: {} for split in numbers}
    for split, images in splits.items():
        for number in numbers[split]:
            images[f"{number:06}"] = [(["cat", "dog"][number % 2], 0)]
    for year in (2007, 2012):
        trees.write_voc(root / "VOCdevkit" / f"VOC{year}", splits)


def write_nuswide(root):
    """Write the files of both readers. The validation images have an unseen class."""
    rows = []
    for split, numbers in SPLITS.items():
        for number in numbers:
            write_picture(root / "images" / f"{number}.jpg", red=16 * number)
            labels = f"['{['sky', 'cat', 'dog'][number % 3]}', 'sea']"
            rows.append((f"images/{number}.jpg", labels, split))
    for name in ("data.csv", "nus_wid_data.csv"):
        (root / name).write_text(trees.nuswide_csv(rows))
    for split, numbers in SPLITS.items():
        names = [f"images/{number}.jpg" for number in numbers]
        np.save(root / f"formatted_{split}_images.npy", np.array(names))
        np.save(root / f"formatted_{split}_labels.npy", np.eye(81)[numbers])
    roles = {"train class": ["cat", "sea", "sky"], "test class": ["dog"]}
    (root / "benchmark_81_v0.json").write_text(json.dumps(roles))


def write_cub(root):
    images = {}
    for is_train, numbers in ((1, SPLITS["train"]), (0, SPLITS["val"])):
        for number in numbers:
            images[f"001.Albatross/{number}.jpg"] = (is_train, ["101", "010"][number % 2])
    trees.write_cub(root, images)


def write_vg500(root):
    files = {"train": "train_list_500.txt", "val": "test_list_500.txt"}
    for split, file in files.items():
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


def write_coco_with_list(root):
    """Write eight images per split, and the list of training images of a long-tailed part."""
    write_coco(root, images=8)
    (root / "longtail2017").mkdir()
    names = [f"COCO_train2014_{number:012}" for number in range(8)]
    (root / "longtail2017" / "img_id.pkl").write_text("\n".join(names))


# Writers of a small tree, by the reader of an experiment.
DATA = {
    "coco": write_coco_with_list,
    "voc": write_voc,
    "nuswide81": write_nuswide,
    "nuswide_zsl": write_nuswide,
    "cub": write_cub,
    "vg500": write_vg500,
    "csv_table": write_own,
}


def write_word_vectors(path, width):
    lines = []
    for word in ("thing", "0", "1", "2", "sky", "cat", "dog", "sea"):
        numbers = " ".join(map(str, torch.randn(width).tolist()))
        lines.append(f"{word} {numbers}")
    path.write_text("\n".join(lines))


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_two_steps(name, cli, here, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    config = compose([f"+experiment={name}"])
    reader = config.data["_target_"].rpartition(".")[2]
    DATA[reader](here / "data")
    if "observed_list" in config.data:
        lines = [f"COCO_train2014_{number:012}.jpg,{number % 3}" for number in range(8)]
        (here / "data" / "coco_train_0.4left.txt").write_text("\n".join(lines))
    if "word_dim" in config.head:
        write_word_vectors(here / "data" / "words.txt", config.head["word_dim"])
    if "cvt" in name:
        pytest.importorskip("transformers", reason="needs the extra hf")

    cli.out("train", f"+experiment={name}", *SHORT, *RECIPES[name])
    state = read_torch(Path("outputs", name, "checkpoints", "last.pt"))
    assert (state["step"], state["epoch"]) == (2, 1)
    assert (state["classes"]["queries"] is not None) is ("word_dim" in config.head)

    # The average of the weights differs from the weights, except in a frozen backbone.
    moved = set()
    for key, value in state["model"].items():
        if value.is_floating_point() and not torch.equal(value, state["ema"][key]):
            moved.add(key)
    assert any(key.startswith("head.") for key in moved)
    is_frozen = "backbone" in config.train.freeze
    assert any(key.startswith("backbone.") for key in moved) is not is_frozen
    for prefix in config.train.freeze:
        assert any(key.startswith(prefix) for key in state["model"]), prefix

    if is_frozen and name.startswith("finetune"):
        assert list(Path("cache").rglob("*tokens*")), "the tokens are cached"


def test_recipes_have_official_settings():
    config = compose(["+experiment=q2l_coco_resnet101_448"])
    assert config.head == {"_target_": "mldec.heads.Query2Label"}
    assert config.data["annotated_only"] is False
    loss = config.loss
    assert (loss["gamma_neg"], loss["clip"], loss["eps"], loss["reduction"]) == (2, 0, 1e-5, "mean")
    assert (config.train.epochs, config.train.batch_size) == (80, 128)
    optim = config.optim
    assert (optim.name, optim.lr, optim.weight_decay) == ("adamw", 1e-4, 1e-2)

    step = {"name": ScheduleName.step, "warmup_epochs": 2}
    for name, heads, lam, every in (("coco", 4, 0.5, 5), ("voc2007", 1, 0.1, 4)):
        config = compose([f"+experiment=csra_{name}"])
        head = {"num_heads": heads, "lam": lam, "normalize": True}
        assert config.head == {"_target_": "mldec.heads.CSRA", **head}
        assert (config.data["crop"], config.data["flip"], config.data["cutout"]) == (0.7, True, 0)
        assert (config.train.epochs, config.train.batch_size) == (30, 16)
        optim = config.optim
        assert (optim.name, optim.lr, optim.backbone_lr) == ("momentum", 0.1, 0.01)
        assert (optim.weight_decay, optim.decay) == (1e-4, Decay.all)
        assert config.schedule == Schedule(**step, milestones=list(range(every, 30, every)))

    hill = compose(["+experiment=hill_coco"])
    assert hill.loss == {"_target_": "mldec.losses.HillLoss"}
    assert (hill.train.epochs, hill.train.stop_epoch, hill.train.batch_size) == (80, 31, 128)
    assert hill.data["observed_list"] == f"{hill.data['root']}/coco_train_0.4left.txt"
    assert (hill.backbone["mean"], hill.backbone["std"]) == ([0, 0, 0], [1, 1, 1])
    assert hill.optim == compose(["+experiment=coco_tresnet_l"]).optim

    asl = compose(["+experiment=asl_coco_tresnet_l_448"]).train
    assert (asl.epochs, asl.stop_epoch, asl.batch_size) == (80, 41, 128)


@pytest.mark.parametrize("name", options("experiment"))
def test_commands_in_headers_are_valid_and_select_no_epoch_on_test_images(name):
    commands = header_commands(name)
    assert ["train", f"+experiment={name}"] in [command[:2] for command in commands]
    for command, *words in commands:
        config = compose(words if command == "train" else [f"+experiment={name}"])
        parts = build.check(config)
        # A fit in closed form has no epochs to select.
        if command != "train" and not build.is_fitted(parts):
            # best.pt is a figure on test images only if held-out images selected the epoch.
            is_last = words[0].endswith("/checkpoints/last.pt")
            is_held_out = config.data.get("fold") is not None
            assert is_last or (is_held_out and words[1:] == ["data.fold=null"])


def test_commands_for_other_data_have_its_constants():
    trainings = [words for command, *words in header_commands("coco_lt") if command == "train"]
    coco, voc = [compose(words) for words in trainings]
    for config, negative_scale, mu in ((coco, 2.0, 0.2), (voc, 5.0, 0.3)):
        loss = build.recorded(config, build.check(config)).loss
        assert (loss["negative_scale"], loss["mu"]) == (negative_scale, mu)
    assert coco.data["_target_"].endswith(".coco")
    assert (voc.data["_target_"], voc.name) == ("mldec.data.readers.voc", "voc_lt")
    assert ["evaluate", f"outputs/{voc.name}/checkpoints/last.pt"] in [
        command[:2] for command in header_commands("coco_lt")
    ]

    # The training uses left-out scores instead of the test photos.
    train, test = header_commands("corel5k")
    config = compose(train[1:])
    assert config.data["val"] == "train"
    assert config.head["_target_"].endswith(".RidgeHead")
    assert test == ["evaluate", f"outputs/{config.name}", "data.val=test"]
