"""Write Corel5k in the layout of data=csv: `python scripts/make_corel5k.py CLONE FOLDER`.

CLONE is a clone of the GitHub repository TonyZZX/MultiGraph_MultiLabel_Learning. Its first commit
contains the photos, the words, and the split of Guillaumin et al. (ICCV 2009): 4,500 training and
499 test photos with 260 words. Corel owns the photos; they are for research only.

FOLDER will contain images/, data.csv (path, labels, split) and classes.txt.
"""

import argparse
import csv
import io
import subprocess
import tarfile
from pathlib import Path

from scipy.io import loadmat

COMMIT = "5d6bf599ccf72a7c7e96ccd1696602c4d074ce0a"
SPLITS = {"train": 4500, "test": 499}


def read_commit(clone: str) -> dict[str, bytes]:
    """Return the files of the data set in the commit, by their paths."""
    command = ["git", "-C", clone, "archive", COMMIT, "Corel5k"]
    archive = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                files[member.name.removeprefix("Corel5k/")] = file.read()
    return files


def write(clone: str, folder: Path) -> None:
    """Write the photos and tables of the data set."""
    files = read_commit(clone)
    words = files["corel5k_words.txt"].decode().split()
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for split, count in SPLITS.items():
        names = files[f"corel5k_{split}_list.txt"].decode().split()
        matrices = loadmat(io.BytesIO(files[f"corel5k_{split}_annot.mat"]))
        [labels] = [value for name, value in matrices.items() if not name.startswith("__")]
        assert labels.shape == (count, len(words)), labels.shape
        for name, row in zip(names, labels, strict=True):
            path = f"images/{Path(name).name}.jpg"
            (folder / path).write_bytes(files[f"{name}.jpeg"])
            present = [words[column] for column in row.nonzero()[0]]
            rows.append((path, ";".join(present), split))

    with (folder / "data.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "labels", "split"), *rows])
    (folder / "classes.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    print(f"wrote {len(rows):,} photos with {len(words)} words to {folder}")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("clone", help="clone of TonyZZX/MultiGraph_MultiLabel_Learning")
    parser.add_argument("folder", type=Path, help="folder of the data set")
    arguments = parser.parse_args()
    write(arguments.clone, arguments.folder)


if __name__ == "__main__":
    main()
