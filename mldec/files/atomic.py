"""Write result files, completely or not at all."""

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
    """Raise a `ConfigError` unless result files can be written, before the work that fills them.

    A target is the path of a file, "-" for standard output, or None for a result nobody wants. With
    a keyword, the ending of such results, a file that has another ending is not replaced.
    """
    for ending, target in with_ending.items():
        if target == STANDARD_OUTPUT and ending in ("html", "pt"):
            raise ConfigError("--out -: this is written to a file; pass its name")
        path = Path(target or STANDARD_OUTPUT)
        if path.is_file() and path.suffix != f".{ending}" and path.stat().st_size:
            raise ConfigError(
                f"{path} exists, and is no .{ending} file that could be replaced: name another one"
            )

    chosen = [target for target in (*targets, *with_ending.values()) if target is not None]
    for target in chosen:
        if target != STANDARD_OUTPUT:
            _check_file(Path(target))

    # Compare the real paths: one of them may be a link to the other.
    if len({os.path.realpath(target) for target in chosen}) < len(chosen):
        raise ConfigError(f"cannot write two results to {chosen[0]}: choose another name for one")


def _check_file(path: Path) -> None:
    """Check that one file can be written, or created."""
    existing = path if path.exists() else path.parent
    fault = None
    if path.is_dir():
        fault = "it is a folder; add the name of a file"
    elif not path.parent.is_dir():
        fault = f"there is no folder {path.parent}"
    elif not os.access(existing, os.W_OK):
        fault = "no permission; choose another place"
    if fault:
        raise ConfigError(f"cannot write {path}: {fault}")


def is_stream(target: str) -> bool:
    """Tell whether a target is written as its content comes: standard output, a device, a pipe."""
    path = Path(target)
    return target == STANDARD_OUTPUT or (path.exists() and not (path.is_file() or path.is_dir()))


def check_folder(option: str, folder: str) -> None:
    """Raise a `ConfigError`, which names the option, unless a folder can be made and written to."""
    # What exists of the path decides whether the rest can be made.
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent

    fault = None
    if not existing.is_dir():
        fault = f"{existing} is a file; name a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        fault = f"no permission to write to {existing}; choose another place"
    if fault:
        raise ConfigError(f"{option} {folder}: {fault}")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a value as standard JSON, in which infinite and NaN numbers become null.

    Characters that are not Unicode, such as a byte of a file name in another encoding, are escaped.
    """
    return json.dumps(_clean(value), indent=indent, allow_nan=False)


def _clean(value: Any) -> Any:
    """Copy a tree of values without what JSON and UTF-8 cannot hold."""
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
    """Return the entries of an object in JSON that name an image.

    JSON is UTF-8, which a path need not be: such a path is given in hexadecimal too.
    """
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
    """Open a file to write bytes, which gets its name if the block ends without an error.

    Otherwise an existing file stays as it is. The folder of the file is made. With `durable` the
    content is on the disk before the name. `of_run` says that it is of a training run. With either,
    one process at a time writes it, see `RunLock`: its temporary file has a fixed name, so that
    killed runs leave one at most. With `of_user` the file belongs to the user and is only updated:
    its mode and owner are kept, and the content is on the disk before the name. A `tag` names the
    temporary file of one of several commands that may write the same file.
    """
    name = f".{path.stem[:40]}.{os.getpid()}.tmp{path.suffix}"
    if tag is not None:
        name = f".{path.name[:40]}.{tag}.tmp"
    elif of_run or durable:
        name = f"{path.name}.tmp"
    temporary = path.with_name(name)
    with writing(path, of_run=of_run):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                if of_user and path.exists():
                    _copy_owner(path, temporary)
                if durable or of_user:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _copy_owner(source: Path, target: Path) -> None:
    """Give a file the owner and the mode of another one."""
    known = source.stat()
    made = target.stat()
    if (known.st_uid, known.st_gid) != (made.st_uid, made.st_gid):
        os.chown(target, known.st_uid, known.st_gid)
    target.chmod(known.st_mode & 0o7777)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, completely or not at all, and the folder that it is in; see `replacing`."""
    with replacing(path) as file:
        file.write(content)


def write_result(target: str, text: str) -> None:
    """Write a whole result file of text; see `write_texts`."""
    write_texts(target, [text])


def write_texts(target: str, texts: Iterable[str]) -> None:
    """Write a result file of texts, completely or not at all; see `replacing`.

    A device, a pipe and standard output, which is "-", are written directly, each text at once.
    """
    if not is_stream(target):
        # What a link leads to is replaced, and not the link.
        with replacing(Path(os.path.realpath(target))) as file:
            file.writelines(text.encode() for text in texts)
        return

    name, stream = "standard output", sys.stdout
    if target != STANDARD_OUTPUT:
        name = target
        with writing(name):
            stream = open(target, "w", encoding="utf-8", newline="")  # noqa: PTH123, SIM115
    try:
        for text in texts:
            with writing(name):
                stream.write(text)
                stream.flush()
    finally:
        # Standard output belongs to the whole process. Closing flushes, which may fail on the full
        # disk that the write has reported already.
        if stream is not sys.stdout:
            with suppress(OSError):
                stream.close()


def csv_lines(rows: Iterable[Iterable[Any]], end: str = "\r\n") -> Iterator[str]:
    """Return rows as lines of CSV."""
    # The writer returns what `write` returns.
    return map(csv.writer(SimpleNamespace(write=str), lineterminator=end).writerow, rows)


def write_json(target: str, content: Any) -> None:
    """Write a whole result file of JSON; see `to_json`."""
    write_result(target, to_json(content, indent=1) + "\n")
