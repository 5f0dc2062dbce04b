"""Atomic writes of result files."""

import csv
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from mldec.errors import ConfigError, writing

STANDARD_OUTPUT = "-"


def check_targets(*targets: str | None, **with_ending: str | None) -> None:
    """Raise ConfigError unless all result files can be written, before they are computed.

    A target is a path, "-" for standard output, or None for no output. Targets with a file
    extension as keyword do not replace existing files with another extension.
    """
    for ending, target in with_ending.items():
        if target == STANDARD_OUTPUT and ending in ("html", "pt"):
            raise ConfigError("--out -: standard output is not supported; pass a file name")
        path = Path(target or STANDARD_OUTPUT)
        if path.is_file() and path.suffix != f".{ending}" and path.stat().st_size:
            raise ConfigError(f"{path}: the file exists and is not .{ending}; choose another name")

    chosen = [target for target in targets + tuple(with_ending.values()) if target is not None]
    for target in chosen:
        if target == STANDARD_OUTPUT:
            continue

        path = Path(target)
        existing = path if path.exists() else path.parent
        fault = None
        if path.is_dir():
            fault = "it is a folder; add the name of a file"
        elif not path.parent.is_dir():
            fault = f"the folder {path.parent} does not exist; create it"
        elif not os.access(existing, os.W_OK):
            fault = "no write permission; choose another folder"
        if fault:
            raise ConfigError(f"cannot write {path}: {fault}")

    # Compare real paths, because one may be a link to the other.
    if len({os.path.realpath(target) for target in chosen}) < len(chosen):
        raise ConfigError(f"cannot write two results to {chosen[0]}: choose another name for one")


def is_stream(target: str) -> bool:
    """Return True for targets that are written directly: standard output, devices and pipes."""
    path = Path(target)
    return target == STANDARD_OUTPUT or (path.exists() and not (path.is_file() or path.is_dir()))


def check_folder(option: str, folder: str) -> None:
    """Raise ConfigError unless the folder of an option can be created and written to."""
    # The rest of the path is created in the deepest existing folder.
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent

    fault = None
    if not existing.is_dir():
        fault = f"{existing} is a file; pass a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        fault = f"no permission to write to {existing}; choose another folder"
    if fault:
        raise ConfigError(f"{option} {folder}: {fault}")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return plain containers and values as standard JSON, in one line without `indent`.

    Infinite and NaN numbers become null. Invalid Unicode, as in some file names, is escaped.
    """
    return json.dumps(_clean(value), indent=indent, allow_nan=False)


def _clean(value: Any) -> Any:
    """Copy a tree of values, and replace values that JSON and UTF-8 do not support."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def named(name: str) -> dict[str, str]:
    """Return the JSON entry of an image name; with "image_bytes" in hex if it is not UTF-8."""
    encoded = os.fsencode(name)
    try:
        return {"image": encoded.decode("utf-8")}
    except UnicodeDecodeError:
        return {"image": encoded.decode("utf-8", "backslashreplace"), "image_bytes": encoded.hex()}


@contextmanager
def replacing(
    path: Path,
    *,
    durable: bool = False,
    of_run: bool = False,
    of_user: bool = False,
    tag: str | None = None,
) -> Iterator[BinaryIO]:
    """Write a temporary file that replaces `path` if the block ends without an error.

    After an error, an existing file is unchanged. The parent folder is created. `durable` flushes
    the content to the disk first. `of_user` also keeps the mode and the owner of an existing file.
    `of_run` is for error messages. With `durable` or `of_run`, the temporary file has a fixed name,
    so that killed runs leave at most one; only one process may write such a file at a time, see
    `RunLock`. `tag` is part of this name, if several commands may write the same file.
    """
    name = f".{path.stem[:40]}.{os.getpid()}.tmp{path.suffix}"
    if tag is not None:
        name = f".{path.name[:40]}.{tag}.tmp"
    elif of_run or durable:
        name = f"{path.name}.tmp"
    temporary = path.with_name(name)
    with writing(path, of_run=of_run):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may still write to a file with this name. Do not share it.
        temporary.unlink(missing_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                if of_user:
                    # There may be no file, or another process may remove it now.
                    with suppress(FileNotFoundError):
                        old = path.stat()
                        new = temporary.stat()
                        if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
                            os.chown(temporary, old.st_uid, old.st_gid)
                        temporary.chmod(old.st_mode & 0o7777)
                if durable or of_user:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically, and create its folder; see `replacing`."""
    with replacing(path) as file:
        file.write(content)


def write_result(target: str, text: str) -> None:
    """Write a text to a result file; see `write_texts`."""
    write_texts(target, [text])


def write_texts(target: str, texts: Iterable[str]) -> None:
    """Write texts to a result file atomically; see `replacing`.

    Standard output ("-"), devices and pipes are written directly and flushed after each text.
    """
    if not is_stream(target):
        # Replace the target of a link, not the link itself.
        with replacing(Path(os.path.realpath(target))) as file:
            for text in texts:
                file.write(text.encode())
        return

    if target == STANDARD_OUTPUT:
        for text in texts:
            with writing("standard output"):
                sys.stdout.write(text)
                sys.stdout.flush()
        return

    with writing(target), Path(target).open("w", encoding="utf-8", newline="") as stream:
        for text in texts:
            stream.write(text)
            stream.flush()


def csv_lines(rows: Iterable[Iterable[Any]], end: str = "\r\n") -> Iterator[str]:
    """Return rows as lines of CSV, with line terminator `end`."""
    # `writerow` returns what `write` of its file returns. With `str` this is the line itself.
    writer = csv.writer(SimpleNamespace(write=str), lineterminator=end)
    return map(writer.writerow, rows)


def write_json(target: str, content: Any) -> None:
    """Write a value to a JSON result file; see `to_json`."""
    write_result(target, to_json(content, indent=1) + "\n")
