from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mldec.build import chosen_data
from mldec.checkpoint import Loaded, load_model
from mldec.data.base import Classes, DataModule, Split
from mldec.errors import ConfigError
from mldec.report import heat
from mldec.report.heat import heat_maps

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded(digits_run: Path) -> Loaded:
    return load_model(digits_run, plugins=["patches"])


@pytest.fixture(scope="module")
def data() -> DataModule:
    return chosen_data(["data=digits", "data.val_images=40"])[1]


def same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Tell whether two maps are equal, but for the rounding of batches."""
    assert one is not None
    assert other is not None
    return bool(np.abs(one.astype(int) - other).max() <= 1)


def test_each_pair_has_a_map_whatever_its_batch(loaded: Loaded, data: DataModule) -> None:
    rng = np.random.default_rng(0)
    pairs = [(int(image), int(rng.integers(10))) for image in rng.permutation(40)]
    pairs += [(pairs[0][0], k) for k in range(10)]
    maps = heat_maps(loaded, data, pairs, device=CPU)
    assert maps.method
    assert maps.notes == []
    for place in (0, 17, 39, 44):
        [alone] = heat_maps(loaded, data, [pairs[place]], device=CPU).heats
        assert same(maps.heats[place], alone)
    for found in maps.heats:
        assert found is not None
        assert (found.dtype, found.max()) == (np.uint8, 255)


def test_classes_are_found_by_their_names(loaded: Loaded, data: DataModule) -> None:
    reversed_classes = Classes(loaded.classes.names[::-1])
    split = Split(data.val.dataset, reversed_classes)
    in_reverse = replace(data, load_val=lambda: split)
    [one] = heat_maps(loaded, data, [(3, 2)], device=CPU).heats
    [other] = heat_maps(loaded, in_reverse, [(3, 7)], device=CPU).heats
    assert same(one, other)


def test_a_model_without_maps_has_a_note(
    loaded: Loaded, data: DataModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("the tokens form no square")

    monkeypatch.setattr(heat, "Explainer", refuse)
    maps = heat_maps(loaded, data, [(0, 0), (1, 1)], device=CPU)
    assert maps.heats == [None, None]
    assert maps.method is None
    assert maps.notes == ["There are no heat maps: the tokens form no square."]
