"""The first training steps against the official loop; tests/full compares the whole trajectory."""

from trajectory import check_steps


def test_losses_and_rates_of_the_first_steps(tmp_path):
    assert check_steps(tmp_path, 2).step == 2
