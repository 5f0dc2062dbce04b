import numpy as np
import pytest
import torch
from readers import Reader, labels, write_picture
from scipy.io import loadmat, savemat

from mldec.data.readers.cars_cifar import _parse, cars
from mldec.data.transforms import EvalTransform, read_image
from mldec.data.types import fixed_sample
from mldec.errors import DataError

NAMES = ["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "Ram C/V Cargo Van Minivan 2012"]
TRAIN = [("00001.jpg", 3), ("00002.jpg", 1)]
TEST = [("00001.jpg", 2), ("00002.jpg", 3), ("00003.jpg", 3)]


def structs(rows):
    """A MATLAB struct array."""
    array = np.zeros((1, len(rows)), [(name, object) for name in rows[0]])
    for number, row in enumerate(rows):
        array[0, number] = tuple(row.values())
    return array


def object_row(names):
    return np.array(names, object)[None]


def annotations(path, rows, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = [
        {"bbox_x1": 1, "class": label, "fname": name} if label else {"fname": name}
        for name, label in rows
    ]
    savemat(path, {"annotations": structs(fields), **more})


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "stanford_cars"
    annotations(root / "devkit" / "cars_train_annos.mat", TRAIN)
    annotations(root / "devkit" / "cars_test_annos.mat", [(name, None) for name, _ in TEST])
    annotations(root / "cars_test_annos_withlabels.mat", TEST)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": object_row(NAMES)})
    for folder, rows in (
        ("cars_train", TRAIN),
        ("cars_test/cars_test", TEST),
    ):  # nested as Kaggle's copy
        for number, (name, _) in enumerate(rows):
            write_picture(root / folder / name, 50 * number)
    return root


@pytest.fixture
def build(root):
    return Reader(cars, root, "Stanford-Cars")


def test_classes_count_from_one_and_test_labels_have_a_file_of_their_own(build, root):
    """Trap 17."""
    data = build()
    assert data.val.classes.names == tuple(NAMES)
    assert data.val.classes.exclusive
    assert labels(data.train) == [2, 0]
    assert labels(data.val) == [1, 2, 2]
    assert data.val.dataset.name(2) == str(root / "cars_test" / "cars_test" / "00003.jpg")
    assert torch.equal(
        fixed_sample(data.val.dataset, 1)[0],
        EvalTransform(image_size=16)(read_image(data.val.dataset.name(1))),
    )


def test_test_labels_in_the_devkit(build, root):
    (root / "cars_test_annos_withlabels.mat").rename(
        root / "devkit" / "cars_test_annos_withlabels.mat"
    )
    assert labels(build().val) == [1, 2, 2]


def test_no_test_labels(build, root):
    (root / "cars_test_annos_withlabels.mat").unlink()
    with pytest.raises(
        DataError,
        match=r"withlabels\.mat is absent; cars_test_annos\.mat of the devkit has no labels",
    ):
        build()


def test_the_form_of_one_file(build, tmp_path):
    root = tmp_path / "other"
    rows = [
        ("car_ims/000001.jpg", 3, 0),
        ("car_ims/000002.jpg", 1, 1),
        ("car_ims/000003.jpg", 2, 0),
    ]
    for name, _, _ in rows:
        write_picture(root / name, 9)
    fields = [
        {"relative_im_path": name, "class": label, "test": test} for name, label, test in rows
    ]
    savemat(
        root / "cars_annos.mat", {"annotations": structs(fields), "class_names": object_row(NAMES)}
    )
    data = build(root=str(root))
    assert labels(data.train) == [2, 1]
    assert labels(data.val) == [0]
    assert data.val.dataset.name(0) == str(root / "car_ims" / "000002.jpg")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("00001.jpg", 4)], "annotation 1: class 4 is not a number from 1 to 3"),
        ([("00001.jpg", -1), ("00002.jpg", 1)], "class -1"),
        ([("00001.jpg", 1.5), ("00002.jpg", 1)], "class 1.5"),
        (
            [("00001.jpg", 1), ("00001.jpg", 2)],
            "annotation 2: the image 00001.jpg is listed twice, first in .* 1",
        ),
        ([("../00001.jpg", 1), ("00002.jpg", 1)], "not a path inside"),
        ([("00001.jpg", None), ("00002.jpg", None)], "have no field 'class'"),
        ([("00007.jpg", 1), ("00002.jpg", 1)], "1 of 2 listed images are absent"),
    ],
)
def test_wrong_annotations(build, root, rows, expected):
    annotations(root / "devkit" / "cars_train_annos.mat", rows)
    with pytest.raises(DataError, match=expected) as caught:
        build()
    assert "\n" not in str(caught.value)
    assert "see DATASETS.md, section Stanford-Cars" in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"<html>not found</html>", b"MATLAB 5.0 MAT-file" + 300 * b"\xff"]
)
def test_files_that_are_not_matlabs(build, root, content):
    (root / "devkit" / "cars_meta.mat").write_bytes(content)
    with pytest.raises(
        DataError, match=r"cars_meta\.mat (is not a MATLAB file|has no variable|cannot be read)"
    ):
        build()


def test_other_faults(build, root):
    with pytest.raises(DataError, match="no split 'val'"):
        build(val="val")
    savemat(root / "devkit" / "cars_meta.mat", {"something": 1})
    with pytest.raises(DataError, match="has no variable 'class_names'"):
        build()
    (root / "devkit" / "cars_meta.mat").unlink()
    with pytest.raises(DataError, match=r"cars_meta\.mat cannot be read"):
        build()


def test_the_devkit_of_the_sample(sample_data):
    devkit = sample_data / "stanford_cars_devkit" / "devkit"
    table = _parse([devkit / "cars_train_annos.mat", devkit / "cars_meta.mat"], "train")
    assert len(table) == 8144
    assert len(table.classes) == 196
    assert (table.classes[0], table.classes[-1]) == (NAMES[0], "smart fortwo Convertible 2012")
    raw = loadmat(str(devkit / "cars_train_annos.mat"), struct_as_record=False, squeeze_me=True)[
        "annotations"
    ]
    assert table.labels.dense().argmax(1).tolist() == [getattr(row, "class") - 1 for row in raw]
    assert table.files.tolist() == [row.fname.encode() for row in raw]
    assert table.labels.counts().min() > 0
    with pytest.raises(DataError, match="no field 'class'"):
        _parse([devkit / "cars_test_annos.mat", devkit / "cars_meta.mat"], "test")


def test_a_name_that_no_class_may_have(build, root):
    savemat(
        root / "devkit" / "cars_meta.mat", {"class_names": object_row([*NAMES[:2], "Ram\x1bVan"])}
    )
    with pytest.raises(
        DataError,
        match=r"cars_meta\.mat: the class name 'Ram.x1bVan' has the control character U\+001B",
    ):
        build()
