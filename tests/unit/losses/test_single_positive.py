"""States of the losses per training image; tests/parity checks their values."""

import torch
import torch.nn.functional as F

from mldec.losses import ROLE, PermanentCorrection, PseudoNegatives
from mldec.training.optim import build_optimizer

LABELS = F.one_hot(torch.arange(6) % 4, 4)
INDEX = torch.tensor([4, 1, 5])
LOGITS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def test_pseudo_labels_are_the_lowest_scores_of_readable_images():
    loss = PseudoNegatives(warmup_epochs=1, share=0.5, train_labels=LABELS)
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    logits[2] = torch.nan
    loss.start_epoch(0, 2, lambda: logits)
    assert (loss.pseudo < 0).all()

    loss.start_epoch(1, 2, lambda: logits)
    for column, labels in enumerate(LABELS.T.tolist()):
        unobserved = [row for row, label in enumerate(labels) if label == 0]
        readable = [row for row in unobserved if row != 2]
        readable.sort(key=lambda row: logits[row, column].item())
        chosen = readable[: len(unobserved) // 2]
        pseudo = loss.pseudo[:, column]
        assert sorted(chosen) == (pseudo >= 0).nonzero().flatten().tolist()
        torch.testing.assert_close(pseudo[chosen], logits[chosen, column].sigmoid())


def test_corrections_are_made_in_training_only():
    loss = PermanentCorrection(delta=0.25, stages=2, train_labels=LABELS)
    loss.progress = 0.5
    loss.eval()
    loss(LOGITS, LABELS[INDEX], INDEX)
    assert not loss.corrections.any()

    # The same image can be twice in a batch.
    loss.train()
    twice = torch.tensor([4, 4])
    loss(LOGITS[[0, 0]], LABELS[twice], twice)
    largest = LOGITS[0].masked_fill(LABELS[4] == 1, -torch.inf).argmax()
    assert (loss.corrections > 0).nonzero().tolist() == [[4, largest]]


def test_role_equals_the_formulas_of_the_paper():
    eps, expected = 1e-3, 1.7
    loss = ROLE(expected_positives=expected, eps=eps, train_labels=LABELS).double()
    logits = LOGITS.double()
    observed = (LABELS[INDEX] == 1).double()
    f = torch.sigmoid(logits)
    g = torch.sigmoid(loss.estimator[INDEX])

    def cross_entropy(q, p):
        return -q * torch.log(p + eps) - (1 - q) * torch.log(1 - p + eps)

    ones = torch.ones_like(f)
    both = cross_entropy(g, f) + cross_entropy(f, g)
    both = both + observed * (cross_entropy(ones, f) + cross_entropy(ones, g))
    total = both.mean() / 2
    for p in (f, g):
        total = total + (p.sum(1).mean() - expected) ** 2 / (2 * 4**2)
    torch.testing.assert_close(loss(logits, LABELS[INDEX], INDEX), total)


def test_label_estimator_is_trained_as_in_the_official_code():
    torch.manual_seed(0)
    loss = ROLE(lr_factor=10, train_labels=LABELS)
    start = loss.estimator.detach().clone()
    assert torch.equal(start > 5, LABELS == 1)
    assert start[LABELS == 0].abs().max() < 0.41

    model = torch.nn.Linear(5, 4)
    ours = build_optimizer(
        model, name="adam", lr=0.01, options={}, loss=loss, weight_decay=0.1, decay="all"
    )
    # The official code has one Adam with two groups and no weight decay.
    estimator = start.clone().requires_grad_()
    official = torch.optim.Adam([estimator], lr=10 * 0.01)

    for index in (INDEX, torch.tensor([0, 2, 3])):
        ours.zero_grad()
        loss(LOGITS, LABELS[index], index).backward()
        ours.step()
        official.zero_grad()
        other = ROLE(train_labels=LABELS)
        other.estimator.data = estimator.data
        other(LOGITS, LABELS[index], index).backward()
        estimator.grad = other.estimator.grad
        official.step()
    torch.testing.assert_close(loss.estimator.data, estimator.data)
    # Adam moves the labels of all images once they have a momentum.
    assert not torch.equal(loss.estimator, start)
