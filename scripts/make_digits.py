#!/usr/bin/env python
"""Write scenes of handwritten digits as image files, in the layout of a data set.

    python scripts/make_digits.py --layout coco OUT

They serve to test all readers without a download. The last line of the output is the command that
trains on them. The scenes are as in `data=digits`. Training and
validation use different handwritten digits. The same arguments give the same files.

    coco        annotations/instances_{train,val}2014.json with boxes, {train,val}2014/*.jpg
    voc         VOCdevkit/VOC2007 (trainval and test); the digits have the names of the first ten
                VOC classes, because readers only accept VOC classes: from aeroplane (zero) to cow
                (nine)
    openimages  the MIIL form: data.csv with verified positives and negatives, mid_to_classes.pth,
                train/, test/
    nuswide     the zero-shot form: data.csv, benchmark_81_v0.json, wordvec_array.pth and its names,
                images/; a class is a digit in colored light ("redfive"); the digit and the color of
                an unseen class also occur in seen classes
    imagenet    {train,val}/<wnid>/*.JPEG, one digit per image
    csv         data.csv with path, labels, split; images/
    yolo        data.yaml, images/{train,val}/*.jpg, labels/{train,val}/*.txt with boxes
"""

import argparse
import csv
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from mldec.cli import positive, whole
from mldec.data.digits import Box, compose, split_writings
from mldec.errors import ConfigError, one_line, writing
from mldec.names import VOC
from mldec.words.digits import NAMES

QUALITY = 95  # JPEG quality
DIFFICULT = 0.1  # fraction of difficult objects in VOC
VERIFIED = 0.6  # fraction of annotated (image, class) pairs in Open Images
COLORS = {
    "red": (1.0, 0.5, 0.5),
    "green": (0.5, 1.0, 0.5),
    "blue": (0.5, 0.5, 1.0),
    "grey": (1.0, 1.0, 1.0),
}
UNSEEN = [f"{list(COLORS)[digit % len(COLORS)]}{name}" for digit, name in enumerate(NAMES[:8])]


@dataclass(frozen=True)
class Scene:
    """An image and its annotations."""

    split: str  # train or val
    index: int  # in its split
    image: Image.Image
    objects: list[tuple[int, Box]]  # each digit with its square
    rng: np.random.Generator  # for the random choices of a layout

    @property
    def digits(self) -> list[int]:
        """The sorted digits in the scene, without duplicates."""
        return sorted({digit for digit, _ in self.objects})


def scenes(args: argparse.Namespace, *, least: int = 0, most: int = 4) -> Iterator[Scene]:
    """Generate all scenes, first the training scenes.

    A scene depends only on the seed, the split, its index and its size.

    Args:
        args: The command line.
        least: Minimum number of digits in a scene.
        most: Maximum number of digits in a scene.
    """
    counts = {"train": args.train, "val": args.val}
    bar = tqdm(total=sum(counts.values()), desc=args.layout, disable=not sys.stderr.isatty())

    # No handwritten digit is in both splits.
    for number, (split, writings) in enumerate(zip(counts, split_writings(args.seed), strict=True)):
        for index in range(counts[split]):
            rng = np.random.default_rng((args.seed, number, index))

            # Repeat scenes without room for enough digits.
            image, placed = compose(rng, writings, size=args.size, max_digits=most)
            while len(placed) < least:
                image, placed = compose(rng, writings, size=args.size, max_digits=most)

            objects = [(int(writings.labels[row]), box) for row, box in placed]
            yield Scene(split, index, image, objects, rng)
            bar.update()
    bar.close()


def save(image: Image.Image, path: Path) -> None:
    """Write a JPEG file, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, "JPEG", quality=QUALITY)


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) + "\n")


def write_csv(path: Path, header: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def coco(out: Path, args: argparse.Namespace) -> None:
    """Write the MS-COCO layout, with gaps between the category ids."""
    categories = []
    for digit, name in enumerate(NAMES):
        categories.append({"id": 2 * digit + 1, "name": name, "supercategory": "digit"})
    content: dict[str, dict[str, Any]] = {}
    for split in ("train", "val"):
        content[split] = {
            "info": {},
            "licenses": [],
            "images": [],
            "annotations": [],
            "categories": categories,
        }

    # Image ids are unique in both splits.
    for scene in scenes(args):
        number = scene.index + 1 + (args.train if scene.split == "val" else 0)
        name = f"COCO_{scene.split}2014_{number:012}.jpg"
        save(scene.image, out / f"{scene.split}2014" / name)
        content[scene.split]["images"].append(
            {"id": number, "file_name": name, "width": args.size, "height": args.size}
        )
        for position, (digit, box) in enumerate(scene.objects):
            annotation = _coco_object(10 * number + position, number, digit, box)
            content[scene.split]["annotations"].append(annotation)

    for split, part in content.items():
        write_json(out / "annotations" / f"instances_{split}2014.json", part)


def _coco_object(number: int, image: int, digit: int, box: Box) -> dict[str, object]:
    """Return the annotation of a digit."""
    left, top, right, bottom = box
    return {
        "id": number,
        "image_id": image,
        "category_id": 2 * digit + 1,
        "iscrowd": 0,
        "bbox": [left, top, right - left, bottom - top],
        "area": (right - left) * (bottom - top),  # of the square, without a mask
        "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
    }


def voc(out: Path, args: argparse.Namespace) -> None:
    """Write the Pascal VOC layout.

    The halves of the training scenes are train and val. The validation scenes are test.
    """
    root = out / "VOCdevkit" / "VOC2007"
    sets: dict[str, list[tuple[str, dict[int, int]]]] = {
        "train": [],
        "val": [],
        "trainval": [],
        "test": [],
    }

    for scene in scenes(args):
        name = f"{scene.index + 1 + (args.train if scene.split == 'val' else 0):06}"
        difficult = [bool(scene.rng.random() < DIFFICULT) for _ in scene.objects]
        save(scene.image, root / "JPEGImages" / f"{name}.jpg")
        _voc_xml(root / "Annotations" / f"{name}.xml", scene, difficult)

        # The flag of a class is 1, or 0 if all of its objects in the image are difficult.
        flags: dict[int, int] = {}
        for (digit, _), hard in zip(scene.objects, difficult, strict=True):
            flags[digit] = max(flags.get(digit, 0), int(not hard))

        if scene.split == "val":
            sets["test"].append((name, flags))
        else:
            half = "train" if scene.index < args.train // 2 else "val"
            sets[half].append((name, flags))
            sets["trainval"].append((name, flags))

    # One list per set, and one per set and class, where -1 means absent.
    main = root / "ImageSets" / "Main"
    main.mkdir(parents=True)
    for part, rows in sets.items():
        (main / f"{part}.txt").write_text("".join(f"{name}\n" for name, _ in rows))
        for number, class_name in enumerate(VOC):
            lines = [f"{name} {flags.get(number, -1):2}\n" for name, flags in rows]
            (main / f"{class_name}_{part}.txt").write_text("".join(lines))


def _voc_xml(path: Path, scene: Scene, difficult: list[bool]) -> None:
    """Write the annotation file of a scene."""
    root = ElementTree.Element("annotation")
    _add(root, folder="VOC2007", filename=f"{path.stem}.jpg")
    width, height = scene.image.size
    _add(ElementTree.SubElement(root, "size"), width=width, height=height, depth=3)

    for (digit, box), hard in zip(scene.objects, difficult, strict=True):
        node = ElementTree.SubElement(root, "object")
        _add(node, name=VOC[digit], pose="Unspecified", truncated=0, difficult=int(hard))

        # Pixels of VOC start at 1, and both ends are inclusive.
        left, top, right, bottom = box
        corners = ElementTree.SubElement(node, "bndbox")
        _add(corners, xmin=left + 1, ymin=top + 1, xmax=right, ymax=bottom)

    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.indent(root)
    path.write_text(ElementTree.tostring(root, encoding="unicode") + "\n")


def _add(parent: ElementTree.Element, **texts: object) -> None:
    """Append one element per text."""
    for tag, text in texts.items():
        ElementTree.SubElement(parent, tag).text = str(text)


def openimages(out: Path, args: argparse.Namespace) -> None:
    """Write the MIIL form of Open Images.

    Most (image, class) pairs are verified, the others are not annotated. Split val is in test/.
    """
    mids = [f"/m/digit_{name}" for name in NAMES]
    rows = []
    for scene in scenes(args):
        folder = "train" if scene.split == "train" else "test"
        path = f"{folder}/{scene.index + (args.train if scene.split == 'val' else 0):016x}.jpg"
        save(scene.image, out / path)

        # The selection of annotated classes does not depend on the content of the image.
        verified = np.flatnonzero(scene.rng.random(len(NAMES)) < VERIFIED).tolist()
        present = [mids[digit] for digit in verified if digit in scene.digits]
        absent = [mids[digit] for digit in verified if digit not in scene.digits]
        rows.append((path, repr(present), repr(absent), scene.split))

    write_csv(out / "data.csv", ("image_id", "class_list", "class_list_neg", "split"), rows)
    torch.save(dict(zip(mids, NAMES, strict=True)), out / "mid_to_classes.pth")


def nuswide(out: Path, args: argparse.Namespace) -> None:
    """Write the zero-shot form of NUS-WIDE.

    A class is a digit in colored light. Its vector has one entry for the digit and one for the
    color.
    """
    names = sorted(f"{color}{digit}" for color in COLORS for digit in NAMES)
    rows = []
    for number, scene in enumerate(scenes(args, least=1)):
        # All digits of a scene have the same light.
        color = list(COLORS)[int(scene.rng.integers(len(COLORS)))]
        tinted = np.asarray(scene.image) * np.array(COLORS[color])
        path = f"images/{number}_{scene.split}_m.jpg"
        save(Image.fromarray(tinted.astype(np.uint8)), out / path)

        tags = sorted(f"{color}{NAMES[digit]}" for digit in scene.digits)
        rows.append((path, f"[{', '.join(tags)}]", scene.split))

    write_csv(out / "data.csv", ("filepath", "label", "split_name"), rows)
    write_json(out / "benchmark_81_v0.json", {"test class": sorted(UNSEEN)})
    torch.save(torch.stack([_vector(name) for name in names], 1), out / "wordvec_array.pth")
    (out / "wordvec_array.txt").write_text("".join(f"{name}\n" for name in names))


def _vector(name: str) -> torch.Tensor:
    """Return the vector of a class, with norm 1."""
    color = next(color for color in COLORS if name.startswith(color))
    digit_index = NAMES.index(name.removeprefix(color))
    color_index = len(NAMES) + list(COLORS).index(color)

    vector = torch.zeros(len(NAMES) + len(COLORS))
    vector[[digit_index, color_index]] = 0.5**0.5
    return vector


def imagenet(out: Path, args: argparse.Namespace) -> None:
    """Write the ImageNet layout.

    The folders are invented wnids, n00000000 to n00000009. The file with their names is as in
    Kaggle's download.
    """
    wnids = [f"n{digit:08}" for digit in range(len(NAMES))]
    for split in ("train", "val"):
        for wnid in wnids:
            (out / split / wnid).mkdir(parents=True)

    for scene in scenes(args, least=1, most=1):
        wnid = wnids[scene.digits[0]]
        name = f"{wnid}_{scene.index}"
        if scene.split == "val":
            name = f"ILSVRC2012_val_{scene.index + 1:08}"
        save(scene.image, out / scene.split / wnid / f"{name}.JPEG")

    lines = [f"{wnid} {name}\n" for wnid, name in zip(wnids, NAMES, strict=True)]
    (out / "LOC_synset_mapping.txt").write_text("".join(lines))


def table(out: Path, args: argparse.Namespace) -> None:
    """Write one table, with semicolons between the labels of an image."""
    rows = []
    for number, scene in enumerate(scenes(args)):
        path = f"images/{number:06}.jpg"
        save(scene.image, out / path)
        rows.append((path, ";".join(NAMES[digit] for digit in scene.digits), scene.split))
    write_csv(out / "data.csv", ("path", "labels", "split"), rows)


def yolo(out: Path, args: argparse.Namespace) -> None:
    """Write the YOLO layout. The numbers of a box are fractions of the image size."""
    for scene in scenes(args):
        name = f"{scene.split}/{scene.index:06}"
        save(scene.image, out / "images" / f"{name}.jpg")

        lines = []
        for digit, (left, top, right, bottom) in scene.objects:
            box = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
            numbers = " ".join(f"{side / args.size:.6f}" for side in box)
            lines.append(f"{digit} {numbers}")
        path = out / "labels" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))

    names = "".join(f"  {digit}: {name}\n" for digit, name in enumerate(NAMES))
    (out / "data.yaml").write_text(f"train: images/train\nval: images/val\nnames:\n{names}")


LAYOUTS: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "coco": coco,
    "voc": voc,
    "openimages": openimages,
    "nuswide": nuswide,
    "imagenet": imagenet,
    "csv": table,
    "yolo": yolo,
}

# Settings that a layout needs in addition to those of the experiment digits_coco: the reader, a
# loss for unknown labels or one label per image, no crop of a digit, and word vectors of width 14.
SETTINGS = {
    "coco": "",
    "voc": "data=voc2007",
    "openimages": "data=openimages_miil loss=partial",
    "nuswide": "data=nuswide_zsl head.num_groups=null head.word_dim=14",
    "imagenet": (
        "data=imagenet data.class_map=folders data.flip=false data.crop=1.0 data.test_crop=null "
        "loss=asl_single_label"
    ),
    "csv": "data=csv",
    "yolo": "data=yolo",
}


def command(layout: str, out: str) -> str:
    """Return the command that trains on the files, quoted for a shell."""
    words = ["mldec", "train", "+experiment=digits_coco"] + SETTINGS[layout].split()
    words.append(f"data.root={out}")
    if layout != "coco":
        words.append(f"name=digits_{layout}")
    return shlex.join(words)


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("out", metavar="OUT", help="new or empty folder")
    arguments.add_argument("--layout", choices=LAYOUTS, required=True)
    option = partial(arguments.add_argument, metavar="N")
    option("--train", type=positive, default=8192, help="training images (default: %(default)s)")
    option("--val", type=positive, default=2048, help="validation images (default: %(default)s)")
    # Smaller images have no room for a digit.
    side = partial(whole, smallest=16)
    option("--size", type=side, default=64, help="pixels per side (default: %(default)s)")
    option("--seed", type=whole, default=0, help="default: %(default)s")
    return arguments


def main() -> None:
    with one_line():
        args = parser().parse_args()
        out = Path(args.out)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out}: not an empty folder; use another one")

        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            LAYOUTS[args.layout](out, args)
        counts = f"{args.train:,} training and {args.val:,} validation images"
        print(f"{out}: {counts}, layout {args.layout}")
        print(command(args.layout, args.out))


if __name__ == "__main__":
    main()
