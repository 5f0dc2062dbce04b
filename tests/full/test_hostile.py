"""Files from strangers, at three doors: each ends in one line, and none of them is run."""

import pickle
from contextlib import suppress
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
# The config and the shapes of the head are not looked at when a run starts from the file, and none
# of a file that is sound otherwise when it is one of word vectors.
SOUND_FOR_INIT = {"target.pt", "large.pt", "shape.pt"}


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


def fault_of(call, path):
    """Return the one line that a call ends in, or None if it succeeds."""
    try:
        call()
    except UserError as error:
        message = str(error)
        assert path.name in message, message
        assert len(message.splitlines()) == 1, message
        assert len(message) < 1500, message[:1500]
        return message
    return None


def words(path):
    return load_word_vectors(str(path), ["one", "two"], order=["one", "two"])


def test_every_file_ends_in_one_line_at_every_door(corpus, model, trace):
    assert len(corpus) >= 15
    before = [tensor.clone() for tensor in model.state_dict().values()]
    for path in corpus:
        assert fault_of(lambda: loading.load_model(path), path), path  # noqa: B023
        assert fault_of(lambda: words(path), path), path  # noqa: B023
        if path.name not in SOUND_FOR_INIT:
            assert fault_of(lambda: loading.initialise(model, path), path), path  # noqa: B023
        assert not trace.exists(), path
    assert all(map(torch.equal, before, model.state_dict().values()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("target.pt", "head._target_: 'os.system'"),
        ("environment.pt", "holds an interpolation"),
        ("large.pt", "does not fit the model: "),
        ("steers.pt", "of class 2 "),
        ("shape.pt", "1 tensor is of another shape (head.pool_bias)"),
        ("bomb.pt", "torch.save compresses nothing"),
        ("zip.pth", "system"),
        ("page.pt", "but a web page: download it again"),
        ("empty.pt", "but an empty file: download it again"),
        ("program.pt2", "no command opens a .pt2 file"),
    ],
)
def test_the_message_says_what_is_wrong(corpus, name, message):
    (path,) = (path for path in corpus if path.name == name)
    assert message in (fault_of(lambda: loading.load_model(path), path) or "")


def test_pickle_and_torch_themselves_run_what_the_corpus_holds(tmp_path):
    trace = tmp_path / "trace"
    pickle.loads(pickle.dumps({"model": hostile.Runs(f"touch {trace}")}))
    assert trace.exists(), "the trap is no trap"

    trace.unlink()
    hostile.write_program(tmp_path / "x.pt2", hostile.Runs(f"touch {trace}"))
    with suppress(RuntimeError):
        torch.export.load(tmp_path / "x.pt2")
    assert trace.exists(), "the trap is no trap"


@pytest.mark.parametrize("command", ["predict", "demo --port 0", "evaluate", "benchmark predict"])
def test_no_command_opens_a_pt2_file(command, corpus, cli):
    (path,) = (path for path in corpus if path.name == "program.pt2")
    images = [path] if "predict" in command else []
    status, out, err = cli(*command.split(), path, *images)
    assert (status, out) == (1, "")
    assert err.startswith(f"mldec: {path}: no command opens a .pt2 file, which can run code")
    assert err.count("\n") == 1


@pytest.fixture(scope="module")
def content(good):
    return good.read_bytes()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_bytes_are_one_line_or_success(content, model, tmp_path, data):
    changed = bytearray(content)
    # The pickle is at the start of the file, and the directory at its end.
    places = st.integers(0, 12_000) | st.integers(len(content) - 12_000, len(content) - 1)
    for place, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=4)):
        changed[place] = byte
    end = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    odd = data.draw(st.just(bytes(changed[:end])) | st.binary(max_size=2000))

    path = tmp_path / "odd.pt"
    path.write_bytes(odd)
    fault_of(lambda: loading.load_model(path), path)
    fault_of(lambda: loading.initialise(model, path), path)
    fault_of(lambda: words(path), path)


def test_the_floors_of_versions_are_those_that_security_md_explains():
    project = (ROOT / "pyproject.toml").read_text()
    security = (ROOT / "SECURITY.md").read_text()
    for package, floor in (("torch", "2.11"), ("hydra-core", "1.3.8")):
        assert f'"{package}>={floor}' in project
        assert f"`{package} >= {floor}`" in security
