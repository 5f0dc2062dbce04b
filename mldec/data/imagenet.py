"""ImageNet-1k, or some of its classes: folders named by wnid; validation also flat, with Kaggle's table of labels.

The class index is the place of the wnid among all sorted wnids of a class map, as in torchvision, Keras and timm; so a
class whose folder is missing does not move the others. The devkit's ILSVRC2012_ID (1 to 1,000) is another order and is
never used.
"""

import csv
from collections import Counter
from functools import partial
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import numpy as np

from mldec.data.base import DataModule
from mldec.data.files import check_folder, file_data
from mldec.data.folders import class_folders, list_images, log_split, read_folders
from mldec.data.labels import from_lists, from_single
from mldec.data.names import check_names, read_lines, unknown_class
from mldec.data.tables import Table, cached, inside, paths
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.errors import DataError
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.inputs import read_json

_SEE = "see DATASETS.md, section ImageNet"
_KAGGLE = Path("ILSVRC", "Data", "CLS-LOC")
_SOLUTION = "LOC_val_solution.csv"


def imagenet(
    *,
    root: str,
    image_size: int = 224,
    train: str = "train",
    val: str = "val",
    class_map: str = "imagenet1k",
    real_labels: str | None = None,
    augment: str = "none",
    cutout: float = 0.0,
    flip: bool = True,
    crop: float = 0.08,
    interpolation: str = "random",
    erase: float = 0.0,
    test_crop: float | None = 0.95,
    test_size: int | None = None,
    test_interpolation: str = "bicubic",
    top_k: int | None = None,
    bad_images: str = "stop",
    cache_dir: str | None = None,
) -> DataModule:
    """Return ImageNet: classes by sorted wnid, images by class and name.

    Args:
        root: folder with train/WNID/*.JPEG and val/WNID/*.JPEG, or Kaggle's with ILSVRC/Data/CLS-LOC/{train,val} and
            LOC_val_solution.csv.
        image_size: side of the square input in pixels.
        train: folder to learn from.
        val: folder to evaluate on.
        class_map: "imagenet1k": its 1,000 classes; "folders": the folders of `train`; or a text file whose lines start
            with a wnid, in any order.
        real_labels: file of the ReaL labels: a JSON list with the valid class indices of each validation image, by its
            number. They replace the labels of `val`: an image may have several, and those without any are left out;
            the metrics are called top1_real and so on. timm carries the file as data/_info/imagenet_real_labels.json.
        augment: this and the next five are described at `mldec.data.transforms.TrainTransform`.
        cutout: see there.
        flip: see there.
        crop: see there.
        interpolation: see there.
        erase: see there.
        test_crop: side of the evaluated centre as a fraction of the shorter side; None squashes the whole image.
        test_size: side of the evaluated square in pixels; None is `image_size`.
        test_interpolation: "bilinear" or "bicubic".
        top_k: see `SingleLabelEvaluator`.
        bad_images: "stop" at an image that cannot be read, or "skip" and count it.
        cache_dir: folder for the parsed lists; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    learn = TrainTransform(
        image_size=image_size,
        augment=augment,
        cutout=cutout,
        flip=flip,
        crop=crop,
        interpolation=interpolation,
        erase=erase,
    )
    size = image_size if test_size is None else test_size
    check = EvalTransform(image_size=size, crop=test_crop, interpolation=test_interpolation)
    evaluator = partial(SingleLabelEvaluator, top_k=top_k, suffix="_real" if real_labels else "")
    evaluator()  # refuses a wrong value now
    folder = check_folder(root, "ImageNet", _SEE)
    if (folder / _KAGGLE).is_dir():
        folder = folder / _KAGGLE
    wnids = _wnids(class_map, folder / train)

    def read(split: str) -> tuple[Path, Table]:
        table = _read_split(folder, split, wnids, cache_dir)
        if real_labels and split == val:
            table = _with_real_labels(table, Path(real_labels).expanduser())
        log_split("imagenet", split, table)
        return folder / split, table

    return file_data(
        read,
        train=train,
        val=val,
        learn=learn,
        check=check,
        evaluator=evaluator,
        where=folder,
        see=_SEE,
        exclusive=True,
        bad_images=bad_images,
    )


def readable(wnids: list[str]) -> tuple[str, ...]:
    """Return unique class names, such as "tench, Tinca tinca"; with the wnid where two classes have the same words.

    So it is for the two "crane" of the 1,000. A wnid that timm does not know is its own name.
    """
    lines = _info("imagenet_synset_to_lemma.txt").splitlines()
    lemmas = dict(line.split("\t", 1) for line in lines)
    words = [lemmas.get(wnid, wnid) for wnid in wnids]
    times = Counter(words)
    return tuple(f"{w} ({wnid})" if times[w] > 1 else w for w, wnid in zip(words, wnids, strict=True))


def _info(name: str) -> str:
    return (files("timm.data") / "_info" / name).read_text(encoding="utf-8")


def _wnids(class_map: str, train: Path) -> list[str]:
    if class_map == "imagenet1k":
        return sorted(_info("imagenet_synsets.txt").split())
    if class_map == "folders":
        return class_folders(train, _SEE)
    file = Path(class_map).expanduser()
    return sorted(check_names([line.split()[0] for line in read_lines(file, _SEE)], file, _SEE))


def _read_split(root: Path, split: str, wnids: list[str], cache_dir: str | None) -> Table:
    folder, names = root / split, readable(wnids)
    if class_folders(folder, _SEE) or not list_images(folder, _SEE):
        return read_folders(folder, wnids, names, cache_dir=cache_dir, see=_SEE)
    places = [root / _SOLUTION, *(parent / _SOLUTION for parent in root.parents[:3])]
    solution = next((place for place in places if place.is_file()), None)
    if solution is None:
        raise DataError(f"{folder} has images and no folders, and {places[0]} with their classes is absent; {_SEE}")
    settings = sha256(" ".join(wnids).encode()).hexdigest()
    parse = partial(_parse_solution, solution, wnids, names)
    return cached(f"imagenet {settings}", [solution], parse, cache_dir=cache_dir, see=_SEE)


def _parse_solution(solution: Path, wnids: list[str], names: tuple[str, ...]) -> Table:
    """Read Kaggle's table: ImageId,PredictionString, the latter "wnid x y x y" for each of the boxes."""
    columns = {wnid: column for column, wnid in enumerate(wnids)}
    labels: dict[str, int] = {}
    lines = read_lines(solution, _SEE)
    rows = csv.reader(lines)
    if next(rows) != ["ImageId", "PredictionString"]:
        raise DataError(f"{solution}: its header is {lines[0]!r}, not ImageId,PredictionString; {_SEE}")
    for number, row in enumerate(rows, 2):
        where = f"{solution}, row {number}"
        if len(row) != 2 or not row[1].split():
            raise DataError(f"{where} is not an image and its boxes; {_SEE}")
        wnid = row[1].split()[0]
        if wnid not in columns:
            raise unknown_class(wnid, wnids, where, _SEE)
        file = inside(f"{row[0]}.JPEG", where, _SEE)
        if file in labels:
            raise DataError(f"{where}: the image {row[0]} is there twice; {_SEE}")
        labels[file] = columns[wnid]
    order = sorted(labels, key=lambda file: (labels[file], file))
    return Table(paths(order), from_single(np.array([labels[file] for file in order], np.int32), len(names)), names)


def _with_real_labels(table: Table, file: Path) -> Table:
    """Replace the labels by those of "Are we done with ImageNet?" (arXiv 2006.07159)."""
    real = read_json(file, _SEE)
    count = len(table.classes)
    if not isinstance(real, list) or not all(_is_classes(row, count) for row in real):
        raise DataError(f"{file} is not a list with class indices below {count} for each image; {_SEE}")
    rows = []
    for name in table.files.tolist():
        number = name.rpartition(b"_")[2].partition(b".")[0]  # of ILSVRC2012_val_00000293.JPEG
        if not number.isdigit() or len(number) > 18 or not 0 < int(number) <= len(real):
            raise DataError(f"{file} has {len(real):,} images; {name.decode(errors='replace')} is none of them; {_SEE}")
        rows.append(real[int(number) - 1])
    kept = np.array([bool(row) for row in rows], bool)
    return Table(table.files, from_lists(rows, num_classes=count), table.classes).select(kept)


def _is_classes(row: object, count: int) -> bool:
    return isinstance(row, list) and all(type(column) is int and 0 <= column < count for column in row)
