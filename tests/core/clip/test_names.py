import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_towers import clip_folder

from mldec.data.text_encoder import TextEncoder, encode_names
from mldec.errors import ConfigError

TEMPLATES = ("a {}", "the {}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("names") / "model")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the names that are encoded."""
    names_of_calls: list[list[str]] = []
    encode = TextEncoder.encode_names

    def recorded(self, names, templates):
        names_of_calls.append(list(names))
        return encode(self, names, templates)

    monkeypatch.setattr(TextEncoder, "encode_names", recorded)
    return names_of_calls


def test_a_name_is_encoded_once(folder: Path, tmp_path: Path, asked) -> None:
    source, cache = f"clip:{folder}", str(tmp_path)
    encoder = TextEncoder.open(source)
    first, hash_of_weights = encode_names(source, ["ox", "cat"], TEMPLATES, cache)
    assert torch.equal(first, encoder.encode_names(["ox", "cat"], TEMPLATES))
    assert hash_of_weights == encoder.sha256
    asked.clear()

    # Another list of classes: the known one is not encoded again, and the order is that asked for.
    second, _ = encode_names(source, ["dog", "ox"], TEMPLATES, cache)
    assert asked == [["dog"]]
    torch.testing.assert_close(second[1], first[0], rtol=0, atol=0)
    torch.testing.assert_close(second, encoder.encode_names(["dog", "ox"], TEMPLATES))
    asked.clear()

    # Other templates are other vectors.
    other, _ = encode_names(source, ["ox"], ("{}",), cache)
    assert asked == [["ox"]]
    assert not torch.allclose(other[0], first[0])
    assert len(list(tmp_path.iterdir())) == 2


def test_known_names_need_no_library(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = f"clip:{folder}", str(tmp_path)
    before = encode_names(source, ["ox", "cat"], TEMPLATES, cache)
    monkeypatch.setitem(sys.modules, "open_clip", None)
    after = encode_names(source, ["cat", "ox"], TEMPLATES, cache)
    assert torch.equal(after[0].flip(0), before[0])
    assert after[1] == before[1]
    with pytest.raises(ConfigError, match="mldec\\[text\\]"):
        encode_names(source, ["cat", "new"], TEMPLATES, cache)


def test_other_weights_are_another_encoder(folder: Path, tmp_path: Path, asked) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    source, cache = f"clip:{copy}", str(tmp_path / "cache")
    first, first_hash = encode_names(source, ["ox"], TEMPLATES, cache)
    shutil.rmtree(copy)
    clip_folder(copy, seed=1)
    second, second_hash = encode_names(source, ["ox"], TEMPLATES, cache)
    assert first_hash != second_hash
    assert not torch.allclose(first, second)
    assert len(asked) == 2


def test_a_tag_with_other_weights_than_before(folder: Path, tmp_path: Path, asked) -> None:
    source, cache = f"clip:{folder}", str(tmp_path)
    encode_names(source, ["ox"], TEMPLATES, cache)
    [file] = tmp_path.iterdir()
    with np.load(file) as stored:
        content = dict(stored)
    content["sha256"] = "0" * 64
    np.savez(file, **content)

    # All names are encoded again, the known one too.
    encode_names(source, ["ox", "cat"], TEMPLATES, cache)
    assert asked == [["ox"], ["ox", "cat"]]


@pytest.mark.parametrize("damage", ["cut", "names", "shape", "length", "type"])
def test_a_damaged_file_is_not_used(
    damage: str, folder: Path, tmp_path: Path, asked, caplog: pytest.LogCaptureFixture
) -> None:
    source, cache = f"clip:{folder}", str(tmp_path)
    before, _ = encode_names(source, ["ox", "cat"], TEMPLATES, cache)
    [file] = tmp_path.iterdir()
    with np.load(file) as stored:
        content = dict(stored)
    content |= {
        "cut": {},
        "names": {"names": np.frombuffer(b'["ox", 5]', np.uint8)},
        "shape": {"vectors": content["vectors"][:1]},
        "length": {"vectors": content["vectors"] * np.float32("nan")},
        "type": {"vectors": content["vectors"].astype(np.float64)},
    }[damage]
    np.savez(file, **content)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-200])

    after, _ = encode_names(source, ["ox", "cat"], TEMPLATES, cache)
    assert torch.equal(before, after)
    assert len(asked) == 2
    assert "is not used" in caplog.text
    assert "\n" not in caplog.records[-1].message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written(folder: Path, tmp_path: Path, asked, caplog) -> None:
    tmp_path.chmod(0o500)
    encode_names(f"clip:{folder}", ["ox"], TEMPLATES, str(tmp_path))
    assert "encoded at every start" in caplog.text


def test_a_cache_folder_that_is_a_file(folder: Path, tmp_path: Path, caplog) -> None:
    (tmp_path / "file").touch()
    vectors, _ = encode_names(f"clip:{folder}", ["ox"], TEMPLATES, str(tmp_path / "file"))
    assert vectors.shape == (1, 16)
    assert "encoded at every start" in caplog.text
