"""XMP sidecars with keywords for photo managers: photo.jpg.xmp. Photos are not changed."""

import errno
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mldec.data.images import READ
from mldec.data.keywords import PhotoKeywords, keywords_in, read_keywords, sidecars
from mldec.errors import ConfigError, DataError, naming_errors, print_error, say, writing
from mldec.files.atomic import replacing
from mldec.files.text import read_if_exists
from mldec.files.xmp import EMPTY, Keyword, with_keywords, without_own
from mldec.runtime.console import progress_bar
from mldec.tools.predict.answers import Row

TAG = ".mldec"  # of temporary files, which a killed run may leave behind


def suggestions(row: Row) -> Row:
    """Return a row without the classes that are keywords of its photo."""
    if row.error is not None:
        return row
    present = _names(read_keywords(photo_of(row, "--suggest")))
    missing = [item for item in row.predictions if item.name.strip().casefold() not in present]
    return replace(row, predictions=missing)


def write_sidecar(row: Row, parent: str | None = None) -> list[str]:
    """Write predicted classes to the sidecar of an image file, unless the file has them.

    Keywords of an earlier call are replaced. Keywords of the user, all other bytes, the mode, the
    owner and a link to the sidecar are kept. Returns the result of `_update` for each sidecar of
    the image; none if the row has an error.
    """
    if row.error is not None:
        return []
    photo = photo_of(row, "--xmp")
    of_photo = read_keywords(photo)
    present = _names(of_photo)
    keywords = []
    for name in dict.fromkeys(prediction.name.strip() for prediction in row.predictions):
        if name.casefold() not in present:
            path = f"{parent}/{name}" if parent else name
            keywords.append(tuple(level.strip() for level in path.split("/")))

    results = []
    sidecar = sidecar_of(photo)
    for other in sidecars(photo):
        # On some file systems, names that differ in case are the same file.
        with suppress(OSError):
            if other.samefile(sidecar):
                continue
        results.append(_update(other))
    try:
        results.append(_update(sidecar, keywords, of_photo.listed))
    except DataError as error:
        if getattr(error.__cause__, "errno", None) != errno.ENAMETOOLONG:
            raise
        # The row keeps its predictions, because another attempt would fail, too.
        print_error(str(error))
    return results


def photo_of(row: Row, option: str) -> Path:
    """Return the image file of a row. Raises ConfigError with the option if there is none."""
    if row.path is None or not Path(row.path).is_file():
        raise ConfigError(f"{option}: {row.image} is not an image file; omit {option}")
    return Path(row.path)


def _names(keywords: PhotoKeywords) -> set[str]:
    return {name.casefold() for name in keywords.names()}


def sidecar_of(photo: Path) -> Path:
    """Return the sidecar to write: photo.jpg.xmp, or photo.xmp if only that exists.

    Applications ignore photo.xmp if there is a photo.jpg.xmp. If several images are named photo,
    their keywords need separate files.
    """
    path = photo.with_name(f"{photo.name}.xmp")
    shared = photo.with_suffix(".xmp")
    # In contrast to `Path.exists`, this is False for a name that is too long.
    exists = os.path.exists
    if exists(path) or not exists(shared):
        return path
    for suffix in READ - {photo.suffix.lower()}:
        if exists(photo.with_suffix(suffix)) or exists(photo.with_suffix(suffix.upper())):
            return path
    return shared


def _update(path: Path, keywords: Sequence[Keyword] = (), of_photo: Sequence[Keyword] = ()) -> str:
    """Replace our keywords in a sidecar; return "written", "removed", "unchanged" or "missing".

    A new list starts with the keywords in the other lists of the sidecar, else `of_photo`. A
    sidecar without other content is removed. Other commands may update or remove the sidecar at the
    same time. The last one wins, because the keywords of all others are replaced.
    """
    with naming_errors(path, DataError, remedy="restore it, or move it away"):
        target = Path(os.path.realpath(path))
        before = read_if_exists(target)
        content, _ = without_own(EMPTY if before is None else before)
        if keywords:
            # The user may have removed a keyword from the sidecar, but not from the photo.
            listed = keywords_in(path, content).listed or of_photo
            content = with_keywords(content, keywords, of_photo=listed)

        if content == before:
            return "unchanged"
        if content == EMPTY and before is None:
            return "missing"
        if content == EMPTY and not path.is_symlink():
            with writing(path):
                path.unlink(missing_ok=True)
            return "removed"
        # Other processes, machines and containers must not use the same temporary file.
        with replacing(target, of_user=True, tag=secrets.token_hex(4) + TAG) as file:
            file.write(content)
        return "written"


def undo(paths: Sequence[str]) -> int:
    """Remove the keywords of all runs from sidecars; return the exit status, 1 after an error."""
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise ConfigError(f"--xmp-undo {name}: no local file or folder; check the path")
        if path.is_dir():
            # Also hidden files, such as the temporary files of a killed run.
            files += sorted(path.rglob("*"))
        else:
            files += [path] + sidecars(path)

    # A temporary file may belong to a command that is still running, and is renamed soon.
    files.sort(key=lambda path: path.name.endswith(f"{TAG}.tmp"))
    counts: Counter[str] = Counter()
    errors = 0
    for path in progress_bar(files, desc="--xmp-undo", unit=" files"):
        try:
            if path.name.endswith(f"{TAG}.tmp"):
                with writing(path):
                    path.unlink(missing_ok=True)
            elif path.suffix.lower() == ".xmp":
                counts[_update(path)] += 1
        except DataError as error:
            print_error(str(error))
            errors += 1
    failed = f", {errors:,} with an error" if errors else ""
    say(f"--xmp-undo: {sidecar_counts(counts)}{failed}")
    return int(errors > 0)


def sidecar_counts(counts: Counter[str]) -> str:
    """Return the number of sidecars with each result of `_update` as text."""
    return (
        f"{counts['written']:,} sidecars written, {counts['removed']:,} removed, "
        f"{counts['unchanged']:,} unchanged"
    )
