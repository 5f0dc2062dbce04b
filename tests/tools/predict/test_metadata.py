"""What an exported file says of itself, and files that say nothing."""

import importlib.util
import json
from pathlib import Path

import pytest
from networks import metadata

from mldec.errors import CheckpointError, ConfigError
from mldec.predict.engine import KEY, parse, read_metadata, require_onnx

onnx = pytest.importorskip("onnx")
METADATA = metadata(classes=["one", "zwei, drei"])


def write_onnx(path: Path, text: str | None) -> Path:
    graph = onnx.helper.make_graph([], "empty", [], [])
    model = onnx.helper.make_model(graph)
    if text is not None:
        onnx.helper.set_model_props(model, {"other": "x", KEY: text})
    path.write_bytes(model.SerializeToString())
    return path


def test_it_is_read_without_the_network(tmp_path: Path) -> None:
    text = METADATA.to_json()
    assert read_metadata(write_onnx(tmp_path / "x.onnx", text)) == METADATA


@pytest.mark.parametrize("text", [None, "", "{}", "[1]", "no json", json.dumps({"classes": []})])
def test_a_file_of_another_program_says_nothing_of_its_classes(
    text: str | None, tmp_path: Path
) -> None:
    path = write_onnx(tmp_path / "x.onnx", text)
    with pytest.raises(CheckpointError, match=r"lacks the metadata .* mldec\.export"):
        read_metadata(path)


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    with pytest.raises(CheckpointError, match=r"no file at .*x\.onnx: check the path"):
        read_metadata(path)
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"x\.onnx is damaged, or no \.onnx file"):
        read_metadata(path)


def test_the_resize_of_older_files_is_pillows() -> None:
    content = json.loads(METADATA.to_json())
    assert content.pop("resize") == "pillow"
    assert parse(json.dumps(content), Path("x.onnx")) == METADATA


def test_unknown_entries_are_those_of_another_version() -> None:
    content = json.loads(METADATA.to_json())
    with pytest.raises(CheckpointError, match="x does not say"):
        parse(json.dumps({**content, "newer": 1}), Path("x"))


def test_it_is_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_onnx(tmp_path / "x.onnx", METADATA.to_json())
    require_onnx("x.onnx")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"x\.onnx: .* onnx, which is not .* pip install 'mldec\[export\]'"
    ):
        require_onnx("x.onnx")
    with pytest.raises(ConfigError, match=r"mldec\[export\]"):
        read_metadata(tmp_path / "x.onnx")
