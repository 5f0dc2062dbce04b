import dataclasses
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from pictures import picture

from mldec.checkpoint import Loaded, load_model
from mldec.data.transforms import EvalTransform, to_tensor
from mldec.data.types import Classes
from mldec.errors import CheckpointError, ConfigError, OutOfMemoryError
from mldec.predict import engine as engine_module
from mldec.predict.engine import ExportedEngine, Metadata, TorchEngine, is_exported, scores
from mldec.runtime.devices import Precision

METADATA = Metadata(
    classes=["r", "g", "b"],
    word_dim=None,
    exclusive=False,
    calibrated=False,
    thresholds=[0.25],
    image_size=24,
    crop=0.75,
    interpolation="bicubic",
    resizes=False,
    mean=None,
    std=None,
    precision="fp32",
    versions={},
    checkpoint={},
    date="2026-11-22",
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    path = tmp_path_factory.mktemp("engine") / "x.pt"
    torch.save(hostile.good(), path)
    return load_model(path)


class MeanColours:
    """An exported file whose probabilities are the mean colours."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.inputs: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.inputs.append(inputs)
        probabilities = inputs[0].float().mean((2, 3)) / 255
        return probabilities, probabilities > 0.5


def exported(
    monkeypatch: pytest.MonkeyPatch, classes: Classes | None = None, **changes: Any
) -> tuple[ExportedEngine, MeanColours]:
    file = MeanColours(dataclasses.replace(METADATA, **changes))
    monkeypatch.setattr(engine_module, "OnnxFile", lambda path: file)
    return ExportedEngine(Path("x.onnx"), classes), file


def test_a_checkpoint_answers_as_its_model_does(loaded: Loaded) -> None:
    engine = TorchEngine(loaded)
    images = [engine.transform(picture(seed=number)) for number in range(3)]
    answers = engine.answer(images)
    torch.testing.assert_close(answers.scores, scores(loaded, torch.stack(images)))
    assert answers.features is None
    assert (engine.classes, engine.thresholds) == (loaded.classes, None)
    assert (engine.image_size, engine.shorter_side) == (64, 64)


def test_the_precision_is_that_of_the_forward_pass(loaded: Loaded) -> None:
    images = [picture(seed=number) for number in range(3)]
    engines = [TorchEngine(loaded, precision) for precision in Precision]
    shown = torch.stack([engines[0].transform(image) for image in images])
    answers = {engine.precision: engine.answer(shown).scores for engine in engines}
    assert [engine.precision for engine in engines] == ["fp32", "fp32", "fp32", "bf16"]
    assert not torch.equal(answers["bf16"], answers["fp32"])
    torch.testing.assert_close(answers["bf16"], answers["fp32"], atol=2e-2, rtol=0)


def test_features_are_the_mean_of_the_tokens(loaded: Loaded) -> None:
    engine = TorchEngine(loaded)
    images = torch.stack([engine.transform(picture(seed=number)) for number in range(2)])
    answers = engine.answer(images, features=True)
    with torch.no_grad():
        expected = loaded.model.backbone(images).mean(1)
    assert answers.features is not None
    torch.testing.assert_close(answers.features, expected)
    torch.testing.assert_close(answers.scores, engine.answer(images).scores)


def test_a_zero_shot_checkpoint_scores_other_classes(loaded: Loaded) -> None:
    assert not TorchEngine(loaded).zero_shot
    trained = Classes(("a", "b", "c"), queries=torch.randn(3, 5))
    engine = TorchEngine(dataclasses.replace(loaded, classes=trained))
    assert engine.zero_shot
    other = engine.for_classes(Classes(("fox",), queries=torch.randn(1, 5)))
    assert other.classes.names == ("fox",)
    assert engine.classes is trained
    with pytest.raises(CheckpointError, match="vectors of 5 numbers, the data has vectors of 7"):
        engine.for_classes(Classes(("fox",), queries=torch.randn(1, 7)))


def test_too_large_a_batch_names_the_option(loaded: Loaded) -> None:
    class Hungry(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise MemoryError

    engine = TorchEngine(loaded)
    modules = {**loaded.model._modules, "backbone": Hungry()}
    model = torch.nn.Module.__new__(type(loaded.model))
    model.__dict__.update({**loaded.model.__dict__, "_modules": modules})
    engine.loaded = dataclasses.replace(loaded, model=model)
    message = r"^out of memory on cpu: batches of 3, images of 64 pixels; pass a smaller --b"
    with pytest.raises(OutOfMemoryError, match=message):
        engine.answer(torch.zeros(3, 3, 64, 64, dtype=torch.uint8))


def test_an_exported_file_answers_with_its_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, file = exported(monkeypatch)
    image = picture(60, 40)
    expected = EvalTransform(image_size=24, crop=0.75, interpolation="bicubic")(image)
    assert torch.equal(engine.transform(image), expected)
    assert engine.classes == Classes(("r", "g", "b"))
    assert engine.thresholds == [0.25] * 3
    assert (engine.image_size, engine.shorter_side) == (24, 32)
    answers = engine.answer([expected, expected])
    assert answers.scores.shape == (2, 3)
    assert [list(tensor.shape) for [tensor] in file.inputs] == [[2, 3, 24, 24]]
    with pytest.raises(CheckpointError, match="--features: an exported file holds no features"):
        engine.answer([expected], features=True)


def test_the_resize_of_an_exported_file_is_the_one_it_was_trained_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = exported(monkeypatch, resize="tensor")
    transform = EvalTransform(image_size=24, crop=0.75, interpolation="bicubic", resize="tensor")
    assert engine.transform == transform


def test_a_checkpoint_needs_its_decoder(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    transform = dataclasses.replace(loaded.transform, decoder="torchcodec")
    loaded = dataclasses.replace(loaded, transform=transform)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^data.decoder: torchcodec is not installed"):
        TorchEngine(loaded)


def test_a_file_that_resizes_gets_whole_images_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, file = exported(monkeypatch, resizes=True)
    images = [picture(60, 40), picture(30, 50)]
    answers = engine.answer([engine.transform(image) for image in images])
    assert [list(tensor.shape) for [tensor] in file.inputs] == [[1, 3, 40, 60], [1, 3, 50, 30]]
    expected = torch.stack([to_tensor(image).float().mean((1, 2)) / 255 for image in images])
    torch.testing.assert_close(answers.scores, expected)


def test_a_file_that_asks_for_word_vectors_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = Classes(("cat", "dog", "zebra"), queries=torch.randn(3, 5))
    engine, file = exported(monkeypatch, classes, word_dim=5)
    assert engine.classes.names == classes.names
    engine.answer(torch.zeros(1, 3, 24, 24, dtype=torch.uint8))
    assert file.inputs[0][1] is classes.queries

    other = engine.for_classes(Classes(("fox",), queries=torch.randn(1, 5)))
    assert (other.classes.names, other.thresholds) == (("fox",), [0.25])
    assert (engine.classes.names, engine.thresholds) == (classes.names, [0.25] * 3)
    assert engine.zero_shot
    assert not exported(monkeypatch)[0].zero_shot

    with pytest.raises(CheckpointError, match="asks for word vectors: pass --classes and --vec"):
        exported(monkeypatch, word_dim=5)
    with pytest.raises(CheckpointError, match="vectors of 7 numbers, and those of --vectors have"):
        exported(monkeypatch, classes, word_dim=7)
    with pytest.raises(CheckpointError, match=r"x.onnx knows its own classes only; export the"):
        exported(monkeypatch, classes)


def test_the_ending_says_what_is_exported() -> None:
    assert is_exported("b/a.onnx")
    for name in ("a.pt", "a.pt2", "run", "zoo:x", "onnx", "hf:owner/x.onnx"):
        assert not is_exported(name)
