"""examples/train_minimal.py computes the same as the learner with the recipe of the paper."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from numpy.random import default_rng
from PIL import Image
from support import write_coco

from mldec import build
from mldec.backbones import Normalize
from mldec.config.compose import compose
from mldec.data.loader import Batch, sample_seed
from mldec.data.readers import coco, csv_table
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes
from mldec.training.step import Learner

STEPS = 8
SIDE = 64
SCRIPT = Path(__file__).parents[3] / "examples" / "train_minimal.py"
spec = importlib.util.spec_from_file_location("train_minimal", SCRIPT)
minimal = importlib.util.module_from_spec(spec)
spec.loader.exec_module(minimal)


@pytest.fixture
def learner():
    """The learner of the paper's experiment in float32, with a small network."""
    words = ["+experiment=coco_tresnet_l", "data.root=unused", "backbone=timm"]
    words += ["backbone.name=test_resnet", "head.embed_dim=64", "head.mlp_dim=64"]
    config = compose([*words, "train.precision=fp32", "train.channels_last=false"])
    parts = build.check(config)
    classes = Classes(tuple(f"class {number}" for number in range(80)))
    torch.manual_seed(1)
    model = build.model(parts, classes, pretrained=False)
    device = torch.device("cpu")
    return Learner(config, model, build.loss(parts), device=device, steps=STEPS)


def test_constants_equal_the_recipe(learner):
    config = learner.config
    assert config.data["image_size"] == minimal.IMAGE_SIZE
    assert config.train.batch_size == minimal.BATCH_SIZE
    assert config.train.epochs == minimal.EPOCHS


def test_csv_rows_equal_the_reader(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text("path,labels,split\na.jpg,dog;cat,train\nb/c.jpg,,val\nd.jpg,owl,val\n")
    for split in ("train", "val"):
        assert_same_rows(*minimal.read_csv(file, split), csv_table(root=str(tmp_path)), split)


def test_coco_rows_equal_the_reader(tmp_path):
    write_coco(tmp_path)
    # An image without objects is omitted.
    path = tmp_path / "annotations" / "instances_val2014.json"
    content = json.loads(path.read_text())
    content["annotations"] = content["annotations"][2:]
    path.write_text(json.dumps(content))
    for split in ("train", "val"):
        found = minimal.read_coco(tmp_path, split)
        assert_same_rows(*found, coco(root=str(tmp_path)), f"{split}2014")


def assert_same_rows(rows, classes, source, split):
    expected = source.load(split, None)
    assert classes == list(expected.classes)
    assert len(rows) == len(expected)
    for index, (path, labels) in enumerate(rows):
        assert str(path) == expected.name(index)
        assert [name in labels for name in classes] == (expected.labels.row(index) == 1).tolist()


def test_steps_equal_the_learner(learner):
    network = minimal.Network("test_resnet", 80, pretrained=False)
    network.backbone.load_state_dict(learner.model.backbone.network.state_dict())
    network.head = copy.deepcopy(learner.model.head)
    training = minimal.Training(network, steps=STEPS, lr=minimal.LR, ema_decay=minimal.EMA_DECAY)
    transform = minimal.make_transform(network.backbone, SIDE, augment=False)

    rng = default_rng(0)
    learner.train()
    network.train()
    expected = []
    losses = []
    for step in range(STEPS):
        pixels = rng.integers(256, size=(6, 50, 70, 3), dtype="uint8")
        pictures = [Image.fromarray(picture) for picture in pixels]
        targets = torch.from_numpy(rng.random((6, 80)) < 0.1)
        shown = torch.stack([EvalTransform(image_size=SIDE)(picture) for picture in pictures])
        learner.learn([Batch(shown, targets.to(torch.int8), torch.arange(6))], 6)
        [stats] = learner.read()
        expected.append(stats.loss)

        # Both normalize in a different order, which changes the last bits.
        images = Normalize.forward(learner.model.backbone, shown)
        ours = torch.stack([transform(picture) for picture in pictures])
        torch.testing.assert_close(ours, images, rtol=0, atol=1e-6)
        # The learner seeds the dropout of each step.
        torch.manual_seed(sample_seed(learner.config.seed, step, 0))
        losses.append(training.step(images, targets.float()).item())
    assert losses == pytest.approx(expected, rel=1e-6)

    for ours, theirs in ((network, learner.model), (training.ema.module, learner.average)):
        for part, other in ((ours.backbone, theirs.backbone.network), (ours.head, theirs.head)):
            torch.testing.assert_close(part.state_dict(), other.state_dict(), rtol=1e-6, atol=0)
