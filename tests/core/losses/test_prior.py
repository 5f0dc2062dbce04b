from pathlib import Path

import pytest
import torch
from support import in_processes

from mldec.errors import ConfigError, DataError
from mldec.losses.partial import PartialAsymmetricLoss, read_prior, write_prior

GENERATOR = torch.Generator().manual_seed(5)
LOGITS = 3 * torch.randn(6, 4, generator=GENERATOR)
TARGETS = torch.randint(-1, 2, (6, 4), generator=GENERATOR)


def test_the_estimate_is_the_mean_prediction_in_training_only() -> None:
    loss = PartialAsymmetricLoss(mode="ignore", class_prior="estimate")
    assert loss.prior() is None
    loss(LOGITS[:4], TARGETS[:4])
    loss(LOGITS[4:], TARGETS[4:])
    torch.testing.assert_close(loss.prior(), LOGITS.sigmoid().mean(0))
    loss.eval()
    loss(LOGITS.neg(), TARGETS)
    torch.testing.assert_close(loss.prior(), LOGITS.sigmoid().mean(0))


def test_the_estimate_does_not_change_the_loss_where_nothing_is_selected() -> None:
    for mode in ("negative", "ignore", "ignore_normalized"):
        with_it = PartialAsymmetricLoss(mode=mode, class_prior="estimate")
        with_it(LOGITS, TARGETS)
        assert with_it(LOGITS, TARGETS).equal(PartialAsymmetricLoss(mode=mode)(LOGITS, TARGETS))


def test_selection_goes_by_the_estimate() -> None:
    loss = PartialAsymmetricLoss(mode="selective", class_prior="estimate")
    found = loss(LOGITS, TARGETS)
    given = PartialAsymmetricLoss(mode="selective", class_prior=LOGITS.sigmoid().mean(0).tolist())
    assert found.equal(given(LOGITS, TARGETS))
    assert not found.equal(PartialAsymmetricLoss()(LOGITS, TARGETS))


def test_a_resumed_run_goes_on_with_the_estimate(tmp_path: Path) -> None:
    whole, first, second = (
        PartialAsymmetricLoss(mode="selective", class_prior="estimate") for _ in range(3)
    )
    whole(LOGITS[:3], TARGETS[:3])
    first(LOGITS[:3], TARGETS[:3])
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second(LOGITS[3:], TARGETS[3:]).equal(whole(LOGITS[3:], TARGETS[3:]))
    assert second.prior().equal(whole.prior())


def test_the_state_of_a_loss_without_estimate_is_as_before() -> None:
    assert PartialAsymmetricLoss().state_dict() == {}


def in_a_process(rank: int, world_size: int, folder: str) -> None:
    loss = PartialAsymmetricLoss(mode="ignore", class_prior="estimate")
    share = slice(0, 2) if rank == 0 else slice(2, 6)
    loss(LOGITS[share], TARGETS[share])
    torch.save(loss.prior(), f"{folder}/{rank}.pt")


def test_the_estimate_is_over_all_processes(tmp_path: Path) -> None:
    in_processes(in_a_process, 2, str(tmp_path))
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one.equal(two)
    torch.testing.assert_close(one, LOGITS.sigmoid().mean(0))


def test_a_step_that_is_not_finite_does_not_spoil_the_estimate() -> None:
    loss = PartialAsymmetricLoss(mode="ignore", class_prior="estimate")
    loss(LOGITS, TARGETS)
    loss(torch.full((2, 4), float("nan")), TARGETS[:2])
    torch.testing.assert_close(loss.prior(), LOGITS.sigmoid().mean(0))


def test_a_file_of_priors_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "prior.csv"
    values = [0.125, 0.0, 1.0, 1e-7]
    write_prior(path, ["Human leg", 'a "b", c', "/m/01", "Caf\u00e9"], values)
    assert path.read_text(encoding="utf-8").startswith("Classes,avg_pred")
    assert read_prior(path) == values
    from_file = PartialAsymmetricLoss(mode="selective", class_prior=str(path))
    from_list = PartialAsymmetricLoss(mode="selective", class_prior=values)
    assert from_file(LOGITS, TARGETS).equal(from_list(LOGITS, TARGETS))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "header '' and 0 rows"),
        ("Classes,avg_pred\n", "0 rows"),
        ("Class,prior\na,0.1\n", "header 'Class,prior'"),
        ("Classes,avg_pred\na,0.1\nb,high\n", "row 3 is 'b,high'"),
        ("Classes,avg_pred\na,1.5\n", "row 2 is 'a,1.5'"),
        ("Classes,avg_pred\na,nan\n", "row 2"),
        ("Classes,avg_pred\na,b,0.5\n", "row 2"),
        ('Classes,avg_pred\n"a,0.5\n', "cannot be read"),
    ],
)
def test_a_broken_file_of_priors_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prior.csv"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        PartialAsymmetricLoss(mode="selective", class_prior=str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_file_without_effect_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.csv"):
        PartialAsymmetricLoss(mode="selective", class_prior=str(tmp_path / "nowhere.csv"))
    with pytest.raises(ConfigError, match=r"no effect with loss\.mode=ignore"):
        PartialAsymmetricLoss(mode="ignore", class_prior="prior.csv")
