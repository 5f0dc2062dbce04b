"""What `torch.load` would unpack of a zip archive, read from the archive's own end, before anything of it is unpacked.

An archive has its directory at its end, and a reader that looks for it somewhere else finds another one: Python's
`zipfile` and the reader inside torch disagree on files that are made for it. So this module asks neither of them. It
takes only the layout that torch.save writes (and every plain archive has), in which there is one directory to find.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mldec.errors import CheckpointError

MAX_MEMBERS = 1_000_000

# The records of the format, as PKWARE's APPNOTE.TXT (4.3) names their fields.
_END = struct.Struct(
    "<4s4H2LH"
)  # mark, disk, its disk, members here, members, size and offset of the directory, comment
_LOCATOR = struct.Struct("<4sLQL")  # mark, disk, offset of the end record of 64 bits, disks
_END_64 = struct.Struct(
    "<4sQ2H2L4Q"
)  # mark, size of the rest, versions, disks, then as `_END` from its members on
_ENTRY = struct.Struct(
    "<4s6H3L5H2L"
)  # of the directory; followed by name, extra fields and comment
_LOCAL = struct.Struct("<4s5H3L2H")  # before a member; followed by name and extra fields
_ZIP64_EXTRA = 1
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF  # "see the field of 64 bits"
_ENCRYPTED = 1


class _Fault(Exception):
    """What keeps an archive from being read."""


class _Directory(NamedTuple):
    offset: int  # bytes
    size: int  # bytes
    members: int


class _Member(NamedTuple):
    offset: int  # bytes, of its local header
    packed: int  # bytes
    unpacked: int  # bytes
    stored: bool  # not compressed


def refuse_bomb(path: Path) -> None:
    """Refuse an archive that could unpack to more than its own size; torch.save compresses nothing.

    Raises:
        CheckpointError: if a member is compressed or encrypted, members overlap, or the archive has not the one
            directory that ends where its end record begins.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":  # what torch goes by
            return
        size = path.stat().st_size
        try:
            directory = _find_directory(file, size)
            members = _read_directory(file, directory)
            compressed = not all(
                member.stored and member.packed == member.unpacked for member in members
            )
            unpacked = sum(member.unpacked for member in members)
            if not compressed:
                _check_places(file, members, directory)
        except (_Fault, struct.error) as error:
            raise CheckpointError(
                f"{path} is damaged, or no archive that torch.save wrote: {error}; use another copy"
            ) from error
    if compressed:
        raise CheckpointError(
            f"{path} is refused: its {size:,} bytes unpack to {unpacked:,}, and torch.save compresses nothing"
        )


def _find_directory(file: BinaryIO, size: int) -> _Directory:
    """Return the directory that the end of the file names, if it ends exactly where the end records begin."""
    end_offset = size - _END.size
    mark, disk, first_disk, members_here, members, length, offset, comment = _unpack(
        file, end_offset, _END
    )
    if mark != b"PK\x05\x06" or comment:
        raise _Fault("it does not end in the end record of an archive")
    if disk or first_disk or members_here != members:
        raise _Fault("it is a part of an archive")

    # torch's reader goes by the record of 64 bits wherever it finds its mark, whatever the other record says.
    locator_offset = end_offset - _LOCATOR.size
    has_locator = locator_offset >= 0 and _bytes(file, locator_offset, 4) == b"PK\x06\x07"
    if has_locator:
        end_offset = locator_offset - _END_64.size
        found = _find_directory_64(file, locator_offset, end_offset)
        for short, full, value in (
            (members, _FULL_16, found.members),
            (length, _FULL_32, found.size),
            (offset, _FULL_32, found.offset),
        ):
            if short not in (value, full):
                raise _Fault("its two end records differ")
    else:
        found = _Directory(offset, length, members)

    if found.offset + found.size != end_offset:
        raise _Fault("its directory does not end where its end record begins")
    if found.members > MAX_MEMBERS:
        raise _Fault(f"it has more than {MAX_MEMBERS:,} members")
    return found


def _find_directory_64(file: BinaryIO, locator_offset: int, end_offset: int) -> _Directory:
    """Return the directory that the end record of 64 bits names, which lies just before its locator."""
    _, disk, named_offset, disks = _unpack(file, locator_offset, _LOCATOR)
    if disk or disks > 1 or named_offset != end_offset:
        raise _Fault("its end record of 64 bits is not where it should be")
    fields = _unpack(file, end_offset, _END_64)
    mark, rest, _, _, disk, first_disk, members_here, members, length, offset = fields
    if mark != b"PK\x06\x06" or rest != _END_64.size - 12:
        raise _Fault("its end record of 64 bits is not whole")
    if disk or first_disk or members_here != members:
        raise _Fault("it is a part of an archive")
    return _Directory(offset, length, members)


def _read_directory(file: BinaryIO, directory: _Directory) -> list[_Member]:
    content = _bytes(file, directory.offset, directory.size)
    members: list[_Member] = []
    place = 0
    for _ in range(directory.members):
        entry = _ENTRY.unpack_from(content, place)
        mark, flags, method, packed, unpacked = entry[0], entry[3], entry[4], entry[8], entry[9]
        name_length, extra_length, comment_length, offset = (
            entry[10],
            entry[11],
            entry[12],
            entry[16],
        )
        if mark != b"PK\x01\x02" or flags & _ENCRYPTED:
            raise _Fault("its directory is not whole, or a member is encrypted")
        extra_start = place + _ENTRY.size + name_length
        place = extra_start + extra_length + comment_length
        if place > len(content):
            raise _Fault("its directory is not whole")
        extra = content[extra_start : extra_start + extra_length]
        packed, unpacked, offset = _widen(extra, unpacked=unpacked, packed=packed, offset=offset)
        members.append(_Member(offset, packed, unpacked, stored=method == 0))
    if place != len(content):
        raise _Fault("its directory holds more than its members")
    return members


def _widen(extra: bytes, *, unpacked: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Return packed size, unpacked size and offset of a member, taken from its field of 64 bits where they are full."""
    wide: bytes | None = None
    place = 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, place)
        if kind == _ZIP64_EXTRA:
            if wide is not None:
                raise _Fault("a member has two sizes")
            wide = extra[place + 4 : place + 4 + length]
        place += 4 + length

    values = []
    used = 0
    for value in (unpacked, packed, offset):  # in this order, and only those that are full
        if value == _FULL_32:
            (value,) = struct.unpack_from("<Q", wide or b"", used)
            used += 8
        values.append(value)
    return values[1], values[0], values[2]


def _check_places(file: BinaryIO, members: list[_Member], directory: _Directory) -> None:
    """Check that no two members share a byte, and that none lies in the directory."""
    free = 0
    for member in sorted(members):
        if member.offset < free:
            raise _Fault("its members overlap")
        if member.offset > directory.offset:
            raise _Fault("a member is not where its directory says")
        fields = _unpack(file, member.offset, _LOCAL)
        mark, method, name_length, extra_length = fields[0], fields[3], fields[9], fields[10]
        if mark != b"PK\x03\x04" or method != 0:
            raise _Fault("a member is not where its directory says")
        free = member.offset + _LOCAL.size + name_length + extra_length + member.unpacked
        if free > directory.offset:
            raise _Fault("a member reaches into its directory")


def _unpack(file: BinaryIO, offset: int, record: struct.Struct) -> tuple[Any, ...]:
    return record.unpack(_bytes(file, offset, record.size))


def _bytes(file: BinaryIO, offset: int, count: int) -> bytes:
    """Read exactly so many bytes."""
    if offset < 0:
        raise _Fault("it is cut short")
    file.seek(offset)
    content = file.read(count)
    if len(content) != count:
        raise _Fault("it is cut short")
    return content
