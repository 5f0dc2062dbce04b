"""The module that is exported: it answers as the checkpoint does, can be traced, and resizes."""

from dataclasses import replace

import networks
import numpy as np
import pytest
import torch
from networks import CALIBRATION, HEADS, OF_WORDS, noise, words_of
from pictures import picture
from PIL import Image

from mldec.data.transforms import EvalTransform, to_tensor
from mldec.errors import CheckpointError
from mldec.evaluation.run import scores
from mldec.model import Classifier
from mldec.tools.export import Program, Resize, decided, traced

SIZES = ((32, 32), (64, 48), (31, 90), (200, 33), (20, 30), (1, 1), (500, 333))
TRANSFORMS = [
    {},
    {"interpolation": "bicubic"},
    {"crop": 0.875, "interpolation": "bicubic"},
    {"crop": 1.0},
    {"crop": 0.3},
]


@pytest.mark.parametrize(
    "head",
    # The others are in the matrix of the tests of ONNX files.
    ["gap", "csra", "groups", "query2label", "word_groups"],
)
def test_a_traced_program_answers_as_the_checkpoint(head):
    exclusive = head in ("gap", "word_gap")
    loaded = networks.loaded(head, calibration=CALIBRATION, exclusive=exclusive)
    thresholds = None if exclusive else [0.4]
    program = Program(loaded, thresholds, asks=head in OF_WORDS)
    graph = traced(program, loaded, "x.pt").module()

    for images, classes in ((1, 3), (5, 8)):
        words = words_of(head, classes)
        asked = loaded
        if words:
            names = tuple(map(str, range(classes)))
            asked = replace(
                loaded, classes=replace(loaded.classes, names=names, word_vectors=words[0])
            )
        expected = scores(asked, noise(images))
        probabilities, decisions = graph(noise(images), *words)
        assert expected.std() > 1e-3
        torch.testing.assert_close(probabilities, expected, atol=1e-6, rtol=0)
        limits = None if thresholds is None else torch.tensor(thresholds)
        assert torch.equal(decisions, decided(expected, limits))


def test_half_precision_leaves_the_checkpoint_as_it_is():
    loaded = networks.loaded("groups", calibration=CALIBRATION)
    before = scores(loaded, noise(2))
    program = Program(loaded, [0.5], half=True)
    probabilities, _ = program(noise(2))
    assert {parameter.dtype for parameter in program.model.parameters()} == {torch.float16}
    assert probabilities.dtype == torch.float32
    assert 0 < (probabilities - before).abs().max() < 5e-3
    assert torch.equal(scores(loaded, noise(2)), before)


class Branching(torch.nn.Module):
    """A backbone whose way depends on the pixels, which no graph can follow."""

    num_features = 3

    def forward(self, images):
        if images.float().mean() > 9:
            images = 255 - images
        return images.float().flatten(2).transpose(1, 2)


def test_a_network_that_cannot_be_traced_is_one_line():
    loaded = networks.loaded("gap")
    loaded = replace(loaded, model=Classifier(Branching(), HEADS["gap"](3)))
    with pytest.raises(
        CheckpointError, match=r"x\.pt: its network cannot be used .* does not follow it"
    ):
        traced(Program(loaded, [0.5]), loaded, "x.pt")


@pytest.mark.parametrize("settings", TRANSFORMS)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_is_pillows(settings, width, height):
    transform = EvalTransform(image_size=32, **settings)
    image = picture(width, height)
    expected = transform(image).int()
    resized = Resize(transform)(to_tensor(image)[None])
    assert resized.dtype == torch.uint8
    # Two roundings, each of which may fall to the other side.
    assert (resized[0].int() - expected).abs().max() <= 2
    assert (resized[0].int() - expected).float().abs().mean() < 0.3


def test_an_image_of_the_right_size_stays_as_it_is():
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    image = to_tensor(Image.fromarray(pixels))
    for settings in ({}, {"interpolation": "bicubic"}, {"crop": 1.0}):
        transform = EvalTransform(image_size=32, **settings)
        assert torch.equal(Resize(transform)(image[None])[0], image)
