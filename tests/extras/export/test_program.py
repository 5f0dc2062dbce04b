"""The exported module: outputs, tracing and resize."""

from dataclasses import replace

import networks
import pytest
import torch
from networks import CALIBRATION, HEADS, OF_WORDS, noise, words_of
from pictures import picture

from mldec.data.transforms import EvalTransform, to_tensor
from mldec.errors import CheckpointError
from mldec.evaluation.run import decided, scores
from mldec.model import Classifier
from mldec.tools.export import Program, Resize, to_onnx, trace

SIZES = ((32, 32), (64, 48), (31, 90), (200, 33), (20, 30), (1, 1), (500, 333))
TRANSFORMS = [
    {},
    {"interpolation": "bicubic"},
    {"crop": 0.875, "interpolation": "bicubic"},
    {"crop": 1.0},
    {"crop": 0.3},
]


# Each head is exported to ONNX in tests/full/predict/test_onnx_networks.py.
@pytest.mark.parametrize("head", ["gap", "word_groups"])
def test_traced_program_equals_checkpoint(head):
    exclusive = head == "gap"
    loaded = networks.loaded(head, calibration=CALIBRATION, exclusive=exclusive)
    thresholds = None if exclusive else [0.4]
    program = Program(loaded, thresholds, takes_word_vectors=head in OF_WORDS)
    graph = trace(program, loaded).module()

    for images, count in ((1, 3), (5, 8)):
        word_vectors = words_of(head, count)
        tested = loaded
        if word_vectors:
            names = tuple(map(str, range(count)))
            classes = replace(loaded.classes, names=names, word_vectors=word_vectors[0])
            tested = replace(loaded, classes=classes)
        expected = scores(tested, noise(images))
        probabilities, decisions = graph(noise(images), *word_vectors)
        assert expected.std() > 1e-3
        torch.testing.assert_close(probabilities, expected, atol=1e-6, rtol=0)
        limits = None if exclusive else torch.tensor(thresholds)
        assert torch.equal(decisions, decided(expected, limits))


def test_half_precision_leaves_checkpoint_unchanged():
    loaded = networks.loaded("groups", calibration=CALIBRATION)
    before = scores(loaded, noise(2))
    program = Program(loaded, [0.5], half=True)
    probabilities, _ = program(noise(2))
    assert {parameter.dtype for parameter in program.model.parameters()} == {torch.float16}
    assert probabilities.dtype == torch.float32
    assert 0 < (probabilities - before).abs().max() < 5e-3
    assert torch.equal(scores(loaded, noise(2)), before)


class Branching(torch.nn.Module):
    """A backbone with a branch on pixel values, which torch.export does not support."""

    num_features = 3

    def forward(self, images):
        if images.float().mean() > 9:
            images = 255 - images
        return images.float().flatten(2).transpose(1, 2)


def test_unsupported_network_raises_error():
    loaded = networks.loaded("gap")
    loaded = replace(loaded, model=Classifier(Branching(), HEADS["gap"](3)))
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        to_onnx(Program(loaded, [0.5]), loaded, "x.pt")


@pytest.mark.parametrize("settings", TRANSFORMS)
def test_resize_equals_pillow(settings):
    transform = EvalTransform(image_size=32, **settings)
    for width, height in SIZES:
        image = picture(width, height)
        expected = transform(image).int()
        resized = Resize(transform)(to_tensor(image)[None])
        assert resized.dtype == torch.uint8
        # Two roundings may differ by one level each.
        assert (resized[0].int() - expected).abs().max() <= 2
        assert (resized[0].int() - expected).float().abs().mean() < 0.3


def test_resize_keeps_images_of_the_right_size():
    images = noise(1)
    for settings in ({}, {"interpolation": "bicubic"}, {"crop": 1.0}):
        assert torch.equal(Resize(EvalTransform(image_size=32, **settings))(images), images)
