import copy
import gzip
import json
import logging
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from readers import Reader, names, targets, versions, write_picture
from support import made

from mldec.data.cache import TableCache
from mldec.data.readers import coco as module
from mldec.data.readers.coco import coco
from mldec.data.transforms import EvalTransform
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError, DataError
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.losses.partial import PartialAsymmetricLoss

CATEGORIES = [
    {"id": 7, "name": "train"},
    {"id": 1, "name": "person"},
    {"id": 90, "name": "tooth brush"},
]
# Image id -> category ids of its objects: not in order, one image without, one class twice.
TRAIN = {30: [7], 4: [90, 1, 1], 12: [], 5: [1]}
VAL = {8: [7, 90], 6: []}


def content(split, objects, categories=CATEGORIES):
    annotations = [
        {
            "id": 100 * image + number,
            "image_id": image,
            "category_id": category,
            "iscrowd": int(category == 90),
        }
        for image, numbers in objects.items()
        for number, category in enumerate(numbers)
    ]
    images = [{"id": image, "file_name": f"COCO_{split}_{image:012d}.jpg"} for image in objects]
    return {"images": images, "annotations": annotations, "categories": categories}


def annotation_file(root, split):
    return root / "annotations" / f"instances_{split}.json"


def write(root, split, data):
    annotation_file(root, split).parent.mkdir(parents=True, exist_ok=True)
    annotation_file(root, split).write_text(json.dumps(data))


@pytest.fixture
def root(tmp_path):
    """A tree of the 2014 layout with a few small images."""
    for split, objects in {"train2014": TRAIN, "val2014": VAL}.items():
        data = content(split, objects)
        write(tmp_path / "coco", split, data)
        for image in data["images"]:
            write_picture(tmp_path / "coco" / split / image["file_name"], image["id"])
    return tmp_path / "coco"


@pytest.fixture
def build(root):
    return Reader(coco, root, "MS-COCO")


def test_evaluation_needs_no_training_files(build, root):
    annotation_file(root, "train2014").unlink()
    data = made(coco, root=str(root), cache_dir=str(root / "cache"))
    assert len(data.val.dataset) == 1
    with pytest.raises(DataError, match="instances_train2014"):
        _ = data.train


# Labels


def test_images_by_id_and_classes_by_category_id(build):
    data = build()
    assert data.train.classes.names == data.val.classes.names == ("person", "train", "tooth brush")
    assert not data.train.classes.exclusive
    assert data.train.classes.queries is None
    assert names(data.train) == [f"COCO_train2014_{image:012d}.jpg" for image in (4, 5, 30)]
    assert targets(data.train) == [[1, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert targets(data.val) == [[0, 1, 1]]


def test_word_vectors_are_matched_by_name(build, root):
    (root / "words.txt").write_text("tooth 1 0\nbrush 0 1\ntrain 3 4\nperson 5 6\n")
    data = build(vectors="words.txt")
    for split in (data.train, data.val):
        assert split.classes.queries.tolist() == [[5, 6], [3, 4], [0.5, 0.5]]
    assert data.train.classes.queries is data.val.classes.queries, "they are read once"
    with pytest.raises(DataError, match=r"nowhere\.txt"):
        _ = build(vectors="nowhere.txt").val


def test_all_images(build):
    data = build(annotated_only=False)
    assert len(data.train.dataset) == 4
    assert names(data.train)[2] == "COCO_train2014_000000000012.jpg"
    assert targets(data.train)[2] == [0, 0, 0]
    assert targets(data.val) == [[0, 0, 0], [0, 1, 1]]


def test_samples(build, root):
    data = build()
    image, target = fixed_sample(data.val.dataset, 0)
    path = root / "val2014" / "COCO_val2014_000000000008.jpg"
    assert data.val.dataset.name(0) == str(path)
    with Image.open(path) as stored:
        assert torch.equal(image, EvalTransform(image_size=16)(stored))
    assert (image.dtype, target.dtype) == (torch.uint8, torch.int8)
    assert data.transform == EvalTransform(image_size=16)
    with pytest.raises(IndexError):
        fixed_sample(data.val.dataset, 1)


def test_training_images_are_augmented_and_validation_images_are_not(build):
    data = build()
    assert len(versions(data.train.dataset)) > 1  # the colour of the cutout alone
    assert len(versions(data.val.dataset)) == 1
    plain = build(augment="none", cutout=0)
    assert len(versions(plain.train.dataset)) == 1


def test_one_split_may_serve_as_both(build):
    data = build(train="val2014", augment="none", cutout=0.5)
    assert names(data.train) == names(data.val)
    assert len(versions(data.train.dataset)) > 1
    assert len(versions(data.val.dataset)) == 1


def test_a_target_is_the_callers_own(build):
    dataset = build().train.dataset
    fixed_sample(dataset, 0)[1].zero_()
    assert fixed_sample(dataset, 0)[1].tolist() == [1, 0, 1]


@pytest.mark.parametrize(("threshold", "recall"), [(0.5, 100), (0.75, 0)])
def test_the_evaluator_gets_the_threshold(build, threshold, recall):
    evaluator = build(threshold=threshold).evaluator()
    # Probability 0.73 of the true class; the third class is never there.
    evaluator.update(
        torch.tensor([[1.0, -1.0, -9.0], [-1.0, 1.0, -9.0]]), torch.tensor([[1, 0, 0], [0, 1, 0]])
    )
    metrics = evaluator.compute()
    assert next(iter(metrics)) == "mAP"
    assert metrics["OR"] == pytest.approx(recall)


def test_the_log_says_what_was_read(build, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        build()
        build(annotated_only=False)
    assert caplog.messages == [
        "coco train2014: 3 images with an object, 3 classes",
        "coco val2014: 1 images with an object, 3 classes",
        "coco train2014: 4 images, 3 classes",
        "coco val2014: 2 images, 3 classes",
    ]


def test_nothing_is_printed(build, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mldec"), "handlers", [])  # of a command's console
    build()
    assert capsys.readouterr() == ("", "")


def test_workers_hold_arrays_only(build):
    dataset = build().train.dataset
    held = {
        name: type(value)
        for part in (dataset, dataset.storage)
        for name, value in vars(part).items()
    }
    assert held["files"] is np.ndarray
    assert {type(vars(dataset.labels)[name]) for name in ("starts", "classes", "values")} == {
        np.ndarray
    }
    assert dataset.storage.files.dtype.kind == "S"
    assert not {list, dict, set} & set(held.values())
    again = pickle.loads(pickle.dumps(dataset))
    assert fixed_sample(again, 0)[1].tolist() == [1, 0, 1]


def test_other_splits_and_names_in_inner_folders(root, build):
    for folder in ("a", "b"):
        write_picture(root / "mine" / folder / "x \u00e4.png")
    data = content("mine", {1: [1], 2: [7]})
    data["images"] = [
        {"id": 1, "file_name": "b/x \u00e4.png"},
        {"id": 2, "file_name": "a/x \u00e4.png"},
    ]
    write(root, "mine", data)
    dataset = build(val="mine").val.dataset
    assert dataset.name(0) == str(root / "mine" / "b" / "x \u00e4.png")
    assert fixed_sample(dataset, 1)[0].shape == (3, 16, 16)
    (root / "mine" / "a" / "x \u00e4.png").unlink()
    with pytest.raises(DataError, match=r"1 of 2 listed images are absent, the first is .*a/x"):
        build(val="mine")


def test_home_and_relative_roots(root, build, monkeypatch):
    monkeypatch.setenv("HOME", str(root.parent))
    assert len(build(root="~/coco").val.dataset) == 1
    monkeypatch.chdir(root.parent)
    assert build(root="coco").val.dataset.name(0).startswith(str(root))


# The layout of 2017


def test_the_layout_of_2017(build, root):
    for split, objects in {"train2017": TRAIN, "val2017": VAL}.items():
        data = content(split, objects)
        for image in data["images"]:
            image["file_name"] = f"{image['id']:012d}.jpg"
        write(root, split, data)
        for image in data["images"]:
            write_picture(root / split / image["file_name"])
    new, old = build(train="train2017", val="val2017"), build()
    assert new.val.dataset.name(0) == str(root / "val2017" / "000000000008.jpg")
    assert targets(new.train) == targets(old.train)
    assert targets(new.val) == targets(old.val)


# Labels taken away


def test_only_training_labels_are_taken_away(build):
    whole = build(annotated_only=False)
    for option in ({"drop_labels": 0.5}, {"keep_per_class": 1}):
        data = build(annotated_only=False, **option)
        thin = np.array(targets(data.train))
        assert (thin == -1).any()
        assert np.array_equal(thin[thin >= 0], np.array(targets(whole.train))[thin >= 0])
        assert targets(data.val) == targets(whole.val)
    assert [(thin[:, 0] == value).sum() for value in (1, 0)] == [1, 1]
    assert names(data.train) == names(whole.train)


def test_the_seed_decides_which_labels_go(build):
    seen = {
        str(targets(build(drop_labels=0.5, labels_seed=seed).train)) for seed in (0, 0, 1, 2, 3)
    }
    assert 1 < len(seen) <= 4


def test_the_log_says_how_much_is_left(build, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        build(keep_per_class=1)
    assert (
        "coco train2014: 66.67% of the labels are kept, the others count as not annotated"
        in caplog.messages
    )


def test_partial_labels_need_a_loss_that_takes_them(build):
    rows = torch.tensor(targets(build(drop_labels=0.5).train))
    assert (rows == -1).any()
    with pytest.raises(DataError, match="target -1 is not allowed"):
        AsymmetricLoss()(torch.zeros(rows.shape), rows)
    assert PartialAsymmetricLoss(mode="ignore")(torch.zeros(rows.shape), rows).isfinite()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"drop_labels": 1.0}, r"data.drop_labels is 1.0: it must be from 0 on and below 1"),
        ({"drop_labels": -0.1}, "data.drop_labels is -0.1"),
        ({"keep_per_class": 0}, "data.keep_per_class is 0: it must be at least 1"),
        ({"keep_per_class": 5, "drop_labels": 0.5}, "exclude each other"),
        ({"labels_seed": -1}, "data.labels_seed is -1: it must be 0 or more"),
    ],
)
def test_thinning_that_cannot_be(build, options, expected):
    with pytest.raises(ConfigError, match=expected):
        build(**options)


# Real files


def test_the_sample_lies_in_the_official_splits(sample_data, tmp_path):
    data = made(
        coco, root=str(sample_data / "coco2014_mini"), cache_dir=str(tmp_path), annotated_only=False
    )
    official = {}
    for split, part, total in (("train2014", data.train, 82783), ("val2014", data.val, 40504)):
        with gzip.open(sample_data / "coco2014_ids" / f"{split}_ids.txt.gz", "rt") as file:
            official[split] = {int(line) for line in file}
        assert len(official[split]) == total
        assert {int(Path(name).stem.split("_")[-1]) for name in names(part)} <= official[split]
    assert not official["train2014"] & official["val2014"]


def test_counts_of_the_sample(sample_data, tmp_path):
    root, cache = str(sample_data / "coco2014_mini"), str(tmp_path)
    few, every = (
        made(coco, root=root, cache_dir=cache),
        made(coco, root=root, cache_dir=cache, annotated_only=False),
    )
    assert (len(few.train.dataset), len(few.val.dataset)) == (59, 38)
    assert (len(every.train.dataset), len(every.val.dataset)) == (60, 40)
    gone = {Path(name).stem for name in set(names(every.val)) - set(names(few.val))}
    assert gone == {"COCO_val2014_000000010263", "COCO_val2014_000000010440"}


def test_classes_and_labels_of_the_sample(sample_data, tmp_path):
    root = sample_data / "coco2014_mini"
    data = made(coco, root=str(root), cache_dir=str(tmp_path), image_size=32, annotated_only=False)
    expected = (
        (sample_data / "label_embeddings" / "coco80_category_id_order.txt").read_text().split("\n")
    )
    assert list(data.val.classes.names) == [line for line in expected if line]
    for split, part in (("train2014", data.train), ("val2014", data.val)):
        raw = json.loads(annotation_file(root, split).read_text())
        names_of = {category["id"]: category["name"] for category in raw["categories"]}
        for index, image in enumerate(sorted(raw["images"], key=lambda image: image["id"])):
            shown = {
                names_of[a["category_id"]]
                for a in raw["annotations"]
                if a["image_id"] == image["id"]
            }
            assert part.dataset.name(index).endswith(image["file_name"])
            row = part.dataset.labels.row(index).numpy()
            assert {part.classes.names[column] for column in row.nonzero()[0]} == shown
            assert set(row.tolist()) <= {0, 1}
    image, target = fixed_sample(data.train.dataset, 3)
    assert image.shape == (3, 32, 32)
    assert torch.equal(target, data.train.dataset.labels.row(3))


# The cache


def forbid_parsing(monkeypatch):
    def parse(*_):
        raise AssertionError("the annotations are parsed again")

    monkeypatch.setattr(module, "read_json", parse)


def test_a_second_start_reads_no_json(build, monkeypatch):
    first = build()
    forbid_parsing(monkeypatch)
    second = build()
    third = build(annotated_only=False)  # the same file serves both
    assert names(first.train) == names(second.train)
    assert targets(first.train) == targets(second.train)
    assert first.train.classes.names == second.train.classes.names
    assert len(third.train.dataset) == 4


def replace_text(path, text, later):
    """Write a file and set its time to `later` nanoseconds after the old one."""
    before = path.stat()
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later))
    return path.stat().st_size - before.st_size


def test_a_file_of_another_size_is_read_again(build, root, monkeypatch):
    build()
    assert (
        replace_text(annotation_file(root, "val2014"), json.dumps(content("val2014", {8: [1]})), 0)
        != 0
    )
    assert targets(build().val) == [[1, 0, 0]]
    forbid_parsing(monkeypatch)
    build()


def test_a_file_of_another_time_is_read_again(build, root, monkeypatch):
    build()
    text = (
        annotation_file(root, "val2014").read_text().replace('"category_id": 7', '"category_id": 1')
    )
    assert replace_text(annotation_file(root, "val2014"), text, 1000) == 0
    assert targets(build().val) == [[1, 0, 1]]
    forbid_parsing(monkeypatch)
    build()


def test_another_tree_has_its_own_cache(build, root, tmp_path):
    build()
    root.rename(tmp_path / "moved")
    (tmp_path / "moved" / "annotations" / "instances_val2014.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        build(root=str(tmp_path / "moved"))


def cache_files(tmp_path):
    return sorted((tmp_path / "cache").iterdir())


def test_the_cache_holds_one_file_for_each_annotation_file(build, tmp_path, root):
    build()
    write(root, "val2014", content("val2014", {8: [1], 6: []}))
    build()
    assert len(cache_files(tmp_path)) == 2
    assert {path.suffix for path in cache_files(tmp_path)} == {".npz"}


def spoil_by_text(path):
    path.write_text("hello")


def spoil_by_cutting(path):
    path.write_bytes(path.read_bytes()[:-200])


def spoil_by_emptying(path):
    path.write_bytes(b"")


def spoil_by_flipping(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 255
    path.write_bytes(data)


def spoil_by_an_array(path):
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


def spoil_by_pickle(path):
    np.savez(path, key=np.array([{}], object), files=1, labels=1, classes=1)


def spoil_by_other_keys(path):
    np.savez(path, something=np.zeros(3))


SPOILERS = [spoiler for name, spoiler in sorted(globals().items()) if name.startswith("spoil_by")]


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
def test_a_damaged_or_foreign_cache_file_is_ignored_and_rebuilt(
    build, tmp_path, monkeypatch, spoil
):
    expected = targets(build().train)
    for path in cache_files(tmp_path):
        spoil(path)
    assert targets(build().train) == expected
    forbid_parsing(monkeypatch)
    assert targets(build().train) == expected


def test_a_cache_that_cannot_be_written_only_costs_the_parse(build, tmp_path, caplog):
    (tmp_path / "blocked").write_text("a file where the folder should be")
    data = build(cache_dir=str(tmp_path / "blocked"))
    assert targets(data.val) == [[0, 1, 1]]
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "parsed at every start" in warnings[0]
    assert str(tmp_path / "blocked") in warnings[0]


def test_a_failed_write_leaves_nothing(build, tmp_path, monkeypatch, caplog):
    def full(file, **_):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert len(build().val.dataset) == 1
    assert cache_files(tmp_path) == []
    assert "No space left on device" in caplog.text


def test_the_default_cache_folder(build, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    build(cache_dir=None)
    assert len(list((tmp_path / "home" / ".cache" / "mldec").iterdir())) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    build(cache_dir=None)
    assert len(list((tmp_path / "xdg" / "mldec").iterdir())) == 2


# Faults


def test_root_missing_or_empty(build, tmp_path):
    assert f"{tmp_path / 'nowhere'} is not a folder" in build.fault(root=str(tmp_path / "nowhere"))
    (tmp_path / "bare").mkdir()
    assert f"{tmp_path / 'bare'} is empty" in build.fault(root=str(tmp_path / "bare"))


def test_annotation_file_missing(build, root):
    annotation_file(root, "train2014").unlink()
    message = build.fault()
    assert str(annotation_file(root, "train2014")) in message
    assert "No such file" in message


def test_annotation_file_is_a_folder(build, root):
    annotation_file(root, "val2014").unlink()
    annotation_file(root, "val2014").mkdir()
    assert str(annotation_file(root, "val2014")) in build.fault()


@pytest.mark.parametrize("text", ["", '{"images": [', "<html>\nnot found\n</html>", "\ufeff{}"])
def test_broken_json(build, root, text):
    annotation_file(root, "train2014").write_text(text)
    message = build.fault()
    assert f"{annotation_file(root, 'train2014')} is not valid JSON" in message


def test_json_that_is_not_text(build, root):
    annotation_file(root, "train2014").write_bytes(b"\x80\xff\x00\x9c" * 9)
    assert "is not valid JSON" in build.fault()


def without(key, entry=None):
    data = copy.deepcopy(content("train2014", TRAIN))
    del (data if entry is None else data[entry][0])[key]
    return data


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([1, 2], "list"),
        ([], "list"),
        ("text", "str"),
        ({}, "no list of images"),
        (without("images"), "no list of images"),
        (without("annotations"), "no list of annotations"),
        (without("categories"), "no list of categories"),
        ({**content("train2014", TRAIN), "images": {}}, "no list of images"),
        ({**content("train2014", TRAIN), "annotations": ["a"]}, "not a COCO instances file"),
        (without("image_id", "annotations"), "no key 'image_id'"),
        (without("category_id", "annotations"), "no key 'category_id'"),
        (without("file_name", "images"), "no key 'file_name'"),
        (without("name", "categories"), "no key 'name'"),
    ],
)
def test_json_that_is_not_coco(build, root, data, expected):
    write(root, "train2014", data)
    message = build.fault()
    assert f"{annotation_file(root, 'train2014')} is not a COCO instances file" in message
    assert expected in message


def test_unknown_category_or_image(build, root):
    write(root, "train2014", content("train2014", {4: [1, 2]}))
    assert "annotation 401 names the unknown category 2" in build.fault()
    data = content("train2014", {4: [1]})
    data["annotations"][0]["image_id"] = 77
    write(root, "train2014", data)
    message = build.fault()
    assert "annotation 400 names the unknown image 77" in message
    assert str(annotation_file(root, "train2014")) in message


def test_absent_images_are_counted_at_the_start(build, root):
    (root / "train2014" / "COCO_train2014_000000000030.jpg").unlink()
    (root / "train2014" / "COCO_train2014_000000000005.jpg").unlink()
    message = build.fault()
    assert message.startswith(f"{root}: 2 of 3 listed images are absent")
    assert f"the first is {root / 'train2014' / 'COCO_train2014_000000000005.jpg'}" in message


def test_absent_images_are_noticed_behind_a_cache_too(build, root):
    build()
    (root / "val2014" / "COCO_val2014_000000000008.jpg").unlink()
    assert "1 of 1 listed images are absent" in build.fault()


def test_an_unused_image_may_be_absent(build, root):
    (root / "train2014" / "COCO_train2014_000000000012.jpg").unlink()  # it shows no object
    assert len(build().train.dataset) == 3
    assert "1 of 4 listed images" in build.fault(annotated_only=False)


def test_image_folder_missing(build, root):
    (root / "val2014").rename(root / "elsewhere")
    message = build.fault()
    assert f"{root / 'val2014'} cannot be listed (No such file" in message


def test_train_and_val_with_different_classes(build, root):
    write(
        root,
        "val2014",
        content("val2014", {8: [1]}, [*CATEGORIES, {"id": 91, "name": "hair brush"}]),
    )
    message = build.fault()
    assert str(root) in message
    assert "train (3) and val (4)" in message
    assert "'hair brush' is in one only" in message
    swapped = [{"id": 7, "name": "person"}, {"id": 1, "name": "train"}, CATEGORIES[2]]
    write(root, "val2014", content("val2014", {8: [1]}, swapped))
    assert "their order differs" in build.fault()


def test_no_image_left(build, root):
    write(root, "val2014", content("val2014", {8: [], 6: []}))
    message = build.fault()
    assert str(annotation_file(root, "val2014")) in message
    assert "no image with an object" in message
    assert len(build(annotated_only=False).val.dataset) == 2
    write(root, "val2014", content("val2014", {}))
    assert "no image at all" in build.fault(annotated_only=False)


def test_settings_are_checked_before_the_files(tmp_path):
    with pytest.raises(ConfigError, match="augment: 'strong'"):
        made(coco, root=str(tmp_path / "nowhere"), augment="strong")
    with pytest.raises(ConfigError, match=r"threshold.*1\.5"):
        made(coco, root=str(tmp_path / "nowhere"), threshold=1.5)


def test_an_image_that_breaks_later_is_named(build, root):
    data = build()
    path = Path(data.val.dataset.name(0))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=path.name):
        fixed_sample(data.val.dataset, 0)


@pytest.mark.parametrize(
    "name", ["../val2014/a.jpg", "/etc/passwd", "C:\\a.jpg", "a/../../b.jpg", ""]
)
def test_a_file_name_does_not_lead_out_of_the_image_folder(build, root: Path, name: str) -> None:
    file = annotation_file(root, "val2014")
    content = json.loads(file.read_text())
    content["images"][0]["file_name"] = name
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="is not a path inside the image folder"):
        _ = build().val


# Names of the categories


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, "category 7: the class name None is of type NoneType, not text"),
        ([], r"category 7: the class name \[\] is of type list, not text"),
        (True, "category 7: the class name True is of type bool, not text"),
        ("", "category 7: the class name '' is empty"),
        ("red\ncar", "category 7: .* has the control character U\\+000A"),
        ("\x1b[31mred", "category 7: .* has the control character U\\+001B"),
        ("x\0", "category 7: .* has the control character U\\+0000"),
        ("\ud800", "category 7: .* has the control character U\\+D800"),
        ("person", "the categories 1 and 7 are both called 'person': merge or rename them"),
    ],
)
def test_names_that_no_class_may_have(build, root, name, expected):
    for split, objects in (("train2014", TRAIN), ("val2014", VAL)):
        write(root, split, content(split, objects, [{"id": 7, "name": name}, *CATEGORIES[1:]]))
    with pytest.raises(DataError, match=expected) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_names_that_are_numbers_become_text(build, root):
    for split, objects in (("train2014", TRAIN), ("val2014", VAL)):
        write(
            root,
            split,
            content(split, objects, [{"id": 7, "name": 1}, {"id": 1, "name": 2.5}, CATEGORIES[2]]),
        )
    for _ in range(2):  # the second time from the cache
        assert build().train.classes.names == ("2.5", "1", "tooth brush")


def test_a_hundred_thousand_categories_stay_sparse(tmp_path):
    import tracemalloc

    categories = [{"id": number, "name": f"class {number}"} for number in range(100_000)]
    images = [{"id": number, "file_name": f"{number}.jpg"} for number in range(20_000)]
    objects = [{"id": 1, "image_id": 19_999, "category_id": 99_999}]
    write(tmp_path, "val2014", {"images": images, "annotations": objects, "categories": categories})
    tracemalloc.start()
    table = module.load_split(
        tmp_path, "val2014", TableCache(str(tmp_path / "cache"), ""), annotated_only=True
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(table) == 1
    assert np.flatnonzero(table.labels.dense()).tolist() == [99_999]
    assert peak < 200 * 2**20  # a matrix would have 2 GB
