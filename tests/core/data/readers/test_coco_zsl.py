import json

import numpy as np
import pytest
import torch
from support import made

from mldec.data.readers.coco import SEEN, UNSEEN, coco, coco_zsl
from mldec.errors import DataError


@pytest.fixture
def build(sample_data, tmp_path):
    def build(**arguments):
        vectors = str(sample_data / "label_embeddings" / "coco80_sdl_80x300.npy")
        root = str(sample_data / "coco2014_mini")
        defaults = {"root": root, "vectors": vectors, "cache_dir": str(tmp_path), "image_size": 32}
        return made(coco_zsl, **{**defaults, **arguments})

    return build


def test_the_classes_are_those_of_the_file(sample_data):
    folder = sample_data / "label_embeddings"
    names = [
        line for line in (folder / "coco80_category_id_order.txt").read_text().split("\n") if line
    ]
    numbers = json.loads((folder / "coco_zsl_48_17_cls_ids.json").read_text())
    assert tuple(names[number] for number in numbers["train"]) == SEEN
    assert tuple(names[number] for number in numbers["test"]) == UNSEEN


def test_there_are_48_and_17_classes():
    assert (len(set(SEEN)), len(set(UNSEEN)), len({*SEEN, *UNSEEN})) == (48, 17, 65)


def test_labels_and_vectors_of_the_sample(build, sample_data, tmp_path):
    data = build()
    whole = made(
        coco, root=str(sample_data / "coco2014_mini"), cache_dir=str(tmp_path), image_size=32
    )
    every = whole.val.classes.names
    assert data.train.classes.names == tuple(name for name in every if name in SEEN)
    assert data.val.classes.names == tuple(name for name in every if name in {*SEEN, *UNSEEN})
    raw = np.load(sample_data / "label_embeddings" / "coco80_sdl_80x300.npy").astype(np.float32)
    for split in (data.train, data.val):
        for name, query in zip(split.classes.names, split.classes.queries, strict=True):
            assert torch.equal(query, torch.from_numpy(raw[every.index(name)]))
    dense = whole.val.dataset.labels.dense()
    unseen = dense[:, [every.index(name) for name in UNSEEN]].any(1)
    assert len(data.val.dataset) == unseen.sum() > 0
    used = [every.index(name) for name in data.val.classes.names]
    assert np.array_equal(data.val.dataset.labels.dense(), dense[unseen][:, used])
    assert len(build(val_images="all").val.dataset) == dense[:, used].any(1).sum()
    seen = whole.train.dataset.labels.dense()[
        :, [every.index(name) for name in data.train.classes.names]
    ]
    assert np.array_equal(data.train.dataset.labels.dense(), seen[seen.any(1)])


def test_classes_that_the_annotations_lack(tmp_path):
    (tmp_path / "annotations").mkdir()
    stated = {
        "images": [{"id": 1, "file_name": "a.jpg"}],
        "annotations": [],
        "categories": [{"id": 1, "name": "dog"}],
    }
    (tmp_path / "annotations" / "instances_val2014.json").write_text(json.dumps(stated))
    data = made(coco_zsl, root=str(tmp_path), vectors="v.npy", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(
        DataError, match="64 of the 65 classes are not in its annotations, such as 'airplane'"
    ):
        _ = data.val
