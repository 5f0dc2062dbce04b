"""A packed dataset, written with the tarfile module of Python instead of our script."""

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

DENSE = np.array([[1, -1, 0], [0, 1, -1], [-1, -1, -1], [1, 1, 1]], np.int8)  # of each split
FIRST_GRAY = {"train": 0, "val": 100}  # red value of image 0; it grows by 1 per image


def write_packed(root: Path) -> None:
    """Write two splits of four images in two shards each."""
    for split, gray in FIRST_GRAY.items():
        folder = root / split
        folder.mkdir(parents=True)
        for number in range(2):
            pair = range(2 * number, 2 * number + 2)
            members = {f"{index:09}.png": picture(gray + index) for index in pair}
            write_tar(folder / f"shard-{number:06}.tar", {**members, f"{pair[0]:09}.json": b"{}"})
        np.savez(folder / "index.npz", **index_arrays(folder))


def change_index(root: Path, **changed: Any) -> None:
    """Write the index of the validation split with some arrays replaced."""
    np.savez(root / "val" / "index.npz", **{**index_arrays(root / "val"), **changed})


def picture(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), (value, 50, 100)).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def index_arrays(folder: Path) -> dict[str, Any]:
    """Return the index of the tar files in a folder."""
    tars = sorted(folder.glob("*.tar"))
    members = []
    for path in tars:
        with tarfile.open(path) as tar:
            members.append([member for member in tar if not member.name.endswith("json")])

    annotated = DENSE != -1
    return {
        "shards": np.array([path.name for path in tars]),
        "sha256": np.array([hashlib.sha256(path.read_bytes()).hexdigest() for path in tars]),
        "bytes": np.array([path.stat().st_size for path in tars]),
        "first": np.cumsum([0, *map(len, members)]),
        "offsets": np.array([member.offset_data for of_tar in members for member in of_tar]),
        "sizes": np.array([member.size for of_tar in members for member in of_tar]),
        "starts": np.cumsum([0, *annotated.sum(1)]),
        "label_classes": np.nonzero(annotated)[1].astype(np.int32),
        "values": DENSE[annotated],
        "rest": -1,
        "classes": np.array(["a", "b", "c"]),
        "exclusive": False,
        "queries": np.arange(6, dtype=np.float32).reshape(3, 2),
        "format": 1,
    }
