"""Recipes: each trains two steps; those of the papers with a small network of the family."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from readers import write_picture
from support import write_coco

from mldec.config.compose import compose, experiments
from mldec.files.torch_files import read_torch

RECIPES = [name for name in experiments() if name.startswith(("q2l_", "asl_"))]
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
SMALL_HEAD = ["head.embed_dim=32", "head.mlp_dim=32", "head.input_proj=true"]


def write_voc(root: Path, year: str) -> None:
    """Write eight images per split of a VOC tree, each with one object."""
    tree = root / "VOCdevkit" / f"VOC{year}"
    (tree / "Annotations").mkdir(parents=True)
    (tree / "ImageSets" / "Main").mkdir(parents=True)
    for split, first in (("train", 0), ("trainval", 0), ("val", 8), ("test", 8)):
        names = [f"{number:06}" for number in range(first, first + 8)]
        (tree / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(names))
        for number, name in enumerate(names):
            kind = ["cat", "dog"][number % 2]
            write_picture(tree / "JPEGImages" / f"{name}.jpg", red=number)
            (tree / "Annotations" / f"{name}.xml").write_text(
                f"<annotation><object><name>{kind}</name><difficult>0</difficult></object>"
                f"</annotation>"
            )


def write_nuswide(root: Path) -> None:
    """Write eight images per split in the CSV form of ASL."""
    lines = ["filepath,label,split_name"]
    for number in range(16):
        write_picture(root / "images" / f"{number}.jpg", red=number)
        split = "train" if number < 8 else "val"
        lines.append(f"images/{number}.jpg,\"['{['sky', 'cat'][number % 2]}']\",{split}")
    (root / "nus_wid_data.csv").write_text("\n".join(lines) + "\n")


def write_vg500(root: Path) -> None:
    """Write eight images per split in the form of SSGRL."""
    names = [f"{number}.jpg" for number in range(16)]
    for number, name in enumerate(names):
        write_picture(root / "VG_100K" / name, red=number)
    (root / "train_list_500.txt").write_text("\n".join(names[:8]))
    (root / "test_list_500.txt").write_text("\n".join(names[8:]))
    labels = {name: [number % 2] for number, name in enumerate(names)}
    (root / "vg_category_500_labels_index.json").write_text(json.dumps(labels))


def write_data(name: str, root: Path) -> None:
    """Write a small tree of the dataset that a recipe is for."""
    if "_coco_" in name:
        write_coco(root, images=8)
    elif "_voc" in name:
        write_voc(root, year=name.partition("_voc")[2][:4])
    elif "_nuswide81_" in name:
        write_nuswide(root)
    else:
        write_vg500(root)


def network(name: str) -> list[str]:
    """Return the settings of a small network of a recipe's family."""
    return next(settings for family, settings in NETWORKS.items() if family in name)


@pytest.mark.parametrize("name", [name for name in RECIPES if "cvt" not in name])
def test_a_recipe_trains_two_steps(
    name: str, cli: Callable[..., tuple[int, str, str]], monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_data(name, tmp_path / "data")

    words = [*SMALL, *SHORT, *network(name), *(SMALL_HEAD if name.startswith("q2l") else [])]
    status, _, err = cli("train", f"+experiment={name}", "data.root=data", *words)
    assert status == 0, err
    state = read_torch(Path("outputs", name, "checkpoints", "last.pt"))
    assert (state["step"], state["epoch"]) == (2, 1)

    # What a recipe freezes stays as it was built.
    frozen = compose([f"+experiment={name}"]).train.freeze
    for prefix in frozen:
        assert any(key.startswith(prefix) for key in state["model"]), prefix


def test_the_recipe_with_cvt_trains_two_steps(
    cli: Callable[..., tuple[int, str, str]], monkeypatch, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = "q2l_coco_cvt_w24_384"
    write_data(name, tmp_path / "data")
    small = transformers.CvtConfig(embed_dim=[8, 8, 16], num_heads=[1, 1, 2], depth=[1, 2, 3])
    small.save_pretrained(tmp_path / "cvt")
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "cvt" / "preprocessor_config.json").write_text(json.dumps(processor))

    words = [*SMALL, *SHORT, *SMALL_HEAD, "backbone.name=cvt"]
    status, _, err = cli("train", f"+experiment={name}", "data.root=data", *words)
    assert status == 0, err
    state = read_torch(Path("outputs", name, "checkpoints", "last.pt"))
    assert (state["step"], state["epoch"]) == (2, 1)


def test_a_recipe_of_query2label_is_that_of_the_official_command() -> None:
    config = compose(["+experiment=q2l_coco_resnet101_448"])
    assert config.head == {"_target_": "mldec.heads.Query2Label"}
    assert config.data["annotated_only"] is False
    loss = config.loss
    assert (loss["gamma_neg"], loss["clip"], loss["eps"], loss["reduction"]) == (2, 0, 1e-5, "mean")
    assert (config.train.epochs, config.train.batch_size) == (80, 128)
    optim = config.optim
    assert (optim.name, optim.lr, optim.weight_decay) == ("adamw", 1e-4, 1e-2)


def test_a_recipe_of_asl_stops_after_41_of_80_epochs() -> None:
    train = compose(["+experiment=asl_coco_tresnet_m_224"]).train
    assert (train.epochs, train.stop_epoch, train.batch_size) == (80, 41, 128)


def write_own(root: Path) -> None:
    """Write eight images per split in the form of `data=csv`."""
    lines = ["path,labels,split"]
    for number in range(16):
        write_picture(root / f"{number}.jpg", red=16 * number)
        labels = ["cat", "cat;dog", "dog", ""][number % 4]
        lines.append(f"{number}.jpg,{labels},{'train' if number < 8 else 'val'}")
    (root / "data.csv").write_text("\n".join(lines) + "\n")


def write_nuswide_zsl(root: Path) -> None:
    """Write eight images per split in the zero-shot form; val shows an unseen class too."""
    lines = ["filepath,label,split_name"]
    for number in range(16):
        write_picture(root / "images" / f"{number}.jpg", red=16 * number)
        name = ["sky", "cat", "dog"][number % 3]
        split = "train" if number < 8 else "val"
        lines.append(f"images/{number}.jpg,\"['{name}', 'sea']\",{split}")
    (root / "data.csv").write_text("\n".join(lines) + "\n")
    split_file = {"train class": ["cat", "sea", "sky"], "test class": ["dog"]}
    (root / "benchmark_81_v0.json").write_text(json.dumps(split_file))


# Encoders of images, with a small network of their kind.
SHALLOW = "backbone.model_args={embed_dim:32,depth:2,num_heads:2}"
ENCODERS = {
    "coco_dinov3_l_frozen": ["data.image_size=64", SHALLOW],
    "coco_dinov3_b": ["data.image_size=64", SHALLOW],
    "coco_dinov2_b": ["data.image_size=56", SHALLOW],
    "coco_clip_l_336": ["data.image_size=56", SHALLOW, "data.vectors=words.txt"],
    "nuswide_zsl_clip_b16": ["data.image_size=64", SHALLOW, "data.vectors=words.txt"],
    "nuswide_zsl_siglip2_b16": ["data.image_size=64", SHALLOW, "data.vectors=words.txt"],
    "tags_tresnet_l": ["data.image_size=64", *NETWORKS["tresnet"]],
}


# One of each kind runs by default: these differ from it in the network alone.
LIKE_OTHERS = (
    "coco_dinov3_b",
    "coco_dinov2_b",
    "nuswide_zsl_clip_b16",
    "nuswide_zsl_siglip2_b16",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ())
        for name in ENCODERS
    ],
)
def test_a_recipe_for_a_later_network_trains_two_steps(
    name: str, cli: Callable[..., tuple[int, str, str]], monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write = {"coco": partial(write_coco, images=8), "nuswide": write_nuswide_zsl, "tags": write_own}
    write[name.partition("_")[0]](tmp_path / "data")

    # The text encoder is not here: a file has vectors of its width.
    config = compose([f"+experiment={name}"])
    width = config.head.get("word_dim", 1)
    words = ["thing", "0", "1", "2", "sky", "cat", "dog", "sea"]
    rows = torch.randn(len(words), width).tolist()
    lines = [
        " ".join([word, *(f"{value:.3f}" for value in row)])
        for word, row in zip(words, rows, strict=True)
    ]
    (tmp_path / "data" / "words.txt").write_text("\n".join(lines))

    small = ["head.embed_dim=32", "head.mlp_dim=32", *ENCODERS[name]]
    settings = [*SMALL, *SHORT, *small, "train.ema_decay=0.9", "data.root=data"]
    status, _, err = cli("train", f"+experiment={name}", *settings)
    assert status == 0, err
    state = read_torch(Path("outputs", name, "checkpoints", "last.pt"))
    assert (state["step"], state["epoch"]) == (2, 1)

    # Only the weights of a frozen backbone stay as they were: their average does not move.
    tensors = {key: value for key, value in state["model"].items() if value.is_floating_point()}
    moved = [key for key, value in tensors.items() if not torch.equal(value, state["ema"][key])]
    assert any(key.startswith("head.") for key in moved)
    is_frozen = "backbone" in config.train.freeze
    assert any(key.startswith("backbone.") for key in moved) is not is_frozen
    assert (state["classes"]["queries"] is not None) is ("word_dim" in config.head)


@pytest.mark.parametrize("name", ["finetune", "finetune_frozen"])
def test_a_recipe_for_own_photos_trains_two_steps(
    name: str, cli: Callable[..., tuple[int, str, str]], monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_own(tmp_path / "data")
    words = [f"+experiment={name}", "data.root=data", *SMALL, *SHORT, "train.ema_decay=0.9"]
    status, out, err = cli("train", *words)
    assert status == 0, err
    state = read_torch(Path("outputs", name, "checkpoints", "last.pt"))
    assert (state["step"], state["epoch"]) == (2, 1)

    # The average of the weights moves where they do.
    backbone = [key for key in state["model"] if key.startswith("backbone.")]
    moved = [key for key in backbone if not torch.equal(state["model"][key], state["ema"][key])]
    assert bool(moved) is (name == "finetune")
    if name == "finetune_frozen":
        assert "has seen 0 of 8 training images before" in out
        assert "data.augment=official" in cli("train", *words, "data.augment=official")[2]
