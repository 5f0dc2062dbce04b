"""Shards of pack_shards.py, also after a kill and a restart."""

import hashlib
import importlib.util
import io
import json
import os
import signal
import sys
import tarfile
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from PIL import Image
from support import made, one_line, write_coco

from mldec.data.readers.coco_json import coco
from mldec.data.readers.tar_shards import shards
from mldec.data.types import fixed_sample

SCRIPT = Path(__file__).parents[3] / "scripts" / "pack_shards.py"
spec = importlib.util.spec_from_file_location("pack_shards", SCRIPT)
pack_shards = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack_shards)

IMAGES = 40  # in each split


@pytest.fixture
def root(tmp_path):
    write_coco(tmp_path / "coco", images=IMAGES)
    rng = np.random.default_rng(0)
    for number, path in enumerate(sorted((tmp_path / "coco").rglob("*.jpg"))):
        height = 20 + number % 7
        Image.fromarray(rng.integers(0, 255, (height, 40, 3), np.uint8)).save(path)
    return tmp_path / "coco"


def command(root, out, *args):
    settings = ["data=coco", f"data.root={root}", f"data.cache_dir={root.parent}", "--workers", "0"]
    return [str(out), *settings, "--images", "7", *args]


@pytest.fixture
def pack(root, tmp_path, monkeypatch):
    def pack(*args, out="shards"):
        monkeypatch.setattr(sys, "argv", ["pack_shards.py", *command(root, tmp_path / out, *args)])
        pack_shards.main()
        return tmp_path / out

    return pack


def content(folder):
    files = [path for path in folder.rglob("*.*") if path.suffix != ".json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_images_and_targets_equal_those_of_the_files(pack, root):
    out = pack()
    plain = {"image_size": 16, "augment": "none", "cutout": 0.0}
    files = made(coco, root=str(root), cache_dir=str(root.parent), **plain)
    packed = made(shards, root=str(out), **plain)
    for one, other in ((files.train, packed.train), (files.val, packed.val)):
        assert one.classes == other.classes
        assert len(one.dataset) == len(other.dataset) == IMAGES
        for index in range(IMAGES):
            samples = [fixed_sample(part.dataset, index) for part in (one, other)]
            assert all(map(torch.equal, *samples))
    assert files.transform == packed.transform


def test_shards_have_the_layout_of_webdataset(pack, root):
    folder = pack() / "train"
    described = json.loads((root / "annotations" / "instances_train2014.json").read_text())
    names = {category["id"]: category["name"] for category in described["categories"]}
    tars = sorted(folder.glob("shard-*.tar"))
    assert len(tars) == 6
    members = []
    with np.load(folder / "index.npz") as index:
        hashes = [hashlib.sha256(tar.read_bytes()).hexdigest() for tar in tars]
        assert index["sha256"].tolist() == hashes
        assert index["classes"].tolist() == list(names.values())
    for path in tars:
        with tarfile.open(path) as tar:
            members += [(member.name, tar.extractfile(member).read()) for member in tar]
    assert len(members) == 2 * IMAGES
    pairs = zip(described["images"], described["annotations"], strict=True)
    for number, (image, annotation) in enumerate(pairs):
        (name, pixels), (label_name, labels) = members[2 * number : 2 * number + 2]
        assert (name, label_name) == (f"{number:09}.jpg", f"{number:09}.json")
        assert pixels == (root / "train2014" / image["file_name"]).read_bytes()
        assert json.loads(labels) == {"labels": [names[annotation["category_id"]]], "negatives": []}


def pack_three_shards(*words):
    """Run the script, and kill it after its third shard, before the record of this shard."""
    replace = Path.replace

    def replace_and_die(path, target):
        replace(path, target)
        if target.name == "shard-000002.tar":
            os.kill(os.getpid(), signal.SIGKILL)

    Path.replace = replace_and_die
    forked.script(str(SCRIPT), *words)


def test_a_killed_run_is_resumed(pack, root, tmp_path):
    out = tmp_path / "killed"
    killed = forked.run(pack_three_shards, *command(root, out, "--images", "1"))
    assert killed.status == -signal.SIGKILL, killed.err
    done = {path.name: path.stat().st_mtime_ns for path in (out / "train").glob("shard-*.json")}
    assert len(done) == 2
    assert not (out / "val" / "index.npz").exists()
    (out / "train" / "shard-000039.tmp").write_bytes(b"half a shard")
    pack("--images", "1", out="killed")
    again = {name: (out / "train" / name).stat().st_mtime_ns for name in done}
    assert again == done
    assert content(out) == content(pack("--images", "1", out="whole"))
    assert len(list(out.rglob("shard-*.tar"))) == 2 * IMAGES


def test_short_side_resizes_only_larger_images(pack, root):
    out = pack("--short-side", "23")
    dataset = made(shards, root=str(out)).train.dataset
    for index, path in enumerate(sorted((root / "train2014").iterdir())):
        packed = dataset.storage.content(index)
        with Image.open(path) as before, Image.open(io.BytesIO(packed)) as after:
            if before.height <= 23:
                assert packed == path.read_bytes()
            else:
                assert after.size == (round(40 * 23 / before.height), 23)


def test_bad_images_are_packed_with_skip(pack, root):
    bad = sorted((root / "train2014").iterdir())[3]
    bad.write_bytes(b"no image")
    out = pack("--short-side", "10", "data.bad_images=skip")
    assert made(shards, root=str(out)).train.dataset.storage.content(3) == b"no image"


def test_errors(pack, root, capsys):
    out = pack()
    bad = sorted((root / "train2014").iterdir())[3]
    bad.write_bytes(b"no image")
    for folder, name in (("shards", out / "train"), ("other", bad)):
        with pytest.raises(SystemExit):
            pack("--short-side", "10", out=folder)
        one_line(capsys.readouterr().err, str(name))
