"""The asymmetric loss for partly annotated data, and the priors of its classes."""

import logging
import math

import pytest
import torch
from support import in_processes

from mldec import build
from mldec.config.compose import compose
from mldec.errors import DataError
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.losses.partial import PartialAsymmetricLoss, read_prior, save_estimate

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 3.0], [-2.0, 0.0, 1.0, -0.5]])
TARGETS = torch.tensor([[1, 0, -1, -1], [0, -1, 1, -1]])


@pytest.mark.parametrize("mode", ["negative", "ignore", "ignore_normalized"])
def test_the_value_is_that_of_the_formula(mode):
    options = {"gamma_pos": 1.0, "gamma_neg": 2.0, "gamma_unannotated": 3.0, "clip": 0.05}
    alphas = {"alpha_pos": 0.5, "alpha_neg": 2.0, "alpha_unannotated": 1.5}
    loss = PartialAsymmetricLoss(mode=mode, **options, **alphas)
    expected = 0.0
    for row, labels in zip(LOGITS.tolist(), TARGETS.tolist(), strict=True):
        annotated = sum(label != -1 for label in labels)
        for x, y in zip(row, labels, strict=True):
            p = 1 / (1 + math.exp(-x))
            right = p if y == 1 else min(1 - p + 0.05, 1)
            alpha, gamma = {1: (0.5, 1), 0: (2.0, 2), -1: (1.5, 3)}[y]
            weight = 1.0 if mode == "negative" or y != -1 else 0.0
            if mode == "ignore_normalized":
                weight *= 1 + 1 / (1 + annotated)
            expected -= weight * alpha * (1 - right) ** gamma * math.log(right)
    assert loss(LOGITS, TARGETS).item() == pytest.approx(expected, rel=1e-5)


def test_fully_annotated_data_costs_what_the_asymmetric_loss_says():
    targets = TARGETS.clamp(min=0)
    partial = PartialAsymmetricLoss(gamma_pos=1, gamma_neg=4, clip=0.05)
    whole = AsymmetricLoss(gamma_pos=1, gamma_neg=4)
    torch.testing.assert_close(partial(LOGITS, targets), whole(LOGITS, targets))


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({"mode": "ignore"}, [[0, 2], [0, 3], [1, 1], [1, 3]]),
        # The two highest of four in the whole batch, both in the first image.
        ({"mode": "selective", "likelihood_top_k": 1}, [[0, 2], [0, 3]]),
        ({"mode": "selective", "likelihood_top_k": 9}, [[0, 2], [0, 3], [1, 1], [1, 3]]),
        ({"mode": "selective", "class_prior": [0.1, 0.9, 0.1, 0.6]}, [[0, 3], [1, 1], [1, 3]]),
    ],
)
def test_labels_that_do_not_count_have_no_gradient(options, left_out):
    logits = LOGITS.clone().requires_grad_()
    value = PartialAsymmetricLoss(**options)(logits, TARGETS)
    (gradient,) = torch.autograd.grad(value, logits)
    assert (gradient == 0).nonzero().tolist() == left_out


# Class priors

GENERATOR = torch.Generator().manual_seed(5)
MANY = 3 * torch.randn(6, 4, generator=GENERATOR)
LABELS = torch.randint(-1, 2, (6, 4), generator=GENERATOR)
MEANS = MANY.sigmoid().mean(0)


def test_the_estimate_is_the_mean_prediction_in_training_only():
    loss = PartialAsymmetricLoss(mode="ignore", class_prior="estimate")
    assert loss.prior() is None
    plain = PartialAsymmetricLoss(mode="ignore")
    for part in (slice(0, 4), slice(4, 6)):
        assert loss(MANY[part], LABELS[part]).equal(plain(MANY[part], LABELS[part]))
    torch.testing.assert_close(loss.prior(), MEANS)

    # A step that is not finite does not spoil it, and evaluation does not change it.
    loss(torch.full((2, 4), math.nan), LABELS[:2])
    loss.eval()(MANY.neg(), LABELS)
    torch.testing.assert_close(loss.prior(), MEANS)


def test_a_resumed_run_selects_by_the_estimate_so_far(tmp_path):
    whole, first, second = (
        PartialAsymmetricLoss(mode="selective", class_prior="estimate") for _ in range(3)
    )
    whole(MANY[:3], LABELS[:3])
    first(MANY[:3], LABELS[:3])
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    found = second(MANY[3:], LABELS[3:])
    assert found.equal(whole(MANY[3:], LABELS[3:]))
    given = PartialAsymmetricLoss(mode="selective", class_prior=second.prior().tolist())
    assert found.equal(given(MANY[3:], LABELS[3:]))
    assert PartialAsymmetricLoss().state_dict() == {}


def test_the_estimate_that_selects_forgets_the_beginning():
    loss = PartialAsymmetricLoss(mode="selective", class_prior="estimate")
    batches = [torch.full((3, 4), 4.0), *torch.linspace(-3, -1, 6)[:, None, None].expand(6, 3, 4)]
    for batch in batches:
        loss(batch, LABELS[:3])
    # Of seven batches those from the third on count: windows end after 1, 2 and 4 batches.
    expected = torch.cat(batches[2:]).sigmoid().mean(0)
    torch.testing.assert_close(loss.prior(), expected)


ESTIMATE = ["loss=partial", "loss.mode=ignore", "loss.class_prior=estimate"]


def in_a_process(rank, world_size, folder):
    loss = build.loss(build.check(compose(["+experiment=digits", *ESTIMATE])))
    share = slice(0, 2) if rank == 0 else slice(2, 6)
    loss(MANY[share], LABELS[share])
    torch.save(loss.prior(), f"{folder}/{rank}.pt")


def test_the_estimate_is_over_all_processes(tmp_path):
    in_processes(in_a_process, 2, str(tmp_path))
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one.equal(two)
    torch.testing.assert_close(one, MEANS)


def test_an_estimate_is_saved_and_read(tmp_path, caplog):
    path = tmp_path / "prior.csv"
    loss = PartialAsymmetricLoss(mode="selective", class_prior="estimate")
    save_estimate(loss, path, [])
    save_estimate(AsymmetricLoss(), path, [])
    assert not path.exists()
    loss(MANY, LABELS)
    with caplog.at_level(logging.INFO, "mldec"):
        save_estimate(loss, path, ["Human leg", 'a "b", c', "/m/01", "Caf\u00e9"])
    assert str(path) in caplog.text
    assert path.read_text(encoding="utf-8").startswith("Classes,avg_pred")
    assert read_prior(path) == loss.prior().tolist()
    from_file = PartialAsymmetricLoss(mode="selective", class_prior=str(path))
    assert from_file(MANY, LABELS).equal(loss.eval()(MANY, LABELS))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "cannot be used"),
        ("Classes,avg_pred\na,0.1\nb,high\n", "high"),
        ("Classes,avg_pred\na,1.5\n", "outside of this range"),
        ('Classes,avg_pred\n"a,0.5\n', "unexpected end of data"),
    ],
)
def test_a_broken_file_of_priors_is_one_line(tmp_path, text, part):
    path = tmp_path / "prior.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError) as caught:
        PartialAsymmetricLoss(mode="selective", class_prior=str(path))
    message = str(caught.value)
    assert message.startswith(f"loss.class_prior {path} cannot be used")
    assert message.endswith(
        "give a CSV file with the header Classes,avg_pred and a number from 0 to 1 per class"
    )
    assert part in message
    assert "\n" not in message
