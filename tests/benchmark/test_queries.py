"""The work and time of a zero-shot model by the number of its queries."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldec.benchmark import queries as measure_queries


def test_the_command_for_queries(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["+experiment=nuswide_zsl_tresnet_m", "head.embed_dim=32", "head.mlp_dim=32"]
    small += ["backbone=timm", "backbone.name=resnet10t"]
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
