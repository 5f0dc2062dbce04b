"""Names, order and word vectors of the classes of a checkpoint and of the data."""

import shutil
from dataclasses import replace

import pytest
import torch
from clip_models import clip_folder, siglip_folder
from support import made
from torch import nn

from mldec.checkpoint.classes import (
    can_encode,
    check_classes,
    check_queries,
    read_class_names,
    same_names,
    scoring,
)
from mldec.data.digits import digits_zsl
from mldec.data.types import Classes
from mldec.errors import CheckpointError, DataError, UserError
from mldec.evaluation.class_list import queries_for
from mldec.words.digits import class_names, class_queries
from mldec.words.encoder import open_encoder
from mldec.words.types import VectorOrigin
from mldec.words.vectors import load_word_vectors

ABC = Classes(("a", "b", "c"))
CAB = Classes(("c", "a", "b"))


class Fixed(nn.Module):
    """A model whose logits are 0, 1 and 2."""

    def forward(self, images, word_vectors=None):
        return torch.arange(3.0).expand(len(images), -1)


def words(names=ABC.names, width=5, seed=0):
    """Return classes with random word vectors."""
    generator = torch.Generator().manual_seed(seed)
    return Classes(names, word_vectors=torch.randn(len(names), width, generator=generator))


def test_logits_follow_the_class_order_of_the_data():
    model = Fixed()
    assert scoring(model, ABC, CAB, "x.pt")(torch.zeros(2, 3, 4, 4)).tolist() == [[2, 0, 1]] * 2
    assert scoring(model, ABC, ABC, "x.pt") is model
    # The logits of a zero-shot model have the order of its word vectors.
    with_words = [replace(classes, word_vectors=torch.ones(3, 7)) for classes in (ABC, CAB)]
    assert scoring(model, *with_words, "x.pt") is model


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("TV-monitor", 0),
        ("tv_monitor", 0),
        ("tvmonitor", 1),  # an equal name has precedence
        ("sofa", 2),
        ("SOFA", 2),
        ("Television", 0),
        ("lounge", None),
    ],
)
def test_classes_are_found_by_name_and_synonym(name, index):
    known = ["tv monitor", "tvmonitor", "Couch", "cat"]
    synonyms = [("sofa", "couch"), ("tv monitor", "television")]
    assert same_names(["dog", name], known, synonyms) == [None, index]


def test_class_names_keep_blanks_and_number_duplicates(tmp_path):
    path = tmp_path / "names.txt"
    path.write_bytes("\ufeffa b\r\n c\u00e9 \r\nd".encode())
    assert read_class_names(path) == ("a b", " c\u00e9 ", "d")
    path.write_text("\u732b\nb\n\u732b")
    assert read_class_names(path) == ("\u732b (0)", "b", "\u732b (2)")
    for text in ("a\n\nb\n", "a\nb\na\na (0)", "a\tb\n"):
        path.write_text(text)
        with pytest.raises(DataError, match=f"^--class-names {path}: "):
            read_class_names(path)


ORIGIN = VectorOrigin("glove.txt", "0123456789ab" + "0" * 52)
OPEN_CLIP = VectorOrigin("clip:X", "1" * 64, ("a {}",))
COMMON = Classes(("z", "c"), word_vectors=words().word_vectors[[0, 2]])


@pytest.mark.parametrize(
    ("check", "trained", "current", "name"),
    [
        (check_queries, ABC, Classes(("a", "x", "y")), "'x'"),
        (check_queries, ABC, Classes(("a", "b")), "'c'"),
        (check_queries, words(), ABC, "5-dim"),
        (check_queries, words(), words(width=7), "7-dim"),
        (check_queries, words(), words(seed=1), "'a'"),
        (check_queries, replace(words(), origin=ORIGIN), words(seed=1), "glove.txt"),
        (check_queries, words(), replace(COMMON, names=("c", "z")), "'c'"),
        (check_queries, replace(words(()), origin=OPEN_CLIP), words(), "clip:X"),
        (check_classes, ABC, Classes(("a", "b")), "'c'"),
        (check_classes, ABC, CAB, "'a'"),
        (check_classes, words(), words(seed=1), "data.vectors"),
    ],
)
def test_other_classes_raise_an_error(check, trained, current, name):
    with pytest.raises(CheckpointError, match=rf"^x\.pt .*{name}"):
        check(trained, current, "x.pt")


def test_fitting_classes_are_accepted():
    check_queries(ABC, CAB, "x.pt")
    check_classes(ABC, Classes(ABC.names, exclusive=True), "x.pt")
    for current in (words(), words(("x", "y")), words(("x", "y"), seed=1), COMMON):
        check_queries(words(), current, "x.pt")

    # Other prompts of the same text encoder, and another length.
    word_vectors = words().word_vectors
    near = replace(words(), word_vectors=word_vectors + 0.3 * torch.ones_like(word_vectors))
    check_queries(words(), near, "x.pt")
    check_queries(words(), replace(words(), word_vectors=3 * word_vectors.half()), "x.pt")
    check_queries(replace(words(()), origin=ORIGIN), replace(words(), origin=ORIGIN), "x.pt")


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return clip_folder(tmp_path_factory.mktemp("tower") / "model")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def trained_on(source):
    """Return three classes with word vectors of a text encoder."""
    names, word_vectors, origin = load_word_vectors(source, ["r", "g", "b"], templates=("the {}",))
    return Classes(names, word_vectors=word_vectors, origin=origin)


def queries(trained, names, vectors=None):
    return queries_for(names.split(","), vectors, trained, option="--classes")


@pytest.mark.usefixtures("cache")
def test_new_classes_use_the_text_encoder_of_the_training(tower, tmp_path):
    trained = trained_on(f"clip:{tower}")
    assert can_encode(trained)
    wanted = open_encoder(f"clip:{tower}").encode_names(["zebra", "traffic jam"], ["the {}"])
    # An encoder on the command line also uses the prompts of the training.
    for vectors in (None, f"clip:{tower}"):
        other = queries(trained, "zebra,traffic jam", vectors)
        assert other.names == ("zebra", "traffic jam")
        torch.testing.assert_close(other.word_vectors, wanted)

    # The weights of the encoder have changed since the training.
    place = tmp_path / "model"
    shutil.copytree(tower, place)
    trained = trained_on(f"clip:{place}")
    shutil.rmtree(place)
    siglip_folder(place, seed=3)
    for vectors in (None, f"clip:{place}"):
        with pytest.raises(CheckpointError, match=str(place)):
            queries(trained, "zebra", vectors)
    queries(trained, "zebra", f"clip:{tower}")


def test_new_classes_of_a_vector_file_require_the_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("cat 1 0\ndog 0 1\nred 1 1\npanda -1 0\n")
    unknown = Classes(("r", "g", "b"), word_vectors=torch.zeros(3, 2))
    assert not can_encode(unknown)
    vectors = load_word_vectors(str(path), ["cat", "dog", "red"])
    trained = Classes(vectors.names, word_vectors=vectors.word_vectors, origin=vectors.origin)
    colored = made(digits_zsl, colours=4, unseen=8, vectors="words").train.classes
    for classes, wanted, name in (
        (unknown, ("panda",), "--vectors"),
        (trained, ("panda",), "words.txt"),
        (colored, ("zebra",), "zebra"),
        (colored, ("red six", "digits:x"), "digits:x"),
    ):
        with pytest.raises(UserError, match=name):
            queries(classes, *wanted)
    assert queries(trained, "panda", str(path)).names == ("panda",)


@pytest.mark.parametrize("kind", ["words", "one_hot"])
def test_word_vectors_of_colored_digits_are_computed(kind):
    trained = made(digits_zsl, colours=4, unseen=8, vectors=kind).train.classes
    unseen = next(name for name in class_names(4) if name not in trained.names)
    other = queries(trained, f"{unseen},red six")
    vector_of = dict(zip(class_names(4), class_queries(4, kind), strict=True))
    assert other.word_vectors.equal(torch.stack([vector_of[unseen], vector_of["red six"]]))
