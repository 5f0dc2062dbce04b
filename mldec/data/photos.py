"""Lists of the user's photos in a folder or an archive, and search for photos by name.

All code that lists a folder or an archive uses `user_entries`, `files_below` or `is_junk`, so that
thumbnails of other programs are never used as photos. Files that are given individually, as
arguments or in the rows of a table, are never skipped.
"""

import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Literal
from unicodedata import normalize

from mldec.data.images import HEIF, INSTALL_HEIF, NOT_READ, READ
from mldec.errors import DataError, log, visible

# Names of files and folders that programs create for internal use, many with copies of photos.
_JUNK = re.compile(
    r"""
    \..*                                                # hidden, such as ._IMG.jpg of macOS
    | __macosx | network\ trash\ folder | temporary\ items                              # macOS
    | \$recycle\.bin | system\ volume\ information | found\.\d{3} | (eh)?thumbs(_vista)?\.db
    | lost\+found | lost\.dir                                               # Linux and Android
    | @eadir | \#recycle | \#snapshot | @tmp                                # Synology
    | @recycle | @recently-snapshot | ~snapshot                             # QNAP and NetApp
    | files_trashbin | files_versions | appdata_\w+                         # Nextcloud
    | .*\.lrdata | .*\.lrcat-data | captureone          # previews of Lightroom and Capture One
    | thmbnl | ipod\ photo\ cache             # previews of Sony's cameras and of iTunes
    | (?-i:RECYCLER|RECYCLED) | ~\$.*                   # older Windows, and open files of Office
    """,
    re.VERBOSE | re.IGNORECASE,
)

# Libraries of Apple Photos, iPhoto, Aperture and Capture One, and their folders of original photos.
_LIBRARIES = (".photoslibrary", ".photolibrary", ".aplibrary", ".cocatalog")
_ORIGINALS = ("originals", "masters")


def is_junk(path: str, parent: str = "") -> bool:
    """Return True if the path of a file or folder shows that a program created it for internal use.

    Args:
        path: Path inside the folder or archive that the user gave. All its parts are compared.
        parent: Name of this folder, which may be a photo library of macOS.
    """
    for part in path.split("/"):
        if part in ("", ".", ".."):
            continue
        is_preview = parent.lower().endswith(_LIBRARIES) and part.lower() not in _ORIGINALS
        if is_preview or _JUNK.fullmatch(part):
            return True
        # The next part is judged as a member of this folder, which may be a photo library.
        parent = part
    return False


class SkippedFiles:
    """Counter of the files that a listing skips, with examples.

    Image files of unsupported formats are counted by suffix. Junk (see `is_junk`) is counted only
    if it is a folder or has the suffix of an image file, because users do not miss other files.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.junk = 0
        self.junk_example = ""

    def accepts(self, path: str) -> bool:
        """Return True for the suffix of a supported image file, and count it if unsupported."""
        # A PurePath would take most of the time of a listing.
        suffix = os.path.splitext(path)[1].lower()  # noqa: PTH122
        if suffix in NOT_READ:
            self.counts[suffix] += 1
            self.examples.setdefault(suffix, path)
        return suffix in READ

    def add_junk(self, path: str, *, is_folder: bool = False) -> None:
        """Count a folder, or a file with the suffix of an image."""
        if is_folder or PurePath(path).suffix.lower() in READ | NOT_READ:
            self.junk += 1
            self.junk_example = self.junk_example or path

    def __bool__(self) -> bool:
        return bool(self.counts or self.junk)

    def __str__(self) -> str:
        sentences = []
        if self.counts:
            kinds = []
            for suffix, count in self.counts.most_common():
                kinds.append(f"{count:,} {suffix} (such as {visible(self.examples[suffix])})")
            fix = "convert them to JPEG"
            if not HEIF.isdisjoint(self.counts):
                fix = f"run {INSTALL_HEIF} for HEIC files, and convert others to JPEG"
            sentences.append(
                f"{self.counts.total():,} image files of unsupported formats are left out: "
                f"{', '.join(kinds)}; {fix}"
            )
        if self.junk:
            sentences.append(
                f"{self.junk:,} hidden files, folders of other programs, links to folders or "
                f"broken links are left out (such as {visible(self.junk_example)})"
            )
        return "; ".join(sentences)

    def log(self, what: str) -> None:
        """Log the counts after the prefix `what`. Unsupported formats are a warning."""
        if self:
            log.log(logging.WARNING if self.counts else logging.INFO, f"{what}: {self}")


def list_folder(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Yield all files and folders in a folder, including junk, in arbitrary order."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        fault = f"cannot be listed ({error.strerror}); restore it or correct the path"
        raise DataError(f"{folder}: {fault}") from error


def user_entries(folder: str | Path, skipped: SkippedFiles | None = None) -> list[os.DirEntry[str]]:
    """Return the user's files and folders in a folder, sorted by name.

    Junk and entries that are neither folders nor regular files are counted in `skipped`. Symbolic
    links are treated as their targets.
    """
    parent = Path(folder).name
    kept = []
    for entry in sorted(list_folder(folder), key=attrgetter("name")):
        kind = _kind(entry)
        if kind and not is_junk(entry.name, parent):
            kept.append(entry)
        elif skipped is not None:
            skipped.add_junk(entry.path, is_folder=kind == "folder")
    return kept


def _kind(entry: os.DirEntry[str]) -> Literal["folder", "file", ""]:
    """Return the kind of an entry, or of its target if it is a link; "" for pipes and the like."""
    try:
        if entry.is_dir():
            return "folder"
        return "file" if entry.is_file() else ""
    except OSError:
        # A link to itself raises an error. A broken link does not.
        return ""


def files_below(
    folder: str | Path, skipped: SkippedFiles, without: Collection[str] = ()
) -> Iterator[str]:
    """Yield the paths of the user's files below a folder, sorted by the names in their paths.

    Links to files are yielded. Links to folders are counted in `skipped` and not followed: a link
    to a parent would never end, and a link out of the folder would change other folders if sidecars
    are written. Folders whose paths are in `without` are not listed.
    """
    for entry in user_entries(folder, skipped):
        if not entry.is_dir():
            yield entry.path
        elif entry.path in without:
            continue
        elif entry.is_symlink():
            skipped.add_junk(entry.path, is_folder=True)
        else:
            yield from files_below(entry.path, skipped, without)


def find_list(paths: Sequence[str], folders: Sequence[Path]) -> tuple[Path, list[str]]:
    """Return the image folder of a list of photos, and the paths of the photos inside it.

    `paths` are relative, see `path_inside`. The result is the first of the `folders` that has most
    of the first 20 photos. Lists often have paths of another computer or of an archive. If no photo
    is found, all paths lose their first folder, and so on. They lose the same number of folders,
    because a/1.jpg must never be replaced by b/1.jpg.
    """
    finders = list(map(PhotoFinder, folders))
    for number in range(1 + max(path.count("/") for path in paths)):
        # The name of the photo always remains.
        shorter = [path.split("/", number)[-1] for path in paths]
        first = shorter[:20]
        counts = [sum((folder / path).exists() for path in first) for folder in folders]
        if not any(counts):
            # Names may differ in case. This search lists whole folders.
            counts = [sum(bool(each.find(path, folders[0])) for path in first) for each in finders]
        if any(counts) and len(set(shorter)) == len(set(paths)):
            folder = folders[counts.index(max(counts))]
            if number:
                log.info(f"{folder}: listed paths are shorter, such as {shorter[0]} of {paths[0]}")
            return folder, shorter
    return folders[0], list(paths)


class PhotoFinder:
    """Finds photos below a folder by their paths, with or without suffix.

    Tables and exports often omit the suffix. Each folder is listed only once, because a system call
    per photo takes minutes for millions of photos.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

        # Maps a folder to the names of its files, by the keys of their names and stems.
        self._listings: dict[str, dict[str, list[str]]] = {}

        # Maps the names and stems of all photos below the folder to their paths.
        self._below: defaultdict[str, list[str]] | None = None

    def find(self, path: str, where: str | Path) -> str | None:
        """Return the path of an existing photo, or None.

        `path` is relative to the folder, and `where` is the file and entry that contain it, for
        messages. The file with this name has precedence over a photo with this name and a suffix,
        and the same case over others, because Windows and macOS ignore it. macOS writes accents as
        separate characters (NFD), other systems do not (NFC), so both forms are found.

        Raises:
            DataError: If several photos have this name without suffix.
        """
        inner, slash, name = path.rpartition("/")
        for parent in dict.fromkeys([inner, normalize("NFC", inner), normalize("NFD", inner)]):
            if parent not in self._listings:
                self._listings[parent] = self._list(parent)

            found = self._listings[parent].get(fold_case(name), [])
            if name in found:
                return f"{parent}{slash}{name}"
            if len(found) > 1:
                found = _matches(name, found)
            if len(found) > 1:
                fault = f"{path!r} may be {found[0]} or {found[1]} in {self._folder / parent}"
                raise DataError(f"{where}: {fault}; add the suffix, or remove one")
            if found:
                return f"{parent}{slash}{found[0]}"
        return None

    def find_below(self, path: str, where: str | Path, folders: Collection[str] = ()) -> str | None:
        """Return the only photo below the folder whose path ends with `path`, or None.

        Tables often list only the names of photos that are in inner folders. Photos in one of
        `folders`, names in lower case such as train, have precedence over others. For the other
        arguments, the precedence and the error see `find`.
        """
        if self._below is None:
            self._below = defaultdict(list)
            # The tree is listed only if some path is not found directly, because that takes long.
            for file in files_below(self._folder, SkippedFiles()):
                photo = PurePath(file).relative_to(self._folder)
                if photo.suffix.lower() in READ:
                    self._below[fold_case(photo.name)].append(photo.as_posix())
                    self._below[fold_case(photo.stem)].append(photo.as_posix())

        photos = self._below.get(fold_case(path.rpartition("/")[2]), [])
        inside = [photo for photo in photos if set(folders) & set(photo.lower().split("/")[:-1])]
        found = _matches(path, inside) or _matches(path, photos)
        if len(found) > 1:
            fault = f"{path!r} may be {found[0]} or {found[1]} in {self._folder}"
            raise DataError(f"{where}: {fault}; set data.images, or write the whole paths")
        return found[0] if found else None

    def _list(self, parent: str) -> dict[str, list[str]]:
        listing: defaultdict[str, list[str]] = defaultdict(list)
        try:
            entries = list_folder(self._folder / parent)
            names = sorted(entry.name for entry in entries if _kind(entry) == "file")
        except (DataError, ValueError):
            # The folder does not exist, or its path is invalid. The caller reports its photos.
            return {}

        for name in names:
            listing[fold_case(name)].append(name)
            stem, suffix = os.path.splitext(name)  # noqa: PTH122
            # If a.jpg is missing, a.jpg.png must not replace it.
            is_photo = suffix.lower() in READ and PurePath(stem).suffix.lower() not in READ
            if is_photo and not is_junk(name):
                listing[fold_case(stem)].append(name)
        return listing


def fold_case(name: str) -> str:
    """Return a name without differences in case and in Unicode form."""
    return normalize("NFC", name).casefold()


def _matches(path: str, photos: Sequence[str]) -> list[str]:
    """Return the photos whose paths end with `path`, with the same case if there is one."""
    for simplify in (partial(normalize, "NFC"), fold_case):
        found = []
        for photo in photos:
            ends = (f"/{photo}", f"/{photo.removesuffix(PurePath(photo).suffix)}")
            if any(simplify(end).endswith(simplify(f"/{path}")) for end in ends):
                found.append(photo)
        if found:
            return found
    return []
