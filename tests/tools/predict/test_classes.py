import dataclasses
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch

from mldec.checkpoint import Loaded, load_model
from mldec.data.types import Classes
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.predict.run import with_classes


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    path = tmp_path_factory.mktemp("classes") / "x.pt"
    torch.save(hostile.good(), path)
    return load_model(path)


def with_queries(whole: Loaded, queries: torch.Tensor | None) -> Loaded:
    return dataclasses.replace(whole, classes=Classes(("r", "g", "b"), queries=queries))


@pytest.fixture
def vectors(tmp_path: Path) -> str:
    """A file of word vectors of width 2."""
    path = tmp_path / "words.txt"
    path.write_text("cat 1 0\ndog 0 1\nred 1 1\npanda -1 0\n")
    return str(path)


def test_other_classes_of_a_zero_shot_model(whole: Loaded, vectors: str) -> None:
    zero_shot = with_queries(whole, torch.zeros(3, 2))
    other = with_classes(zero_shot, " dog, cat,,", vectors)
    assert other.classes.names == ("dog", "cat")
    assert other.classes.queries is not None
    assert other.classes.queries.tolist() == [[0, 1], [1, 0]]
    assert other.model is zero_shot.model
    assert zero_shot.classes.names == ("r", "g", "b")


@pytest.mark.parametrize(
    ("width", "names", "error", "message"),
    [
        (None, "cat", CheckpointError, "knows its own classes only"),
        (2, " , ", ConfigError, "names no class: pass names with commas"),
        (2, "cat,cat", ConfigError, "names 'cat' twice"),
        (2, "cat,unicorn", DataError, "unicorn"),
        (5, "cat", CheckpointError, "by word vectors of 5 numbers, the data has vectors of 2"),
    ],
)
def test_other_classes_that_cannot_be_scored(
    whole: Loaded, vectors: str, width: int | None, names: str, error: Any, message: str
) -> None:
    queries = None if width is None else torch.zeros(3, width)
    with pytest.raises(error, match=message):
        with_classes(with_queries(whole, queries), names, vectors)
