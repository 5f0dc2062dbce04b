"""Hostile files at three doors: each raises a one-line error, and none runs code."""

import pickle
from contextlib import suppress
from functools import partial
from pathlib import Path

import hostile
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mldec
from mldec.checkpoint import loading
from mldec.errors import UserError
from mldec.words.vectors import load_word_vectors

ROOT = Path(mldec.__file__).parents[1]
# `init=` ignores the config and the shapes of the head.
VALID_FOR_INIT = {"target.pt", "shape.pt"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return tmp_path_factory.mktemp("trace") / "trace"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, trace):
    return hostile.write_all(tmp_path_factory.mktemp("hostile"), trace)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "good.pt"
    torch.save(hostile.good(), path)
    return path


@pytest.fixture(scope="module")
def model(good):
    return loading.load_model(good).model


def has_one_line_error(call, path):
    """Return True if a call raises a one-line error with the file name, False if it succeeds."""
    try:
        call()
    except UserError as error:
        message = str(error)
    else:
        return False
    assert path.name in message
    assert len(message.splitlines()) == 1
    return True


def words(path):
    return load_word_vectors(str(path), ["one", "two"], order=["one", "two"])


def test_hostile_file_raises_one_line_error_at_every_door(corpus, model, trace):
    assert len(corpus) >= 14
    before = [tensor.clone() for tensor in model.state_dict().values()]
    for path in corpus:
        assert has_one_line_error(partial(loading.load_model, path), path), path
        assert has_one_line_error(partial(words, path), path), path
        if path.name not in VALID_FOR_INIT:
            assert has_one_line_error(partial(loading.initialize, model, path), path), path
        assert not trace.exists(), path
    assert all(map(torch.equal, before, model.state_dict().values()))


def test_corpus_runs_code_without_protection(tmp_path):
    trace = tmp_path / "trace"
    pickle.loads(pickle.dumps({"model": hostile.Runs(f"touch {trace}")}))
    assert trace.exists()

    trace.unlink()
    hostile.write_program(tmp_path / "x.pt2", hostile.Runs(f"touch {trace}"))
    with suppress(RuntimeError):
        torch.export.load(tmp_path / "x.pt2")
    assert trace.exists()


@pytest.fixture(scope="module")
def content(good):
    return good.read_bytes()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_bytes_raise_one_line_error_or_load(content, model, tmp_path, data):
    changed = bytearray(content)
    # The pickle is at the start of the file, and the directory at its end.
    places = st.integers(0, 12_000) | st.integers(len(content) - 12_000, len(content) - 1)
    for place, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=4)):
        changed[place] = byte
    end = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    odd = data.draw(st.just(bytes(changed[:end])) | st.binary(max_size=2000))

    path = tmp_path / "odd.pt"
    path.write_bytes(odd)
    has_one_line_error(partial(loading.load_model, path), path)
    has_one_line_error(partial(loading.initialize, model, path), path)
    has_one_line_error(partial(words, path), path)


def test_minimum_versions_match_security_md():
    project = (ROOT / "pyproject.toml").read_text()
    security = (ROOT / "SECURITY.md").read_text()
    for package, floor in (("torch", "2.11"), ("hydra-core", "1.3.8")):
        assert f'"{package}>={floor}' in project
        assert f"`{package} >= {floor}`" in security
