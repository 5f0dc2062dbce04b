"""Single-label data: class folders, ImageNet, Stanford Cars and CIFAR-100."""

import json
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from readers import Reader, labels, names, write_picture
from scipy.io import loadmat, savemat
from trees import (
    CARS,
    CIFAR,
    CIFAR_LABELS,
    WNIDS,
    cifar_content,
    python2,
    structs,
    tree,
    write_cifar,
)

from mldec.data.readers import folders, imagenet
from mldec.data.readers.cars_cifar import _parse as parse_cars
from mldec.data.readers.class_folders import readable
from mldec.data.transforms import EvalTransform
from mldec.data.types import fixed_sample


@pytest.fixture
def write(tmp_path):
    return lambda name: tree(name, tmp_path)


# Class folders


def test_folders_are_sorted_by_class_and_name(write):
    build = write("folders")
    for name in (".DS_Store", "._0.JPG", "notes.txt", "Thumbs.db"):
        (build.root / "train" / "cat" / name).write_text("no image")
    (build.root / "train" / ".cache").mkdir()
    data = build()
    assert data.val.classes.names == ("cat", "dog", "eel")
    assert data.val.classes.exclusive
    assert labels(data.train) == [0, 0, 0, 1, 1, 2]
    assert labels(data.val) == [0, 1, 1]
    assert names(data.train) == ["0.JPG", "1.JPG", "2.JPG", "0.JPG", "1.JPG", "0.JPG"]

    again = pickle.loads(pickle.dumps(data.val.dataset))
    assert fixed_sample(again, 1)[0].shape == (3, 16, 16)
    assert fixed_sample(again, 1)[1].tolist() == [0, 1, 0]

    # The cache notices new images. Their names may have any bytes.
    write_picture(build.root / "val" / "eel" / "caf\udce9.png")
    assert labels(build().val) == [0, 1, 1, 2]


def test_split_folders_may_have_other_names(write):
    build = write("folders")
    (build.root / "train").rename(build.root / "Training")
    (build.root / "val").rename(build.root / "Validation")
    data = build()
    assert labels(data.train) == [0, 0, 0, 1, 1, 2]
    assert labels(data.val) == [0, 1, 1]
    (build.root / "Validation").rename(build.root / "Testing")
    assert "data.val=Testing" in build.fault()


@pytest.mark.parametrize("name", ["train", "Training"])
def test_single_training_folder_is_divided(tmp_path, name, caplog):
    for label in ("cat", "dog"):
        for number in range(8):
            write_picture(tmp_path / "all" / name / label / f"{number}.png")
    # A test folder without classes is counted.
    write_picture(tmp_path / "all" / "test" / "1.png")
    data = Reader(folders, tmp_path / "all")(val_fraction=0.25, split="stratified")
    assert data.train.classes.names == ("cat", "dog")
    assert labels(data.train) == 6 * [0] + 6 * [1]
    assert labels(data.val) == [0, 0, 1, 1]
    assert "1 images are outside" in caplog.text
    assert "test" in Reader(folders, tmp_path / "all").fault(val="test")


def test_folder_without_classes_or_with_an_empty_split_is_an_error(write, tmp_path):
    write_picture(tmp_path / "flat" / "1.png")
    assert "CLASS/IMAGE.jpg" in Reader(folders, tmp_path / "flat").fault()
    build = write("folders")
    (build.root / "val").rename(tmp_path / "elsewhere")
    (build.root / "val").mkdir()
    assert "data/val: " in build.fault()


def test_only_validation_folder_can_be_evaluated(write):
    build = write("folders")
    (build.root / "train").rename(build.root.parent / "elsewhere")
    assert "data/train: " in build.fault()
    source = folders(root=str(build.root))
    assert len(source.load("val", None)) == 3


def test_class_folder_may_be_called_like_a_split(tmp_path):
    for name in ("valid", "invalid"):
        for number in range(4):
            write_picture(tmp_path / "all" / name / f"{number}.png")
    data = Reader(folders, tmp_path / "all")(val_fraction=0.25)
    assert data.train.classes.names == ("invalid", "valid")


def test_images_of_a_class_in_inner_folders_are_an_error(write):
    build = write("folders")
    write_picture(build.root / "train" / "cat" / "more" / "9.png")
    assert "train/cat: " in build.fault()
    assert "more/9.png" in build.fault()


def test_each_folder_is_listed_once(write, monkeypatch):
    build = write("folders")
    write_picture(build.root / "other" / "cat" / "9.png")
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or scandir(path))
    source = folders(root=str(build.root))
    for split in ("train", "val"):
        source.load(split, None)
    inner = [path for path in listed if len(Path(path).relative_to(build.root).parts) == 2]
    assert sorted(inner) == sorted(set(inner))
    assert len(inner) >= 6


def test_images_outside_the_class_folders_are_counted(write, caplog):
    build = write("folders")
    for name in ("1.png", "train/2.png", "holdout/cat/3.png", "holdout/cat/more/4.png"):
        write_picture(build.root / name)
    expected = labels(build().train)
    assert expected == [0, 0, 0, 1, 1, 2]
    assert "4 images are outside" in caplog.text


def test_class_folder_called_train_has_no_folders(write, tmp_path):
    for name in ("train", "car"):
        for number in range(8):
            write_picture(tmp_path / "all" / name / f"{number}.png")
    data = Reader(folders, tmp_path / "all")(val_fraction=0.4)
    assert data.train.classes.names == ("car", "train")
    # Folders of splits with other names are listed.
    build = write("folders")
    (build.root / "val").rename(build.root / "pr\u00fcf")
    assert "pr\u00fcf, train" in build.fault()
    assert labels(build(val="pr\u00fcf").val) == [0, 1, 1]


def test_class_folders_have_equal_names_in_both_unicode_forms(write):
    build = write("folders")
    (build.root / "train" / "eel").rename(build.root / "train" / "T\u00fcr")
    write_picture(build.root / "val" / "Tu\u0308r" / "9.png")
    data = build()
    assert data.train.classes.names == data.val.classes.names == ("T\u00fcr", "cat", "dog")
    assert data.val.dataset.name(0).endswith("Tu\u0308r/9.png")
    (build.root / "val" / "T\u00fcr").mkdir()
    assert "same name" in build.fault()


def test_no_held_out_image_names_the_fraction(tmp_path):
    for name in ("cat", "dog"):
        write_picture(tmp_path / "all" / name / "1.png")
    assert "data.val_fraction" in Reader(folders, tmp_path / "all").fault(val_fraction=1e-9)


def test_single_class_is_an_error(tmp_path):
    for number in range(20):
        write_picture(tmp_path / "all" / "photos" / f"{number}.png")
    assert "too few classes (photos)" in Reader(folders, tmp_path / "all").fault(val_fraction=0.5)


def test_single_folder_is_split_by_path(tmp_path):
    for name in ("a", "b"):
        for number in range(20):
            write_picture(tmp_path / "all" / name / f"{number}.png")

    def parts(**arguments):
        data = Reader(folders, tmp_path / "all")(val_fraction=0.25, **arguments)
        datasets = (data.train.dataset, data.val.dataset)
        return [{dataset.name(i) for i in range(len(dataset))} for dataset in datasets]

    train, val = parts()
    assert not train & val
    assert len(train | val) == 40
    assert parts() == [train, val]
    assert parts(seed=1) != [train, val]
    removed = sorted(train)[0]
    Path(removed).unlink()
    assert parts() == [train - {removed}, val]


# ImageNet

INDICES = [0, 278, 491]


def test_imagenet_index_is_position_of_sorted_wnid(write):
    build = write("imagenet")
    data = build()
    assert labels(data.train) == labels(data.val) == INDICES
    assert len(data.val.classes) == len(set(data.val.classes.names)) == 1000
    first_words = [data.val.classes.names[index].split(",")[0] for index in INDICES]
    assert first_words == ["tench", "kit fox", "chain saw"]
    assert data.val.classes.names[134] == "crane (n02012849)"
    assert data.val.classes.names[517] == "crane (n03126707)"
    assert readable(["n02012849", "n01440764", "nx"]) == ("crane", "tench, Tinca tinca", "nx")

    # A missing class folder does not shift other classes.
    for split in ("train", "val"):
        for image in (build.root / split / WNIDS[0]).iterdir():
            image.unlink()
        (build.root / split / WNIDS[0]).rmdir()
    assert labels(build().val) == INDICES[1:]
    assert labels(build(class_map="folders").val) == [0, 1]


def test_imagenet_class_map_selects_classes(write, tmp_path):
    build = write("imagenet")
    file = tmp_path / "map.txt"
    file.write_text("n03000684 chain saw\nn01440764\tx\nn02119789\nn09999999\n")
    data = build(class_map=str(file))
    assert labels(data.val) == [0, 1, 2]
    assert data.val.classes.names[3] == "n09999999"
    for text, name in (
        ("n01440764\nn02119789\n", "n03000684"),
        ("n01440764\nn01440764\n", "n01440764"),
    ):
        file.write_text(text)
        assert name in build.fault(class_map=str(file))


@pytest.fixture
def kaggle(write, tmp_path):
    """Return the reader of the same images in the Kaggle layout."""
    root = write("imagenet").root
    inner = tmp_path / "kaggle" / "ILSVRC" / "Data" / "CLS-LOC"
    inner.mkdir(parents=True)
    (root / "train").rename(inner / "train")
    rows = ["ImageId,PredictionString"]
    for number, wnid in reversed(list(enumerate(WNIDS))):
        image = f"ILSVRC2012_val_{10 - number:08d}"
        write_picture(inner / "val" / f"{image}.JPEG")
        rows.append(f"{image},{wnid} 111 108 441 193 {wnid} 1 2 3 4 ")
    (tmp_path / "kaggle" / "LOC_val_solution.csv").write_text("\n".join(rows) + "\n")
    return Reader(imagenet, tmp_path / "kaggle")


@pytest.mark.parametrize("inner", ["", "ILSVRC/Data/CLS-LOC"])
def test_kaggle_layout_has_same_labels(kaggle, inner):
    data = kaggle(root=str(kaggle.root / inner))
    assert labels(data.val) == INDICES
    assert [name[-9:] for name in names(data.val)] == ["0010.JPEG", "0009.JPEG", "0008.JPEG"]


def test_faulty_kaggle_table_is_named(kaggle):
    file = kaggle.root / "LOC_val_solution.csv"
    text = file.read_text()
    for old, new, name in (
        ("ImageId,", "Image,", "ImageId"),
        ("n01440764 111", "n99999999 111", "row 4"),
    ):
        file.write_text(text.replace(old, new))
        assert name in kaggle.fault()
    file.unlink()
    assert "LOC_val_solution.csv" in kaggle.fault()


def test_real_labels_replace_validation_labels(write, tmp_path):
    build = write("imagenet")
    file = tmp_path / "real.json"
    real = [[] for _ in range(10)]
    real[9], real[8] = [5, 0], [7]  # images 10 (tench) and 9; image 8 has none
    file.write_text(json.dumps(real))
    data = build(real_labels=str(file))
    assert labels(data.train) == INDICES
    targets = torch.stack([fixed_sample(data.val.dataset, index)[1] for index in range(2)])
    assert [row.nonzero().flatten().tolist() for row in targets] == [[0, 5], [7]]
    evaluator = data.evaluator()
    logits = torch.zeros(2, 1000)
    logits[:, 5] = 1
    evaluator.update(logits, targets)
    assert evaluator.compute()["top1_real"] == 50

    for content in (json.dumps([[1000]] * 10), "[[1]]"):
        file.write_text(content)
        assert "real.json" in build.fault(real_labels=str(file))


# Stanford Cars


def test_cars_count_classes_from_one(write):
    build = write("cars")
    data = build()
    assert data.val.classes.names == tuple(CARS)
    assert data.val.classes.exclusive
    assert labels(data.train) == [2, 0]
    assert labels(data.val) == [1, 2, 2]
    nested = build.root / "cars_test" / "cars_test"
    assert data.val.dataset.name(2) == str(nested / "00003.jpg")

    name = "cars_test_annos_withlabels.mat"
    (build.root / name).rename(build.root / "devkit" / name)
    assert labels(build().val) == [1, 2, 2]


def test_cars_layout_of_one_file(write, tmp_path):
    build = write("cars")
    root = tmp_path / "other"
    fields = []
    for name, label, test in [("1.jpg", 3, 0), ("2.jpg", 1, 1), ("3.jpg", 2, 0)]:
        write_picture(root / "car_ims" / name)
        fields.append({"relative_im_path": f"car_ims/{name}", "class": label, "test": test})
    class_names = np.array(CARS, object)[None]
    content = {"annotations": structs(fields), "class_names": class_names}
    savemat(root / "cars_annos.mat", content)
    data = build(root=str(root))
    assert labels(data.train) == [2, 1]
    assert labels(data.val) == [0]
    assert data.val.dataset.name(0) == str(root / "car_ims" / "2.jpg")


def test_cars_devkit_of_sample(sample_data):
    devkit = sample_data / "stanford_cars_devkit" / "devkit"
    file = devkit / "cars_train_annos.mat"
    table = parse_cars([file, devkit / "cars_meta.mat"], "train")
    assert len(table.classes) == 196
    assert (table.classes[0], table.classes[-1]) == (CARS[0], "smart fortwo Convertible 2012")
    raw = loadmat(str(file), struct_as_record=False, squeeze_me=True)["annotations"]
    assert len(table) == len(raw) == 8144
    assert table.labels.dense().argmax(1).tolist() == [getattr(row, "class") - 1 for row in raw]
    assert table.files.tolist() == [row.fname.encode() for row in raw]


# CIFAR-100


@pytest.mark.parametrize("form", [python2, pickle.dumps], ids=["python2", "python3"])
def test_cifar_pictures_and_labels(write, form):
    build = write("cifar100")
    write_cifar(build.root, form)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = build(image_size=48)
    assert data.val.classes.names == tuple(CIFAR)
    assert data.val.classes.exclusive
    assert (labels(data.train), labels(data.val)) == (CIFAR_LABELS["train"], CIFAR_LABELS["test"])

    again = pickle.loads(pickle.dumps(data.val.dataset))
    image, target = fixed_sample(again, 1)
    assert target.tolist() == [0, 0, 1]
    red, green, blue = cifar_content("test")["data"][1].reshape(3, 32, 32)
    picture = Image.fromarray(np.dstack([red, green, blue]))
    assert torch.equal(image, EvalTransform(image_size=48, interpolation="bicubic")(picture))
    folder = build.root / "cifar-100-python"
    assert data.val.dataset.name(1) == f"picture 1 of {folder / 'test'}"
    assert len(build(root=str(folder)).train.dataset) == 4
