"""A small tree of files for each reader."""

import json
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from readers import Reader, write_picture
from scipy.io import savemat

from mldec.data import readers


def tree(name: str, folder: Path) -> Reader:
    """Write the tree of a reader, and return the reader with it."""
    TREES[name](folder / "data")
    return Reader(getattr(readers, name), folder / "data")


def write_texts(root: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8", newline="")


# MS-COCO: image id -> category ids of its objects. The ids are not sorted.

CATEGORIES = [
    {"id": 7, "name": "train"},
    {"id": 1, "name": "person"},
    {"id": 90, "name": "tooth brush"},
]
COCO = {"train2014": {30: [7], 4: [90, 1, 1], 12: [], 5: [1]}, "val2014": {8: [7, 90], 6: []}}


def coco_content(
    split: str, objects: Mapping[int, Sequence[int]], categories: Sequence[dict] = CATEGORIES
) -> dict[str, Any]:
    """Return the content of an "instances" file."""
    annotations = []
    for image, numbers in objects.items():
        for number in numbers:
            entry = {"id": len(annotations), "image_id": image, "category_id": number}
            annotations.append({**entry, "iscrowd": int(number == 90)})
    images = [{"id": image, "file_name": f"COCO_{split}_{image:012d}.jpg"} for image in objects]
    return {"images": images, "annotations": annotations, "categories": list(categories)}


def coco_file(root: Path, split: str) -> Path:
    return root / "annotations" / f"instances_{split}.json"


def write_coco(root: Path) -> None:
    for split, objects in COCO.items():
        content = coco_content(split, objects)
        write_texts(root, {f"annotations/instances_{split}.json": json.dumps(content)})
        for image in content["images"]:
            write_picture(root / split / image["file_name"], image["id"])


# Pascal VOC: image id -> (class, difficult). None omits the element, as in converted files.

VOC_SPLITS: dict[str, dict[str, list]] = {
    "trainval": {
        "000012": [("dog", 0), ("dog", 1)],
        "000005": [("chair", 1), ("person", 0)],
        "2008_000002": [("tvmonitor", None)],
        "000007": [],
    },
    "test": {
        "000020": [("cat", 1), ("bus", 0)],
        "000021": [("cat", 0)],
        "000022": [("bus", 1), ("bus", 1)],
    },
}


def voc_xml(objects: Sequence[tuple[str, Any]]) -> str:
    text = "<annotation><folder>VOC2007</folder><filename>x.jpg</filename>"
    for name, difficult in objects:
        mark = "" if difficult is None else f"<difficult>{difficult}</difficult>"
        # Only a direct child is the class of the object.
        text += f"<object><part><name>head</name></part><name>{name}</name>{mark}</object>"
    return text + "</annotation>\n"


def write_voc(root: Path, splits: Mapping[str, Mapping[str, Any]] = VOC_SPLITS) -> None:
    for split, images in splits.items():
        write_texts(root, {f"ImageSets/Main/{split}.txt": "".join(f"{i}\n" for i in images)})
        for image, objects in images.items():
            write_texts(root, {f"Annotations/{image}.xml": voc_xml(objects)})
            write_picture(root / "JPEGImages" / f"{image}.jpg", len(objects))


# Open Images in both formats

STATEMENTS = "ImageID,Source,LabelName,Confidence\n"
OPENIMAGES = {
    "annotations/oidv6-classes-trainable.txt": "/m/0c\n/m/0a\n/m/0b\n/m/0d\n",
    "annotations/oidv6-class-descriptions.csv": "LabelName,DisplayName\n"
    '/m/0a,"Ducks, geese and ""swans"""\n/m/0b,Ball\n/m/0c,Ball\n/m/0z,Ball\n',
    "annotations/oidv6-train-annotations-human-imagelabels.csv": STATEMENTS
    + "0c00000000000004,verification,/m/0d,1\n",
    "annotations/test-annotations-human-imagelabels.csv": STATEMENTS
    + """\
0b00000000000001,verification,/m/0a,1
0b00000000000001,crowdsource-verification,/m/0b,0
0a00000000000002,verification,/m/0z,1
0b00000000000001,verification,/m/0c,1.0
0a00000000000003,verification,/m/0a,0.0
0a00000000000003,verification,/m/0a,1
0a00000000000003,verification,/m/0c,1
0a00000000000003,verification,/m/0c,1
""",
}
MIIL = """\
image_id,class_list,class_list_neg,split
train/b.jpg,"['/m/0b', '/m/0a']","['/m/0c']",train
train/a.jpg,[],[],train
test/c.jpg,"['/m/0b','/m/0b', ""/m/0d""]","['/m/0a' , '/m/0b']",val
train\\d.jpg,"[ ]","['/m/0c']",train
"""


def write_openimages(root: Path) -> None:
    write_texts(root, OPENIMAGES)
    for name in ("test/0b00000000000001", "test/0a00000000000002", "test/0a00000000000003"):
        write_picture(root / f"{name}.jpg")
    write_picture(root / "train" / "0c00000000000004.jpg")


def write_miil(root: Path) -> None:
    write_texts(root, {"data.csv": MIIL})
    for name in ("train/a", "train/b", "train/d", "test/c"):
        write_picture(root / f"{name}.jpg")


# NUS-WIDE: (path, labels, split); the classes are cat, cloud, clouds, dog, sky

NUSWIDE = [
    ("images/a.jpg", "[sky, dog]", "train"),
    ("images/b.jpg", "['sky', 'cat']", "train"),
    ("images/c.jpg", "[cat]", "train"),
    ("images/d.jpg", "[]", "train"),
    ("images\\e.jpg", "[clouds, sky, cloud]", "val"),
    ("images/f.jpg", "['dog']", "val"),
    ("images/g.jpg", "['cat', 'cat']", "val"),
    ("images/h.jpg", "", "val"),
    ("images/i.jpg", "[whale]", "test"),
]
UNSEEN = ["clouds", "cat"]
VECTORS = torch.arange(1.0, 16.0).reshape(3, 5)


def nuswide_csv(rows: Sequence[tuple[str, str, str]]) -> str:
    lines = [f'{file},"{labels}",{split}\n' for file, labels, split in rows]
    return "filepath,label,split_name\n" + "".join(lines)


def write_nuswide(root: Path) -> None:
    text = nuswide_csv(NUSWIDE)
    roles = json.dumps({"test class": UNSEEN})
    texts = {"data.csv": text, "nus_wid_data.csv": text, "benchmark_81_v0.json": roles}
    write_texts(root, texts)
    for letter in "abcdefgh":
        write_picture(root / "images" / f"{letter}.jpg")
    torch.save(VECTORS, root / "wordvec_array.pth")


# Official lists: image -> (concepts, tags). The tag "cat" is also a concept.

CONCEPTS, TAGS = ["cat", "sea"], ["sky", "cat", "dog"]
OFFICIAL = {
    "Train": {
        "actor/0001_11.jpg": ("10", "100"),
        "actor/0002_12.jpg": ("11", "010"),
        "b/0003_13.jpg": ("00", "101"),
    },
    "Test": {"b/0001_21.jpg": ("01", "110"), "actor/0009_22.jpg": ("00", "001")},
}


def write_official(root: Path) -> None:
    texts = {
        "ConceptsList/Concepts81.txt": "\n".join(CONCEPTS) + "\n",
        "NUS_WID_Tags/TagList1k.txt": "\r\n".join(TAGS) + "\r\n",
    }
    for split, images in OFFICIAL.items():
        listed = [path.replace("/", "\\") + "\r\n" for path in images]
        texts[f"ImageList/{split}Imagelist.txt"] = "".join(listed)
        tags = ["\t".join(of_image) + "\t\n" for _, of_image in images.values()]
        texts[f"NUS_WID_Tags/{split}_Tags1k.dat"] = "".join(tags)
        for place, concept in enumerate(CONCEPTS):
            lines = [of_image[place] + "\n" for of_image, _ in images.values()]
            name = f"Groundtruth/TrainTestLabels/Labels_{concept}_{split}.txt"
            texts[name] = "".join(lines)
        for path in images:
            write_picture(root / "Flickr" / path)
    write_texts(root, texts)
    torch.save(torch.arange(1.0, 13.0).reshape(3, 4), root / "wordvec_array.pth")


# Single-label data

WNIDS = ["n01440764", "n02119789", "n03000684"]  # tench, kit fox, chain saw: 0, 278, 491
CARS = ["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "Ram C/V Cargo Van Minivan 2012"]
CARS_TRAIN = [("00001.jpg", 3), ("00002.jpg", 1)]
CARS_TEST = [("00001.jpg", 2), ("00002.jpg", 3), ("00003.jpg", 3)]
CIFAR = ["apple", "aquarium_fish", "baby"]
CIFAR_LABELS = {"train": [2, 0, 1, 1], "test": [1, 2]}


def write_folders(root: Path) -> None:
    for split, counts in {"train": (3, 2, 1), "val": (1, 2, 0)}.items():
        for name, count in zip(("cat", "dog", "eel"), counts, strict=True):
            for number in range(count):
                write_picture(root / split / name / f"{number}.JPG")


def write_imagenet(root: Path) -> None:
    for number, wnid in enumerate(WNIDS):
        write_picture(root / "train" / wnid / f"{wnid}_7.JPEG")
        write_picture(root / "val" / wnid / f"ILSVRC2012_val_{10 - number:08d}.JPEG")


def structs(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return a MATLAB struct array."""
    array = np.zeros((1, len(rows)), [(name, object) for name in rows[0]])
    for number, row in enumerate(rows):
        array[0, number] = tuple(row.values())
    return array


def write_annotations(path: Path, rows: Sequence[tuple[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = [{"bbox_x1": 1, "class": label, "fname": name} for name, label in rows]
    savemat(path, {"annotations": structs(fields)})


def write_cars(root: Path) -> None:
    write_annotations(root / "devkit" / "cars_train_annos.mat", CARS_TRAIN)
    write_annotations(root / "cars_test_annos_withlabels.mat", CARS_TEST)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": np.array(CARS, object)[None]})
    # The test folder is nested, as in the Kaggle copy.
    for folder, rows in (("cars_train", CARS_TRAIN), ("cars_test/cars_test", CARS_TEST)):
        for number, (name, _) in enumerate(rows):
            write_picture(root / folder / name, 50 * number)


class Python2(pickle._Pickler):
    """Pickler of Python 2: byte strings, and flags as 0 and 1."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_text(self, value: Any) -> None:
        data = value.encode("latin1") if isinstance(value, str) else value
        self.write(b"T" + struct.pack("<i", len(data)) + data)
        self.memoize(value)

    def save_flag(self, value: Any) -> None:
        self.save_long(int(value))

    dispatch[str] = dispatch[bytes] = save_text
    dispatch[bool] = save_flag


def python2(content: Any) -> bytes:
    stream = BytesIO()
    Python2(stream, 2).dump(content)
    return stream.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def cifar_content(split: str) -> dict[str, Any]:
    labels = CIFAR_LABELS[split]
    rng = np.random.default_rng(len(labels))
    pixels = rng.integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    return {"data": pixels, "fine_labels": labels, "batch_label": split}


def write_cifar(root: Path, form: Callable[[Any], bytes] = python2) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True, exist_ok=True)
    for split in CIFAR_LABELS:
        (folder / split).write_bytes(form(cifar_content(split)))
    (folder / "meta").write_bytes(form({"fine_label_names": CIFAR}))


# Multi-label data of lists and tables

CSV = """\
path,labels,split
a/1.png,dog;cat,train
a/2.png,,train
"b/x, y.png","eel ; dog",train
b/4.png,cat,val
b/5.png,dog,test
"""
VG_LABELS = {"1.jpg": [3, 0], "20.jpg": [], "300.jpg": [499], "4.jpg": [7, 3]}


def write_csv(root: Path) -> None:
    write_texts(root, {"data.csv": CSV})
    for name in ("a/1.png", "a/2.png", "b/x, y.png", "b/4.png", "b/5.png"):
        write_picture(root / name)


def write_vg500(root: Path) -> None:
    texts = {
        "train_list_500.txt": "300.jpg\r\n1.jpg\r\n20.jpg",
        "test_list_500.txt": "4.jpg\n",
        "vg_category_500_labels_index.json": json.dumps(VG_LABELS),
    }
    write_texts(root, texts)
    for name in VG_LABELS:
        write_picture(root / "VG_100K" / name)


# CUB-200-2011 with three attributes: image -> (is in training, attributes). Certainties and times
# follow, and two lines of the official file have more fields.

CUB_ATTRIBUTES = ["has_bill_shape::dagger", "has_size::small_(5_-_9_in)", "has_size::large"]
CUB = {
    "002.Crow/Crow_0003_9.jpg": (1, "101"),
    "001.Albatross/Albatross_0046_18.jpg": (0, "010"),
    "001.Albatross/Albatross_0009_34.jpg": (1, "000"),
    "002.Crow/Crow_0130_1.jpg": (0, "111"),
}


def write_cub(root: Path, content: Mapping[str, tuple[int, str]] = CUB) -> None:
    names = [f"{number} {name}\n" for number, name in enumerate(CUB_ATTRIBUTES, 1)]
    images, split, labels = [], [], []
    for number, (file, (is_train, attributes)) in enumerate(content.items(), 1):
        images.append(f"{number} {file}\n")
        split.append(f"{number} {is_train}\n")
        for attribute, present in enumerate(attributes, 1):
            extra = " 0" if number == attribute else ""
            labels.append(f"{number} {attribute} {present} {attribute}{extra} 27.7080\n")
        write_picture(root / "CUB_200_2011" / "images" / file, red=number)
    texts = {
        "attributes.txt": "".join(names),
        "CUB_200_2011/images.txt": "".join(images),
        "CUB_200_2011/train_test_split.txt": "".join(split),
        "CUB_200_2011/attributes/image_attribute_labels.txt": "".join(labels),
    }
    write_texts(root, texts)


# YOLO: image -> label file or None, in the folders of a Roboflow export

YOLO_YAML = """\
train: ../train/images
val: ../valid/images
test: ../test/images
nc: 3
names: [dog, cat, 7]
roboflow: {license: CC BY 4.0}
"""
YOLO = {
    "train/a.jpg": "1 0.5 0.5 0.25 0.25\r\n0 0.1 0.1 0.2 0.1 0.2 0.2\r\n1 0.2 0.2 0.1 0.1\r\n",
    "train/b.PNG": "",
    "train/c/d.rf.0f.jpg": "\n2.000000\n",
    "train/e.jpg": None,
    "valid/f.jpg": "0 0.5 0.5 1 1",
    "test/g.jpg": "2 0.5 0.5 1 1",
    "test/h.jpg": "0\n1\n",
}


def write_yolo(root: Path) -> None:
    write_texts(root, {"data.yaml": YOLO_YAML})
    for image, text in YOLO.items():
        split, _, name = image.partition("/")
        write_picture(root / split / "images" / name)
        if text is not None:
            label_file = Path(split, "labels", name).with_suffix(".txt")
            write_texts(root, {str(label_file): text})


# Labeling tools


def choices(*names: str, kind: str = "choices", **extra: Any) -> dict[str, Any]:
    """Return an annotation of Label Studio."""
    value = {kind: list(names)}
    result = {"type": kind, "from_name": "choice", "to_name": "image", "value": value}
    return {"result": [result] if names else [], "was_cancelled": False, **extra}


TASKS = [
    {"data": {"image": "/data/upload/3/0a1b2c3d-a.jpg"}, "annotations": [choices("dog", "cat")]},
    {"data": {"image": "/data/local-files/?d=photos/more/b%20c.jpg"}, "annotations": [choices()]},
    {"data": {"image": "https://host/bucket/d.jpg?x=1"}, "annotations": [choices("cat")]},
    {"data": {"image": "e.jpg"}, "annotations": [choices("dog", was_cancelled=True)]},
    {"data": {"image": "s3://bucket/f.jpg"}, "annotations": [choices("dog")]},
]


def write_label_studio(root: Path) -> None:
    write_texts(root, {"export.json": json.dumps(TASKS)})
    for name in ("a.jpg", "more/b c.jpg", "d.jpg", "e.jpg", "f.jpg"):
        write_picture(root / name)


CVAT = """\
<?xml version="1.0" encoding="utf-8"?>
<annotations><version>1.1</version>
<meta><job><labels><label><name>dog</name><type>tag</type></label>
<label><name>cat</name><type>any</type></label><label><name>box</name><type>rectangle</type></label>
</labels></job></meta>
<image id="0" name="a.jpg" subset="Train"><tag label="cat" source="manual"/>
<tag label="dog" source="manual"/></image>
<image id="1" name="more/b.jpg" subset="Train">
<box label="box" xtl="0" ytl="0" xbr="1" ybr="1"/></image>
<image id="2" name="c.jpg" subset="Train">
<tag label="dog"><attribute name="x">1</attribute></tag></image>
<image id="3" name="d.jpg" subset="Val"><tag label="cat"/></image>
</annotations>
"""


def write_cvat(root: Path) -> None:
    write_texts(root, {"annotations.xml": CVAT})
    for name in ("a.jpg", "more/b.jpg", "Train/c.jpg", "Val/d.jpg"):
        write_picture(root / "images" / name.lower())


FIFTYONE = {
    "train": {"a": ["dog", "cat"], "more/b": [{"label": "cat", "confidence": 0.5}], "c": None},
    "val": {"d": "dog"},
}


def write_fiftyone(root: Path) -> None:
    for split, labels in FIFTYONE.items():
        content = {"classes": ["dog", "cat"], "labels": labels}
        write_texts(root, {f"{split}/labels.json": json.dumps(content)})
        for key in labels:
            write_picture(root / split / "data" / f"{key}.jpg")


TREES: dict[str, Callable[[Path], None]] = {
    "cars": write_cars,
    "cifar100": write_cifar,
    "coco": write_coco,
    "csv_table": write_csv,
    "cub": write_cub,
    "cvat": write_cvat,
    "fiftyone": write_fiftyone,
    "label_studio": write_label_studio,
    "folders": write_folders,
    "imagenet": write_imagenet,
    "nuswide81": write_nuswide,
    "nuswide_official": write_official,
    "nuswide_zsl": write_nuswide,
    "openimages": write_openimages,
    "openimages_miil": write_miil,
    "vg500": write_vg500,
    "voc": write_voc,
    "yolo": write_yolo,
}
