"""Stanford-Cars: 196 models of cars, from the MATLAB files of its devkit, which are data only."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import loadmat

from mldec.data.base import DataModule
from mldec.data.files import check_folder, file_data
from mldec.data.folders import log_split
from mldec.data.labels import from_single
from mldec.data.names import check_names
from mldec.data.tables import Table, cached, inside, paths
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.errors import DataError
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.inputs import open_binary

_SEE = "see DATASETS.md, section Stanford-Cars"
_LABELLED = "cars_test_annos_withlabels.mat"
_ONE_FILE = "cars_annos.mat"


def cars(
    *,
    root: str,
    image_size: int = 384,
    train: str = "train",
    val: str = "test",
    augment: str = "official",
    cutout: float = 0.5,
    flip: bool = False,
    crop: float = 1.0,
    interpolation: str = "bilinear",
    erase: float = 0.0,
    test_crop: float | None = None,
    top_k: int | None = None,
    bad_images: str = "stop",
    cache_dir: str | None = None,
) -> DataModule:
    """Return Stanford-Cars: 8,144 training and 8,041 test images, whole images squashed to a square.

    Args:
        root: folder with devkit/, cars_train/ and cars_test/ (also nested: cars_test/cars_test/) and
            cars_test_annos_withlabels.mat in it or in devkit/; or the other form: cars_annos.mat and car_ims/.
        image_size: side of the square input in pixels.
        train: split to learn from, "train" or "test".
        val: split to evaluate on.
        augment: this and the next five are described at `mldec.data.transforms.TrainTransform`.
        cutout: see there.
        flip: see there.
        crop: see there.
        interpolation: see there; "random" evaluates with bicubic.
        erase: see there.
        test_crop: side of the evaluated centre as a fraction of the shorter side; None squashes the whole image.
        top_k: see `SingleLabelEvaluator`.
        bad_images: "stop" at an image that cannot be read, or "skip" and count it.
        cache_dir: folder for the parsed annotations; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

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
    check = EvalTransform(
        image_size=image_size, crop=test_crop, interpolation=interpolation.replace("random", "bicubic")
    )
    evaluator = partial(SingleLabelEvaluator, top_k=top_k)
    evaluator()  # refuses a wrong value now
    folder = check_folder(root, "Stanford-Cars", _SEE)
    return file_data(
        partial(_read_split, folder, cache_dir=cache_dir),
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


def _read_split(root: Path, split: str, *, cache_dir: str | None) -> tuple[Path, Table]:
    if split not in ("train", "test"):
        raise DataError(f"Stanford-Cars has no split {split!r}: choose train or test; {_SEE}")
    if (root / _ONE_FILE).is_file():
        folder, sources = root, [root / _ONE_FILE]
    else:
        folder = root / f"cars_{split}"
        folder = folder / folder.name if (folder / folder.name).is_dir() else folder  # as the copy on Kaggle nests it
        sources = [_annotations(root, split), root / "devkit" / "cars_meta.mat"]
    parse = partial(_parse, sources, split)
    table = cached(f"cars {split}", sources, parse, cache_dir=cache_dir, see=_SEE)
    log_split("cars", split, table)
    return folder, table


def _annotations(root: Path, split: str) -> Path:
    """Return the file with the labels of a split: those of the test images came later, in a file of their own."""
    if split == "train":
        return root / "devkit" / "cars_train_annos.mat"
    places = [root / _LABELLED, root / "devkit" / _LABELLED]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(f"{root}: {_LABELLED} is absent; cars_test_annos.mat of the devkit has no labels; {_SEE}")
    return found


def _parse(sources: list[Path], split: str) -> Table:
    rows = _load(sources[0], "annotations")
    names = _load(sources[-1], "class_names")
    one_file = len(sources) == 1
    file_key = "relative_im_path" if one_file else "fname"
    missing = [
        key for key in (file_key, "class", *(["test"] if one_file else [])) if key not in (rows.dtype.names or ())
    ]
    if missing:
        raise DataError(f"{sources[0]}: its annotations have no field {missing[0]!r}; {_SEE}")
    classes = check_names([str(name) for name in names], sources[-1], _SEE)
    files: dict[str, int] = {}
    for number, row in enumerate(rows, 1):
        if one_file and bool(row["test"]) != (split == "test"):
            continue
        where = f"{sources[0]}, annotation {number}"
        file, label = inside(str(row[file_key]), where, _SEE), row["class"]
        if not isinstance(label, int | np.integer) or not 1 <= label <= len(classes):
            raise DataError(f"{where}: class {label} is not a number from 1 to {len(classes)}; {_SEE}")
        if file in files:
            raise DataError(f"{where}: the image {file} is there twice; {_SEE}")
        files[file] = int(label) - 1  # MATLAB counts from 1
    labels = np.array(list(files.values()), np.int32)
    return Table(paths(list(files)), from_single(labels, len(classes)), classes)


def _load(file: Path, name: str) -> np.ndarray:
    """Read one variable of a MATLAB file; scipy makes arrays of it and runs nothing."""
    try:
        with open_binary(file) as stream:
            content: dict[str, Any] = loadmat(stream, squeeze_me=True, variable_names=[name])
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}); {_SEE}") from error
    except Exception as error:  # on a damaged file scipy raises almost anything
        raise DataError(f"{file} is not a MATLAB file ({' '.join(str(error).split())}); {_SEE}") from error
    if name not in content:
        raise DataError(f"{file} has no variable {name!r}; {_SEE}")
    return np.atleast_1d(content[name])
