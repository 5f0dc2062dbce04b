import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from readers import Reader, write_picture
from support import made

from mldec.data.readers import nuswide as module
from mldec.data.readers.nuswide import nuswide81, nuswide_zsl
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError, DataError

# (path, labels, split); classes in alphabetical order: cat, cloud, clouds, dog, sky
ROWS = [
    ("images/a.jpg", "[sky, dog]", "train"),
    ("images/b.jpg", "['sky', 'cat']", "train"),
    ("images/c.jpg", "[cat]", "train"),
    ("images/d.jpg", "[]", "train"),
    ("images\\e.jpg", "[clouds, sky, cloud]", "val"),
    ("images/f.jpg", "['dog']", "val"),
    ("images/g.jpg", "['cat', 'cat']", "val"),
    ("images/h.jpg", "[]", "val"),
    ("images/i.jpg", "[whale]", "test"),
]
CLASSES = ("cat", "cloud", "clouds", "dog", "sky")
UNSEEN = ["clouds", "cat"]
VECTORS = torch.arange(1.0, 16.0).reshape(3, 5)


def write_csv(path, rows=ROWS, header="filepath,label,split_name"):
    text = "".join(f'{file},"{labels}",{split}\n' for file, labels, split in rows)
    path.write_text(f"{header}\n{text}" if header else text, encoding="utf-8")


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "nus_wide"
    for letter in "abcdefgh":
        write_picture(root / "images" / f"{letter}.jpg")
    write_csv(root / "data.csv")
    write_csv(root / "nus_wid_data.csv")
    (root / "benchmark_81_v0.json").write_text(json.dumps({"test class": UNSEEN}))
    torch.save(VECTORS, root / "wordvec_array.pth")
    return root


@pytest.fixture
def build(root):
    return Reader(nuswide_zsl, root, "NUS-WIDE")


def labels(split):
    """Return the images with the names of their labels."""
    found = {}
    for index in range(len(split.dataset)):
        row = split.dataset.labels.row(index).tolist()
        stem = Path(split.dataset.name(index)).stem
        found[stem] = {name for name, value in zip(split.classes.names, row, strict=True) if value}
    return found


# Zero-shot


def test_training_knows_seen_classes_only_and_validation_all(build):
    data = build()
    assert data.train.classes.names == ("cloud", "dog", "sky")
    assert data.val.classes.names == CLASSES
    assert labels(data.train) == {
        "a": {"sky", "dog"},
        "b": {"sky"},
    }  # c shows an unseen class only, d nothing
    assert labels(data.val) == {"e": {"clouds", "sky", "cloud"}, "g": {"cat"}}


def test_trap_15_validation_images_with_an_unseen_class_or_all(build):
    assert set(labels(build(val_images="unseen").val)) == {"e", "g"}
    every = build(val_images="all")
    assert set(labels(every.val)) == {"e", "f", "g", "h"}
    assert set(labels(every.train)) == {"a", "b"}
    with pytest.raises(ConfigError, match=r"data.val_images is 'some': it must be unseen or all"):
        build(val_images="some")


def test_every_class_has_its_own_vector(build):
    data = build()
    assert torch.equal(data.val.classes.queries, VECTORS.T)
    assert torch.equal(data.train.classes.queries, VECTORS.T[[1, 3, 4]])


def test_trap_13_both_ways_to_write_labels_and_empty_lists(build, root):
    rows = [("images/a.jpg", "[sky, dog]", "train"), ("images/b.jpg", "['cloud']", "train")]
    rows += [
        ("images/c.jpg", "[]", "train"),
        ("images/d.jpg", "", "train"),
        ("images/e.jpg", "[cat, , clouds]", "val"),
    ]
    write_csv(root / "data.csv", rows)
    data = build()
    assert data.val.classes.names == CLASSES  # no class '' in front
    assert labels(data.train) == {"a": {"sky", "dog"}, "b": {"cloud"}}
    assert labels(data.val) == {"e": {"cat", "clouds"}}


def test_trap_14_classes_are_sorted_whatever_the_order_of_the_list(build, root):
    first = build().train.classes
    (root / "benchmark_81_v0.json").write_text(json.dumps({"test class": UNSEEN[::-1]}))
    assert build().train.classes.names == first.names == tuple(sorted(first.names))


def test_samples(build, root):
    image, target = fixed_sample(build().val.dataset, 0)
    assert (image.shape, image.dtype, target.dtype) == ((3, 16, 16), torch.uint8, torch.int8)
    assert target.tolist() == [0, 1, 1, 0, 1]
    assert build().val.dataset.name(0) == str(
        root / "images" / "e.jpg"
    )  # the row has a Windows separator


def test_the_log_names_twins_and_other_splits(build, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        build()
    assert "rows of other splits than train and val are left out: {'test': 1}" in caplog.text
    assert "1 of 2 unseen classes have a seen singular or plural: clouds/cloud" in caplog.text
    assert "zero-shot: 2 of 4 training images have a seen class" in caplog.text
    assert "zero-shot: 2 of 4 validation images have an unseen class, 2 are used" in caplog.text


def test_the_evaluator_is_told_which_classes_are_unseen_and_which_images_count(build):
    for images in ("unseen", "all"):
        evaluator = build(val_images=images).evaluator()
        assert evaluator.is_unseen.tolist() == [True, False, True, False, False]
        assert evaluator.all_images == (images == "all")


def test_vectors_from_another_file_are_joined_by_name(build, root):
    words = sorted(CLASSES, reverse=True)
    (root / "glove.txt").write_text("".join(f"{word} {len(word)}.5 1.0\n" for word in words))
    queries = build(vectors="glove.txt").val.classes.queries
    assert queries[:, 0].tolist() == [len(name) + 0.5 for name in CLASSES]
    torch.save(VECTORS, root / "other.pth")
    (root / "other.txt").write_text("\n".join(words))
    assert torch.equal(
        build(vectors=str(root / "other.pth")).val.classes.queries, VECTORS.T.flip(0)
    )


def test_evaluation_needs_no_training_images(root, tmp_path):
    (root / "images" / "a.jpg").unlink()
    data = made(nuswide_zsl, root=str(root), cache_dir=str(tmp_path))
    assert len(data.val.dataset) == 2
    with pytest.raises(
        DataError, match=r"1 of 2 listed images are absent, the first is .*images/a\.jpg"
    ):
        _ = data.train


def test_a_second_start_parses_nothing(build, monkeypatch):
    first = build()
    monkeypatch.setattr(module, "_rows", None)
    second = build()
    assert labels(first.train) == labels(second.train)
    assert labels(first.val) == labels(second.val)


# The lists of classes


def test_a_class_both_seen_and_unseen(build, root):
    split = {"test class": UNSEEN, "train class": ["cloud", "dog", "sky", "cat"]}
    (root / "benchmark_81_v0.json").write_text(json.dumps(split))
    assert "1 classes are both seen and unseen: cat" in build.fault()


def test_sets_that_do_not_cover_the_data(build, root):
    (root / "benchmark_81_v0.json").write_text(
        json.dumps({"test class": UNSEEN, "train class": ["cloud"]})
    )
    assert "2 classes of the data are neither seen nor unseen: dog, sky" in build.fault()


@pytest.mark.parametrize(
    ("split", "text"),
    [
        ({"test class": ["cat", "whale"]}, "1 classes do not occur in the data: whale"),
        ({"test class": ["cat", "cat"]}, "1 classes are named twice: cat"),
        ({"test class": list(CLASSES)}, "0 seen and 5 unseen classes"),
        ({"test class": []}, "5 seen and 0 unseen classes"),
        ({"test": ["cat"]}, "has no list of names 'test class'"),
        ({"test class": "cat"}, "has no list of names 'test class'"),
        ({"test class": [1]}, "has no list of names 'test class'"),
        ({"test class": ["cat"], "train class": 5}, "has no list of names 'train class'"),
        ([], "has no list of names 'test class'"),
    ],
)
def test_lists_that_cannot_be(build, root, split, text):
    (root / "benchmark_81_v0.json").write_text(json.dumps(split))
    assert text in build.fault()


def test_an_image_set_without_any_unseen_label(build, root):
    rows = [
        ("images/e.jpg", "[cloud, clouds, cat]", "train"),
        ("images/f.jpg", "[dog]", "val"),
        ROWS[7],
    ]
    write_csv(root / "data.csv", [ROWS[0], *rows])
    for images in ("unseen", "all"):
        assert "0 of 2 validation images have an unseen class" in build.fault(val_images=images)


def test_broken_or_absent_files(build, root):
    (root / "benchmark_81_v0.json").write_bytes(b"\xff{")
    assert "benchmark_81_v0.json is not valid JSON" in build.fault()
    (root / "benchmark_81_v0.json").unlink()
    assert "benchmark_81_v0.json cannot be read (No such file" in build.fault()
    (root / "data.csv").unlink()
    assert "data.csv cannot be read (No such file" in build.fault()
    assert "is not a folder" in build.fault(root=str(root / "nowhere"))


# The vectors


def vectors_fault(build):
    return replace(build, section="Word vectors").fault()


def test_vectors_and_classes_of_different_counts(build, root):
    torch.save(VECTORS[:, :4], root / "wordvec_array.pth")
    assert "has shape [3, 4], which does not fit 5 names" in vectors_fault(build)


def test_trap_12_the_two_files_are_swapped(build, root):
    (root / "data.csv").rename(root / "x")
    (root / "wordvec_array.pth").rename(root / "data.csv")
    (root / "x").rename(root / "wordvec_array.pth")
    message = build.fault()
    assert "data.csv is not text but a torch file" in message
    assert "swap the two files back" in message
    write_csv(root / "data.csv")
    assert "wordvec_array.pth is not a torch file but begins like text" in vectors_fault(build)


# The CSV


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\nimages/a.jpg,[sky]\n", "row 1: 2 columns, not 3"),
        ("path,label,split\nimages/a.jpg,[sky, dog],train\n", "row 2: 4 columns, not 3"),
        ("images/a.jpg,[sky],train\n", "row 1: an image, where a header is wanted"),
        ('path,label,split\nimages/a.jpg,"[sky]"x,train\n', "is not CSV"),
        ('path,label,split\nimages/a.jpg,"[sky],train\n', "is not CSV"),
        (
            "path,label,split\n../a.jpg,[sky],train\n",
            "row 2: '../a.jpg' is not a path inside the image folder",
        ),
        ("path,label,split\nx\\..\\a.jpg,[sky],train\n", "is not a path inside the image folder"),
        ("path,label,split\n/etc/a.jpg,[sky],train\n", "is not a path inside the image folder"),
        ("path,label,split\nC:\\a.jpg,[sky],train\n", "is not a path inside the image folder"),
        ("path,label,split\n,[sky],train\n", "row 2: '' is not a path"),
        (
            "path,label,split\na.jpg,[sky],train\n./a.jpg,[sky],val\n",
            "row 3: the image a.jpg is listed twice, first in row 2",
        ),
        (
            "path,label,split\na.jpg,[sky],train\na.jpg,[sky],test\n",
            "row 3: the image a.jpg is listed twice, first in row 2",
        ),
        (
            "path,label,split\na.jpg,[sky],train\n../b.jpg,[],test\n",
            "row 3: '../b.jpg' is not a path",
        ),
        ("path,label,split\na.jpg,[],train\n", "no row of train or val has a label"),
        ("", "no row of train or val has a label"),
        ("path,label,split\nimages/a.jpg,[\xe9],train\n".encode("latin-1"), "is not UTF-8 text"),
    ],
)
def test_csv_files_that_cannot_be(build, root, text, message):
    (root / "data.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in build.fault()


# 81 classes


def test_the_form_of_81_concepts(build):
    data = replace(build, function=nuswide81)()
    assert data.train.classes.names == data.val.classes.names == CLASSES
    assert data.train.classes.queries is None
    assert labels(data.train) == {
        "a": {"sky", "dog"},
        "b": {"sky", "cat"},
        "c": {"cat"},
        "d": set(),
    }
    assert labels(data.val) == {
        "e": {"clouds", "sky", "cloud"},
        "f": {"dog"},
        "g": {"cat"},
        "h": set(),
    }
    evaluator = data.evaluator()
    evaluator.update(torch.zeros(2, 5), torch.eye(5)[:2])
    assert next(iter(evaluator.compute())) == "mAP"


def test_a_split_that_is_missing(build, root):
    write_csv(root / "nus_wid_data.csv", [row for row in ROWS if row[2] == "train"])
    assert "val has no image" in replace(build, function=nuswide81).fault()


# Real files


def write_sample(folder, sample, images_from):
    """Write data.csv, the split and vectors for the names of the sample: 20 rows, six images."""
    names = (sample / "classes_1006.txt").read_text().split()
    concepts = (sample / "Concepts81.txt").read_text().split()
    rows = []
    for line in (sample / "nuswide81_hashnet_test_5000.txt").read_text().splitlines():
        path, *digits = line.split()
        shown = [concept for concept, digit in zip(concepts, digits, strict=True) if digit == "1"]
        rows.append(("images/" + path.rpartition("/")[2], "[" + ", ".join(shown) + "]", "val"))
    rows += [(f"images/{path.name}", f"[{', '.join(names)}]", "train") for path in images_from]
    write_csv(folder / "data.csv", rows)
    return names, rows


def test_the_sample_of_nus_wide(sample_data, tmp_path):
    sample = sample_data / "nus_wide_zsl"
    (tmp_path / "images").mkdir()
    pictures = sorted((sample / "images").iterdir())
    names, rows = write_sample(tmp_path, sample, pictures)
    for path in pictures:
        (tmp_path / "images" / path.name).write_bytes(path.read_bytes())
    for file, _, _ in rows:
        (tmp_path / file).touch()
    raw = np.load(sample / "wordvec_array_fasttext_300x1006.npy")
    torch.save(torch.from_numpy(raw), tmp_path / "wordvec_array.pth")
    arguments = {"root": str(tmp_path), "cache_dir": str(tmp_path / "cache")}
    data = made(nuswide_zsl, split_file=str(sample / "benchmark_81_v0.json"), **arguments)
    assert list(data.val.classes.names) == names
    assert list(data.train.classes.names) == (sample / "seen_925_sorted.txt").read_text().split()
    assert data.val.classes.queries.shape == (1006, 300)
    assert torch.equal(data.train.classes.queries[-1], torch.from_numpy(raw[:, names.index("zoo")]))
    assert (len(data.train.dataset), len(data.val.dataset)) == (6, 5000 - 1131)
    image, target = fixed_sample(data.train.dataset, 0)
    assert (image.shape, int(target.sum())) == ((3, 224, 224), 925)
    every = made(
        nuswide_zsl, split_file=str(sample / "benchmark_81_v0.json"), val_images="all", **arguments
    )
    assert len(every.val.dataset) == 5000
    most = sorted(
        zip(every.val.dataset.labels.counts().tolist(), names, strict=True), reverse=True
    )[:5]
    assert [name for _, name in most] == ["sky", "clouds", "person", "animal", "water"]
