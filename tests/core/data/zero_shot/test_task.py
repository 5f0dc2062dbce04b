"""Zero-shot: which classes and images are learnt from, and which are evaluated on."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import made

from mldec.data.readers.coco import coco_zsl
from mldec.data.readers.nuswide import nuswide_official, nuswide_zsl
from mldec.data.table import encode_paths, from_dense
from mldec.data.tasks import ZeroShot, neighbours, split_classes
from mldec.data.types import Classes, ImageFiles, StoredImages, VectorOrigin
from mldec.data.word_vectors import WordVectors
from mldec.errors import ConfigError, DataError
from mldec.evaluators.zero_shot import ZeroShotEvaluator

NAMES = ("ant", "bee", "cat", "dogs")
SEEN, UNSEEN = [0, 2], [1, 3]
VECTORS = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
WORDS = WordVectors(NAMES, VECTORS, VectorOrigin("v.txt", "0" * 64))
DENSE = np.array([[1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]], np.int8)


def task(**changed: Any) -> ZeroShot:
    settings: dict[str, Any] = {
        "roles": lambda names: (SEEN, UNSEEN),
        "vectors": lambda names: WORDS,
        "val_images": "unseen",
        "where": "/data (see there)",
    }
    return ZeroShot(**{**settings, **changed})


@pytest.mark.parametrize("reader", [nuswide_zsl, nuswide_official, coco_zsl])
def test_every_reader_passes_its_threshold_on(reader: Any, tmp_path: Path) -> None:
    (tmp_path / "some file").touch()
    with pytest.raises(ConfigError, match=r"threshold.*1\.5"):
        made(reader, root=str(tmp_path), threshold=1.5)


def test_the_threshold_reaches_the_evaluator() -> None:
    low, high = (task(threshold=value).evaluator(Classes(NAMES)) for value in (0.5, 0.75))
    for evaluator in (low, high):
        evaluator.update(torch.ones(1, 4), torch.ones(1, 4))  # probability 0.73
    assert (low.compute()["zsl_OR"], high.compute()["zsl_OR"]) == (100, 0)


def images(dense: np.ndarray = DENSE) -> StoredImages:
    files = encode_paths([str(number) for number in range(len(dense))])
    return StoredImages(ImageFiles(Path("/"), files, ""), from_dense(dense), NAMES)


def test_training_is_of_images_with_a_seen_class_and_of_seen_classes() -> None:
    used, classes = task().training(images())
    assert classes.names == used.classes == ("ant", "cat")
    assert classes.queries is not None
    assert torch.equal(classes.queries, VECTORS[SEEN])
    assert classes.origin == WORDS.origin
    assert [used.storage.name(index) for index in range(len(used))] == ["/0", "/2"]
    assert used.labels.dense().tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(("val_images", "rows"), [("unseen", [0, 1]), ("all", [0, 1, 2, 3])])
def test_validation_is_of_all_classes(
    val_images: str, rows: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mldec"):
        used, classes = task(val_images=val_images).validation(images())
    assert classes.names == NAMES
    assert classes.queries is VECTORS
    assert classes.origin == WORDS.origin
    assert used.labels.dense().tolist() == DENSE[rows].tolist()
    text = f"zero-shot: 2 of 4 validation images have an unseen class, {len(rows)} are used"
    assert caplog.messages == [text]


def test_the_evaluator_knows_the_unseen_classes() -> None:
    whole = task(val_images="all")
    _, classes = whole.validation(images())
    evaluator = whole.evaluator(classes)
    assert isinstance(evaluator, ZeroShotEvaluator)
    assert evaluator.is_unseen.tolist() == [False, True, False, True]
    assert evaluator.all_images


def test_roles_and_vectors_are_read_once() -> None:
    asked = []

    def vectors(names: Any) -> WordVectors:
        asked.append(names)
        return WORDS

    whole = task(vectors=vectors)
    whole.training(images())
    whole.evaluator(whole.validation(images())[1])
    assert asked == [NAMES]


def test_splits_without_a_class_of_their_kind() -> None:
    only_seen = images(DENSE * np.array([1, 0, 1, 0], np.int8))
    with pytest.raises(DataError, match=r"^/data \(see there\): 0 of 4 validation images have an"):
        task(val_images="all").validation(only_seen)
    only_unseen = images(DENSE * np.array([0, 1, 0, 1], np.int8))
    with pytest.raises(DataError, match=r"^/data \(see there\): 0 of 4 training images have a"):
        task().training(only_unseen)
    with pytest.raises(ValueError, match="val_images is 'some': it must be unseen or all"):
        task(val_images="some")


def test_twins_across_the_split_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    ants = StoredImages(images().storage, images().labels, ("dog", "bee", "cat", "dogs"))
    task().validation(ants)
    assert "1 of 2 unseen classes have a seen singular or plural: dogs/dog" in caplog.text


def test_roles_are_indices_in_ascending_order() -> None:
    for unseen in (["dogs", "bee"], ["bee", "dogs"]):
        assert split_classes(NAMES, unseen=unseen, seen=None, where="") == (SEEN, UNSEEN)
        found = split_classes(NAMES, unseen=unseen, seen=["cat", "ant"], where="")
        assert found == (SEEN, UNSEEN)


@pytest.mark.parametrize(
    ("unseen", "seen", "expected"),
    [
        (["bee", "bee"], None, "1 classes are named twice: bee"),
        (["bee"], ["ant", "cat", "dogs", "bee"], "1 classes are both seen and unseen: bee"),
        (["bee", "eel"], None, "1 classes do not occur in the data: eel"),
        (["bee"], ["ant"], "2 classes of the data are neither seen nor unseen: cat, dogs"),
        ([], None, "4 seen and 0 unseen classes; at least one of each is needed"),
        (list(NAMES), None, "0 seen and 4 unseen classes"),
    ],
)
def test_roles_that_cannot_be(unseen: list[str], seen: list[str] | None, expected: str) -> None:
    with pytest.raises(DataError, match=f"^a.json: {expected}"):
        split_classes(NAMES, unseen=unseen, seen=seen, where="a.json")


def test_the_nearest_seen_classes_of_each_unseen_one() -> None:
    train = Classes(("ant", "cat"), queries=VECTORS[SEEN])
    table = neighbours(train, Classes(NAMES, queries=VECTORS))
    assert {name: near[0][0] for name, near in table.items()} == {"bee": "ant", "dogs": "cat"}
    assert neighbours(Classes(("ant", "cat")), Classes(NAMES)) == {}
