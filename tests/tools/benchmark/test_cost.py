"""The work per image that the paper states, against ours."""

import json
from pathlib import Path

import pytest
from support import decoder_macs

from mldec.model import count_parameters, multiply_accumulates
from mldec.tools.benchmark import cost as measure_cost
from mldec.tools.benchmark.cost import POINTS, ROWS, TOLERANCE, built

# What the job wrote; tests/full counts all of it again.
COMMITTED = json.loads(
    (Path(__file__).parents[3] / "benchmarks" / "cpu_cost.json").read_text(encoding="utf-8")
)["figures"]


def test_the_paper_is_met():
    assert len(COMMITTED["rows"]) == len(ROWS)
    for row in COMMITTED["rows"]:
        assert row["difference"] == pytest.approx(row["gmac"] - row["paper_gmac"])
        if row["paper_gmac"] == 178.6:
            assert row["gmac"] == pytest.approx(212.33, abs=0.01)
            assert not row["explained"]
        else:
            assert abs(row["difference"]) < TOLERANCE
            assert row["explained"]


def test_the_command_prints_a_table_and_writes_what_is_committed(cli, tmp_path, monkeypatch):
    # The others take as long.
    monkeypatch.setattr(measure_cost, "ROWS", ROWS[3:6])
    monkeypatch.setattr(measure_cost, "POINTS", POINTS[:2])
    done = cli("benchmark", "cost", "--json", tmp_path / "cost.json")
    assert done.status == 0, done.err
    figures = json.loads((tmp_path / "cost.json").read_text())["figures"]
    assert figures["rows"] == COMMITTED["rows"][3:6]
    assert figures["figure_6"] == COMMITTED["figure_6"][:2]
    assert "no formula is known" in done.out


def test_figure_6_by_hand():
    plain, decoder = built(POINTS[4]), built(POINTS[5])
    macs = multiply_accumulates(plain, 224)
    # As published by torchvision.
    assert macs / 1e9 == pytest.approx(4.089, abs=1e-3)
    assert count_parameters(plain)[0] == 25_557_032
    head = decoder_macs(49, 100, 1000) - 2048 * 1000
    assert multiply_accumulates(decoder, 224) - macs == head
