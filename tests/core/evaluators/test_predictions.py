"""Predictions are kept exactly, and average precision comes from blocks as from one matrix."""

import pytest
import torch

from mldec.evaluators.average_precision import (
    Predictions,
    average_precision,
    average_precision_of_all,
)

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(30, 4, generator=GENERATOR)
TARGETS = torch.randint(-1, 2, (30, 4), generator=GENERATOR).to(torch.int8)


def test_batches_are_kept_in_full_precision() -> None:
    predictions = Predictions(2)
    close = torch.tensor([[1.0, 1.0 + 2**-20]])
    logits, targets = predictions.add(close.double(), torch.tensor([[1.0, -1.0]]))
    assert (logits.dtype, targets.dtype) == (torch.float32, torch.int8)
    assert logits[0, 0] < logits[0, 1]
    assert targets.tolist() == [[1, -1]]

    blocks = predictions.shared_by_classes()
    assert [torch.cat(of_kind).tolist() for of_kind in blocks] == [close.tolist(), [[1, -1]]]


def test_logits_of_half_precision_are_widened() -> None:
    logits, _ = Predictions(1).add(torch.ones(2, 1, dtype=torch.bfloat16), torch.ones(2, 1))
    assert logits.dtype == torch.float32


def test_a_process_without_images_has_blocks_without_rows() -> None:
    logits, targets = Predictions(3).shared_by_classes()
    assert [block.shape for block in (*logits, *targets)] == [(0, 3), (0, 3)]
    assert average_precision_of_all(logits, targets)["none"].isnan().all()


@pytest.mark.parametrize("size", [1, 7, 30])
def test_the_cut_into_batches_does_not_show(size: int) -> None:
    predictions = Predictions(4)
    for logits, targets in zip(LOGITS.split(size), TARGETS.split(size), strict=True):
        predictions.add(logits, targets)
    kinds = ("none", "envelope")
    found = average_precision_of_all(*predictions.shared_by_classes(), interpolations=kinds)
    expected = average_precision(LOGITS, TARGETS, interpolations=kinds)
    assert found.keys() == expected.keys() == set(kinds)
    for kind in kinds:
        assert torch.equal(found[kind], expected[kind])
