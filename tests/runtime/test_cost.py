import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldec.benchmark import queries as measure_queries
from mldec.benchmark.paper import TOLERANCE, Row, build_row, cost, rows, table
from mldec.heads.gap import GAP
from mldec.heads.ml_decoder import MLDecoder
from mldec.heads.query2label import Query2Label
from mldec.model import Classifier
from mldec.runtime.cost import count_parameters, multiply_accumulates

NAMES = [f"{row.where}, {row.network}, {row.method}, {row.num_queries}" for row in rows()]


class Free(nn.Module):
    """A backbone without work: as many tokens as an image has pixels a side."""

    num_features = 2048

    def forward(self, images: Tensor) -> Tensor:
        return images.new_empty(len(images), images.shape[-1], self.num_features)


def head_macs(
    head: Callable[..., nn.Module], tokens: int, num_classes: int, **arguments: Any
) -> float:
    with torch.device("meta"):
        return multiply_accumulates(
            Classifier(Free(), head(2048, num_classes, **arguments)), tokens
        )


def formula(t: int, k: int, n: int, *, self_attention: bool = False) -> int:
    """Multiply-accumulates of a decoder head, term by term, with the widths of the paper."""
    c, d, f, g = 2048, 768, 2048, -(-n // k)
    embedding, keys_and_values = t * c * d, 2 * t * d * d
    queries_and_output, attention, feed_forward, pooling = (
        2 * k * d * d,
        2 * k * t * d,
        2 * k * d * f,
        k * d * g,
    )
    among = 4 * k * d * d + 2 * k * k * d if self_attention else 0
    return (
        embedding
        + keys_and_values
        + queries_and_output
        + attention
        + feed_forward
        + pooling
        + among
    )


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


@pytest.mark.parametrize(
    ("tokens", "groups", "classes"), [(196, 20, 80), (196, 80, 80), (49, 100, 9600), (5, 3, 10)]
)
def test_counter_against_the_closed_formula(tokens: int, groups: int, classes: int) -> None:
    assert head_macs(MLDecoder, tokens, classes, num_groups=groups) == formula(
        tokens, groups, classes
    )
    full = head_macs(MLDecoder, tokens, groups, num_groups=None, self_attention=True)
    assert full == formula(tokens, groups, groups, self_attention=True)


def test_gap_and_convolution_by_hand() -> None:
    assert head_macs(GAP, 49, 9600) == 2048 * 9600  # pooling has no products
    convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    assert multiply_accumulates(convolution, 10) == 5 * 5 * 8 * 27


def test_query2label_counts_too() -> None:
    t, k, d, f = 49, 80, 2048, 8192
    encoder = 4 * t * d * d + 2 * t * t * d + 2 * t * d * f
    decoder = 2 * t * d * d + 2 * k * d * d + 2 * k * t * d + 2 * k * d * f
    assert head_macs(Query2Label, t, k) == encoder + 2 * decoder


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert multiply_accumulates(model, 4) == 16 * 12
    assert [module.training for module in model] == [True, False, True]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_values_do_not_matter_to_the_count() -> None:
    head = MLDecoder(2048, 10, embed_dim=32, mlp_dim=16)
    small = multiply_accumulates(Classifier(Free(), head), 9)
    assert small == head_macs(MLDecoder, 9, 10, embed_dim=32, mlp_dim=16)


def test_word_queries_cost_their_projection_and_one_product_each() -> None:
    options = {"num_groups": None, "word_dim": 300}
    model = Classifier(Free(), MLDecoder(2048, 925, **options))
    for count in (81, 1006):
        # One pooling vector for all: a full decoding with one class per group has that; then
        # 300 x 768 per query.
        expected = formula(49, count, count) + count * 300 * 768
        assert multiply_accumulates(model, 49, (count, 300)) == expected


def test_the_command_for_queries(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["+experiment=nuswide_zsl_tresnet_m", "head.embed_dim=32", "head.mlp_dim=32"]
    monkeypatch.setattr(measure_queries, "MODEL", small)
    done = cli(
        "benchmark",
        "queries",
        "--device",
        "cpu",
        "--batch-size",
        "1",
        "--seconds",
        "0.01",
        "--json",
        tmp_path / "q",
    )
    assert done.status == 0, done.err
    figures = json.loads((tmp_path / "q").read_text())["figures"]
    assert figures["gmac_full_81"] < figures["gmac_full_1006"] < figures["gmac_full_9605"]
    assert figures["times_full"] == pytest.approx(figures["ms_full_1006"] / figures["ms_full_81"])


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
    ("classes", "groups", "trainable"),
    [(20, 20, 7_104_532), (1000, 100, 7_858_152), (9605, 100, 14_548_357), (9605, 200, 14_625_157)],
)
def test_parameters_of_the_published_heads(classes: int, groups: int, trainable: int) -> None:
    with torch.device("meta"):
        head = MLDecoder(2048, classes, num_groups=groups)
    assert count_parameters(head) == (trainable, trainable + groups * 768)


@pytest.mark.parametrize(
    ("network", "width", "gap"), [("ResNet-18", 512, 1.814), ("ResNet-50", 2048, 4.089)]
)
def test_figure_6_by_hand(figures: dict[str, Any], network: str, width: int, gap: float) -> None:
    plain, decoder = [row for row in figures["figure_6"] if row["backbone"] == network]
    assert plain["gmac"] == pytest.approx(
        gap, abs=1e-3
    )  # as published by torchvision: 1.81 and 4.09
    narrower = 49 * (2048 - width) * 768  # the formula is for tokens of 2,048
    head = formula(49, 100, 1000) - narrower - width * 1000
    assert decoder["gmac"] - plain["gmac"] == pytest.approx(head / 1e9, abs=1e-9)
    assert (
        plain["trainable_parameters"] == {"ResNet-18": 11_689_512, "ResNet-50": 25_557_032}[network]
    )


def test_rows_are_built_on_the_meta_device() -> None:
    model = build_row(find(num_queries=9600))
    assert {value.device.type for value in model.parameters()} == {"meta"}


def test_the_command_prints_a_table_and_writes_json(
    cli: Callable[..., Any], figures: dict[str, Any], tmp_path: Path
) -> None:
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
    committed = Path(__file__).parents[2] / "benchmarks" / "cpu_cost.json"
    assert json.loads(committed.read_text())["figures"] == figures


def test_the_command_takes_no_settings(cli: Callable[..., Any]) -> None:
    done = cli("benchmark", "cost", "head=gap")
    assert done.status == 1
    assert "cost takes no settings" in done.err
