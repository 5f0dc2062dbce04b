#!/usr/bin/env python
"""Write scenes of real handwriting as image files, in the on-disk form of a data set.

    python scripts/make_digits.py --layout coco OUT

So every reader trains and evaluates end to end without a download. The scenes are those of `data=digits`; training and
validation share no writing. The same words give the same files again.

    coco        annotations/instances_{train,val}2014.json with boxes, {train,val}2014/*.jpg
    voc         VOCdevkit/VOC2007 (trainval and test); the digits bear the names of the first ten VOC classes, because
                readers know these twenty only: zero is aeroplane, one is bicycle, ... nine is cow
    openimages  the MIIL form: data.csv with verified positives and negatives, mid_to_classes.pth, train/, test/
    nuswide     the zero-shot form: data.csv, benchmark_81_v0.json, wordvec_array.pth and its names, images/; a class is
                a digit in a light of some colour ("redfive"), and every unseen class is seen in its parts
    imagenet    {train,val}/<wnid>/*.JPEG, one digit an image
    csv         data.csv with path, labels, split; images/
"""

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from mldec.data.class_names import VOC
from mldec.data.digits.grey import compose
from mldec.data.digits.scenes import NAMES, Box, split_writings
from mldec.errors import ConfigError, one_line

QUALITY = 95  # of the JPEG files
DIFFICULT = 0.1  # share of the objects that VOC calls difficult
VERIFIED = 0.6  # share of the (image, class) pairs that Open Images says something of
COLOURS = {
    "red": (1.0, 0.5, 0.5),
    "green": (0.5, 1.0, 0.5),
    "blue": (0.5, 0.5, 1.0),
    "grey": (1.0, 1.0, 1.0),
}
UNSEEN = [f"{list(COLOURS)[digit % len(COLOURS)]}{name}" for digit, name in enumerate(NAMES[:8])]


@dataclass(frozen=True)
class Scene:
    """A picture and what is known of it."""

    split: str  # train or val
    index: int  # in its split
    image: Image.Image
    objects: list[tuple[int, Box]]  # each digit with its square
    rng: np.random.Generator  # for what else a layout draws

    @property
    def digits(self) -> list[int]:
        """The digits in the scene, each once."""
        return sorted({digit for digit, _ in self.objects})


def scenes(words: argparse.Namespace, *, least: int = 0, most: int = 4) -> Iterator[Scene]:
    """Draw all scenes, those of training first: each a function of (seed, split, index) and the size."""
    counts = {"train": words.train, "val": words.val}
    bar = tqdm(total=sum(counts.values()), desc=words.layout, disable=not sys.stderr.isatty())
    for number, (split, writings) in enumerate(
        zip(counts, split_writings(words.seed), strict=True)
    ):
        for index in range(counts[split]):
            rng = np.random.default_rng((words.seed, number, index))
            image, placed = compose(rng, writings, size=words.size, max_digits=most)
            while len(placed) < least:
                image, placed = compose(rng, writings, size=words.size, max_digits=most)
            yield Scene(
                split, index, image, [(int(writings.labels[row]), box) for row, box in placed], rng
            )
            bar.update()
    bar.close()


def save(image: Image.Image, path: Path) -> None:
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


def coco(out: Path, words: argparse.Namespace) -> None:
    """Category ids have gaps and image ids are those of both splits together, as in MS-COCO."""
    categories = [
        {"id": 2 * digit + 1, "name": name, "supercategory": "digit"}
        for digit, name in enumerate(NAMES)
    ]
    content = {
        split: {
            "info": {},
            "licenses": [],
            "images": [],
            "annotations": [],
            "categories": categories,
        }
        for split in ("train", "val")
    }
    for scene in scenes(words):
        number = scene.index + 1 + (words.train if scene.split == "val" else 0)
        name = f"COCO_{scene.split}2014_{number:012}.jpg"
        save(scene.image, out / f"{scene.split}2014" / name)
        content[scene.split]["images"].append(
            {"id": number, "file_name": name, "width": words.size, "height": words.size}
        )
        for place, (digit, box) in enumerate(scene.objects):
            content[scene.split]["annotations"].append(
                _coco_object(10 * number + place, number, digit, box)
            )
    for split, part in content.items():
        write_json(out / "annotations" / f"instances_{split}2014.json", part)


def _coco_object(number: int, image: int, digit: int, box: Box) -> dict[str, object]:
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


def voc(out: Path, words: argparse.Namespace) -> None:
    """The first half of trainval is train, the second val; validation scenes are test."""
    root = out / "VOCdevkit" / "VOC2007"
    sets: dict[str, list[tuple[str, dict[int, int]]]] = {
        "train": [],
        "val": [],
        "trainval": [],
        "test": [],
    }
    for scene in scenes(words):
        name = f"{scene.index + 1 + (words.train if scene.split == 'val' else 0):06}"
        difficult = [bool(scene.rng.random() < DIFFICULT) for _ in scene.objects]
        save(scene.image, root / "JPEGImages" / f"{name}.jpg")
        _voc_xml(root / "Annotations" / f"{name}.xml", scene, difficult)
        said: dict[int, int] = {}  # 1: an object that is not difficult; 0: difficult ones only
        for (digit, _), hard in zip(scene.objects, difficult, strict=True):
            said[digit] = max(said.get(digit, 0), int(not hard))
        if scene.split == "train":
            sets["train" if scene.index < words.train // 2 else "val"].append((name, said))
        sets["test" if scene.split == "val" else "trainval"].append((name, said))
    main = root / "ImageSets" / "Main"
    main.mkdir(parents=True)
    for part, rows in sets.items():
        (main / f"{part}.txt").write_text("".join(f"{name}\n" for name, _ in rows))
        for number, class_name in enumerate(VOC):
            lines = [f"{name} {said.get(number, -1):2}\n" for name, said in rows]
            (main / f"{class_name}_{part}.txt").write_text("".join(lines))


def _voc_xml(path: Path, scene: Scene, difficult: list[bool]) -> None:
    root = ElementTree.Element("annotation")
    _add(root, folder="VOC2007", filename=f"{path.stem}.jpg")
    width, height = scene.image.size
    _add(ElementTree.SubElement(root, "size"), width=width, height=height, depth=3)
    for (digit, box), hard in zip(scene.objects, difficult, strict=True):
        thing = ElementTree.SubElement(root, "object")
        _add(thing, name=VOC[digit], pose="Unspecified", truncated=0, difficult=int(hard))
        left, top, right, bottom = box  # VOC counts pixels from 1, both ends inclusive
        _add(
            ElementTree.SubElement(thing, "bndbox"),
            xmin=left + 1,
            ymin=top + 1,
            xmax=right,
            ymax=bottom,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.indent(root)
    path.write_text(ElementTree.tostring(root, encoding="unicode") + "\n")


def _add(parent: ElementTree.Element, **texts: object) -> None:
    for tag, text in texts.items():
        ElementTree.SubElement(parent, tag).text = str(text)


def openimages(out: Path, words: argparse.Namespace) -> None:
    """Most (image, class) pairs are verified, the others are not annotated; the split val lies in test/."""
    mids = [f"/m/digit_{name}" for name in NAMES]
    rows = []
    for scene in scenes(words):
        folder = "train" if scene.split == "train" else "test"
        path = f"{folder}/{scene.index + (words.train if scene.split == 'val' else 0):016x}.jpg"
        save(scene.image, out / path)
        verified = np.flatnonzero(scene.rng.random(len(NAMES)) < VERIFIED).tolist()
        present = [mids[digit] for digit in verified if digit in scene.digits]
        absent = [mids[digit] for digit in verified if digit not in scene.digits]
        rows.append((path, repr(present), repr(absent), scene.split))
    write_csv(out / "data.csv", ("image_id", "class_list", "class_list_neg", "split"), rows)
    torch.save(dict(zip(mids, NAMES, strict=True)), out / "mid_to_classes.pth")


def nuswide(out: Path, words: argparse.Namespace) -> None:
    """A class is a digit in a light of one colour; its vector has a place for the digit and one for the colour."""
    names = sorted(f"{colour}{digit}" for colour in COLOURS for digit in NAMES)
    rows = []
    for number, scene in enumerate(scenes(words, least=1)):
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
    colour = next(colour for colour in COLOURS if name.startswith(colour))
    vector = torch.zeros(len(NAMES) + len(COLOURS))
    vector[NAMES.index(name.removeprefix(colour))] = vector[
        len(NAMES) + list(COLOURS).index(colour)
    ] = 0.5**0.5
    return vector


def imagenet(out: Path, words: argparse.Namespace) -> None:
    """Folders of made-up wnids n00000000 to n00000009, and the file that names them, as Kaggle's."""
    wnids = [f"n{digit:08}" for digit in range(len(NAMES))]
    for split in ("train", "val"):
        for wnid in wnids:
            (out / split / wnid).mkdir(parents=True)
    for scene in scenes(words, least=1, most=1):
        wnid = wnids[scene.digits[0]]
        name = (
            f"{wnid}_{scene.index}"
            if scene.split == "train"
            else f"ILSVRC2012_val_{scene.index + 1:08}"
        )
        save(scene.image, out / scene.split / wnid / f"{name}.JPEG")
    lines = [f"{wnid} {name}\n" for wnid, name in zip(wnids, NAMES, strict=True)]
    (out / "LOC_synset_mapping.txt").write_text("".join(lines))


def table(out: Path, words: argparse.Namespace) -> None:
    """One table; the labels of an image stand in one column with semicolons between them."""
    rows = []
    for number, scene in enumerate(scenes(words)):
        path = f"images/{number:06}.jpg"
        save(scene.image, out / path)
        rows.append((path, ";".join(NAMES[digit] for digit in scene.digits), scene.split))
    write_csv(out / "data.csv", ("path", "labels", "split"), rows)


LAYOUTS: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "coco": coco,
    "voc": voc,
    "openimages": openimages,
    "nuswide": nuswide,
    "imagenet": imagenet,
    "csv": table,
}


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "out", metavar="OUT", help="folder to make; an existing one must be empty"
    )
    arguments.add_argument("--layout", choices=LAYOUTS, required=True)
    number = partial(arguments.add_argument, type=int, metavar="N")
    number("--train", default=8192, help="training images (default: %(default)s)")
    number("--val", default=2048, help="validation images (default: %(default)s)")
    number("--size", default=64, help="pixels a side (default: %(default)s)")
    number(
        "--seed",
        default=0,
        help="decides the scenes and which writings are held out (default: %(default)s)",
    )
    return arguments


def main() -> None:
    with one_line():
        words = parser().parse_args()
        for name, least in (("train", 2), ("val", 1), ("size", 16), ("seed", 0)):
            if getattr(words, name) < least:
                raise ConfigError(
                    f"--{name} {getattr(words, name)}: give a whole number from {least} on"
                )
        out = Path(words.out)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} exists and is not an empty folder: choose another one")
        try:
            out.mkdir(parents=True, exist_ok=True)
            LAYOUTS[words.layout](out, words)
        except OSError as error:
            raise ConfigError(
                f"{out} cannot be written ({error.strerror}): choose another folder"
            ) from error
        print(
            f"{out}: {words.train:,} training and {words.val:,} validation images, layout {words.layout}"
        )


if __name__ == "__main__":
    main()
