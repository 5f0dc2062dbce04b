"""The module that is exported: it answers as the checkpoint does, and can be traced."""

from dataclasses import replace

import networks
import pytest
import torch
from networks import CALIBRATION, HEADS, OF_WORDS, noise, words_of

from mldec.checkpoint import Loaded
from mldec.errors import CheckpointError
from mldec.export import Program, decided, of_other_classes, traced
from mldec.model import Classifier
from mldec.predict.engine import scores

QUICK = ("gap", "groups", "query2label", "word_groups")


def with_words(loaded: Loaded, words: list[torch.Tensor]) -> Loaded:
    """Return the model for the classes of other word vectors, if there are any."""
    if not words:
        return loaded
    names = tuple(f"{number}" for number in range(len(words[0])))
    return replace(loaded, classes=replace(loaded.classes, names=names, queries=words[0]))


def test_one_label_is_the_most_probable_class_and_the_first_of_equal_ones() -> None:
    rows = torch.tensor([[0.1, 0.7, 0.2], [0.4, 0.2, 0.4]])
    assert decided(rows, None).tolist() == [[False, True, False], [True, False, False]]


def test_a_class_is_present_from_its_threshold_on() -> None:
    rows = torch.tensor([[0.25, 0.5, 0.75]])
    assert decided(rows, torch.tensor([0.5])).tolist() == [[False, True, True]]
    assert decided(rows, torch.tensor([0.2, 0.6, 0.8])).tolist() == [[True, False, False]]


@pytest.mark.parametrize(
    "head",
    # The other heads are slow here, and in the matrix of test_onnx_file.py.
    [pytest.param(head, marks=[] if head in QUICK else pytest.mark.slow) for head in HEADS],
)
def test_a_traced_program_answers_as_the_checkpoint(head: str) -> None:
    exclusive = head in ("gap", "word_gap")
    loaded = networks.loaded(head, calibration=CALIBRATION, exclusive=exclusive)
    thresholds = None if exclusive else [0.4]
    program = Program(loaded, thresholds, asks=head in OF_WORDS)
    graph = traced(program, loaded, "x.pt").module()

    for images, classes in ((1, 3), (5, 8)):
        words = words_of(head, classes)
        expected = scores(with_words(loaded, words), noise(images))
        probabilities, decisions = graph(noise(images), *words)
        assert expected.std() > 1e-3
        torch.testing.assert_close(probabilities, expected, atol=1e-6, rtol=0)
        limits = None if thresholds is None else torch.tensor(thresholds)
        assert torch.equal(decisions, decided(expected, limits))


def test_a_zero_shot_program_may_have_its_classes_inside() -> None:
    loaded = networks.loaded("words")
    probabilities, _ = Program(loaded, [0.5])(noise(2))
    torch.testing.assert_close(probabilities, scores(loaded, noise(2)))
    others = of_other_classes(loaded, 4)
    assert Program(others, [0.5])(noise(2))[0].shape == (2, 4)


def test_half_precision_leaves_the_checkpoint_as_it_is() -> None:
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

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.float().mean() > 9:
            images = 255 - images
        return images.float().flatten(2).transpose(1, 2)


def test_a_network_that_cannot_be_traced_is_one_line() -> None:
    loaded = networks.loaded("gap")
    loaded = replace(loaded, model=Classifier(Branching(), HEADS["gap"](3)))
    with pytest.raises(
        CheckpointError, match=r"x\.pt cannot be exported: torch\.export does not foll"
    ):
        traced(Program(loaded, [0.5]), loaded, "x.pt")
