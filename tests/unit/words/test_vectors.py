"""Word vectors from text files, arrays and text encoders."""

import hashlib
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from clip_models import clip_folder

from mldec.data.tasks import VectorSettings
from mldec.data.types import Classes
from mldec.errors import DataError
from mldec.tools.check_data.examine import nearest_classes
from mldec.words.encoder import open_encoder, read_templates
from mldec.words.types import VectorOrigin, WordVectors
from mldec.words.vectors import load_word_vectors, with_descriptions

NAMES = ["sky", "dog", "sea"]
ARRAY = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
COLUMNS = torch.from_numpy(ARRAY.T.copy())


@pytest.fixture
def save(tmp_path):
    """Write bytes, text, an array as .npy, or other content by torch.save."""

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
    """Return the rows of ARRAY as lines with these words."""
    rows = zip(names or NAMES, ARRAY.tolist(), strict=True)
    return "\n".join(f"{name} {' '.join(map(str, row))}" for name, row in rows)


def read_vectors(path, names, **options):
    return load_word_vectors(str(path), names, **options).word_vectors


@pytest.mark.parametrize(
    ("text", "names", "rows"),
    [
        (lines(), ["sea", "dog"], [2, 1]),
        ("3 4\n" + lines() + "\n", ["sea", "dog"], [2, 1]),
        (lines().replace("\n", " \r\n") + " \r\n", ["sea", "dog"], [2, 1]),
        (lines() + "\ndog 9 9 9 9", ["sea", "dog"], [2, 1]),  # the first line of a word counts
        # An entry of several words has precedence over the mean.
        (lines("traffic", "light", "traffic light"), ["Traffic light"], [2]),
        (lines("traffic", "light", "traffic-light"), ["Traffic light"], [2]),
        (lines("traffic", "light", "Traffic_light"), ["Traffic light"], [2]),
        (lines("dog house", "dog", "dog."), ["dog"], [1]),
        (lines("sky", "caf\u00e9", "x").encode() + b"\n\xff\xfe 1 2 3 4\n", ["caf\u00e9"], [1]),
    ],
)
def test_text_formats(save, text, names, rows):
    found = read_vectors(save("v.vec", text), names)
    assert found.dtype == torch.float32
    assert found.tolist() == ARRAY[rows].tolist()


def test_name_of_several_words_gets_their_mean(save):
    path = save("v.txt", lines("traffic", "light", "dog"))
    found = read_vectors(path, ["dog", "traffic light"])
    assert found.tolist() == [ARRAY[2].tolist(), ARRAY[:2].mean(0).tolist()]


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
def test_array_formats(save, name, content):
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
    ("name", "content", "wanted", "order", "part"),
    [
        ("v.txt", "sky 0.1 0.2 0.3\ndog 0.1 0.2\n", ["dog"], None, "dog"),
        ("v.txt", "sky 1 2 3\ndog 1 x 3\n", ["dog"], None, "could not convert"),
        ("v.npy", ARRAY[:, :2], NAMES, ["a", "b", "c", "d"], r"\[3, 2\]"),
        ("v.npy", np.full((3, 4), np.inf), NAMES, NAMES, "'sky'"),
        ("v.pth", [1, 2], NAMES, NAMES, "structure"),
        ("v.pth", Bomb(), NAMES, NAMES, "print"),
        ("v.pickle", pickle.dumps(Bomb(), protocol=2), NAMES, NAMES, "print"),
        ("v.npy", ARRAY, ["sky", "cat"], NAMES, "cat"),
        ("v.npy", ARRAY, ["sky"], None, "No such file"),
    ],
)
def test_invalid_vectors_name_file_and_fault(save, capsys, name, content, wanted, order, part):
    path = save(name, content)
    with pytest.raises(DataError, match=rf"{path.parent}/v\..*{part}"):
        read_vectors(path, wanted, order=order)
    assert capsys.readouterr().out == ""


def test_coco_samples_are_joined_by_name(sample_data):
    folder = sample_data / "label_embeddings"
    files = [folder / f"coco80_{name}.txt" for name in ("alphabetical", "category_id_order")]
    alphabetical, by_id = (path.read_text().strip().split("\n") for path in files)
    assert alphabetical != by_id
    glove = read_vectors(folder / "coco80_glove_80x300.npy", by_id, order=alphabetical)
    seen = Classes(tuple(name for name in by_id if name != "cat"))
    assert nearest_classes(seen, Classes(tuple(by_id), word_vectors=glove))["cat"][0][0] == "dog"


def test_origin_is_the_name_and_hash_of_a_file(save, tmp_path):
    path = save("glove.txt", "sky 1 2\ndog 3 4\nsea 5 6\n")
    names, word_vectors, origin = load_word_vectors(str(path), ["sea", "sky"])
    assert names == ("sea", "sky")
    assert word_vectors.tolist() == [[5, 6], [1, 2]]
    assert origin == VectorOrigin("glove.txt", hashlib.sha256(path.read_bytes()).hexdigest())

    # A relative path is in the folder of the data.
    save("v.npy", ARRAY)
    settings = VectorSettings(vectors="v.npy")
    found = settings.of_classes(tmp_path, ["sea"], NAMES).word_vectors
    assert found.tolist() == ARRAY[[2]].tolist()
    save("v.txt", "sea\nsky\ndog\n")
    found = settings.of_classes(tmp_path, ["sea"], NAMES).word_vectors
    assert found.tolist() == ARRAY[[0]].tolist()


def test_optional_names_may_be_missing(save):
    optional = ["sea", "sky", "hot dog"]
    order = ["sky", "dog", "x"]
    array = save("v.npy", ARRAY)
    names, word_vectors, _ = load_word_vectors(str(array), ["dog"], optional=optional, order=order)
    assert (names, word_vectors.tolist()) == (("dog", "sky"), ARRAY[[1, 0]].tolist())
    text = save("v.txt", "sky 1 2\ndog 3 4\nhot 5 6\n")
    names, word_vectors, _ = load_word_vectors(str(text), ["dog"], optional=optional)
    assert names == ("dog", "sky", "hot dog")
    assert word_vectors.tolist() == [[3, 4], [1, 2], [4, 5]]


def test_text_encoder_with_templates_and_descriptions(tmp_path):
    source = f"clip:{clip_folder(tmp_path / 'model')}"
    encoder = open_encoder(source)
    settings = {"vectors": source, "prompts": "simple7", "cache_dir": str(tmp_path / "cache")}
    plain = VectorSettings(**settings).of_classes(tmp_path, ["dog", "ox"], [])
    templates = read_templates("simple7", tmp_path)
    expected = encoder.encode_names(["dog", "ox"], templates)
    torch.testing.assert_close(plain.word_vectors, expected)
    assert (plain.origin.source, plain.origin.templates) == (source, templates)

    # A with_descriptions class has the normalized mean of the unit vectors of its sentences.
    sentences = {"ox": ["a heavy animal", "it pulls a cart"], "sky": ["blue"]}
    path = tmp_path / "about.json"
    path.write_text(json.dumps(sentences))
    about = VectorSettings(**settings, descriptions="about.json")
    _, word_vectors, origin = about.of_classes(tmp_path, ["dog", "ox"], [])
    each = encoder.encode_names(sentences["ox"], ("{}",))
    mean = sum(vector / vector.norm() for vector in each) / 2
    torch.testing.assert_close(word_vectors[1], mean / mean.norm())
    assert torch.equal(word_vectors[0], plain.word_vectors[0])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert origin == replace(plain.origin, descriptions=f"about.json (sha256 {digest})")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"cat": ["meows"]}', '{"ox": "heavy"}', '{"ox": [""]}']
)
def test_invalid_descriptions_name_the_file(tmp_path, content):
    path = tmp_path / "about.json"
    path.write_text(content)
    vectors = WordVectors(("ox",), torch.ones(1, 3), VectorOrigin("clip:x", "0" * 64))
    with pytest.raises(DataError, match=f"^{path}"):
        with_descriptions(vectors, "clip:x", path)
