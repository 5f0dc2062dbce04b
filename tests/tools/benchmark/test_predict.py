import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from pictures import picture
from support import one_line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("benchmark") / "x.pt"
    torch.save(hostile.good(), path)
    return path


def test_the_job_compares_predict_with_its_bound(
    cli: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    for number in range(20):
        picture(seed=number).save(tmp_path / f"{number}.png")
    words = ["--count", "15", "--rounds", "1", "--device", "cpu", "--json", tmp_path / "r.json"]
    status, _, err = cli("benchmark", "predict", checkpoint, tmp_path, *words)
    assert (status, err) == (0, "")
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert figures["images"] == 15
    bound = 1 / (1 / figures["decode"] + 1 / figures["model"])
    assert figures["bound"] == pytest.approx(bound)
    assert figures["share"] == pytest.approx(figures["predict"] / bound)


def test_images_that_cannot_be_read_are_one_line(
    cli: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.png").write_text("no image")
    status, _, err = cli("benchmark", "predict", checkpoint, tmp_path, "--device", "cpu")
    assert status == 1
    one_line(err, "the first images cannot be read")
