"""Names, order and word vectors of a checkpoint's classes beside those of the data."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clip_models import clip_folder, siglip_folder
from support import made
from torch import nn

from mldec.checkpoint.classes import (
    can_make,
    check_classes,
    check_queries,
    read_class_names,
    same_names,
    scoring,
)
from mldec.data.digits import digits_zsl
from mldec.data.types import Classes
from mldec.errors import CheckpointError, DataError
from mldec.evaluation.class_list import queries_for
from mldec.words.digits import class_names, class_queries
from mldec.words.encoder import open_encoder
from mldec.words.types import VectorOrigin
from mldec.words.vectors import load_word_vectors

PATH = Path("x.pt")
ABC, CAB = Classes(("a", "b", "c")), Classes(("c", "a", "b"))


class Fixed(nn.Module):
    """A model that gives class i of three the logit i."""

    def forward(self, images, word_vectors=None):
        return torch.arange(3.0).expand(len(images), -1)


def test_logits_come_in_the_order_of_the_data(caplog):
    images = torch.zeros(2, 3, 4, 4)
    with caplog.at_level(logging.INFO, "mldec"):
        model = scoring(Fixed(), ABC, CAB, "best.pt")
    assert model(images).tolist() == [[2, 0, 1]] * 2
    assert caplog.messages == [
        "best.pt has the classes of the data in another order: its logits are reordered"
    ]


def test_nothing_changes_in_the_same_order_or_by_word_vectors(caplog):
    model = Fixed()
    with caplog.at_level(logging.INFO, "mldec"):
        assert scoring(model, ABC, ABC, "best.pt") is model
        words = [replace(classes, word_vectors=torch.ones(3, 7)) for classes in (ABC, CAB)]
        assert scoring(model, *words, "best.pt") is model
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("TV-monitor", 0),
        ("tv_monitor", 0),
        ("tvmonitor", 1),  # an equal name comes first
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


def test_a_checkpoint_scores_its_own_classes_only():
    check_queries(ABC, CAB, "last.pt")
    message = r"data, 3 and 3: number 1 is 'b' there and 'x' here; .*--class-names"
    with pytest.raises(CheckpointError, match=message):
        scoring(Fixed(), ABC, Classes(("a", "x", "y")), "best.pt")
    with pytest.raises(
        CheckpointError, match="3 and 2: number 2 is 'c' there and None here; choose"
    ):
        scoring(Fixed(), ABC, Classes(("a", "b")), "best.pt")


def test_names_are_read_as_they_stand(tmp_path):
    path = tmp_path / "names.txt"
    path.write_bytes("\ufeffa b\r\n c\u00e9 \r\nd".encode())
    assert read_class_names(path) == ("a b", " c\u00e9 ", "d")


def test_names_that_classes_share_get_their_numbers(tmp_path, caplog):
    path = tmp_path / "names.txt"
    path.write_text("\u732b\nb\n\u732b")
    assert read_class_names(path) == ("\u732b (0)", "b", "\u732b (2)")
    assert f"{path}: 2 share a name: \u732b (0), \u732b (2)" in caplog.text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a\n\nb\n", "the name '' of class 1 is empty"),
        ("a\nb\na\na (0)", "the classes 0 and 3 are both called 'a (0)'"),
        ("a\tb\n", "has the control character U+0009"),
    ],
)
def test_a_bad_file_of_names_is_refused(tmp_path, text, part):
    path = tmp_path / "names.txt"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_class_names(path)
    message = str(caught.value)
    assert message.startswith(f"--class-names {path}: ")
    assert part in message
    assert message.endswith("; write one class name per line, in the checkpoint's order")


def words(names=ABC.names, width=5, seed=0):
    """Return classes with word vectors."""
    generator = torch.Generator().manual_seed(seed)
    return Classes(names, word_vectors=torch.randn(len(names), width, generator=generator))


@pytest.mark.parametrize(
    ("current", "fault"),
    [
        (
            Classes(("a", "b")),
            "x.pt has other classes than the data, 3 and 2: number 2 is 'c' there and None",
        ),
        (CAB, "number 0 is 'a' there and 'c' here"),
    ],
)
def test_a_run_goes_on_with_the_same_classes_in_the_same_order(current, fault):
    check_classes(ABC, Classes(ABC.names, exclusive=True), PATH)
    with pytest.raises(CheckpointError) as caught:
        check_classes(ABC, current, PATH)
    assert fault in str(caught.value)


def test_a_zero_shot_model_scores_any_classes_that_have_vectors_of_its_width():
    for current in (words(), words(("x", "y")), words(("x", "y"), seed=1)):
        check_queries(words(), current, PATH)


def test_vectors_of_another_source_are_refused(caplog):
    origin = VectorOrigin("glove.txt", "0123456789ab" + "0" * 52)
    for trained, then in (
        (words(), r"choose the vectors of its training$"),
        (replace(words(), origin=origin), r"training, glove\.txt \(sha256 0123456789ab\)$"),
    ):
        message = r"^x\.pt was trained with other word vectors: those of 3 classes .* such as 'a', "
        with pytest.raises(CheckpointError, match=f"{message}have a mean cosine of 0.*{then}"):
            check_queries(trained, words(seed=1), PATH)

    # One common name suffices, wherever it stands.
    assert words().word_vectors is not None
    common = Classes(("z", "c"), word_vectors=words().word_vectors[[0, 2]])
    check_queries(words(), common, PATH)
    with pytest.raises(CheckpointError, match="those of 1 classes that both know, such as 'c'"):
        check_queries(words(), replace(common, names=("c", "z")), PATH)
    assert not caplog.messages


def test_other_prompts_are_allowed():
    word_vectors = words().word_vectors
    near = replace(words(), word_vectors=word_vectors + 0.3 * torch.ones_like(word_vectors))
    check_queries(words(), near, PATH)
    check_queries(words(), replace(words(), word_vectors=3 * word_vectors.half()), PATH)


# Of a checkpoint of an earlier version, which did not say how its vectors were made.
OLD = Classes(("r", "g", "b"), word_vectors=torch.zeros(3, 2))


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return clip_folder(tmp_path_factory.mktemp("tower") / "model")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def trained_on(source):
    """Return three classes whose word vectors are by a text encoder."""
    names, word_vectors, origin = load_word_vectors(source, ["r", "g", "b"], templates=("the {}",))
    return Classes(names, word_vectors=word_vectors, origin=origin)


def asked(trained, names, vectors):
    return queries_for(names.split(","), vectors, trained, option="--classes")


@pytest.mark.usefixtures("cache")
def test_the_text_encoder_of_the_training(tower):
    trained = trained_on(f"clip:{tower}")
    assert can_make(trained)
    assert not can_make(OLD)

    other = asked(trained, "zebra,traffic jam", None)
    wanted = open_encoder(f"clip:{tower}").encode_names(["zebra", "traffic jam"], ["the {}"])
    assert other.names == ("zebra", "traffic jam")
    torch.testing.assert_close(other.word_vectors, wanted)
    # Named on the command line, it is asked with the prompts of the training too.
    named = asked(trained, "zebra,traffic jam", f"clip:{tower}")
    torch.testing.assert_close(named.word_vectors, wanted)


@pytest.mark.usefixtures("cache")
def test_another_text_encoder_than_that_of_the_training(tower, tmp_path):
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


def test_vectors_of_a_file_are_asked_for_by_its_name(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("cat 1 0\ndog 0 1\nred 1 1\npanda -1 0\n")
    vectors = str(path)
    with pytest.raises(CheckpointError, match="does not say how its word vectors were made; pass "):
        asked(OLD, "cat", None)

    made = load_word_vectors(vectors, ["cat", "dog", "red"])
    trained = Classes(made.names, word_vectors=made.word_vectors, origin=made.origin)
    with pytest.raises(CheckpointError, match=r"vectors of words\.txt \(sha256 .*--vectors FILE$"):
        asked(trained, "panda", None)
    assert asked(trained, "panda", vectors).names == ("panda",)


@pytest.mark.parametrize("kind", ["words", "one_hot"])
def test_vectors_of_colored_digits_are_made_by_name(kind):
    trained = made(digits_zsl, colours=4, unseen=8, vectors=kind).train.classes
    assert can_make(trained)
    unseen = next(name for name in class_names(4) if name not in trained.names)
    other = asked(trained, f"{unseen},red six", None)
    vector_of = dict(zip(class_names(4), class_queries(4, kind), strict=True))
    assert other.word_vectors.equal(torch.stack([vector_of[unseen], vector_of["red six"]]))
    with pytest.raises(DataError, match=r"'zebra'.*'red six'"):
        asked(trained, "zebra", None)
    # A checkpoint of an earlier version does not name its vectors.
    if kind == "words":
        old = replace(trained, origin=None)
        assert asked(old, "blue two", "digits:words").names == ("blue two",)
    with pytest.raises(DataError, match="digits:letters"):
        asked(trained, "red six", "digits:letters")
