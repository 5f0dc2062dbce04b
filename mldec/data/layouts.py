"""Recognition of dataset formats in a folder."""

from os import DirEntry
from pathlib import Path, PurePath

from mldec.data.images import READ
from mldec.data.photos import user_entries

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
