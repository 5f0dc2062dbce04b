"""Asymmetric loss for partial labels, and its class priors."""

import math

import pytest
import torch
from random_weights import with_gradient
from support import in_processes

from mldec import build
from mldec.config.compose import compose
from mldec.errors import DataError
from mldec.files.class_prior import read_prior, write_prior
from mldec.losses.partial import PartialAsymmetricLoss

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 3.0], [-2.0, 0.0, 1.0, -0.5]])
TARGETS = torch.tensor([[1, 0, -1, -1], [0, -1, 1, -1]])


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ({"mode": "ignore"}, [[0, 2], [0, 3], [1, 1], [1, 3]]),
        # The two highest of four labels of the batch, both in the first image.
        ({"mode": "selective", "likelihood_top_k": 1}, [[0, 2], [0, 3]]),
        ({"mode": "selective", "likelihood_top_k": 9}, [[0, 2], [0, 3], [1, 1], [1, 3]]),
        ({"mode": "selective", "class_prior": [0.1, 0.9, 0.1, 0.6]}, [[0, 3], [1, 1], [1, 3]]),
    ],
)
def test_ignored_labels_have_no_gradient(options, ignored):
    _, gradient = with_gradient(PartialAsymmetricLoss(**options), LOGITS, TARGETS)
    assert (gradient == 0).nonzero().tolist() == ignored


# Class priors

GENERATOR = torch.Generator().manual_seed(5)
MANY = 3 * torch.randn(6, 4, generator=GENERATOR)
LABELS = torch.randint(-1, 2, (6, 4), generator=GENERATOR)
MEANS = MANY.sigmoid().mean(0)


def test_estimate_is_mean_prediction_in_training():
    loss = PartialAsymmetricLoss(mode="ignore", class_prior="estimate")
    assert loss.prior() is None
    plain = PartialAsymmetricLoss(mode="ignore")
    for part in (slice(0, 4), slice(4, 6)):
        assert loss(MANY[part], LABELS[part]).equal(plain(MANY[part], LABELS[part]))
    torch.testing.assert_close(loss.prior(), MEANS)

    # Non-finite steps and evaluation do not change it.
    loss(torch.full((2, 4), math.nan), LABELS[:2])
    loss.eval()(MANY.neg(), LABELS)
    torch.testing.assert_close(loss.prior(), MEANS)


def test_estimate_is_restored_on_resume(tmp_path):
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


def test_selective_estimate_uses_newest_images():
    loss = PartialAsymmetricLoss(mode="selective", class_prior="estimate")
    batches = [torch.full((3, 4), 4.0), *torch.linspace(-3, -1, 6)[:, None, None].expand(6, 3, 4)]
    for batch in batches:
        loss(batch, LABELS[:3])
    # Windows end after 1, 2 and 4 batches, so the first two of seven batches are forgotten.
    expected = torch.cat(batches[2:]).sigmoid().mean(0)
    torch.testing.assert_close(loss.prior(), expected)


ESTIMATE = ["loss=partial", "loss.mode=ignore", "loss.class_prior=estimate"]


def estimate_on_rank(rank, world_size, folder):
    loss = build.loss(build.check(compose(["+experiment=digits", *ESTIMATE])))
    share = slice(0, 2) if rank == 0 else slice(2, 6)
    loss(MANY[share], LABELS[share])
    torch.save(loss.prior(), f"{folder}/{rank}.pt")


def test_estimate_includes_all_ranks(tmp_path):
    in_processes(estimate_on_rank, 2, str(tmp_path))
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one.equal(two)
    torch.testing.assert_close(one, MEANS)


def loss_with_prior(path):
    words = ["loss=partial_selective", f"loss.class_prior={path}"]
    return build.loss(build.check(compose(["+experiment=digits", *words])))


def test_estimate_of_a_run_is_read_by_another(tmp_path):
    path = tmp_path / "prior.csv"
    loss = PartialAsymmetricLoss(mode="selective", class_prior="estimate")
    assert loss.estimated_prior() is None
    loss(MANY, LABELS)
    prior = loss.estimated_prior().tolist()
    write_prior(path, ["Human leg", 'a "b", c', "/m/01", "Caf\u00e9"], prior)
    assert path.read_text(encoding="utf-8").startswith("Classes,avg_pred")
    assert read_prior(path) == prior
    from_file = loss_with_prior(path)
    assert from_file.prior().tolist() == prior
    assert from_file.estimated_prior() is None


@pytest.mark.parametrize("text", [None, "Classes,avg_pred\na,high\n", "Classes,avg_pred\na,1.5\n"])
def test_invalid_prior_file_is_named(tmp_path, text):
    path = tmp_path / "prior.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=rf"loss\.class_prior {path}"):
        loss_with_prior(path)


def test_losses_read_no_files(tmp_path):
    with pytest.raises(ValueError, match="class_prior"):
        PartialAsymmetricLoss(class_prior=str(tmp_path / "prior.csv"))
