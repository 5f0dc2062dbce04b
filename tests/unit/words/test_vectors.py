"""Word vectors from text files and arrays: what is read, and what is refused."""

import hashlib
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from clip_models import clip_folder

from mldec.data.settings import VectorSettings
from mldec.data.types import Classes
from mldec.errors import DataError
from mldec.tools.check_data.examine import nearest_classes
from mldec.words.encoder import open_encoder, read_templates
from mldec.words.types import VectorOrigin, WordVectors
from mldec.words.vectors import described, load_word_vectors

NAMES = ["sky", "dog", "sea"]
ARRAY = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
COLUMNS = torch.from_numpy(ARRAY.T.copy())


@pytest.fixture
def save(tmp_path):
    """Write word vectors: bytes, text, an array as .npy, or anything else as torch does."""

    def save(name, content):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        elif path.suffix == ".npy":
            np.save(path, content)
        else:
            torch.save(content, path)
        return path

    return save


def lines(*names):
    """Return the rows of ARRAY as lines, with these words."""
    rows = zip(names or NAMES, ARRAY.tolist(), strict=True)
    return "\n".join(f"{name} {' '.join(map(str, row))}" for name, row in rows)


def read_vectors(path, names, **named):
    return load_word_vectors(str(path), names, **named).word_vectors


def fault(path, names, **named):
    with pytest.raises(DataError) as caught:
        read_vectors(path, names, **named)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


# Text


@pytest.mark.parametrize(
    "text",
    [
        lines(),
        "3 4\n" + lines() + "\n",
        lines().replace("\n", " \r\n") + " \r\n",
        lines().replace(" ", "\t"),
        lines() + "\ndog 9 9 9 9",
    ],
    ids=["glove", "word2vec", "blanks at the end", "tabs", "the first line of a word counts"],
)
def test_text_in_every_dialect(save, caplog, text):
    found = read_vectors(save("v.vec", text), ["sea", "dog"])
    assert found.dtype == torch.float32
    assert found.tolist() == ARRAY[[2, 1]].tolist()
    assert caplog.text == ""


@pytest.mark.parametrize(
    "entry", ["traffic light", "traffic_light", "traffic-light", "Traffic_light"]
)
def test_an_entry_of_several_words_comes_before_the_mean(save, caplog, entry):
    path = save("v.txt", lines("traffic", "light", entry))
    assert read_vectors(path, ["Traffic light"]).tolist() == ARRAY[[2]].tolist()
    assert caplog.text == ""


def test_the_mean_of_the_words_is_reported(save, caplog):
    path = save("v.txt", lines("traffic", "light", "dog"))
    found = read_vectors(path, ["dog", "traffic light"])
    assert found.tolist() == [ARRAY[2].tolist(), ARRAY[:2].mean(0).tolist()]
    assert "the mean of their words' vectors serves traffic light" in caplog.text
    assert "1 of 1 names have no vector: stop light" in fault(path, ["stop light"])


def test_words_with_blanks_and_words_in_no_encoding(save):
    path = save("v.txt", lines("dog house", "dog", "dog."))
    assert read_vectors(path, ["dog"]).tolist() == ARRAY[[1]].tolist()
    path = save("v.txt", lines("sky", "caf\u00e9", "x").encode() + b"\n\xff\xfe 1 2 3 4\n")
    assert read_vectors(path, ["caf\u00e9"]).tolist() == ARRAY[[1]].tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sky 0.1 0.2 0.3\ndog 0.1 0.2\n", "1 of 1 names have no vector: dog"),
        ("sky 1 2 3\ndog 1 x 3\n", "cannot be used (ValueError: could not convert"),
        ("sky 1 2 3\ndog 0 0 0\n", "the vector of 'dog' is all zeros, or has NaN"),
        ("", "it is not a text file with a word and its numbers"),
        (f"3 {'9' * 5000}\nsky 1 2\n", "cannot be used (ValueError"),
    ],
)
def test_text_that_is_refused(save, text, message):
    found = fault(save("v.txt", text), ["dog"])
    assert message in found
    assert "see DATASETS.md, section Word vectors" in found


# Arrays


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("wordvec_array.pth", COLUMNS),
        ("wordvec_array.pth", COLUMNS[None].half()),
        ("wordvec_array.pth", {"wordvec_array": COLUMNS}),
        ("v.npy", ARRAY),
        ("v.npy", ARRAY.T.astype(np.float64)),
    ],
    ids=["pth", "leading 1", "dict", "rows", "columns"],
)
def test_rows_follow_the_names_wherever_they_lie_in_the_file(save, name, content):
    path = save(name, content)
    found = read_vectors(path, ["sea", "sky"], order=NAMES)
    assert found.dtype == torch.float32
    assert found.tolist() == ARRAY[[2, 0]].tolist()
    path.with_suffix(".txt").write_text("dog\nsea\nsky\n")
    assert read_vectors(path, ["sky"]).tolist() == ARRAY[[2]].tolist()


class Bomb:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.npy", ARRAY[:, :2], "shape [3, 2], of which exactly one dimension must be that of the"),
        ("v.npy", np.eye(3), "shape [3, 3], of which exactly one dimension"),
        ("v.npy", np.full((3, 4), np.inf), "the vector of 'sky' is all zeros, or has NaN"),
        ("v.npy", np.array([{}], object), "cannot be used (ValueError"),
        ("v.pth", [1, 2], "cannot be used (AttributeError"),
        ("v.pth", Bomb(), "holds more than tensors and plain values"),
        ("v.pickle", pickle.dumps(Bomb(), protocol=2), "holds more than tensors and plain values"),
    ],
)
def test_arrays_that_are_refused(save, capsys, name, content, message):
    path = save(name, content)
    order = NAMES if name != "v.npy" or "[3, 2]" not in message else ["a", "b", "c", "d"]
    assert message in fault(path, NAMES, order=order)
    assert capsys.readouterr().out == ""


def test_names_that_are_missing_or_listed_twice(save):
    path = save("v.npy", ARRAY)
    assert "are both called 'dog'" in fault(path, ["dog", "dog"], order=NAMES)
    assert "are both called 'sky'" in fault(path, ["sky"], order=["sky", "dog", "sky"])
    assert "v.txt cannot be read (No such file" in fault(path, ["sky"])
    assert "has the control character U+0009" in fault(path, ["sky", "d\tg"])
    wanted = [f"name{number}" for number in range(12)]
    expected = "12 of 13 names have no vector: " + ", ".join(wanted[:10]) + " and 2 more"
    assert expected in fault(path, [*wanted, "dog"], order=NAMES)
    assert expected in fault(save("v.vec", "dog 1 2\n"), [*wanted, "dog"])
    assert "No such file" in fault(path.with_name("w.npy"), NAMES, order=NAMES)


# The samples


def test_the_two_orders_of_the_coco_vectors_are_joined_by_name(sample_data):
    folder = sample_data / "label_embeddings"
    files = [folder / f"coco80_{name}.txt" for name in ("alphabetical", "category_id_order")]
    alphabetical, by_id = (path.read_text().strip().split("\n") for path in files)
    assert alphabetical != by_id
    glove = read_vectors(folder / "coco80_glove_80x300.npy", by_id, order=alphabetical)
    seen = Classes(tuple(name for name in by_id if name != "cat"))
    assert nearest_classes(seen, Classes(tuple(by_id), word_vectors=glove))["cat"][0][0] == "dog"


# Settings


def test_a_file_and_its_hash(save, tmp_path):
    path = save("glove.txt", "sky 1 2\ndog 3 4\nsea 5 6\n")
    names, word_vectors, origin = load_word_vectors(str(path), ["sea", "sky"])
    assert names == ("sea", "sky")
    assert word_vectors.tolist() == [[5, 6], [1, 2]]
    assert (origin.source, origin.templates) == ("glove.txt", ())
    assert origin.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()

    # A relative file is in the folder of the data.
    save("v.npy", ARRAY)
    settings = VectorSettings(vectors="v.npy")
    assert (
        settings.of_classes(tmp_path, ["sea"], NAMES).word_vectors.tolist() == ARRAY[[2]].tolist()
    )
    save("v.txt", "sea\nsky\ndog\n")
    assert (
        settings.of_classes(tmp_path, ["sea"], NAMES).word_vectors.tolist() == ARRAY[[0]].tolist()
    )


@pytest.mark.parametrize("form", ["text", "array"])
def test_optional_names_may_be_missing(form, save, caplog):
    path = save("v.npy", ARRAY)
    expected = (("dog", "sky"), ARRAY[[1, 0]].tolist())
    if form == "text":
        path = save("v.txt", "sky 1 2\ndog 3 4\nhot 5 6\n")
        # A name of several words is their mean; nobody asked for this one, so nothing is said.
        expected = (("dog", "sky", "hot dog"), [[3, 4], [1, 2], [4, 5]])
    optional, order = ["sea", "sky", "hot dog"], ["sky", "dog", "x"]
    names, word_vectors, _ = load_word_vectors(str(path), ["dog"], optional=optional, order=order)
    assert (names, word_vectors.tolist()) == expected
    assert not caplog.messages


def test_a_text_encoder_with_prompts(tmp_path):
    source = f"clip:{clip_folder(tmp_path / 'model')}"
    encoder, cache = open_encoder(source), str(tmp_path / "cache")
    settings = VectorSettings(vectors=source, prompts="simple7", cache_dir=cache)
    names, word_vectors, origin = settings.of_classes(tmp_path, ["ox", "dog"], [])
    templates = read_templates("simple7", tmp_path)
    torch.testing.assert_close(word_vectors, encoder.encode_names(names, templates))
    assert (origin.source, origin.templates) == (source, templates)


def test_descriptions_take_the_place_of_prompts(tmp_path, caplog):
    source = f"clip:{clip_folder(tmp_path / 'model')}"
    encoder, cache = open_encoder(source), str(tmp_path / "cache")
    sentences = {"ox": ["a heavy animal", "it pulls a cart"], "sky": ["blue"]}
    path = tmp_path / "about.json"
    path.write_text(json.dumps(sentences))
    settings = {"vectors": source, "prompts": "simple7", "cache_dir": cache}
    with caplog.at_level("INFO", "mldec"):
        about = VectorSettings(**settings, descriptions="about.json")
        _, word_vectors, origin = about.of_classes(tmp_path, ["dog", "ox"], [])

    # One by one: unit vectors of the sentences, their mean, and length 1 again.
    each = encoder.encode_names(sentences["ox"], ("{}",))
    mean = sum(vector / vector.norm() for vector in each) / 2
    torch.testing.assert_close(word_vectors[1], mean / mean.norm())
    plain = VectorSettings(**settings).of_classes(tmp_path, ["dog", "ox"], [])
    assert torch.equal(word_vectors[0], plain.word_vectors[0])
    assert f"{path} describes 1 classes; prompts serve dog" in caplog.text
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert origin == replace(plain.origin, descriptions=f"about.json (sha256 {digest})")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "is not valid JSON"),
        ("[]", "describes no class of the data"),
        ('{"cat": ["meows"]}', "describes no class of the data"),
        ('{"ox": "heavy"}', "'ox' has no list of sentences"),
        ('{"ox": []}', "'ox' has no list of sentences"),
        ('{"ox": ["heavy", ""]}', "'ox' has no list of sentences"),
    ],
)
def test_descriptions_of_another_content_are_one_line(tmp_path, content, fault):
    path = tmp_path / "about.json"
    path.write_text(content)
    vectors = WordVectors(("ox",), torch.ones(1, 3), VectorOrigin("clip:x", "0" * 64))
    with pytest.raises(DataError) as caught:
        described(vectors, "clip:x", path)
    assert str(caught.value).startswith(f"{path}")
    assert fault in str(caught.value)


def test_descriptions_are_for_a_text_encoder():
    with pytest.raises(ValueError, match=r"^descriptions .*data\.vectors is glove\.txt"):
        VectorSettings(vectors="glove.txt", descriptions="a.json")
