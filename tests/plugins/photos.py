"""A CSV data set of 16 training and 8 validation photos with labels of three classes."""

from pathlib import Path

from pictures import picture

CLASSES = ("cat", "dog", "tree")


def write_photos(folder: Path) -> Path:
    """Write the data set to a new folder."""
    folder.mkdir()
    rows = ["path,labels,split\n"]
    for number in range(24):
        picture(seed=number).save(folder / f"{number}.png")
        labels = ";".join(name for bit, name in enumerate(CLASSES) if (number + 1) >> bit & 1)
        rows.append(f"{number}.png,{labels},{'train' if number < 16 else 'val'}\n")
    (folder / "data.csv").write_text("".join(rows))
    return folder
