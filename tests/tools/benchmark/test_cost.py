"""The work per image that the paper states, against ours."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import decoder_macs

from mldec.benchmark import cost as measure_cost
from mldec.benchmark.cost import TOLERANCE, Row, build_row, cost, rows, table
from mldec.model import Classifier
from mldec.runtime.facts import count_parameters

NAMES = [f"{row.where}, {row.network}, {row.method}, {row.num_queries}" for row in rows()]


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return cost()


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_the_paper_is_met(figures: dict[str, Any], number: int) -> None:
    row = figures["rows"][number]
    if row["paper_gmac"] == 178.6:
        assert row["gmac"] == pytest.approx(212.33, abs=0.01)
        assert not row["explained"]
    else:
        assert abs(row["difference"]) < TOLERANCE
        assert row["explained"]
    assert row["difference"] == pytest.approx(row["gmac"] - row["paper_gmac"])


def find(**wanted: Any) -> Row:
    return next(
        row for row in rows() if all(getattr(row, name) == value for name, value in wanted.items())
    )


@pytest.mark.parametrize(
    ("network", "backbone", "head", "head_all"),
    [("TResNet-M", 29.34, 7_150_672, 7_212_112), ("TResNet-L", 44.13, 7_150_672, 7_212_112)],
)
def test_parameters(network: str, backbone: float, head: int, head_all: int) -> None:
    row = find(where="figure 5", network=network, method="ML-Decoder")
    model = build_row(row)
    assert isinstance(model, Classifier)
    assert count_parameters(model.head) == (
        head,
        head_all,
    )  # as published; 80 frozen queries of width 768
    trainable, total = count_parameters(model.backbone)
    assert trainable == total
    assert trainable / 1e6 == pytest.approx(backbone, abs=0.005)
    assert count_parameters(model) == (trainable + head, total + head_all)


@pytest.mark.parametrize(
    ("network", "width", "gap"), [("ResNet-18", 512, 1.814), ("ResNet-50", 2048, 4.089)]
)
def test_figure_6_by_hand(figures: dict[str, Any], network: str, width: int, gap: float) -> None:
    plain, decoder = [row for row in figures["figure_6"] if row["backbone"] == network]
    assert plain["gmac"] == pytest.approx(
        gap, abs=1e-3
    )  # as published by torchvision: 1.81 and 4.09
    narrower = 49 * (2048 - width) * 768  # the formula is for tokens of 2,048
    head = decoder_macs(49, 100, 1000) - narrower - width * 1000
    assert decoder["gmac"] - plain["gmac"] == pytest.approx(head / 1e9, abs=1e-9)
    assert (
        plain["trainable_parameters"] == {"ResNet-18": 11_689_512, "ResNet-50": 25_557_032}[network]
    )


def test_rows_are_built_on_the_meta_device() -> None:
    model = build_row(find(num_queries=9600))
    assert {value.device.type for value in model.parameters()} == {"meta"}


def test_the_command_prints_a_table_and_writes_json(
    cli: Callable[..., Any],
    figures: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # They are counted once: it takes a quarter of a minute.
    monkeypatch.setattr(measure_cost, "cost", lambda args: figures)
    file = tmp_path / "cost.json"
    done = cli("benchmark", "cost", "--json", file)
    assert done.status == 0, done.err
    assert done.out.rstrip("\n") == table(figures)
    lines = done.out.splitlines()
    assert len(lines) == len(NAMES) + 2 + 2 + 6
    note = len(NAMES) + 1
    assert max(len(line) for line in lines if line != lines[note]) <= 120
    [marked] = [line for line in lines if line.endswith("*")]
    assert "178.6" in marked
    assert "no formula is known" in lines[note]
    assert lines[-1].split() == ["ResNet-50", "ml_decoder", "4.66", "31.37", "2520", "80.4"]
    content = json.loads(file.read_text())
    assert content["benchmark"] == "cost"
    assert content["figures"] == figures


def test_the_committed_figures_are_those_of_the_command(figures: dict[str, Any]) -> None:
    committed = Path(__file__).parents[3] / "benchmarks" / "cpu_cost.json"
    assert json.loads(committed.read_text())["figures"] == figures
