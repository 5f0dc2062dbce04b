import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from clip_towers import clip_folder, siglip_folder

from mldec.checkpoint import Loaded, load_model
from mldec.clip import TextEncoder
from mldec.data.base import Classes
from mldec.data.zero_shot.word_vectors import word_vectors
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.inference.classes import can_make, with_classes


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


# Text encoders


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("tower") / "model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def trained_on(whole: Loaded, source: str, *, templates: tuple[str, ...] = ("the {}",)) -> Loaded:
    """Return a model of three classes whose word vectors are by a text encoder."""
    names, queries, origin = word_vectors(source, ["r", "g", "b"], templates=templates)
    return dataclasses.replace(whole, classes=Classes(names, queries=queries, origin=origin))


@pytest.mark.usefixtures("cache")
def test_the_text_encoder_of_the_training(whole: Loaded, tower: Path) -> None:
    trained = trained_on(whole, f"clip:{tower}")
    assert can_make(trained.classes)
    assert not can_make(with_queries(whole, torch.zeros(3, 2)).classes)

    other = with_classes(trained, "zebra, traffic jam", None).classes
    wanted = TextEncoder.open(f"clip:{tower}").encode(["the zebra", "the traffic jam"])
    assert other.names == ("zebra", "traffic jam")
    torch.testing.assert_close(other.queries, wanted)
    # Named on the command line, it is asked with the prompts of the training too.
    named = with_classes(trained, "zebra, traffic jam", f"clip:{tower}").classes
    torch.testing.assert_close(named.queries, wanted)


@pytest.mark.usefixtures("cache")
def test_another_text_encoder_than_that_of_the_training(
    whole: Loaded, tower: Path, tmp_path: Path
) -> None:
    place = tmp_path / "model"
    shutil.copytree(tower, place)
    trained = trained_on(whole, f"clip:{place}")
    shutil.rmtree(place)
    siglip_folder(place, seed=3)
    with pytest.raises(CheckpointError, match=r"now have the sha256 [0-9a-f]{12}; pass its "):
        with_classes(trained, "zebra", None)
    with pytest.raises(CheckpointError, match="was trained with other word vectors: those of 3 cl"):
        with_classes(trained, "zebra", f"clip:{place}")
    with_classes(trained, "zebra", f"clip:{tower}")


@pytest.mark.usefixtures("cache")
def test_a_text_encoder_that_cannot_be_had(
    whole: Loaded, tower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "model"
    shutil.copytree(tower, place)
    trained = trained_on(whole, f"clip:{place}")
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with_classes(trained, "r,g", None)  # from the cache
    with pytest.raises(
        ConfigError, match=r"cannot be had here: .* pip install 'mldec\[text\]'; or"
    ):
        with_classes(trained, "zebra", None)
    shutil.rmtree(place)
    with pytest.raises(ConfigError, match=r"\(sha256 [0-9a-f]{12}\), which cannot be had here: "):
        with_classes(trained, "zebra", None)


def test_vectors_of_a_file_are_asked_for_by_its_name(whole: Loaded, vectors: str) -> None:
    trained = with_queries(whole, torch.zeros(3, 2))
    with pytest.raises(CheckpointError, match="does not say how its word vectors were made; pass "):
        with_classes(trained, "cat", None)

    made = word_vectors(vectors, ["cat", "dog", "red"])
    classes = Classes(made.names, queries=made.queries, origin=made.origin)
    trained = dataclasses.replace(whole, classes=classes)
    with pytest.raises(CheckpointError, match=r"vectors of words\.txt \(sha256 .*--vectors FILE$"):
        with_classes(trained, "panda", None)
    assert with_classes(trained, "panda", vectors).classes.names == ("panda",)
