"""Files of tensors without code: what is written is read, and everything else is refused."""

import io
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from mldec.errors import CheckpointError, DataError
from mldec.files import torch_files
from mldec.files.torch_files import read_safetensors, write_safetensors

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
    "content",
    [
        b"",
        b"<!DOCTYPE html><html>",
        pickled(),
        b"\x80\x04K\x01.",
        struct.pack("<Q", 2**60),
        save({"a": torch.zeros(9)})[:-1],
        save({"a": torch.zeros(9)}) + b"x",
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(path)
    message = str(caught.value)
    assert message.startswith(f"{path} cannot be used (")
    assert "\n" not in message
    assert len(message) < 600


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise DataError(f"cannot write {path}: No space left on device; free space")

    monkeypatch.setattr(torch_files, "write_file", full)
    with pytest.raises(DataError, match="No space left"):
        write_safetensors(tmp_path / "x.safetensors", TENSORS)
    assert not [*tmp_path.iterdir()]
