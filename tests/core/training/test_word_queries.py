"""Word queries in training: what changes them, and what a run carries of them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from patches import Patches
from support import assert_equal
from torch import Tensor, nn

from mldec.checkpoint import load_model
from mldec.config.compose import compose
from mldec.config.schema import Config
from mldec.data.loader import Batch, sample_seed
from mldec.errors import ConfigError
from mldec.files.torch_files import read_torch
from mldec.heads.ml_decoder import MLDecoder
from mldec.heads.words import WordGAP, WordGroupDecoder
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.model import Classifier
from mldec.train import run
from mldec.training.step import Learner, augment

NARROW: dict[str, Any] = {"embed_dim": 16, "num_heads": 2, "mlp_dim": 16, "word_dim": 6}
HEADS: dict[str, Callable[[], nn.Module]] = {
    "full": lambda: MLDecoder(48, 5, num_groups=None, **NARROW),
    "groups": lambda: WordGroupDecoder(48, 5, **NARROW),
    "gap": lambda: WordGAP(48, 5, word_dim=6),
}
WORDS, TARGETS = torch.randn(5, 6), torch.eye(5, dtype=torch.int8)[:3]


class Recording(nn.Module):
    """A loss that keeps what it was given."""

    reduction = "sum"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor]] = []

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.calls.append((logits.detach().clone(), targets.clone()))
        return (logits.sigmoid() - targets).square().sum()


def learner(
    *words: str, head: str = "full", loss: nn.Module | None = None, queries: Tensor | None = WORDS
) -> Learner:
    torch.manual_seed(0)
    model = Classifier(Patches(), HEADS[head]())
    config = compose(["+experiment=digits", *words])
    device = torch.device("cpu")
    return Learner(
        config, model, loss or AsymmetricLoss(), device=device, steps=10, queries=queries
    )


def batch() -> Batch:
    images = torch.randint(
        256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return Batch(images, TARGETS, torch.arange(3))


# The function


def test_off_returns_the_very_arguments_and_draws_nothing() -> None:
    state = torch.get_rng_state()
    queries, targets = augment(WORDS, TARGETS, noise=0.0, extra=0)
    assert queries is WORDS
    assert targets is TARGETS
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_is_a_fraction_of_the_spread() -> None:
    words = 4 * torch.randn(400, 300) + 1
    queries, targets = augment(words, TARGETS, noise=0.25, extra=0)
    assert targets.equal(TARGETS)
    difference = queries - words
    assert difference.std().item() == pytest.approx(1, rel=0.02)
    assert abs(difference.mean().item()) < 0.02
    assert (
        abs(torch.corrcoef(torch.stack([difference.flatten(), words.flatten()]))[0, 1].item())
        < 0.02
    )


def test_random_queries_come_last_and_are_positive() -> None:
    words = 4 * torch.randn(400, 300) + 1
    labels = -torch.ones(2, 400, dtype=torch.int8)
    queries, targets = augment(words, labels, noise=0.0, extra=100)
    assert queries[:400].equal(words)
    assert targets[:, :400].equal(labels)
    assert targets[:, 400:].tolist() == [[1] * 100] * 2
    assert targets.dtype == torch.int8
    assert queries[400:].std().item() == pytest.approx(4, rel=0.05)
    assert queries[400:].mean().item() == pytest.approx(1, abs=0.1)
    assert len(queries[400:].unique(dim=0)) == 100


# In a step


@pytest.mark.parametrize("head", list(HEADS))
def test_both_off_is_training_with_the_plain_queries_bit_for_bit(head: str) -> None:
    """Against a step written out, whose random numbers are the head's own only."""
    ours = learner(head=head)
    other = learner(head=head)
    for _ in range(3):
        ours.learn([batch()], 3)
    losses = [numbers.loss for numbers in ours.read()]
    expected = []
    for step in range(3):
        torch.manual_seed(sample_seed(0, step, 0))
        loss = AsymmetricLoss()(other.model(batch().images, WORDS), TARGETS)
        expected.append(loss.item())
        loss.backward()
        other.optimizer.step()
        other.optimizer.zero_grad()
        other.schedule.step()
    assert losses == expected


@pytest.mark.parametrize("head", list(HEADS))
def test_the_loss_sees_the_random_queries_too(head: str) -> None:
    loss = Recording()
    job = learner("train.random_queries=2", "train.query_noise=0.1", head=head, loss=loss)
    job.learn([batch()], 3)
    logits, targets = loss.calls[0]
    assert logits.shape == targets.shape == (3, 7)
    assert targets[:, :5].equal(TARGETS)
    assert (targets[:, 5:] == 1).all()
    assert job.queries is not None
    assert job.queries.equal(WORDS)  # what is kept stays clean


def test_each_step_draws_anew_and_as_its_number_says() -> None:
    def logits(*, skip: int) -> list[Tensor]:
        loss = Recording()
        job = learner("train.query_noise=1.0", "optim.lr=1e-12", "optim.weight_decay=0", loss=loss)
        job.model.head.eval()
        job.step = skip
        for _ in range(2 - skip):
            job.learn([batch()], 3)
        return [call[0] for call in loss.calls]

    first, second = logits(skip=0)
    assert (first - second).abs().max() > 1e-3
    torch.manual_seed(99)
    torch.testing.assert_close(logits(skip=1)[0], second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["query_noise", "random_queries"])
def test_without_word_queries_they_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"train.{name} has no effect: the data has no word queries"
    ):
        learner(f"train.{name}=1", queries=None)


@pytest.mark.parametrize("name", ["query_noise", "random_queries"])
def test_below_zero_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"train.{name} is -1.*0 or more"):
        compose(["+experiment=digits", f"train.{name}=-1"])


# A run


def settings(*words: str) -> Config:
    small = [
        "data.train_images=32",
        "data.val_images=60",
        "data.image_size=32",
        "data.colours=2",
        "data.unseen=2",
    ]
    narrow = [
        "head.embed_dim=16",
        "head.num_heads=2",
        "head.mlp_dim=16",
        "train.batch_size=8",
        "train.workers=0",
    ]
    config = compose(
        ["+experiment=digits_zsl", *small, *narrow, "device=cpu", "train.epochs=2", *words]
    )
    return dataclasses.replace(
        config, plugins=["patches"], backbone={"_target_": "patches.Patches"}
    )


@pytest.mark.parametrize(
    "head", ["ml_decoder_zsl_small", "ml_decoder_zsl_groups_small", "ml_decoder_zsl_single_small"]
)
def test_a_resumed_run_equals_one_that_was_not_stopped_and_carries_vectors(
    head: str, tmp_path: Path
) -> None:
    words = [
        "train.query_noise=0.3",
        "train.random_queries=1",
        "train.precision=bf16",
        f"head={head}",
    ]
    run(settings(*words, "train.keep_last=4"), tmp_path / "whole")
    middle = tmp_path / "whole" / "checkpoints" / "last.2.pt"
    assert (read_torch(middle)["epoch"], read_torch(middle)["step"]) == (1, 4)
    torch.manual_seed(99)
    run(settings(*words, "train.keep_last=4", f"resume={middle}"), tmp_path / "again")
    one, other = (
        read_torch(tmp_path / name / "checkpoints" / "last.pt") for name in ("whole", "again")
    )
    for state in (one, other):
        del state["log"]["lines"]  # the new folder has a log of its own
    assert_equal(one, other)
    assert one["classes"]["queries"].shape == (20, 300)
    assert next(iter(one["metrics"])) == "val/zsl_mAP"

    loaded = load_model(tmp_path / "whole" / "checkpoints" / "best.pt", plugins=["patches"])
    assert loaded.classes.queries is not None
    logits = loaded.model(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), loaded.classes.queries[:7])
    assert logits.shape == (1, 7)
