"""One optimiser step, against plain loops; whole runs are in test_trainer.py."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from patches import MeanSquare, Patches
from squares import Spoilt
from support import assert_equal
from torch import nn

from mldec.config.compose import compose, override
from mldec.data.loader import Batch, sample_seed
from mldec.errors import CheckpointError, ConfigError
from mldec.heads.ml_decoder import MLDecoder
from mldec.heads.words import WordGAP, WordGroupDecoder
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.model import Classifier
from mldec.training.optim import fast_forward
from mldec.training.step import Learner, augment

CPU = torch.device("cpu")
# Gradient descent without momentum, weight decay and moving average.
PLAIN = ["optim.name=momentum", "optim.options={momentum: 0.0}", "optim.weight_decay=0"]
PLAIN += ["optim.lr=0.1", "schedule.name=cosine", "train.ema_decay=null"]
NARROW = {"embed_dim": 16, "num_heads": 2, "mlp_dim": 16}
WORDS, OF_WORDS = torch.randn(4, 6), {"word_dim": 6, "num_groups": None}


@pytest.fixture(scope="module")
def config():
    # An optimiser of torch: those of timm read the number of their step, on the CPU.
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
    """Return the batch in micro-batches."""
    whole = batch(sum(sizes))
    parts = zip(*(tensor.split(sizes) for tensor in whole[:3]), strict=True)
    return [Batch(*part) for part in parts]


def numbers(ours, batches, images=6):
    """Do a step and read its numbers."""
    ours.learn(batches, images)
    [values] = ours.read()
    return values


def weights(learner):
    return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}


@pytest.mark.parametrize("clip", ["null", "0.01"])
def test_a_step_is_that_of_plain_gradient_descent(config, clip):
    ours = learner(config, *PLAIN, f"train.clip_grad={clip}")
    other = learner(config, *PLAIN)
    rates = []
    for step in range(3):
        rates.append(ours.lr)
        told = ours.learn([batch()], 6)
        assert (told.stop_requested, told.bad_images) == (False, 0)
        [outcome] = ours.read()

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

        assert outcome.loss == pytest.approx(loss.item(), rel=1e-5)
        assert outcome[2:] == (None, [0, 1, 2, 3, 4, 5])
        assert ours.step == step + 1
    torch.testing.assert_close(weights(ours), weights(other), rtol=1e-4, atol=1e-6)
    assert len(set(rates)) == 3, "the schedule goes on with each step"


@pytest.mark.parametrize("loss", [AsymmetricLoss, MeanSquare])
@pytest.mark.parametrize("sizes", [[3, 3], [1, 2, 3]])
def test_micro_batches_of_any_size_make_the_same_step(config, loss, sizes):
    one, other = (learner(config, *PLAIN, loss=loss()) for _ in range(2))
    expected = numbers(one, [batch()]).loss
    assert numbers(other, divided(sizes)).loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(weights(other), weights(one), rtol=1e-4, atol=1e-6)


def test_an_image_that_was_left_out_counts_with_a_loss_of_0(config):
    ours = learner(config, *PLAIN, loss=MeanSquare())
    expected = MeanSquare()(ours.model(batch(3).images), batch(3).targets)
    assert ours.learn([batch(3, bad=2)], 5).bad_images == 2
    [outcome] = ours.read()
    assert outcome.loss == pytest.approx(3 / 5 * expected.item(), rel=1e-5)


def test_random_numbers_are_a_function_of_seed_and_step(config):
    ours, other = (learner(config, *PLAIN, dropout=0.5) for _ in range(2))
    first = numbers(ours, [batch()]).loss
    torch.manual_seed(sample_seed(0, 0, 0))
    expected = AsymmetricLoss()(other.model.train()(batch().images), batch().targets)
    assert first == pytest.approx(expected.item(), rel=1e-5)

    again = learner(config, *PLAIN, dropout=0.5)
    torch.manual_seed(99)
    assert numbers(again, [batch()]).loss == first
    assert numbers(learner(config, *PLAIN, "seed=1", dropout=0.5), [batch()]).loss != first


def test_a_stop_counts_though_it_came_during_the_step(config):
    requests = []
    ours = learner(config, *PLAIN)
    ours.model.head.register_forward_hook(lambda *_: requests.append(15))
    assert ours.learn([batch()], 6, stop=requests).stop_requested
    assert ours.step == 1, "the step is done nevertheless"


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "momentum", "lamb", "lion"])
def test_a_run_goes_on_as_if_a_step_that_is_left_out_had_not_been(config, name, call):
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


def test_after_a_fault_that_ends_the_run_no_step_changes_weights(config):
    ours = learner(config, loss=Spoilt(2))
    numbers(ours, [batch()])
    before = [parameter.detach().clone() for parameter in ours.model.parameters()]
    for _ in range(3):
        ours.learn([batch()], 6)
    assert [values.fault for values in ours.read()] == ["the loss is nan", None, None]
    assert_equal([parameter.detach() for parameter in ours.model.parameters()], before)


class Steep(nn.Module):
    """A loss whose gradients do not fit fp16 while the scale is that of the start."""

    reduction = "sum"

    def forward(self, logits, targets):
        return 1e35 * logits.sum()


@pytest.mark.usefixtures("fp16_on_a_cpu")
def test_overflow_in_fp16_is_the_scalers_affair(config):
    ours = learner(config, *PLAIN, "train.precision=fp16", loss=Steep())
    before, scale = weights(ours), ours.scaler.get_scale()
    assert numbers(ours, [batch()]).fault is None, "or the run would stop"
    assert (ours.skipped, ours.scaler.get_scale()) == (1, scale / 2)
    assert_equal(weights(ours), before)


def test_synchronised_batch_norm_of_several_processes_needs_cuda(config, monkeypatch):
    learner(config, "train.sync_batchnorm=true")
    monkeypatch.setattr("mldec.runtime.distributed.world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"train.sync_batchnorm needs CUDA, not cpu"):
        learner(config, "train.sync_batchnorm=true")


def test_the_moving_average_follows_its_formula(config):
    ours = learner(config, "train.ema_decay=0.9")
    average = ours.ema.module.head.pool_bias
    ours.model.register_buffer("counter", torch.tensor(5))
    ours.ema.module.register_buffer("counter", torch.tensor(0))
    for _ in range(2):
        before = average.clone()
        ours.learn([batch()], 6)
        torch.testing.assert_close(average, 0.9 * before + 0.1 * ours.model.head.pool_bias)
    assert ours.ema.module.counter == 5, "a counter is copied, not averaged"


@pytest.mark.parametrize(("epochs", "cooldown", "flat"), [(8, 1, 1), (2, 10, 1), (1, 10, 0)])
def test_a_cooldown_is_at_most_half_of_the_run(config, epochs, cooldown, flat):
    words = [f"train.epochs={epochs}", f"schedule.cooldown_epochs={cooldown}"]
    words += ["schedule.name=cosine_epochs", "schedule.min_lr=1e-6"]
    ours = learner(config, *words, steps=4 * epochs)
    rates = []
    for epoch in range(epochs):
        fast_forward(ours.schedule, 4 * epoch)
        rates.append(ours.lr)
    assert sum(rate == pytest.approx(1e-6) for rate in rates) == flat


# States


def restored(ours, state):
    """Restore a state, as the part of a checkpoint that a learner reads."""
    ours.load_state(SimpleNamespace(**state), Path("x.pt"))
    return ours


@pytest.mark.parametrize("words", [[], ["train.precision=fp16"], ["train.ema_decay=null"]])
def test_a_state_that_is_restored_goes_on_the_same(config, words):
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


@pytest.mark.usefixtures("fp16_on_a_cpu")
def test_fp16_goes_on_from_steps_without_a_scale(config):
    first = learner(config, "train.precision=fp32")
    first.learn([batch()], 6)
    assert first.state()["scaler"] == {}
    second = restored(learner(config, "train.precision=fp16"), first.state())
    assert (second.scaler.get_scale(), second.step) == (65536, 1)


@pytest.mark.parametrize(
    ("part", "value", "fault"),
    [
        ("model", {}, "does not fit the model"),
        ("ema", None, "does not fit the model"),
        ("loss", {"a": torch.zeros(1)}, "cannot be used"),
        ("optimizer", {"state": {}, "param_groups": []}, "cannot be used"),
        ("exp_avg", torch.zeros(1), "cannot be used .*another shape"),
    ],
)
def test_a_state_that_does_not_fit_is_one_line(config, part, value, fault):
    ours = learner(config)
    ours.learn([batch()], 6)
    state = copy.deepcopy(ours.state())
    holder = state if part in state else state["optimizer"]["state"][0]
    holder[part] = value
    with pytest.raises(CheckpointError, match=rf"^x\.pt .*{fault}") as caught:
        restored(ours, state)
    assert "\n" not in str(caught.value)


# Word queries

HEADS = {
    "full": lambda: MLDecoder(48, 4, **NARROW, **OF_WORDS),
    "groups": lambda: WordGroupDecoder(48, 4, word_dim=6, **NARROW),
    "gap": lambda: WordGAP(48, 4, word_dim=6),
}


class Recording(nn.Module):
    """A loss that keeps what it was given."""

    reduction = "sum"

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, logits, targets):
        self.calls.append((logits.detach().clone(), targets.clone()))
        return (logits.sigmoid() - targets).square().sum()


def test_noise_and_random_queries_have_the_spread_of_the_words():
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
def test_training_with_plain_queries_is_a_step_written_out(config, head):
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


def test_the_loss_sees_random_queries_which_each_step_draws_anew(config):
    def calls(*, skip):
        loss = Recording()
        words = ["train.query_noise=1.0", "train.random_queries=2", "optim.lr=1e-12"]
        job = learner(
            config, *words, "optim.weight_decay=0", loss=loss, word_vectors=WORDS, head=head
        )
        job.step = skip
        for _ in range(2 - skip):
            job.learn([batch()], 6)
        assert job.word_vectors.equal(WORDS), "what is kept stays clean"
        return loss.calls

    head = HEADS["full"]().eval()
    (first, targets), (second, _) = calls(skip=0)
    assert first.shape == targets.shape == (6, 6)
    assert targets[:, :4].equal(batch().targets)
    assert (targets[:, 4:] == 1).all()
    assert (first - second).abs().max() > 1e-3
    torch.manual_seed(99)
    torch.testing.assert_close(calls(skip=1)[0][0], second, rtol=1e-4, atol=1e-5)
