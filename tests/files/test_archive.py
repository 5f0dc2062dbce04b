"""The end of archives: what is read; what is refused is in test_hostile.py."""

import struct
import zipfile
from pathlib import Path

import hostile
import pytest
import torch

from mldec.errors import CheckpointError
from mldec.files.archive import refuse_bomb


def test_what_torch_and_zipfile_store_is_no_bomb(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(1000), "b": [1, "text"]}, path)
    assert b"PK\x06\x07" in path.read_bytes()[-42:], (
        "torch.save no longer writes records of 64 bits"
    )
    refuse_bomb(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"x")
        with archive.open("a/data/0", "w", force_zip64=True) as member:
            member.write(bytes(1000))
    refuse_bomb(path)


def test_an_old_file_of_torch_is_no_archive(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(10)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refuse_bomb(tmp_path / "old.pt")


def wide(
    *, unpacked: int = 1000, packed: int = 1000, offset: int = 0, extra: bytes | None = None
) -> bytes:
    """Return an archive of one stored member with 64-bit fields of size and offset.

    Archives of more than 4 GiB have them.
    """
    archive = hostile.Archive({"a/0": bytes(1000)})
    full = archive.directory(unpacked=2**32 - 1, packed=2**32 - 1, offset=2**32 - 1)
    if extra is None:
        extra = (
            struct.pack("<2H", 0x7075, 1)
            + b"x"
            + struct.pack("<2H3Q", 1, 24, unpacked, packed, offset)
        )
    directory = full[:30] + struct.pack("<H", len(extra)) + full[32:] + extra
    start, size = len(archive.body), len(directory)
    end = archive.end(offset=2**32 - 1, size=2**32 - 1, count=2**16 - 1)
    return (
        archive.body + directory + archive.end_64(offset=start, size=size, place=start + size) + end
    )


def test_sizes_of_64_bits_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(wide())
    with zipfile.ZipFile(path) as archive:
        assert [member.file_size for member in archive.infolist()] == [1000]
    refuse_bomb(path)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (wide(unpacked=2**40), "unpack to 1,099,511,627,776, and torch.save compresses nothing"),
        (wide(unpacked=2**40, packed=2**40), "a member reaches into its directory"),
        (wide(offset=2**63), "a member is not where its directory says"),
        (wide(extra=struct.pack("<2H2Q", 1, 16, 1000, 1000)), "is damaged"),
        (wide(extra=2 * struct.pack("<2H3Q", 1, 24, 1000, 1000, 0)), "a member has two sizes"),
        (wide()[:-1], "it does not end in the end record"),
        (b"PK\x03\x04", "it is cut short"),
    ],
)
def test_sizes_of_64_bits_are_not_believed(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=fault) as caught:
        refuse_bomb(path)
    assert str(path) in str(caught.value)
