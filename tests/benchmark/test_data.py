"""The benchmark of the training transform compares like with like."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mldec.benchmark import data as measure_data
from mldec.data.randomness import SampleRandom
from mldec.data.transforms import TrainTransform, read_image


@pytest.mark.parametrize("seed", range(4))
def test_without_random_operations_both_pipelines_give_the_same_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(measure_data, "_random_operations", lambda: lambda image: image)
    file = tmp_path / "photo.jpg"
    measure_data._photo().save(file, quality=90)
    assert read_image(file).size == (640, 480)
    random.seed(seed)
    ours = TrainTransform(image_size=448, augment="none")(read_image(file), SampleRandom(seed))
    random.seed(seed)
    official = measure_data._official(file)()
    assert official.dtype == torch.float32
    assert torch.equal((255 * official).round().to(torch.uint8), ours)


def test_the_random_operations_are_drawn_as_in_the_official_package() -> None:
    operations = measure_data._random_operations()
    assert (operations.num_layers, len(operations.ops)) == (2, 15)
    assert {operation.prob for operation in operations.ops} == {0.5}
    assert {operation.magnitude_std for operation in operations.ops} == {float("inf")}


def test_the_job_writes_its_figures(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_data, "ROUNDS", 1)
    monkeypatch.setattr(measure_data, "IMAGES", 2)
    threads = torch.get_num_threads()
    status, out, err = cli("benchmark", "data", "--json", tmp_path / "r.json")
    assert status == 0, err
    assert "times_faster" in out
    assert torch.get_num_threads() == threads
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert figures["images_per_second"] > 1
    assert figures["file_kib"] > 50
