"""Images with a text file of tags next to each of them."""

from pathlib import Path

from mldec.data.source import Source
from mldec.data.table import TableBuilder
from mldec.data.tasks import multi_label
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError

IMAGES = {".jpg", ".jpeg", ".png"}


def sidecars(*, root: str, separator: str = ",", threshold: float = 0.5) -> Source:
    """Return images with tags: root/train/NAME.jpg has its tags in root/train/NAME.txt.

    The classes are the sorted tags of the training split. An image without a text file has no tags.

    Args:
        root: Folder with the folders train and val.
        separator: Separator of the tags in a text file.
        threshold: Probability above which a tag is predicted, in (0, 1).
    """
    folder = check_folder(root, "images and text files")

    def tags(image: Path) -> set[str]:
        file = image.with_suffix(".txt")
        if not file.exists():
            return set()
        words = file.read_text(encoding="utf-8").split(separator)
        return {word.strip() for word in words if word.strip()}

    def images(split: str) -> list[Path]:
        found = [path for path in (folder / split).glob("*") if path.suffix.lower() in IMAGES]
        if not found:
            raise DataError(f"{folder / split}: no image; add {', '.join(sorted(IMAGES))} files")
        return sorted(found)

    # mldec calls this function for each split when it is first used.
    def load(split: str, cache_dir: str | None) -> StoredImages:
        classes: set[str] = set()
        for image in images("train"):
            classes |= tags(image)

        # The builder checks names and paths, and reports unknown classes.
        table = TableBuilder(classes=sorted(classes))
        for image in images(split):
            where = str(image.with_suffix(".txt"))
            table.add(image.name, dict.fromkeys(tags(image), 1), where)
        return in_folder(table.build(folder), folder / split)

    return Source(load=load, where=folder, evaluator=multi_label(threshold, skip_empty=True))
