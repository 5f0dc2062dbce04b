"""The table of the zero-shot digits: what is added up, and that a broken-off one goes on."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import made

from mldec.config.compose import compose
from mldec.data.digits import choose_unseen, digits_zsl
from mldec.data.types import fixed_sample

SCRIPT = Path(__file__).parents[3] / "scripts" / "studies" / "digits_zsl.py"
SMALL = [
    "data.train_images=16",
    "data.val_images=40",
    "data.image_size=32",
    "train.epochs=1",
    "train.workers=0",
]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_every_row_composes(script: dict[str, Any]) -> None:
    rows = {
        row: compose(["+experiment=digits_zsl", *choice]) for row, choice in script["ROWS"].items()
    }
    assert [
        (config.train.query_noise > 0, config.train.random_queries) for config in rows.values()
    ] == [
        (False, 0),
        (False, 0),
        (True, 0),
        (False, 1),
        (True, 1),
        (False, 0),
        (False, 0),
    ]
    assert (
        len({(config.head["_target_"], config.head.get("group_size")) for config in rows.values()})
        == 4
    )


def test_chance_is_the_prior_and_half_the_attributes_are_worth_more(script: dict[str, Any]) -> None:
    chances = script["references"](compose(["+experiment=digits_zsl", "data.val_images=1500"]))
    dataset = made(
        digits_zsl, val_images=1500, image_size=40, colours=4, unseen=8
    ).val.dataset  # as the experiment
    prior = torch.stack([fixed_sample(dataset, index)[1] for index in range(1500)])[
        :, choose_unseen(4, 8, 0)
    ]
    assert chances["chance"] == pytest.approx(100 * prior[prior.any(1)].float().mean().item())
    assert 10 < chances["chance"] < 18
    assert chances["digits_only"] > 2 * chances["chance"]
    assert chances["colours_only"] > 2 * chances["chance"]
    assert max(chances.values()) < 70


def test_a_summary_has_mean_and_spread_of_each_row(script: dict[str, Any]) -> None:
    runs = [
        {
            "row": row,
            "seed": seed,
            **dict.fromkeys((*script["METRICS"], *script["REFERENCES"], "times_chance"), value),
        }
        for row, seed, value in (("both", 0, 10.0), ("both", 1, 20.0), ("noise", 0, 7.0))
    ]
    table = script["summary"](runs)
    assert list(table) == ["noise", "both"]
    assert table["both"]["seeds"] == [0, 1]
    assert table["both"]["zsl_mAP"] == pytest.approx({"mean": 15, "std": 50**0.5})
    assert table["noise"]["times_chance"] == {"mean": 7, "std": None}


def test_a_broken_off_table_goes_on(
    script: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "table.json"
    monkeypatch.setattr(
        sys, "argv", ["digits_zsl.py", str(path), "--seeds", "1", "device=cpu", *SMALL]
    )
    names = script["main"].__globals__
    monkeypatch.setitem(
        names, "ROWS", {row: script["ROWS"][row] for row in ("no augmentation", "both")}
    )
    script["main"]()
    whole = json.loads(path.read_text())
    assert [one["row"] for one in whole["runs"]] == ["no augmentation", "both"]
    assert whole["environment"]["torch"]
    path.write_text(json.dumps(whole | {"runs": whole["runs"][:1]}))
    script["main"]()
    again = json.loads(path.read_text())
    assert again["runs"][0] == whole["runs"][0]  # to the second: not done again
    assert again["runs"][1]["zsl_mAP"] == whole["runs"][1]["zsl_mAP"]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["digits_zsl.py", str(path), "train.epochs=9"])
    with pytest.raises(SystemExit):
        script["main"]()
    assert "name another file" in capsys.readouterr().err
