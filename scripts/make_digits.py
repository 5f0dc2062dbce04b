#!/usr/bin/env python
"""Write scenes of real handwriting as image files, in the on-disk form of a data set.

    python scripts/make_digits.py --layout coco OUT

So every reader can be trained and evaluated end to end without a download. The scenes are those of
`data=digits`; training and validation share no writing. The same arguments give the same files.

    coco        annotations/instances_{train,val}2014.json with boxes, {train,val}2014/*.jpg
    voc         VOCdevkit/VOC2007 (trainval and test); the digits have the names of the first ten
                VOC classes, because readers know only these twenty: zero is aeroplane, one is
                bicycle, ... nine is cow
    openimages  the MIIL form: data.csv with verified positives and negatives, mid_to_classes.pth,
                train/, test/
    nuswide     the zero-shot form: data.csv, benchmark_81_v0.json, wordvec_array.pth and its names,
                images/; a class is a digit in a light of some colour ("redfive"), and the digit and
                the colour of every unseen class are in seen classes
    imagenet    {train,val}/<wnid>/*.JPEG, one digit per image
    csv         data.csv with path, labels, split; images/
    yolo        data.yaml, images/{train,val}/*.jpg, labels/{train,val}/*.txt with boxes
"""

import argparse
import csv
import json
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

from mldec.data.digits import Box, compose, split_writings
from mldec.errors import ConfigError, one_line
from mldec.names import VOC
from mldec.words.digits import NAMES

QUALITY = 95  # of the JPEG files
DIFFICULT = 0.1  # share of the objects that VOC calls difficult
VERIFIED = 0.6  # share of the (image, class) pairs that Open Images has annotated
COLOURS = {
    "red": (1.0, 0.5, 0.5),
    "green": (0.5, 1.0, 0.5),
    "blue": (0.5, 0.5, 1.0),
    "grey": (1.0, 1.0, 1.0),
}
UNSEEN = [f"{list(COLOURS)[digit % len(COLOURS)]}{name}" for digit, name in enumerate(NAMES[:8])]


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
        """Return the digits in the scene, each once, ascending."""
        return sorted({digit for digit, _ in self.objects})


def scenes(args: argparse.Namespace, *, least: int = 0, most: int = 4) -> Iterator[Scene]:
    """Draw all scenes, those of training first.

    A scene depends on the seed, its split, its index and the size alone.

    Args:
        args: the command line.
        least: the smallest number of digits in a scene.
        most: the largest number of digits in a scene.
    """
    counts = {"train": args.train, "val": args.val}
    bar = tqdm(total=sum(counts.values()), desc=args.layout, disable=not sys.stderr.isatty())

    # Each split has writings of its own, so that no handwritten digit is in both.
    for number, (split, writings) in enumerate(zip(counts, split_writings(args.seed), strict=True)):
        for index in range(counts[split]):
            rng = np.random.default_rng((args.seed, number, index))

            # Draw again until there are enough digits; they may find no room.
            image, placed = compose(rng, writings, size=args.size, max_digits=most)
            while len(placed) < least:
                image, placed = compose(rng, writings, size=args.size, max_digits=most)

            objects = [(int(writings.labels[row]), box) for row, box in placed]
            yield Scene(split, index, image, objects, rng)
            bar.update()
    bar.close()


def save(image: Image.Image, path: Path) -> None:
    """Write a JPEG file, and the folder that it is in."""
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
    """Write the MS-COCO layout.

    As there, category ids have gaps, and the image ids of the splits differ.
    """
    categories = [
        {"id": 2 * digit + 1, "name": name, "supercategory": "digit"}
        for digit, name in enumerate(NAMES)
    ]
    content: dict[str, dict[str, Any]] = {
        split: {
            "info": {},
            "licenses": [],
            "images": [],
            "annotations": [],
            "categories": categories,
        }
        for split in ("train", "val")
    }

    # Number the images through both splits.
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
        "area": (right - left) * (bottom - top),  # of the square: there is no mask
        "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
    }


def voc(out: Path, args: argparse.Namespace) -> None:
    """Write the Pascal VOC layout.

    The first half of the training scenes is train, the second val; the validation scenes are test.
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

        # The flag of a class in an image is 1, or 0 if all of its objects are difficult.
        flags: dict[int, int] = {}
        for (digit, _), hard in zip(scene.objects, difficult, strict=True):
            flags[digit] = max(flags.get(digit, 0), int(not hard))

        if scene.split == "val":
            sets["test"].append((name, flags))
        else:
            half = "train" if scene.index < args.train // 2 else "val"
            sets[half].append((name, flags))
            sets["trainval"].append((name, flags))

    # One list per set, and one per set and class, in which -1 means absent.
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

        # VOC counts pixels from 1, both ends inclusive.
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

    Most (image, class) pairs are verified, the others are not annotated. The split val is in test/.
    """
    mids = [f"/m/digit_{name}" for name in NAMES]
    rows = []
    for scene in scenes(args):
        folder = "train" if scene.split == "train" else "test"
        path = f"{folder}/{scene.index + (args.train if scene.split == 'val' else 0):016x}.jpg"
        save(scene.image, out / path)

        # Which classes are annotated does not depend on what is shown.
        verified = np.flatnonzero(scene.rng.random(len(NAMES)) < VERIFIED).tolist()
        present = [mids[digit] for digit in verified if digit in scene.digits]
        absent = [mids[digit] for digit in verified if digit not in scene.digits]
        rows.append((path, repr(present), repr(absent), scene.split))

    write_csv(out / "data.csv", ("image_id", "class_list", "class_list_neg", "split"), rows)
    torch.save(dict(zip(mids, NAMES, strict=True)), out / "mid_to_classes.pth")


def nuswide(out: Path, args: argparse.Namespace) -> None:
    """Write the zero-shot form of NUS-WIDE.

    A class is a digit in a light of one colour. Its vector has one entry for the digit and one for
    the colour.
    """
    names = sorted(f"{colour}{digit}" for colour in COLOURS for digit in NAMES)
    rows = []
    for number, scene in enumerate(scenes(args, least=1)):
        # One light for the whole scene.
        colour = list(COLOURS)[int(scene.rng.integers(len(COLOURS)))]
        tinted = np.asarray(scene.image) * np.array(COLOURS[colour])
        path = f"images/{number}_{scene.split}_m.jpg"
        save(Image.fromarray(tinted.astype(np.uint8)), out / path)

        tags = sorted(f"{colour}{NAMES[digit]}" for digit in scene.digits)
        rows.append((path, f"[{', '.join(tags)}]", scene.split))

    write_csv(out / "data.csv", ("filepath", "label", "split_name"), rows)
    write_json(out / "benchmark_81_v0.json", {"test class": sorted(UNSEEN)})
    torch.save(torch.stack([_vector(name) for name in names], 1), out / "wordvec_array.pth")
    (out / "wordvec_array.txt").write_text("".join(f"{name}\n" for name in names))


def _vector(name: str) -> torch.Tensor:
    """Return the vector of a class, of length 1."""
    colour = next(colour for colour in COLOURS if name.startswith(colour))
    digit_index = NAMES.index(name.removeprefix(colour))
    colour_index = len(NAMES) + list(COLOURS).index(colour)

    vector = torch.zeros(len(NAMES) + len(COLOURS))
    vector[[digit_index, colour_index]] = 0.5**0.5
    return vector


def imagenet(out: Path, args: argparse.Namespace) -> None:
    """Write the ImageNet layout.

    The folders are invented wnids, n00000000 to n00000009, with the file of their names that
    Kaggle's download has.
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
    """Write one table, with the labels of an image in one column, separated by semicolons."""
    rows = []
    for number, scene in enumerate(scenes(args)):
        path = f"images/{number:06}.jpg"
        save(scene.image, out / path)
        rows.append((path, ";".join(NAMES[digit] for digit in scene.digits), scene.split))
    write_csv(out / "data.csv", ("path", "labels", "split"), rows)


def yolo(out: Path, args: argparse.Namespace) -> None:
    """Write the YOLO layout; the numbers of a box are fractions of the side of the image."""
    for scene in scenes(args):
        name = f"{scene.split}/{scene.index:06}"
        save(scene.image, out / "images" / f"{name}.jpg")

        lines = []
        for digit, (left, top, right, bottom) in scene.objects:
            box = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
            lines.append(" ".join([str(digit), *(f"{side / args.size:.6f}" for side in box)]))
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


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "out", metavar="OUT", help="the new folder; an existing one must be empty"
    )
    arguments.add_argument("--layout", choices=LAYOUTS, required=True)
    number = partial(arguments.add_argument, type=int, metavar="N")
    number("--train", default=8192, help="training images (default: %(default)s)")
    number("--val", default=2048, help="validation images (default: %(default)s)")
    number("--size", default=64, help="side in pixels (default: %(default)s)")
    number(
        "--seed",
        default=0,
        help="decides the scenes and which writings are held out (default: %(default)s)",
    )
    return arguments


def main() -> None:
    with one_line():
        args = parser().parse_args()
        for name, least in (("train", 2), ("val", 1), ("size", 16), ("seed", 0)):
            if getattr(args, name) < least:
                raise ConfigError(
                    f"--{name} {getattr(args, name)}: give a whole number from {least} on"
                )

        # Nothing of the user's is overwritten, or mixed with what is written here.
        out = Path(args.out)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} exists and is not an empty folder: choose another one")

        try:
            out.mkdir(parents=True, exist_ok=True)
            LAYOUTS[args.layout](out, args)
        except OSError as error:
            raise ConfigError(
                f"{out} cannot be written ({error.strerror}): choose another folder"
            ) from error

        counts = f"{args.train:,} training and {args.val:,} validation images"
        print(f"{out}: {counts}, layout {args.layout}")


if __name__ == "__main__":
    main()
