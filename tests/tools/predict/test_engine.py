"""Engines: checkpoints in torch, other classes, and exported files."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import networks
import pytest
import torch
from networks import metadata, noise
from pictures import picture
from torch._subclasses import FakeTensorMode

from mldec.data.transforms import EvalTransform, to_tensor
from mldec.data.types import Classes
from mldec.errors import CheckpointError
from mldec.evaluation.class_list import with_classes
from mldec.evaluation.run import decided, scores
from mldec.runtime import distributed
from mldec.runtime.devices import Precision
from mldec.tools.exported import parse
from mldec.tools.predict.engine import ExportedEngine, TorchEngine


@pytest.fixture(scope="module")
def loaded():
    return networks.loaded(size=64)


def test_scores_are_sigmoids_or_a_softmax_in_float32(loaded):
    images = noise(4, 64)
    with torch.no_grad():
        logits = loaded.model(images)
    several = scores(loaded, images)
    assert several.dtype == torch.float32
    torch.testing.assert_close(several, 1 / (1 + (-logits).exp()))
    one_label = replace(loaded, classes=replace(loaded.classes, exclusive=True))
    expected = logits.exp() / logits.exp().sum(1, keepdim=True)
    torch.testing.assert_close(scores(one_label, images), expected)
    torch.testing.assert_close(TorchEngine(one_label).answer(images).scores, expected)

    rows = torch.tensor([[0.5, 0.4, 0.1], [0.2, 0.4, 0.4]])
    at_thresholds = decided(rows, torch.tensor([0.5, 0.5, 0.4]))
    assert at_thresholds.tolist() == [[True, False, False], [False, False, True]]
    assert decided(rows, None).tolist() == [[True, False, False], [False, True, False]]


def test_checkpoint_engine_scores_like_its_model(loaded):
    engine = TorchEngine(loaded)
    images = [engine.transform(picture(seed=number)) for number in range(3)]
    answers = engine.answer(images)
    stacked = torch.stack(images)
    torch.testing.assert_close(answers.scores, scores(loaded, stacked))
    assert answers.features is None
    assert (engine.classes, engine.thresholds) == (loaded.classes, None)
    assert (engine.image_size, engine.shorter_side) == (64, 64)

    with torch.no_grad():
        expected = loaded.model.backbone(stacked).mean(1)
    torch.testing.assert_close(engine.answer(stacked, features=True).features, expected)

    engines = [TorchEngine(loaded, precision) for precision in Precision]
    assert [engine.precision for engine in engines] == ["fp32", "fp32", "fp32", "bf16"]
    rounded = engines[-1].answer(stacked).scores
    assert not torch.equal(rounded, answers.scores)
    torch.testing.assert_close(rounded, answers.scores, atol=5e-2, rtol=0)


@pytest.mark.parametrize(
    ("recorded", "chosen", "used"),
    [
        ("fp16", None, "fp16"),
        ("bf16", None, "bf16"),
        ("fp32", None, "bf16"),
        ("fp16", Precision.auto, "bf16"),
        ("fp16", Precision.fp32, "fp32"),
    ],
)
def test_gpu_uses_the_half_precision_of_the_training(recorded, chosen, used, monkeypatch):
    monkeypatch.setattr(distributed, "prepare_device", lambda device, **options: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode(), torch.device("cuda:0"):
        loaded = networks.loaded("gap")
        loaded.config.train.precision = Precision[recorded]
        assert TorchEngine(loaded, chosen).precision == used


@pytest.fixture
def vectors(tmp_path):
    """A file of word vectors of width 5."""
    path = tmp_path / "words.txt"
    path.write_text("cat 1 0 0 0 0\ndog 0 1 0 0 0\nred 1 1 0 0 0\n")
    return str(path)


def test_zero_shot_engine_scores_other_classes(loaded, vectors):
    words = networks.loaded("words")
    other = with_classes(words, ("dog", "cat"), vectors)
    assert other.classes.names == ("dog", "cat")
    assert other.classes.word_vectors.argmax(1).tolist() == [1, 0]
    assert other.model is words.model
    assert not TorchEngine(loaded).zero_shot
    engine = TorchEngine(words)
    assert engine.zero_shot
    fox = engine.for_classes(Classes(("fox",), word_vectors=other.classes.word_vectors[:1]))
    expected = TorchEngine(other).answer(noise(2)).scores[:, :1]
    torch.testing.assert_close(fox.answer(noise(2)).scores, expected)

    with pytest.raises(CheckpointError, match="--classes"):
        with_classes(loaded, ["cat"], vectors)


class MeanColors:
    """An exported file whose probabilities are the mean colors."""

    path = Path("x.onnx")

    def __init__(self, **changes):
        settings = {"classes": ["r", "g", "b"], "thresholds": [0.25], "image_size": 24}
        self.metadata = metadata(**{**settings, "crop": 0.75, **changes})
        self.inputs = []

    def __call__(self, *inputs):
        self.inputs.append(inputs)
        probabilities = inputs[0].float().mean((2, 3)) / 255
        return probabilities, probabilities > 0.5


def exported(classes=None, **changes):
    file = MeanColors(**changes)
    return ExportedEngine(file, classes), file


def test_exported_engine_scores_its_classes():
    engine, file = exported(resize="tensor")
    expected = EvalTransform(image_size=24, crop=0.75, interpolation="bilinear", resize="tensor")
    assert engine.transform == expected
    assert (engine.classes, engine.thresholds) == (Classes(("r", "g", "b")), [0.25] * 3)
    assert (engine.image_size, engine.shorter_side, engine.zero_shot) == (24, 32, False)
    image = expected(picture(60, 40))
    assert engine.answer([image, image]).scores.shape == (2, 3)
    assert [list(tensor.shape) for [tensor] in file.inputs] == [[2, 3, 24, 24]]

    # A file that resizes receives single images.
    engine, file = exported(resizes=True)
    images = [picture(60, 40), picture(30, 50)]
    answers = engine.answer([engine.transform(image) for image in images])
    assert [list(tensor.shape) for [tensor] in file.inputs] == [[1, 3, 40, 60], [1, 3, 50, 30]]
    expected = torch.stack([to_tensor(image).float().mean((1, 2)) / 255 for image in images])
    torch.testing.assert_close(answers.scores, expected)


def test_exported_zero_shot_file_receives_word_vectors():
    classes = Classes(("cat", "dog", "zebra"), word_vectors=torch.randn(3, 5))
    engine, file = exported(classes, word_dim=5)
    assert engine.zero_shot
    engine.answer(torch.zeros(1, 3, 24, 24, dtype=torch.uint8))
    assert file.inputs[0][1] is classes.word_vectors
    other = engine.for_classes(Classes(("fox",), word_vectors=torch.randn(1, 5)))
    assert (other.classes.names, other.thresholds) == (("fox",), [0.25])
    assert (engine.classes.names, engine.thresholds) == (classes.names, [0.25] * 3)


@pytest.mark.parametrize(
    "change",
    [
        {"classes": ["a", "a"]},
        {"thresholds": [0.1, 0.2]},
        {"exclusive": "no"},
        {"newer": 1},
        None,
    ],
)
def test_invalid_metadata_raise_an_error(change):
    text = "no json" if change is None else json.dumps({**asdict(metadata()), **change})
    with pytest.raises(CheckpointError, match=r"x\.onnx"):
        parse(text, Path("x.onnx"))
    with pytest.raises(CheckpointError, match=r"x\.onnx"):
        parse(None, Path("x.onnx"))
