"""Files and folders that other programs leave among the photos of a user."""

import os
from pathlib import Path

from readers import write_picture

# What macOS writes beside a photo on a disk of another system.
APPLE_DOUBLE = bytes.fromhex("0005160700020000") + b"Mac OS X" + bytes(60)

PHOTOS = [
    ".hidden.jpg",
    ".ipynb_checkpoints/1-checkpoint.jpg",
    ".Trash-1000/files/1.jpg",
    ".@__thumb/1.jpg",
    "__MACOSX/1.jpg",
    "@eaDir/1.jpg/SYNOPHOTO_THUMB_XL.jpg",
    "@Recycle/1.jpg",
    "#recycle/1.jpg",
    "#snapshot/GMT-01/1.jpg",
    "$RECYCLE.BIN/S-1-5-21/$R1.jpg",
    "$Recycle.Bin/1.jpg",
    "System Volume Information/1.jpg",
    "found.000/1.jpg",
    "lost+found/1.jpg",
    "LOST.DIR/1.jpg",
    "Network Trash Folder/1.jpg",
    "files_trashbin/files/1.jpg",
    "Catalog Previews.lrdata/1.jpg",
    "CaptureOne/Cache/1.jpg",
    "RECYCLER/S-1-5-21/Dc1.jpg",
    "iPod Photo Cache/T1.jpg",
    "~$1.jpg",
]
# Previews in folders that may also contain photos of the user.
NESTED = ["PRIVATE/M4ROOT/THMBNL/C0001T01.JPG", "My.photoslibrary/resources/derivatives/1.jpg"]
FILES = {"._1.jpg": APPLE_DOUBLE, "__MACOSX/._2.jpg": APPLE_DOUBLE, "Thumbs.db": b"thumbnails"}
FILES |= dict.fromkeys(("._a.csv", "._a.json", "._a.yaml", "~$a.xlsx"), APPLE_DOUBLE)


def plant(folder: Path, *, links: bool = True, nested: bool = True) -> None:
    """Write junk to a folder. `links` adds a pipe, links to nothing and a link to the folder."""
    for name in PHOTOS + NESTED if nested else PHOTOS:
        write_picture(folder / name)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    if links:
        (folder / "nowhere.jpg").symlink_to(folder / "missing.jpg")
        (folder / "itself.jpg").symlink_to("itself.jpg")
        (folder / "back").symlink_to(folder)
        os.mkfifo(folder / "pipe.jpg")
