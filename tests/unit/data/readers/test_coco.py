"""MS-COCO with all labels, partial labels, and zero-shot."""

import json
from functools import partial

import numpy as np
import pytest
from readers import Reader, names, targets, write_picture
from support import made
from trees import COCO, coco_content, coco_file, tree

from mldec.data.readers import coco, coco_zsl
from mldec.data.readers.coco_json import SEEN, UNSEEN


@pytest.fixture
def build(tmp_path):
    return tree("coco", tmp_path)


def write(root, split, content):
    coco_file(root, split).write_text(json.dumps(content))


def test_images_and_classes_are_sorted_by_id(build):
    data = build()
    assert data.train.classes.names == data.val.classes.names == ("person", "train", "tooth brush")
    assert not data.train.classes.exclusive
    assert data.train.classes.word_vectors is None
    assert names(data.train) == [f"COCO_train2014_{image:012d}.jpg" for image in (4, 5, 30)]
    assert targets(data.train) == [[1, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert targets(data.val) == [[0, 1, 1]]

    data = build(annotated_only=False)
    assert names(data.train)[2] == "COCO_train2014_000000000012.jpg"
    assert targets(data.train)[2] == [0, 0, 0]
    assert targets(data.val) == [[0, 0, 0], [0, 1, 1]]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_ids_may_be_text_or_decimals(build, encoding):
    content = coco_content("val2014", COCO["val2014"])
    for key, kinds in (("images", (str, int)), ("categories", (float, int, str))):
        for entry, kind in zip(content[key], kinds, strict=True):
            entry["id"] = kind(entry["id"])
    for entry, kind in zip(content["annotations"], (float, str), strict=True):
        entry["image_id"] = kind(entry["image_id"])
        entry["category_id"] = kind(entry["category_id"])
        del entry["id"]
    coco_file(build.root, "val2014").write_text(json.dumps(content), encoding=encoding)
    data = build()
    assert data.val.classes.names == ("person", "train", "tooth brush")
    assert (names(data.val), targets(data.val)) == (["COCO_val2014_000000000008.jpg"], [[0, 1, 1]])


def test_word_vectors_are_matched_by_name(build):
    (build.root / "words.txt").write_text("tooth 1 0\nbrush 0 1\ntrain 3 4\nperson 5 6\n")
    data = build(vectors="words.txt")
    for split in (data.train, data.val):
        assert split.classes.word_vectors.tolist() == [[5, 6], [3, 4], [0.5, 0.5]]
    assert data.train.classes.word_vectors is data.val.classes.word_vectors, "read once"


@pytest.fixture
def build_2017(build):
    """Return the reader of the same data in the layout of 2017."""
    root = build.root
    for split, objects in COCO.items():
        split = split.replace("2014", "2017")
        content = coco_content(split, objects)
        for image in content["images"]:
            image["file_name"] = f"\u00e4 b/{image['id']:012d}.jpg"
            write_picture(root / split / image["file_name"])
        write(root, split, content)
    return partial(build, train="train2017", val="val2017")


@pytest.mark.parametrize("name", ["{}.json", "annotations/{}.json", "{}/annotations.json"])
def test_files_may_have_names_of_splits(tmp_path, name):
    for split, number in (("train", 1), ("val", 2)):
        images = [{"id": number, "file_name": f"{number}.jpg"}]
        categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
        objects = [{"id": 1, "image_id": number, "category_id": number}]
        content = {"images": images, "categories": categories, "annotations": objects}
        path = tmp_path / name.format(split)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
        write_picture(tmp_path / "images" / f"{number}.jpg")
    (tmp_path / "._x.json").write_bytes(b"junk")
    build = Reader(coco, tmp_path)
    data = build(train="train", val="val")
    assert (targets(data.train), targets(data.val)) == ([[1, 0]], [[0, 1]])
    path.rename(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("{}")
    if name == "{}.json":
        (tmp_path / "train.json").unlink()
        assert "a.json, b.json" in build.fault(train="train", val="val")


def test_photos_of_fiftyone_are_in_data(tmp_path):
    content = {"images": [], "annotations": [], "categories": [{"id": 0, "name": "cat"}]}
    for number in range(3):
        content["images"].append({"id": number, "file_name": f"{number}.jpg"})
        content["annotations"].append({"image_id": number, "category_id": 0})
        write_picture(tmp_path / "data" / f"{number}.jpg")
    # The folder with most of the photos is the image folder.
    write_picture(tmp_path / "0.jpg")
    (tmp_path / "labels.json").write_text(json.dumps(content))
    data = Reader(coco, tmp_path)(train="train", val="val", val_fraction=0)
    assert targets(data.train) == [[1], [1], [1]]
    content["categories"].append({"id": 1, "name": "Cat"})
    (tmp_path / "labels.json").write_text(json.dumps(content))
    assert "Cat" in Reader(coco, tmp_path).fault(train="train", val="val")


def test_layout_of_2017_with_inner_folders(build, build_2017):
    root = build.root
    old = build()
    new = build_2017()
    assert new.val.dataset.name(0) == str(root / "val2017" / "\u00e4 b" / "000000000008.jpg")
    assert targets(new.train) == targets(old.train)
    assert targets(new.val) == targets(old.val)


def test_long_tail_list_has_ids_of_2017(build_2017, tmp_path):
    # COCO-MLT: `longtail2017/img_id.pkl` of its authors is a text file with one id per line.
    listing = tmp_path / "img_id.pkl"
    listing.write_text("30\n4\n")
    data = build_2017(train_list=str(listing))
    assert names(data.train) == ["000000000004.jpg", "000000000030.jpg"]
    assert targets(data.train) == [[1, 0, 1], [0, 1, 0]]
    assert len(data.val.dataset) == len(build_2017().val.dataset)


@pytest.mark.parametrize("project", ["cells", "dog"])
def test_roboflow_project_is_not_a_class(tmp_path, project):
    categories = [{"id": 0, "name": project, "supercategory": "none"}]
    categories += [{"id": 2, "name": "cat", "supercategory": project}]
    categories += [{"id": 1, "name": "dog", "supercategory": project}]
    for split, objects in {"train": {0: [2], 1: []}, "valid": {0: [1, 2]}}.items():
        content = coco_content(split, objects, categories)
        for image in content["images"]:
            write_picture(tmp_path / "data" / split / image["file_name"])
        (tmp_path / "data" / split / "_annotations.coco.json").write_text(json.dumps(content))

    data = Reader(coco, tmp_path / "data")(train="train", val="val", annotated_only=False)
    assert data.train.classes.names == ("dog", "cat")
    assert (targets(data.train), targets(data.val)) == ([[0, 1], [0, 0]], [[1, 1]])


@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("annotations/instances_default.json", "images"),  # CVAT
        ("annotations/instances_default.json", "images/default"),
        ("result.json", "images"),  # Label Studio
        ("annotations/instances_train.json", "images/train"),
        ("photos.json", ""),
    ],
)
def test_single_file_is_divided(tmp_path, file, folder):
    content = coco_content("own", {image: [(1, 7)[image % 2]] for image in range(10)})
    for image in content["images"]:
        write_picture(tmp_path / "data" / folder / image["file_name"])
    (tmp_path / "data" / file).parent.mkdir(exist_ok=True)
    (tmp_path / "data" / file).write_text(json.dumps(content))
    data = Reader(coco, tmp_path / "data")(train="train", val="val", val_fraction=0.2)
    files = [image["file_name"] for image in content["images"]]
    assert 0 < len(names(data.val)) < 5
    assert sorted(names(data.train) + names(data.val)) == files


@pytest.mark.parametrize(
    "prefix",
    ["/home/eva/", "C:\\own\\images\\", "../images/", "https://x.org/own/", "{root}/images/"],
)
def test_paths_of_another_computer(tmp_path, prefix):
    content = {"images": [], "annotations": []}
    content["categories"] = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    for number, name in enumerate(("a/1.jpg", "b/1.jpg"), 1):
        file = prefix.replace("{root}", str(tmp_path)) + name
        content["images"].append({"id": number, "file_name": file})
        content["annotations"].append({"image_id": number, "category_id": number})
        write_picture(tmp_path / "images" / name)
    # A photo of the same name elsewhere is not used.
    write_picture(tmp_path / "1.jpg")
    (tmp_path / "labels.json").write_text(json.dumps(content))
    data = Reader(coco, tmp_path)(train="train", val="val", val_fraction=0)
    files = [data.train.dataset.name(index) for index in range(2)]
    assert files == [str(tmp_path / "images" / name) for name in ("a/1.jpg", "b/1.jpg")]
    assert targets(data.train) == [[1, 0], [0, 1]]
    (tmp_path / "images" / "b").rename(tmp_path / "images" / "c")
    assert "1 of 2 listed images are absent" in Reader(coco, tmp_path).fault(
        train="train", val="val", val_fraction=0
    )


@pytest.mark.parametrize("prefix", ["", "/home/eva/"])
def test_names_of_photos_may_differ_in_case_and_unicode_form(tmp_path, prefix):
    content = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    files = {"Tu\u0308r.jpg": "T\u00fcr.jpg", "IMG_1.JPG": "img_1.jpg"}
    for number, (file, listed) in enumerate(files.items()):
        content["images"].append({"id": number, "file_name": f"{prefix}{listed}"})
        content["annotations"].append({"image_id": number, "category_id": 1})
        write_picture(tmp_path / "images" / file)
    (tmp_path / "labels.json").write_text(json.dumps(content))
    data = Reader(coco, tmp_path)(train="train", val="val", val_fraction=0)
    assert names(data.train) == list(files)


def test_no_class_is_an_error(build):
    write(build.root, "val2014", coco_content("val2014", {1: []}, []))
    assert "too few classes (none)" in build.fault(annotated_only=False)


def test_unused_val_fraction_is_logged_once(build, caplog):
    data = build(val_fraction=0.2)
    assert names(data.train)
    assert names(data.val)
    assert caplog.text.count("data.val_fraction") == 1


def test_sample_has_labels_of_annotations(sample_data, tmp_path):
    root = sample_data / "coco2014_mini"
    data = made(coco, root=str(root), cache_dir=str(tmp_path), annotated_only=False)
    file = sample_data / "label_embeddings" / "coco80_category_id_order.txt"
    assert list(data.val.classes.names) == file.read_text().split("\n")[:80]

    for split, part in (("train2014", data.train), ("val2014", data.val)):
        raw = json.loads(coco_file(root, split).read_text())
        names_of = {category["id"]: category["name"] for category in raw["categories"]}
        objects = {image["id"]: set() for image in raw["images"]}
        for annotation in raw["annotations"]:
            objects[annotation["image_id"]].add(names_of[annotation["category_id"]])
        assert len(objects) == {"train2014": 60, "val2014": 40}[split]
        for (_, expected), row in zip(sorted(objects.items()), targets(part), strict=True):
            found = {name for name, value in zip(part.classes.names, row, strict=True) if value}
            assert found == expected


# Zero-shot


def test_zero_shot_has_48_seen_and_17_unseen_classes(sample_data):
    folder = sample_data / "label_embeddings"
    every = (folder / "coco80_category_id_order.txt").read_text().split("\n")
    indices = json.loads((folder / "coco_zsl_48_17_cls_ids.json").read_text())
    assert tuple(every[index] for index in indices["train"]) == SEEN
    assert tuple(every[index] for index in indices["test"]) == UNSEEN
    assert (len(SEEN), len(UNSEEN), len({*SEEN, *UNSEEN})) == (48, 17, 65)


def test_zero_shot_labels_and_vectors(sample_data, tmp_path):
    vectors = sample_data / "label_embeddings" / "coco80_sdl_80x300.npy"
    place = {"root": str(sample_data / "coco2014_mini"), "cache_dir": str(tmp_path)}
    data = made(coco_zsl, **place, vectors=str(vectors), image_size=32)
    whole = made(coco, **place)

    every = whole.val.classes.names
    assert data.train.classes.names == tuple(name for name in every if name in SEEN)
    assert data.val.classes.names == tuple(name for name in every if name in {*SEEN, *UNSEEN})
    raw = np.load(vectors).astype(np.float32)
    for split in (data.train, data.val):
        rows = [every.index(name) for name in split.classes.names]
        assert np.array_equal(split.classes.word_vectors.numpy(), raw[rows])

    dense = np.array(targets(whole.val))
    unseen = dense[:, [every.index(name) for name in UNSEEN]].any(1)
    used = [every.index(name) for name in data.val.classes.names]
    assert np.array_equal(targets(data.val), dense[unseen][:, used])
    columns = [every.index(name) for name in data.train.classes.names]
    seen = np.array(targets(whole.train))[:, columns]
    assert np.array_equal(targets(data.train), seen[seen.any(1)])


def test_zero_shot_needs_all_classes(build):
    assert "airplane" in Reader(coco_zsl, build.root).fault()
