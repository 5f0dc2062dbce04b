"""Check what a zip archive would unpack to, before `torch.load` unpacks any of it.

An archive has its directory at its end. A reader that looks for it elsewhere may find another one:
Python's `zipfile` and the reader inside torch disagree on files that are crafted for that. This
module relies on neither. It accepts only the layout that torch.save writes (and every plain archive
has), in which there is just one directory to find.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mldec.errors import CheckpointError

MAX_MEMBERS = 1_000_000

# The records of the format; PKWARE's APPNOTE.TXT (section 4.3) names their fields.

# Signature, disk, disk of the directory, members on this disk, members, size and offset of the
# directory, length of the comment.
_END = struct.Struct("<4s4H2LH")
# Signature, disk, offset of the 64-bit end record, number of disks.
_LOCATOR = struct.Struct("<4sLQL")
# Signature, size of the rest, two versions, then as `_END` from its disk on, without the comment.
_END_64 = struct.Struct("<4sQ2H2L4Q")
# An entry of the directory; its name, extra fields and comment follow.
_ENTRY = struct.Struct("<4s6H3L5H2L")
# The header in front of a member; its name and extra fields follow.
_LOCAL = struct.Struct("<4s5H3L2H")
_ZIP64_EXTRA = 1
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF  # these values refer to the 64-bit field
_ENCRYPTED = 1


class _Fault(Exception):
    """The archive cannot be read; the message says why."""


class _Directory(NamedTuple):
    """The directory of an archive: where it lies in the file."""

    offset: int  # bytes
    size: int  # bytes
    members: int


class _Member(NamedTuple):
    """A member of an archive, as its directory describes it."""

    offset: int  # bytes, of its local header
    packed: int  # bytes
    unpacked: int  # bytes
    stored: bool  # not compressed


def refuse_bomb(path: Path) -> None:
    """Refuse an archive that could unpack to more than its own size; torch.save compresses nothing.

    A file that is no zip archive passes.

    Raises:
        CheckpointError: if a member is compressed or encrypted, if members overlap, or if the
            directory does not end where the end record begins.
    """
    with path.open("rb") as file:
        # torch recognises an archive by these bytes.
        if file.read(4) != b"PK\x03\x04":
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
                _check_layout(file, members, directory)
        except (_Fault, struct.error) as error:
            raise CheckpointError(
                f"{path} is damaged, or no archive that torch.save wrote: {error}; use another copy"
            ) from error

    if compressed:
        raise CheckpointError(
            f"{path} is refused: its {size:,} bytes unpack to {unpacked:,}, "
            f"and torch.save compresses nothing"
        )


def _find_directory(file: BinaryIO, size: int) -> _Directory:
    """Return the directory that the end record of the file names.

    Args:
        file: of the archive.
        size: of the file, in bytes.

    Raises:
        _Fault: if the directory does not end exactly where the end records begin, or the end
            records are malformed.
    """
    end_offset = size - _END.size
    mark, disk, first_disk, members_here, members, length, offset, comment = _unpack(
        file, end_offset, _END
    )
    if mark != b"PK\x05\x06" or comment:
        raise _Fault("it does not end in the end record of an archive")
    if disk or first_disk or members_here != members:
        raise _Fault("it is a part of an archive")

    # torch's reader uses the 64-bit record wherever it finds its signature, whatever the other
    # record says. So the two must agree.
    locator_offset = end_offset - _LOCATOR.size
    has_locator = locator_offset >= 0 and _bytes(file, locator_offset, 4) == b"PK\x06\x07"
    if has_locator:
        end_offset = locator_offset - _END_64.size
        directory = _find_directory_64(file, locator_offset, end_offset)
        for short, full, value in (
            (members, _FULL_16, directory.members),
            (length, _FULL_32, directory.size),
            (offset, _FULL_32, directory.offset),
        ):
            if short not in (value, full):
                raise _Fault("its two end records differ")
    else:
        directory = _Directory(offset, length, members)

    if directory.offset + directory.size != end_offset:
        raise _Fault("its directory does not end where its end record begins")
    if directory.members > MAX_MEMBERS:
        raise _Fault(f"it has more than {MAX_MEMBERS:,} members")
    return directory


def _find_directory_64(file: BinaryIO, locator_offset: int, end_offset: int) -> _Directory:
    """Return the directory that the 64-bit end record names, which lies just before its locator."""
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
    """Read the entries of the directory.

    Raises:
        _Fault: if an entry is malformed or encrypted, or the entries do not fill the directory.
    """
    content = _bytes(file, directory.offset, directory.size)
    members: list[_Member] = []
    position = 0

    for _ in range(directory.members):
        entry = _ENTRY.unpack_from(content, position)
        mark, flags, method, packed, unpacked = entry[0], entry[3], entry[4], entry[8], entry[9]
        name_length, extra_length, comment_length = entry[10], entry[11], entry[12]
        offset = entry[16]
        if mark != b"PK\x01\x02" or flags & _ENCRYPTED:
            raise _Fault("its directory is not whole, or a member is encrypted")

        # The name, the extra fields and the comment follow the entry, in this order.
        extra_start = position + _ENTRY.size + name_length
        position = extra_start + extra_length + comment_length
        if position > len(content):
            raise _Fault("its directory is not whole")

        extra = content[extra_start : extra_start + extra_length]
        packed, unpacked, offset = _widen(extra, unpacked=unpacked, packed=packed, offset=offset)
        members.append(_Member(offset, packed, unpacked, stored=method == 0))

    if position != len(content):
        raise _Fault("its directory holds more than its members")
    return members


def _widen(extra: bytes, *, unpacked: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Replace the 32-bit fields of a member that are full by the values of its 64-bit extra field.

    Args:
        extra: the extra fields of the member.
        unpacked: size of the member in bytes, as its entry says.
        packed: size of its data in the archive in bytes.
        offset: of its local header in bytes.

    Returns:
        Packed size, unpacked size and offset.

    Raises:
        _Fault: if there is more than one 64-bit extra field.
    """
    wide: bytes | None = None
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == _ZIP64_EXTRA:
            # Two readers might choose different ones.
            if wide is not None:
                raise _Fault("a member has two sizes")
            wide = extra[position + 4 : position + 4 + length]
        position += 4 + length

    # The 64-bit field holds only the values that are full in the entry, in this order.
    values = []
    used = 0
    for value in (unpacked, packed, offset):
        if value == _FULL_32:
            (value,) = struct.unpack_from("<Q", wide or b"", used)
            used += 8
        values.append(value)
    return values[1], values[0], values[2]


def _check_layout(file: BinaryIO, members: list[_Member], directory: _Directory) -> None:
    """Check that no two members share a byte, and that none reaches into the directory.

    Raises:
        _Fault: if one does, or has no local header where the directory says.
    """
    # Overlapping members would unpack to more bytes than the archive has.
    end_of_last = 0
    for member in sorted(members):
        if member.offset < end_of_last:
            raise _Fault("its members overlap")
        if member.offset > directory.offset:
            raise _Fault("a member is not where its directory says")

        fields = _unpack(file, member.offset, _LOCAL)
        mark, method, name_length, extra_length = fields[0], fields[3], fields[9], fields[10]
        if mark != b"PK\x03\x04" or method != 0:
            raise _Fault("a member is not where its directory says")

        end_of_last = member.offset + _LOCAL.size + name_length + extra_length + member.unpacked
        if end_of_last > directory.offset:
            raise _Fault("a member reaches into its directory")


def _unpack(file: BinaryIO, offset: int, record: struct.Struct) -> tuple[Any, ...]:
    return record.unpack(_bytes(file, offset, record.size))


def _bytes(file: BinaryIO, offset: int, count: int) -> bytes:
    """Read exactly `count` bytes at an offset.

    Raises:
        _Fault: if the file has fewer.
    """
    if offset < 0:
        raise _Fault("it is cut short")

    file.seek(offset)
    content = file.read(count)
    if len(content) != count:
        raise _Fault("it is cut short")
    return content
