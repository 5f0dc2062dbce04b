import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from readers import Reader, labels
from support import made

from mldec.data.readers.imagenet import _with_real_labels, imagenet, readable
from mldec.data.table import Table, encode_paths, from_single
from mldec.data.transforms import EvalTransform, read_image
from mldec.data.types import fixed_sample
from mldec.errors import DataError

WNIDS = [
    "n01440764",
    "n02119789",
    "n03000684",
]  # tench, kit fox (the devkit's first), chain saw: indices 0, 278, 491
INDICES = [0, 278, 491]


def picture(path, number=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 12), (number, 100, 200)).save(path, "JPEG")


@pytest.fixture
def root(tmp_path):
    for number, wnid in enumerate(WNIDS):
        picture(tmp_path / "in" / "train" / wnid / f"{wnid}_7.JPEG")
        picture(tmp_path / "in" / "val" / wnid / f"ILSVRC2012_val_{10 - number:08d}.JPEG")
    return tmp_path / "in"


@pytest.fixture
def build(root):
    return Reader(imagenet, root, "ImageNet")


def test_the_index_is_the_place_of_the_sorted_wnid(build):
    """The devkit counts from the kit fox on; here it is number 278, whatever folders there are."""
    data = build()
    assert labels(data.train) == labels(data.val) == INDICES
    assert len(data.val.classes) == len(set(data.val.classes.names)) == 1000
    assert [data.val.classes.names[index].split(",")[0] for index in INDICES] == [
        "tench",
        "kit fox",
        "chain saw",
    ]
    assert data.val.classes.names[134] == "crane (n02012849)"
    assert data.val.classes.names[517] == "crane (n03126707)"


def test_a_missing_folder_moves_nothing(build, root):
    for split in ("train", "val"):
        for image in (root / split / WNIDS[0]).iterdir():
            image.unlink()
        (root / split / WNIDS[0]).rmdir()
    assert labels(build().val) == INDICES[1:]
    assert labels(build(class_map="folders").val) == [0, 1]


def test_class_maps(build, root, tmp_path):
    assert labels(build(class_map="folders").val) == [0, 1, 2]
    (tmp_path / "map.txt").write_text("n03000684 chain saw\nn01440764\tx\nn02119789\nn09999999\n")
    data = build(class_map=str(tmp_path / "map.txt"))
    assert labels(data.val) == [0, 1, 2]
    assert data.val.classes.names[3] == "n09999999"
    (tmp_path / "map.txt").write_text("n01440764\nn02119789\n")
    with pytest.raises(DataError, match="'n03000684' is not in the list of 2 classes"):
        build(class_map=str(tmp_path / "map.txt"))
    (tmp_path / "map.txt").write_text("n01440764\nn01440764\n")
    with pytest.raises(DataError, match="twice"):
        build(class_map=str(tmp_path / "map.txt"))


def test_the_evaluated_size_may_be_another_one(build):
    data = build(image_size=32, test_size=48)
    assert fixed_sample(data.train.dataset, 0)[0].shape == (3, 32, 32)
    assert fixed_sample(data.val.dataset, 0)[0].shape == (3, 48, 48)
    assert fixed_sample(build(image_size=32).val.dataset, 0)[0].shape == (3, 32, 32)


def test_mac_files_are_left_out(build, root):
    (root / "val" / WNIDS[0] / "._ILSVRC2012_val_00000001.JPEG").write_text("x")
    (root / "val" / ".DS_Store").write_text("x")
    assert len(build().val.dataset) == 3


@pytest.fixture
def kaggle(root, tmp_path):
    """The same images as Kaggle lays them out, the table in no order."""
    inner = tmp_path / "kaggle" / "ILSVRC" / "Data" / "CLS-LOC"
    inner.mkdir(parents=True)
    (root / "train").rename(inner / "train")
    rows = ["ImageId,PredictionString"]
    for number, wnid in reversed(list(enumerate(WNIDS))):
        picture(inner / "val" / f"ILSVRC2012_val_{10 - number:08d}.JPEG", 10 - number)
        rows.append(f"ILSVRC2012_val_{10 - number:08d},{wnid} 111 108 441 193 {wnid} 1 2 3 4 ")
    (tmp_path / "kaggle" / "LOC_val_solution.csv").write_text("\n".join(rows) + "\n")
    return tmp_path / "kaggle"


@pytest.mark.parametrize("inner", ["", "ILSVRC/Data/CLS-LOC"])
def test_kaggles_layout(build, kaggle, inner):
    data = build(root=str(kaggle / inner))
    assert labels(data.val) == INDICES
    assert [Path(data.val.dataset.name(i)).name[-9:] for i in range(3)] == [
        "0010.JPEG",
        "0009.JPEG",
        "0008.JPEG",
    ]
    assert fixed_sample(data.val.dataset, 0)[0].shape == (3, 16, 16)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("ImageId,", "Image,", "its header is"),
        ("00000010,n01440764", "00000009,n01440764", "twice"),
        (
            "n01440764 111",
            "n99999999 111",
            "row 4: the class 'n99999999' is not in the list of 1000 classes",
        ),
        ("ILSVRC2012_val_00000010", "../00000010", "not a path inside"),
        ("ILSVRC2012_val_00000010", "ILSVRC2012_val_00000011", "1 of 3 listed images are absent"),
        (",n01440764 111 108 441 193 n01440764 1 2 3 4", "", "row 4 is not an image and its boxes"),
    ],
)
def test_a_wrong_table(build, kaggle, old, new, expected):
    file = kaggle / "LOC_val_solution.csv"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(DataError, match=expected) as caught:
        build(root=str(kaggle))
    assert "section ImageNet" in str(caught.value)


def test_a_flat_val_without_its_table(build, kaggle):
    (kaggle / "LOC_val_solution.csv").unlink()
    with pytest.raises(DataError, match=r"LOC_val_solution\.csv with their classes is absent"):
        build(root=str(kaggle))


def test_real_labels(build, tmp_path):
    real = [[] for _ in range(10)]
    real[9], real[8] = [5, 0], [7]  # images 10 (tench) and 9; image 8 has none
    (tmp_path / "real.json").write_text(json.dumps(real))
    data = build(real_labels=str(tmp_path / "real.json"))
    assert labels(data.train) == INDICES
    assert [row.nonzero()[0].tolist() for row in data.val.dataset.labels.dense()] == [[0, 5], [7]]
    evaluator = data.evaluator()
    logits = torch.zeros(2, 1000)
    logits[:, 5] = 1
    evaluator.update(logits, torch.stack([fixed_sample(data.val.dataset, i)[1] for i in range(2)]))
    metrics = evaluator.compute()
    assert metrics["top1_real"] == 50
    for content, expected in [
        ("{", "not valid JSON"),
        ("{}", "is not a list"),
        ("[[1000]]", "is not a list"),
    ]:
        (tmp_path / "real.json").write_text(content)
        with pytest.raises(DataError, match=expected):
            build(real_labels=str(tmp_path / "real.json"))
    (tmp_path / "real.json").write_text("[[1]]")
    with pytest.raises(DataError, match="is none of them"):
        build(real_labels=str(tmp_path / "real.json"))
    with pytest.raises(DataError, match="cannot be read"):
        build(real_labels=str(tmp_path / "none.json"))


def test_unique_names():
    assert readable(["n02012849", "n01440764", "nx"]) == ("crane", "tench, Tinca tinca", "nx")


def test_the_sample(sample_data, tmp_path):
    root = sample_data / "imagenet10_160"
    lines = [line.split("\t") for line in (root / "classes.txt").read_text().splitlines()]
    data = made(imagenet, root=str(root), image_size=32, cache_dir=str(tmp_path))
    assert (len(data.train.dataset), len(data.val.dataset)) == (200, 80)
    for split, each in ((data.train, 20), (data.val, 8)):
        assert {i: n for i, n in enumerate(split.dataset.labels.counts()) if n} == {
            int(i): each for _, i, _ in lines
        }
    assert [data.val.classes.names[int(index)] for _, index, _ in lines] == [
        name for _, _, name in lines
    ]
    few = made(
        imagenet,
        root=str(root),
        class_map=str(root / "classes.txt"),
        image_size=32,
        cache_dir=str(tmp_path),
    )
    assert few.val.classes.names == tuple(name for _, _, name in sorted(lines))
    image, target = fixed_sample(few.val.dataset, 9)
    expected = EvalTransform(image_size=32, crop=0.95, interpolation="bicubic")
    assert torch.equal(image, expected(read_image(few.val.dataset.name(9))))
    assert target.nonzero().tolist() == [[1]]


def test_a_number_of_5000_digits_in_the_name_of_an_image(tmp_path) -> None:
    files = encode_paths([f"n1/ILSVRC2012_val_{'9' * 5000}.JPEG"])
    table = Table(files, from_single(np.zeros(1, np.int32), 1), ("n1",))
    (tmp_path / "real.json").write_text("[[0]]")
    with pytest.raises(DataError, match="has 1 images"):
        _with_real_labels(table, tmp_path / "real.json")
