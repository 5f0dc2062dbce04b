"""Files of tensors without code: what is written is read, and everything else is refused."""

import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from mldec.errors import CheckpointError, DataError
from mldec.files import safetensors_file
from mldec.files.safetensors_file import read_safetensors, write_safetensors

TENSORS = {
    "scalar": torch.tensor(7),
    "half": torch.randn(3, 4).half(),
    "brain": torch.randn(5).bfloat16(),
    "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
    "strided": torch.randn(4, 6).t(),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
}


def pickled() -> bytes:
    stream = io.BytesIO()
    torch.save({"a": torch.zeros(3)}, stream)
    return stream.getvalue()


def built(header: Any, data: bytes = bytes(16)) -> bytes:
    """Return a file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    shared = torch.randn(3)
    tensors = {**TENSORS, "first": shared, "second": shared}
    write_safetensors(path, tensors)
    again = read_safetensors(path)
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        assert again[name].shape == tensor.shape
        same = again[name].contiguous().view(-1).view(torch.uint8)
        assert torch.equal(same, tensor.contiguous().view(-1).view(torch.uint8)), name
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is no safetensors file"),
        (b"\x08\x00", "is no safetensors file"),
        (b"<!DOCTYPE html><html>", "is no safetensors file"),
        (pickled(), "is refused: it holds a pickle, which can run code"),
        (b"\x80\x04K\x01.", "is refused: it holds a pickle"),
        (struct.pack("<Q", 2**60), "not the length of a header"),
        (struct.pack("<Q", 2**24 + 1) + bytes(2**24 + 8), "not the length of a header"),
        (save({"a": torch.zeros(9)})[:-1], "is no safetensors file, or damaged"),
        (save({"a": torch.zeros(9)}) + b"x", "is no safetensors file, or damaged"),
        (built(b"[" * 100_000), "its header is not valid JSON"),
        (built(b'{"a": NaN}'), "its header is not valid JSON"),
        (built(b"\xff\xfe{}"), "its header is not valid JSON"),
        (built([]), "or damaged"),
        (built({"a": entry(dtype="F128")}), "or damaged"),
        (built({"a": entry(shape=[2**40])}), "or damaged"),
        (built({"a": entry(shape=[2**62, 4])}), "or damaged"),
        (built({"a": entry(shape=[-4])}), "or damaged"),
        (built({"a": entry(data_offsets=[0, 2**50])}), "or damaged"),
        (built({"a": entry(data_offsets=[16, 0])}), "or damaged"),
        (built({"a": entry(), "b": entry()}), "or damaged"),
        (built({"a": entry(shape=[2], data_offsets=[8, 16])}), "or damaged"),
        (
            built(f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry())}}}'.encode()),
            "an object has a key twice",
        ),
        (
            built({"a": entry(dtype="F8_E4M3", shape=[16])}),
            "is refused: its 'a' holds a tensor that is not dense numbers",
        ),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert fault in message
    assert "\n" not in message
    assert len(message) < 600


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    for name in ("x.safetensors", "none.safetensors", "."):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_safetensors(tmp_path / name)


def test_many_empty_tensors_are_within_the_limit_of_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {str(number): torch.zeros(0) for number in range(100)})
    monkeypatch.setattr("mldec.files.plain.MAX_VALUES", 99)
    with pytest.raises(CheckpointError, match="more than 99 values"):
        read_safetensors(path)


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise DataError(f"cannot write {path}: No space left on device; free space")

    monkeypatch.setattr(safetensors_file, "write_file", full)
    with pytest.raises(DataError, match="No space left"):
        write_safetensors(tmp_path / "x.safetensors", TENSORS)
    assert not [*tmp_path.iterdir()]
