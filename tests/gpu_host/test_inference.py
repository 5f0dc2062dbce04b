"""Inference on the null GPU: folded batch norms, padded batches and compiled networks."""

import json

import numpy as np
import pytest
from PIL import Image

TRAIN = "train +experiment=digits device=cpu data.train_images=32 data.val_images=20"
TRAIN += " train.batch_size=16 train.workers=0 train.epochs=1"
OPTIONS = "photos --device cuda --workers 0 --batch-size 8 --threshold 0"
COMPILED = {
    "predict": f"predict outputs/digits {OPTIONS} --compile --json rows.json",
    "evaluate": "evaluate outputs/digits device=cuda train.eval_batch_size=8 --compile",
}
PHOTOS = 12  # more than a batch

# Experiments and their numbers of images in a batch.
BATCHES = {"coco_tresnet_l": 56, "imagenet_resnet50_a2": 64}


@pytest.fixture(scope="module")
def folder(null_gpu, tmp_path_factory):
    """Working folder with photos and a run."""
    folder = tmp_path_factory.mktemp("inference")
    (folder / "photos").mkdir()
    rng = np.random.default_rng(0)
    for number in range(PHOTOS):
        pixels = rng.integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.png")
    [run] = null_gpu.run("commands.py", json.dumps([TRAIN.split()]), cwd=folder).result
    assert run["status"] == 0, run["err"]
    return folder


def test_folded_networks_need_fewer_launches(null_gpu, tmp_path):
    results = null_gpu.run("inference.py", json.dumps(BATCHES), cwd=tmp_path).result
    for experiment, (plain, folded) in results.items():
        # Without casts of convolution weights. The bias of a convolution is a kernel like the norm.
        assert folded["convolutions"] == plain["convolutions"], experiment
        assert folded["launches"] <= plain["launches"] - folded["convolutions"], experiment
        assert folded["stream_waits"] == folded["event_waits"] == 0


def test_compiled_commands_end(null_gpu, folder):
    commands = [command.split() for command in COMPILED.values()]
    done = null_gpu.run("commands.py", json.dumps(commands), cwd=folder)
    for command in done.result:
        assert command["status"] == 0, command["err"]
        assert command["counts"]["triton_launches"] > 0
        assert command["counts"]["convolutions"] > 0
    rows = json.loads((folder / "rows.json").read_text())
    assert len(rows) == PHOTOS
    assert all(0 <= item["score"] <= 1 for row in rows for item in row["predictions"])


def test_padded_batches_need_no_new_shape(null_gpu, folder):
    for shapes in null_gpu.run("shapes.py", "outputs/digits", cwd=folder).result.values():
        assert len(shapes) > 1
        assert {tuple(shape) for shape in shapes} == {(8, 3, 64, 64)}


def test_short_jobs_do_not_search_for_kernels(null_gpu, folder):
    result = null_gpu.run("searches.py", "outputs/digits", cwd=folder).result
    assert result["predict"] == [False] * 19 + [True] * 6
    assert result["single"] == [False] * 25
    assert result["evaluate"] == {"few": False, "many": True}


def test_compilation_without_compiler_is_an_error(null_gpu, folder):
    empty = folder / "empty"
    empty.mkdir()
    env = {
        "CC": None,
        "PATH": str(empty),
        "TRITON_CACHE_DIR": str(empty),
        "TORCHINDUCTOR_CACHE_DIR": str(empty),
    }
    command = f"predict outputs/digits {OPTIONS} --compile --json other.json"
    [done] = null_gpu.run("commands.py", json.dumps([command.split()]), cwd=folder, env=env).result
    assert done["status"] == 1
    assert "--compile" in done["err"]
    assert "Traceback" not in done["err"]
