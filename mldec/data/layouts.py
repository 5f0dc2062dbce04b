"""Recognition of dataset formats in a folder, and search for image files by partial paths."""

import logging
from collections.abc import Sequence
from os import DirEntry
from pathlib import Path, PurePath

from mldec.data.images import NOT_READ, READ
from mldec.data.photos import SkippedFiles, files_below, user_entries
from mldec.errors import DataError

log = logging.getLogger("mldec")

# Files that identify a dataset format, and the settings that read it.
_FILES = {
    "data.yaml": "data=yolo",
    "data.yml": "data=yolo data.file=data.yml",
    "obj.names": "data=yolo",
    "annotations/instances_train.json": "data=coco_json",
    "train/_annotations.coco.json": "data=coco_json",
    "annotations.xml": "data=cvat",
    "train/labels.json": "data=fiftyone",
    "ImageSets/Main": "data=voc2007",
}


def find_layouts(folder: Path) -> dict[str, str]:
    """Return the files of known dataset formats in a folder, and the settings that read them."""
    layouts = {name: settings for name, settings in _FILES.items() if (folder / name).exists()}
    if "train/_annotations.coco.json" in layouts and (folder / "valid").is_dir():
        layouts["train/_annotations.coco.json"] += " data.val=valid"

    # At least two folders with images are class folders. They may be in folders of splits.
    parts = [folder / name for name in ("train", "val") if (folder / name).is_dir()] or [folder]
    if not layouts and all(sum(map(_has_image, user_entries(part))) > 1 for part in parts):
        layouts["class folders"] = "data=folders"
    return layouts


def describe_layouts(folder: Path) -> str:
    """Describe how to read a folder without data.csv: the formats in it, as text for a message."""
    found = [f"{name} (add {settings})" for name, settings in find_layouts(folder).items()]
    return f"found {', '.join(found)}" if found else "add it, or set data.file to a table"


def _has_image(entry: DirEntry[str]) -> bool:
    if not entry.is_dir():
        return False
    return any(PurePath(file.name).suffix.lower() in READ for file in user_entries(entry.path))


def find_files(folder: Path, paths: Sequence[str]) -> list[str]:
    """Complete the paths of images, which may lack the suffix or the first folders.

    The folder is searched only if the first path has no suffix or does not exist, because a search
    takes long. Paths without a matching file are returned unchanged, and are reported later.

    Args:
        folder: Folder of the images.
        paths: Paths relative to the folder, at least one.

    Raises:
        DataError: If several files match a path.
    """
    is_whole = PurePath(paths[0]).suffix.lower() in READ | NOT_READ
    if not folder.is_dir() or (is_whole and (folder / paths[0]).is_file()):
        return list(paths)

    # Maps the names of files, with and without their suffix, to their paths.
    files: dict[str, list[str]] = {}
    for entry in map(Path, files_below(folder, SkippedFiles())):
        if entry.suffix.lower() in READ:
            file = entry.relative_to(folder).as_posix()
            files.setdefault(entry.name, []).append(file)
            files.setdefault(entry.stem, []).append(file)

    found = []
    for path in paths:
        fitting = []
        for file in sorted(files.get(path.rpartition("/")[2], [])):
            without_suffix = file.removesuffix(PurePath(file).suffix)
            if any(f"/{form}".endswith(f"/{path}") for form in (file, without_suffix)):
                fitting.append(file)
        if len(fitting) > 1 and path not in fitting:
            fault = f"{path} is {fitting[0]} or {fitting[1]}"
            raise DataError(f"{folder}: {fault}; set data.images, or write the whole paths")
        found.append(fitting[0] if len(fitting) == 1 else path)
    count = sum(file != path for file, path in zip(found, paths, strict=True))
    log.info(f"{folder}: {count:,} of {len(paths):,} images were found by their names")
    return found
