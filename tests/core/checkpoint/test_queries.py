import shutil
import sys
from pathlib import Path

import pytest
import torch
from clip_towers import clip_folder, siglip_folder

from mldec.checkpoint.classes import can_make, queries_for
from mldec.data.text_encoder import TextEncoder
from mldec.data.types import Classes
from mldec.data.word_vectors import word_vectors
from mldec.errors import CheckpointError, ConfigError

# Of a checkpoint of an earlier version, which did not say how its vectors were made.
OLD = Classes(("r", "g", "b"), queries=torch.zeros(3, 2))


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("tower") / "model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def trained_on(source: str) -> Classes:
    """Return three classes whose word vectors are by a text encoder."""
    names, queries, origin = word_vectors(source, ["r", "g", "b"], templates=("the {}",))
    return Classes(names, queries=queries, origin=origin)


def asked(trained: Classes, names: str, vectors: str | None) -> Classes:
    return queries_for(names.split(","), vectors, trained, option="--classes")


@pytest.mark.usefixtures("cache")
def test_the_text_encoder_of_the_training(tower: Path) -> None:
    trained = trained_on(f"clip:{tower}")
    assert can_make(trained)
    assert not can_make(OLD)

    other = asked(trained, "zebra,traffic jam", None)
    wanted = TextEncoder.open(f"clip:{tower}").encode(["the zebra", "the traffic jam"])
    assert other.names == ("zebra", "traffic jam")
    torch.testing.assert_close(other.queries, wanted)
    # Named on the command line, it is asked with the prompts of the training too.
    named = asked(trained, "zebra,traffic jam", f"clip:{tower}")
    torch.testing.assert_close(named.queries, wanted)


@pytest.mark.usefixtures("cache")
def test_another_text_encoder_than_that_of_the_training(tower: Path, tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(tower, place)
    trained = trained_on(f"clip:{place}")
    shutil.rmtree(place)
    siglip_folder(place, seed=3)
    with pytest.raises(CheckpointError, match=r"now have the sha256 [0-9a-f]{12}; pass its "):
        asked(trained, "zebra", None)
    with pytest.raises(CheckpointError, match="was trained with other word vectors: those of 3 cl"):
        asked(trained, "zebra", f"clip:{place}")
    asked(trained, "zebra", f"clip:{tower}")


@pytest.mark.usefixtures("cache")
def test_a_text_encoder_that_cannot_be_had(
    tower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "model"
    shutil.copytree(tower, place)
    trained = trained_on(f"clip:{place}")
    monkeypatch.setitem(sys.modules, "open_clip", None)
    asked(trained, "r,g", None)  # from the cache
    with pytest.raises(
        ConfigError, match=r"cannot be had here: .* pip install 'mldec\[text\]'; or"
    ):
        asked(trained, "zebra", None)
    shutil.rmtree(place)
    with pytest.raises(ConfigError, match=r"\(sha256 [0-9a-f]{12}\), which cannot be had here: "):
        asked(trained, "zebra", None)


def test_vectors_of_a_file_are_asked_for_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("cat 1 0\ndog 0 1\nred 1 1\npanda -1 0\n")
    vectors = str(path)
    with pytest.raises(CheckpointError, match="does not say how its word vectors were made; pass "):
        asked(OLD, "cat", None)

    made = word_vectors(vectors, ["cat", "dog", "red"])
    trained = Classes(made.names, queries=made.queries, origin=made.origin)
    with pytest.raises(CheckpointError, match=r"vectors of words\.txt \(sha256 .*--vectors FILE$"):
        asked(trained, "panda", None)
    assert asked(trained, "panda", vectors).names == ("panda",)
