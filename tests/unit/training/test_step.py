"""Single optimizer steps compared with plain loops. test_trainer.py tests whole runs."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from patches import MeanSquare, Patches
from squares import Spoilt
from support import assert_equal
from timm.utils import ModelEmaV3
from torch import nn

from mldec.config.compose import compose, override
from mldec.data.loader import Batch, sample_seed
from mldec.errors import CheckpointError, ConfigError
from mldec.heads.ml_decoder import MLDecoder
from mldec.heads.words import WordGAP, WordGroupDecoder
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.losses.partial import PartialAsymmetricLoss
from mldec.model import Classifier
from mldec.training.ema import ModelEma
from mldec.training.optim import fast_forward
from mldec.training.step import Learner, augment, flatten, restore_unless

CPU = torch.device("cpu")
# Gradient descent without momentum, weight decay and moving average.
PLAIN = ["optim.name=momentum", "optim.options={momentum: 0.0}", "optim.weight_decay=0"]
PLAIN += ["optim.lr=0.1", "schedule.name=cosine", "train.ema_decay=null"]
NARROW = {"embed_dim": 16, "num_heads": 2, "mlp_dim": 16}
WORDS, OF_WORDS = torch.randn(4, 6), {"word_dim": 6, "num_groups": None}


@pytest.fixture(scope="module")
def config():
    # Optimizers of timm keep their step number on the CPU; those of torch do not.
    return compose(["+experiment=digits", "optim.name=adamw"])


def learner(config, *words, loss=None, dropout=0.0, steps=12, head=None, word_vectors=None):
    torch.manual_seed(0)
    model = Classifier(Patches(), head or MLDecoder(48, 4, dropout=dropout, **NARROW))
    changed = override(config, list(words))
    loss = loss or AsymmetricLoss()
    return Learner(changed, model, loss, device=CPU, steps=steps, word_vectors=word_vectors)


def batch(images=6, bad=0):
    generator = torch.Generator().manual_seed(1)
    shown = torch.randint(256, (images, 3, 16, 16), dtype=torch.uint8, generator=generator)
    targets = torch.randint(2, (images, 4), dtype=torch.int8, generator=generator)
    return Batch(shown, targets, torch.arange(images), ["broken"] * bad)


def divided(sizes):
    """Return the batch in micro-batches of these sizes."""
    whole = batch(sum(sizes))
    parts = zip(*(tensor.split(sizes) for tensor in whole[:3]), strict=True)
    return [Batch(*part) for part in parts]


def numbers(ours, batches, images=6):
    """Do a step and return its stats."""
    ours.learn(batches, images)
    [values] = ours.read()
    return values


def weights(learner):
    return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}


@pytest.mark.parametrize("clip", ["null", "0.01"])
def test_step_equals_plain_gradient_descent(config, clip):
    ours = learner(config, *PLAIN, f"train.clip_grad={clip}")
    other = learner(config, *PLAIN)
    rates = []
    for step in range(3):
        rates.append(ours.lr)
        status = ours.learn([batch()], 6)
        assert (status.stop_requested, status.bad_images) == (False, 0)
        [stats] = ours.read()

        loss = AsymmetricLoss()(other.model(batch().images), batch().targets)
        parameters = [p for p in other.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        used = [gradient for gradient in gradients if gradient is not None]
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in used))
        factor = 1.0 if clip == "null" else min(1.0, float(clip) / (norm + 1e-6))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter -= rates[-1] * factor * gradient

        assert stats.loss == pytest.approx(loss.item(), rel=1e-5)
        assert stats[2:] == (None, [0, 1, 2, 3, 4, 5])
        assert ours.step == step + 1
    torch.testing.assert_close(weights(ours), weights(other), rtol=1e-4, atol=1e-6)
    assert len(set(rates)) == 3, "the schedule is not updated"


@pytest.mark.parametrize("loss", [AsymmetricLoss, MeanSquare])
@pytest.mark.parametrize("sizes", [[3, 3], [1, 2, 3]])
def test_step_does_not_depend_on_micro_batches(config, loss, sizes):
    one, other = (learner(config, *PLAIN, loss=loss()) for _ in range(2))
    expected = numbers(one, [batch()]).loss
    assert numbers(other, divided(sizes)).loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(weights(other), weights(one), rtol=1e-4, atol=1e-6)


class SmallMemory(nn.Module):
    """A backbone with batch norm that runs out of memory with more than `limit` images."""

    num_features = 48

    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.patches = Patches()
        self.norm = nn.BatchNorm1d(48)

    def forward(self, images):
        tokens = self.norm(self.patches(images).transpose(1, 2)).transpose(1, 2)
        if len(images) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tokens


def in_pieces(config, pieces, limit):
    """Return a learner with dropout, batch norm and a loss with a state, after two steps."""
    torch.manual_seed(0)
    model = Classifier(SmallMemory(limit), MLDecoder(48, 4, dropout=0.5, **NARROW))
    loss = PartialAsymmetricLoss(mode="selective", likelihood_top_k=2, class_prior="estimate")
    changed = override(config, [f"train.pieces={pieces}"])
    ours = Learner(changed, model, loss, device=CPU, steps=12)
    ours.train()
    for _ in range(2):
        ours.learn(divided([6, 5]), 11)
    return ours


def test_out_of_memory_halves_micro_batches_and_repeats_step(config):
    ours = in_pieces(config, 1, limit=2)
    assert ours.pieces == 4

    smaller = in_pieces(config, 4, limit=2)
    assert_equal(ours.state(), smaller.state())
    assert ours.read() == smaller.read()

    undivided = in_pieces(config, 1, limit=6)
    assert undivided.pieces == 1
    assert_equal(undivided.state(), in_pieces(config, "null", limit=6).state())
    with pytest.raises(torch.OutOfMemoryError):
        in_pieces(config, 1, limit=0)


def test_unreadable_image_counts_with_loss_0(config):
    ours = learner(config, *PLAIN, loss=MeanSquare())
    expected = MeanSquare()(ours.model(batch(3).images), batch(3).targets)
    assert ours.learn([batch(3, bad=2)], 5).bad_images == 2
    [stats] = ours.read()
    assert stats.loss == pytest.approx(3 / 5 * expected.item(), rel=1e-5)


def test_random_numbers_depend_on_seed_and_step(config):
    ours, other = (learner(config, *PLAIN, dropout=0.5) for _ in range(2))
    first = numbers(ours, [batch()]).loss
    torch.manual_seed(sample_seed(0, 0, 0))
    expected = AsymmetricLoss()(other.model.train()(batch().images), batch().targets)
    assert first == pytest.approx(expected.item(), rel=1e-5)

    again = learner(config, *PLAIN, dropout=0.5)
    torch.manual_seed(99)
    assert numbers(again, [batch()]).loss == first
    assert numbers(learner(config, *PLAIN, "seed=1", dropout=0.5), [batch()]).loss != first


@pytest.mark.parametrize(
    ("name", "call"), [("adamw", 1), ("adam", 3), ("sgd", 1), ("lamb", 3), ("lion", 3)]
)
def test_skipped_step_has_no_effect(config, name, call):
    words = [f"optim.name={name}", "train.nonfinite=skip", "schedule.name=cosine"]
    ours, without = learner(config, *words, loss=Spoilt(call)), learner(config, *words)
    for step in range(1, 5):
        fault = numbers(ours, [batch()]).fault
        assert (fault is not None) is (step == call)
        if fault:
            without.step += 1
            without.schedule.step()
        else:
            numbers(without, [batch()])
    assert ours.skipped == 1
    assert_equal(weights(ours), weights(without))


def test_no_step_changes_weights_after_fatal_fault(config):
    ours = learner(config, loss=Spoilt(2))
    numbers(ours, [batch()])
    before = [parameter.detach().clone() for parameter in ours.model.parameters()]
    for _ in range(3):
        ours.learn([batch()], 6)
    assert [values.fault for values in ours.read()] == ["the loss is nan", None, None]
    assert_equal([parameter.detach() for parameter in ours.model.parameters()], before)


class Doubled(AsymmetricLoss):
    def forward(self, logits, targets):
        return 2 * super().forward(logits, targets)


def test_forward_of_a_users_loss_needs_no_indices(config):
    plain, doubled = (learner(config, loss=loss) for loss in (None, Doubled()))
    expected = 2 * numbers(plain, [batch()]).loss
    assert numbers(doubled, [batch()]).loss == pytest.approx(expected)


class Steep(nn.Module):
    """A loss whose gradients overflow in fp16 at the initial scale."""

    reduction = "sum"

    def forward(self, logits, targets):
        return 1e35 * logits.sum()


@pytest.mark.usefixtures("fp16_on_a_cpu")
def test_overflow_in_fp16_lowers_scale_only(config):
    ours = learner(config, *PLAIN, "train.precision=fp16", loss=Steep())
    before, scale = weights(ours), ours.scaler.get_scale()
    assert numbers(ours, [batch()]).fault is None
    assert (ours.skipped, ours.scaler.get_scale()) == (1, scale / 2)
    assert_equal(weights(ours), before)


def test_sync_batchnorm_needs_cuda(config, monkeypatch):
    learner(config, "train.sync_batchnorm=true")
    monkeypatch.setattr("mldec.runtime.distributed.world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"train\.sync_batchnorm"):
        learner(config, "train.sync_batchnorm=true")


def test_moving_average_equals_timm():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    ours, theirs = ModelEma(model, 0.9), ModelEmaV3(model, decay=0.9)
    for _ in range(3):
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        with torch.no_grad():
            model[0].weight += model[0].weight.grad
        ours.update()
        theirs.update(model)
    assert_equal(dict(ours.module.state_dict()), dict(theirs.module.state_dict()))
    assert ours.module[1].num_batches_tracked == 3

    ours.reset()
    assert_equal(dict(ours.module.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("condition", [True, False])
def test_restore_unless(condition):
    tensors = [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    tensors += [torch.tensor(3), torch.randn(5), torch.tensor(4), torch.randn(())]
    before = copy.deepcopy(tensors)
    saved = flatten(tensors)
    for tensor in tensors:
        tensor.add_(1)
    tensors[2][0] = torch.nan
    after = copy.deepcopy(tensors)

    restore_unless(torch.tensor(condition), tensors, saved)
    for value, one, other in zip(tensors, after, before, strict=True):
        torch.testing.assert_close(value, one if condition else other, equal_nan=True)


@pytest.mark.parametrize(("epochs", "cooldown", "flat"), [(8, 1, 1), (2, 10, 1), (1, 10, 0)])
def test_cooldown_is_at_most_half_of_run(config, epochs, cooldown, flat):
    words = [f"train.epochs={epochs}", f"schedule.cooldown_epochs={cooldown}"]
    words += ["schedule.name=cosine_epochs", "schedule.min_lr=1e-6"]
    ours = learner(config, *words, steps=4 * epochs)
    rates = []
    for epoch in range(epochs):
        fast_forward(ours.schedule, 4 * epoch)
        rates.append(ours.lr)
    assert sum(rate == pytest.approx(1e-6) for rate in rates) == flat


def restored(ours, state):
    """Restore the state of a learner."""
    ours.load_state(SimpleNamespace(**state), Path("x.pt"))
    return ours


@pytest.mark.parametrize("words", [[], ["train.precision=fp16"], ["train.ema_decay=null"]])
def test_restored_state_continues_exactly(config, words):
    whole, first = (learner(config, *words, dropout=0.3) for _ in range(2))
    for _ in range(4):
        whole.learn([batch()], 6)
    for _ in range(2):
        first.learn([batch()], 6)

    second = restored(learner(config, *words, dropout=0.3), first.state())
    assert second.step == 2
    for _ in range(2):
        second.learn([batch()], 6)
    assert_equal(second.state(), whole.state())
    assert second.lr == whole.lr
    assert second.loss.progress == whole.loss.progress == 3 / 12


@pytest.mark.usefixtures("fp16_on_a_cpu")
def test_fp16_resumes_from_fp32(config):
    first = learner(config, "train.precision=fp32")
    first.learn([batch()], 6)
    assert first.state()["scaler"] == {}
    second = restored(learner(config, "train.precision=fp16"), first.state())
    assert (second.scaler.get_scale(), second.step) == (65536, 1)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("model", {}),
        ("ema", None),
        ("loss", {"a": torch.zeros(1)}),
        ("optimizer", {"state": {}, "param_groups": []}),
        ("exp_avg", torch.zeros(1)),
    ],
)
def test_state_of_another_model_raises(config, part, value):
    ours = learner(config)
    ours.learn([batch()], 6)
    state = copy.deepcopy(ours.state())
    holder = state if part in state else state["optimizer"]["state"][0]
    holder[part] = value
    with pytest.raises(CheckpointError, match=r"^x\.pt"):
        restored(ours, state)


HEADS = {
    "full": lambda: MLDecoder(48, 4, **NARROW, **OF_WORDS),
    "groups": lambda: WordGroupDecoder(48, 4, word_dim=6, **NARROW),
    "gap": lambda: WordGAP(48, 4, word_dim=6),
}


class Recording(nn.Module):
    """A loss that records its arguments."""

    reduction = "sum"

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, logits, targets):
        self.calls.append((logits.detach().clone(), targets.clone()))
        return (logits.sigmoid() - targets).square().sum()


def test_augment_uses_spread_of_word_vectors():
    words, labels = 4 * torch.randn(400, 300) + 1, -torch.ones(2, 400, dtype=torch.int8)
    state = torch.get_rng_state()
    assert augment(words, labels, noise=0.0, extra=0) == (words, labels)
    assert torch.equal(torch.get_rng_state(), state)

    noisy, same = augment(words, labels, noise=0.25, extra=0)
    assert same.equal(labels)
    assert (noisy - words).std().item() == pytest.approx(1, rel=0.02)
    both = torch.stack([(noisy - words).flatten(), words.flatten()])
    assert abs(torch.corrcoef(both)[0, 1].item()) < 0.02

    word_vectors, targets = augment(words, labels, noise=0.0, extra=100)
    assert word_vectors[:400].equal(words)
    assert targets[:, :400].equal(labels)
    assert targets[:, 400:].tolist() == [[1] * 100] * 2
    assert word_vectors[400:].std().item() == pytest.approx(4, rel=0.05)
    assert word_vectors[400:].mean().item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("head", list(HEADS))
def test_step_with_word_vectors_equals_plain_loop(config, head):
    ours, other = (learner(config, head=HEADS[head](), word_vectors=WORDS) for _ in range(2))
    other.model.load_state_dict(ours.model.state_dict())
    for step in range(3):
        torch.manual_seed(sample_seed(0, step, 0))
        loss = AsymmetricLoss()(other.model(batch().images, WORDS), batch().targets)
        loss.backward()
        other.optimizer.step()
        other.optimizer.zero_grad()
        other.schedule.step()
        assert numbers(ours, [batch()]).loss == loss.item()


def test_each_step_draws_new_random_queries(config):
    def calls(*, skip):
        loss = Recording()
        words = ["train.query_noise=1.0", "train.random_queries=2", "optim.lr=1e-12"]
        job = learner(
            config, *words, "optim.weight_decay=0", loss=loss, word_vectors=WORDS, head=head
        )
        job.step = skip
        for _ in range(2 - skip):
            job.learn([batch()], 6)
        assert job.word_vectors.equal(WORDS)
        return loss.calls

    head = HEADS["full"]().eval()
    (first, targets), (second, _) = calls(skip=0)
    assert first.shape == targets.shape == (6, 6)
    assert targets[:, :4].equal(batch().targets)
    assert (targets[:, 4:] == 1).all()
    assert (first - second).abs().max() > 1e-3
    torch.manual_seed(99)
    torch.testing.assert_close(calls(skip=1)[0][0], second, rtol=1e-4, atol=1e-5)
