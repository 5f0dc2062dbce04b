"""Numpy's files with odd or damaged content: one reason, no traceback, no memory."""

import struct
from pathlib import Path

import numpy as np
import pytest

from mldec.files.arrays import read_npy, read_npz


def npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode("latin1") + b"\n"
    length = struct.pack("<H" if version == b"\x01\x00" else "<I", len(text))
    return b"\x93NUMPY" + version + length + text + data


def dictionary(descr: str, shape: str) -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


NPY = {
    "huge": npy(dictionary("'<f4'", "(1000000000000,)")),
    "huger": npy(dictionary("'<f4'", f"({2**62}, {2**62})")),
    "negative": npy(dictionary("'<f4'", "(-1,)")),
    "short": npy(dictionary("'<f4'", "(2000000000,)"), b"1234"),
    "a structure": npy(dictionary("[('a', '<f4'), ('b', '<i4')]", "(1,)"), b"12345678"),
    "objects": npy(dictionary("'|O'", "(1,)"), b"12345678"),
    "text": npy(dictionary("'<U3'", "(1,)"), b"x" * 12),
    "dates": npy(dictionary("'<M8[s]'", "(1,)"), b"12345678"),
    "complex": npy(dictionary("'<c8'", "(1,)"), b"12345678"),
    "brackets": npy("(" * 60),
    "more brackets": npy("[" * 60_000),
    "closed brackets": npy("(" * 300 + ")" * 300),
    "python 2": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1L,"),
    "an expression": npy("__import__('os').system('false')"),
    "a NUL": npy("{'descr': '<f4\0', 'fortran_order': False, 'shape': (1,), }"),
    "not latin": npy("{'descr': '\xff'", version=b"\x03\x00"),
    "a number of 5,000 digits": npy(dictionary("'<f4'", f"({'9' * 5000},)")),
    "no header": b"\x93NUMPY\x01\x00",
    "another version": npy("{}", version=b"\x09\x00"),
    "nothing": b"",
    "a pickle": b"\x80\x04K\x01.",
    "junk": b"hello",
    "a zip": b"PK\x03\x04junk",
}


@pytest.mark.parametrize("name", NPY)
def test_odd_npy_files_end_in_one_reason(
    tmp_path: Path, name: str, recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(NPY[name])
    with pytest.raises(ValueError, match=r".") as caught:
        read_npy(path)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) <= 300


def test_npy_of_numbers(tmp_path: Path) -> None:
    for kind in ("<f4", ">f8", "<i2", "|u1", "|b1", "<f2"):
        np.save(tmp_path / "a.npy", np.ones((2, 3), kind))
        assert read_npy(tmp_path / "a.npy").dtype == np.dtype(kind)
    np.savez(tmp_path / "b.npz", np.ones(3))
    with pytest.raises(ValueError, match="several arrays"):
        read_npy(tmp_path / "b.npz")


def test_npz_files(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, a=np.arange(3), b=np.float32(2))
    read = read_npz(path, ["a", "b"])
    assert read["a"].tolist() == [0, 1, 2]
    assert read["b"] == 2
    with pytest.raises(KeyError):
        read_npz(path, ["c"])
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"."):
        read_npz(tmp_path / "b.npy", ["a"])
