"""What scores images: a checkpoint in torch, other classes, and ONNX files in ONNX Runtime."""

import json
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path

import networks
import pytest
import torch
from networks import CALIBRATION, metadata, noise
from pictures import picture
from torch._subclasses import FakeTensorMode

from mldec.checkpoint.sources import is_exported
from mldec.data.transforms import EvalTransform, to_tensor
from mldec.data.types import Classes
from mldec.errors import CheckpointError, ConfigError
from mldec.evaluation.class_list import with_classes
from mldec.evaluation.run import decided, scores
from mldec.runtime import distributed
from mldec.runtime.devices import Precision
from mldec.tools.export import Program, onnx_content, open_axes, quantised, traced, translated
from mldec.tools.predict.engine import (
    ExportedEngine,
    OnnxFile,
    TorchEngine,
    parse,
)


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


def test_a_checkpoint_answers_as_its_model_does(loaded):
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

    # The precision is that of the forward pass.
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
def test_a_gpu_answers_in_the_half_precision_of_the_training(recorded, chosen, used, monkeypatch):
    monkeypatch.setattr(distributed, "prepare_device", lambda device, **options: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode(), torch.device("cuda:0"):
        loaded = networks.loaded("gap")
        loaded.config.train.precision = Precision[recorded]
        monkeypatch.setattr(loaded.model, "to", lambda **options: None)
        assert TorchEngine(loaded, chosen).precision == used


def test_a_decoder_that_is_not_installed_is_named(loaded, monkeypatch):
    transform = replace(loaded.transform, decoder="torchcodec")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^data.decoder: torchcodec is not installed"):
        TorchEngine(replace(loaded, transform=transform))


@pytest.fixture
def vectors(tmp_path):
    """A file of word vectors of width 5."""
    path = tmp_path / "words.txt"
    path.write_text("cat 1 0 0 0 0\ndog 0 1 0 0 0\nred 1 1 0 0 0\n")
    return str(path)


def test_other_classes_of_a_zero_shot_model(loaded, vectors):
    words = networks.loaded("words")
    other = with_classes(words, " dog, cat,,", vectors)
    assert other.classes.names == ("dog", "cat")
    assert other.classes.word_vectors.argmax(1).tolist() == [1, 0]
    assert other.model is words.model
    assert not TorchEngine(loaded).zero_shot
    engine = TorchEngine(words)
    assert engine.zero_shot
    fox = engine.for_classes(Classes(("fox",), word_vectors=other.classes.word_vectors[:1]))
    expected = TorchEngine(other).answer(noise(2)).scores[:, :1]
    torch.testing.assert_close(fox.answer(noise(2)).scores, expected)

    for given, names, error, message in (
        (loaded, "cat", CheckpointError, "--classes"),
        (words, " , ", ConfigError, "--classes"),
        (words, "cat,cat", ConfigError, "'cat'"),
    ):
        with pytest.raises(error, match=message):
            with_classes(given, names, vectors)


# -------------------------------------------------------------------------------- an exported file


class MeanColours:
    """An exported file whose probabilities are the mean colours."""

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
    file = MeanColours(**changes)
    return ExportedEngine(file, classes), file


def test_an_exported_file_answers_with_its_own_classes():
    engine, file = exported(resize="tensor")
    expected = EvalTransform(image_size=24, crop=0.75, interpolation="bilinear", resize="tensor")
    assert engine.transform == expected
    assert (engine.classes, engine.thresholds) == (Classes(("r", "g", "b")), [0.25] * 3)
    assert (engine.image_size, engine.shorter_side, engine.zero_shot) == (24, 32, False)
    image = expected(picture(60, 40))
    assert engine.answer([image, image]).scores.shape == (2, 3)
    assert [list(tensor.shape) for [tensor] in file.inputs] == [[2, 3, 24, 24]]

    # A file that resizes gets whole images one by one.
    engine, file = exported(resizes=True)
    images = [picture(60, 40), picture(30, 50)]
    answers = engine.answer([engine.transform(image) for image in images])
    assert [list(tensor.shape) for [tensor] in file.inputs] == [[1, 3, 40, 60], [1, 3, 50, 30]]
    expected = torch.stack([to_tensor(image).float().mean((1, 2)) / 255 for image in images])
    torch.testing.assert_close(answers.scores, expected)


def test_a_file_that_asks_for_word_vectors_gets_them():
    classes = Classes(("cat", "dog", "zebra"), word_vectors=torch.randn(3, 5))
    engine, file = exported(classes, word_dim=5)
    assert engine.zero_shot
    engine.answer(torch.zeros(1, 3, 24, 24, dtype=torch.uint8))
    assert file.inputs[0][1] is classes.word_vectors
    other = engine.for_classes(Classes(("fox",), word_vectors=torch.randn(1, 5)))
    assert (other.classes.names, other.thresholds) == (("fox",), [0.25])
    assert (engine.classes.names, engine.thresholds) == (classes.names, [0.25] * 3)

    for given, width, message in (
        (None, 5, "asks for word vectors: pass --vec"),
        (classes, 7, "takes word vectors of 7 numbers, not 5: pass others"),
        (classes, None, "x.onnx knows its own classes only: export it"),
    ):
        with pytest.raises(CheckpointError, match=message):
            exported(given, word_dim=width)


def test_the_ending_says_what_is_exported():
    assert is_exported("b/a.onnx")
    for name in ("a.pt", "a.pt2", "run", "zoo:x", "onnx", "hf:owner/x.onnx"):
        assert not is_exported(name)


# -------------------------------------------------------------------------------------------- ONNX


@pytest.fixture(scope="module")
def whole():
    """ML-Decoder in groups, with the resize inside: the program and its translation."""
    pytest.importorskip("onnxruntime")
    loaded = networks.loaded("groups", calibration=CALIBRATION)
    program = Program(loaded, [0.5], any_size=True)
    return program, translated(traced(program, loaded, "x.pt"), open_axes(program), "x.pt")


def write(model, path, **settings):
    path.write_bytes(onnx_content(model, metadata(**settings), path.name))
    return OnnxFile(path)


def test_a_file_answers_as_the_program_for_any_number_of_images(whole, tmp_path):
    program, model = whole
    opened = write(model, tmp_path / "x.onnx")
    assert opened.metadata == metadata()
    assert [path.name for path in tmp_path.iterdir()] == ["x.onnx"]
    forms = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    assert forms == {
        "images": ["batch", 3, "height", "width"],
        "probabilities": ["batch", networks.CLASSES],
        "decisions": ["batch", networks.CLASSES],
    }

    for images in (noise(1), noise(5, 40, 24)):
        with torch.no_grad():
            expected, decisions = program(images)
        answer = opened(images)
        torch.testing.assert_close(answer[0], expected, atol=1e-5, rtol=0)
        assert torch.equal(answer[1], decisions)
    with pytest.raises(CheckpointError, match=r"x\.onnx cannot be used .*ONNX Runtime fails"):
        opened(noise(1).float())

    # An output of another shape than the classes.
    opened.metadata.classes.append("one more")
    with pytest.raises(CheckpointError, match=r"x\.onnx cannot be used: probabilities .*\[2, 7\]"):
        opened(noise(2))


def test_onnx_runtime_reports_to_nobody():
    # Set where the module is imported, before ONNX Runtime is.
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"


def test_eight_bits_change_a_little(whole, tmp_path, monkeypatch):
    program, model = whole
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    small = quantised(model, [(noise(1, side),) for side in (32, 40, 48)])
    assert logging.getLogger().handlers == [], "our messages would be printed twice"
    kinds = {node.op_type for node in small.graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds
    with torch.no_grad():
        expected, _ = program(noise(4))
    probabilities, _ = write(small, tmp_path / "x.onnx", precision="int8")(noise(4))
    assert 1e-5 < (probabilities - expected).abs().max() < 0.1


def test_files_that_say_nothing_are_one_line(tmp_path):
    pytest.importorskip("onnxruntime")
    path = tmp_path / "x.onnx"
    with pytest.raises(CheckpointError, match=r"no file at .*x\.onnx: check the path"):
        OnnxFile(path)
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"x\.onnx cannot be used .*ONNX Runtime"):
        OnnxFile(path)

    known = asdict(metadata())
    changes = [
        {"classes": ["a", "a"]},
        {"classes": "abcdefg"},
        {"classes": 5},
        {"classes": []},
        {"thresholds": "x"},
        {"thresholds": [0.1, 0.2]},
        {"thresholds": [float("nan")]},
        {"thresholds": [2.0]},
        {"thresholds": []},
        {"interpolation": {}},
        {"exclusive": "no"},
        {"image_size": None},
        {"newer": 1},
    ]
    texts = [json.dumps({**known, **change}) for change in changes]
    for text in (None, "no json", "[1]", "[" * 100_000, *texts):
        with pytest.raises(CheckpointError, match=r"x\.onnx cannot be used"):
            parse(text, path)

    # The resize of older files is Pillow's.
    assert known.pop("resize") == "pillow"
    assert parse(json.dumps(known), path) == metadata()
