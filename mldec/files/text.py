"""Read files of users: text, JSON and YAML.

Unreadable files raise DataError with the file name.
"""

import errno
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, TypeVar

import yaml

from mldec.errors import DataError, brief, naming_errors


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Return a path with `~` or `~USER` expanded, unless there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def open_binary(path: str | Path) -> BufferedReader:
    """Open a file to read bytes. An invalid path also raises OSError."""
    try:
        # Equivalent to `Path.open`, in half the time.
        return BufferedReader(FileIO(path))
    except ValueError as error:
        # The path contains a NUL or a lone surrogate.
        raise OSError(errno.EINVAL, "invalid file name", str(path)) from error


def open_text(
    path: str | Path, *, newline: str | None = None, encoding: str = "utf-8-sig"
) -> TextIO:
    """Open a file to read text. The default encoding is UTF-8 with or without a byte order mark."""
    return TextIOWrapper(open_binary(path), encoding=encoding, newline=newline)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert OSError and UnicodeDecodeError of a read into DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}); restore it or correct the path"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def read_bytes(path: Path) -> bytes:
    """Return the content of a file as bytes."""
    with reading(path), open_binary(path) as file:
        return file.read()


def read_if_exists(path: Path) -> bytes | None:
    """Return the content of a file, or None without a file. A name that is too long has none."""
    with reading(path):
        try:
            with open_binary(path) as file:
                return file.read()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
                raise
            return None


def read_text(path: Path, *, newline: str | None = None, encoding: str = "utf-8-sig") -> str:
    """Return the text of a file. For the arguments see `open_text`."""
    with reading(path), open_text(path, newline=newline, encoding=encoding) as file:
        return file.read()


def read_json(path: Path) -> Any:
    """Return the content of a JSON file in UTF-8, UTF-16 or UTF-32. Keys must be unique."""
    content = read_bytes(path)
    try:
        return json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: it is not valid JSON ({brief(error)}); restore it") from error


def read_yaml(path: Path, *, as_text: bool = False) -> Any:
    """Return the content of a YAML file. Keys must be unique.

    With `as_text`, scalars such as 1.10 and no are not converted to numbers and booleans.
    """
    text = read_text(path)
    with naming_errors(path, DataError, remedy="correct it"):
        return yaml.load(text, _TextLoader if as_text else _Loader)


def unique(pairs: Sequence[tuple[Any, Any]], what: str = "the key") -> dict[Any, Any]:
    """Return a dictionary. Raises ValueError if a key is repeated, which would lose a value."""
    content = dict(pairs)
    if len(content) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        values = [str(value)[:60] for other, value in pairs if other == key]
        raise ValueError(f"{what} {key!r} is listed twice, with {values[0]} and {values[1]}")
    return content


class _UniqueKeys(yaml.constructor.BaseConstructor):
    """Constructor that rejects repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # PyYAML would keep the last value of a repeated key without a word.
        pairs = []
        for key, value in node.value:
            # A merged mapping (<<) may be overridden.
            if key.tag != "tag:yaml.org,2002:merge":
                line = f"a value in line {value.start_mark.line + 1}"
                pairs.append((self.construct_object(key, deep=True), line))
        unique(pairs)
        return super().construct_mapping(node, deep)


class _Loader(_UniqueKeys, yaml.SafeLoader):
    pass


class _TextLoader(_UniqueKeys, yaml.BaseLoader):
    pass


_Kind = TypeVar("_Kind")
_KINDS: dict[type, str] = {dict: "an object with keys", list: "a list", str: "text"}


def expect(value: Any, kind: type[_Kind], what: str) -> _Kind:
    """Return a value of a JSON or YAML file if it is of the expected type, else raise ValueError.

    Without this check, text in place of a list would be read as a list of letters.
    """
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    expected = _KINDS.get(kind, "text or a number")
    raise ValueError(f"{what} is {repr(value)[:40]}, not {expected}")


def member(entry: Any, key: str, kind: type[_Kind]) -> _Kind:
    """Return the value of a key of an object, see `expect`. Raises ValueError if it is missing."""
    if key not in expect(entry, dict, "it"):
        raise ValueError(f"{key} is missing")
    return expect(entry[key], kind, key)


def read_lines(path: Path) -> list[str]:
    """Return the stripped lines of a text file, at least one, without blank lines."""
    # `splitlines` would also split at form feeds and other rare separators.
    lines = [line.strip() for line in read_text(path).split("\n") if line.strip()]
    if not lines:
        raise DataError(f"{path}: the file is empty; restore it")
    return lines
