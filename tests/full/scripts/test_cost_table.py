"""Multiply-accumulates of the paper's models against the paper and the committed figures."""

import json
from pathlib import Path

import pytest
from support import decoder_macs

from mldec.model import count_parameters, multiply_accumulates

TOP = Path(__file__).parents[3]
COMMITTED = json.loads((TOP / "benchmarks" / "cpu_cost.json").read_text())["figures"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(TOP / "scripts" / "reproduce")
    import cost_table

    return cost_table


def test_committed_figures_match_the_paper(script):
    assert script.cost() == COMMITTED
    for row in COMMITTED["rows"]:
        assert row["difference"] == pytest.approx(row["gmac"] - row["paper_gmac"])
        if row["paper_gmac"] == 178.6:
            assert row["gmac"] == pytest.approx(212.33, abs=0.01)
            assert not row["explained"]
        else:
            assert abs(row["difference"]) < script.TOLERANCE
            assert row["explained"]


def test_figure_6_by_hand(script):
    plain = script.model_of(script.POINTS[4])
    decoder = script.model_of(script.POINTS[5])
    macs = multiply_accumulates(plain, 224)
    # As published by torchvision.
    assert macs / 1e9 == pytest.approx(4.089, abs=1e-3)
    assert count_parameters(plain)[0] == 25_557_032
    head = decoder_macs(49, 100, 1000) - 2048 * 1000
    assert multiply_accumulates(decoder, 224) - macs == head
