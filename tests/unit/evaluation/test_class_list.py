"""Class lists with synonyms, compared with scikit-learn and the zero-shot task."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import nn

from mldec.checkpoint import Loaded
from mldec.config.compose import compose
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, DataModule, Split, fixed_sample
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.evaluation.class_list import SelectedClasses, with_class_list
from mldec.evaluation.options import EvalOptions
from mldec.evaluation.run import evaluate
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator

CPU = torch.device("cpu")
IMAGES, WIDTH = 60, 12
NAMES = ("cat", "dog", "bird", "sofa", "boat", "bus")

# Without bird, and with synonyms of two classes.
LISTED = (("bus",), ("cat", "kitten", "pet cat"), ("sofa", "couch"), ("dog",), ("boat",))
TRAINED = ("cat", "dog", "couch")  # a synonym of sofa
UNSEEN_COLUMNS, SEEN_COLUMNS = [0, 4], [1, 2, 3]


class Random:
    """Random images with random labels."""

    def __len__(self):
        return IMAGES

    def load(self, index, rng):
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(256, (3, 4, 4), dtype=torch.uint8, generator=generator)
        return image, (torch.rand(len(NAMES), generator=generator) < 0.3).to(torch.int8)

    def name(self, index):
        return f"image {index}"


class Words(nn.Module):
    """Dot products of pixels and word vectors."""

    def forward(self, images, word_vectors):
        return images.flatten(1).float()[:, :WIDTH] @ word_vectors.T / 255


def vectors(names):
    """Return a fixed random vector for each name."""
    rows = []
    for name in names:
        generator = torch.Generator().manual_seed(sum(map(ord, name)) + len(name))
        rows.append(torch.randn(WIDTH, generator=generator))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def config():
    return compose(["+experiment=digits", "train.workers=0", "train.eval_batch_size=16"])


def module(evaluator=MultiLabelEvaluator, **classes):
    split = Split(Random(), Classes(NAMES, **classes))
    return DataModule(
        lambda: split,
        lambda: split,
        lambda classes: evaluator(len(classes)),
        EvalTransform(image_size=4),
    )


def loaded(config, names=TRAINED, **changes):
    classes = Classes(names, word_vectors=vectors(names) if names else torch.zeros(0, WIDTH))
    options = {"unseen": (), "metrics": {}, "weights": "raw", "path": Path("best.pt")}
    transform = EvalTransform(image_size=4)
    return Loaded(Words(), config, classes, transform, **(options | changes))


def listing(folder, listed=LISTED, **options):
    """Write a class list and the word vectors of its names; return the options."""
    file = folder / "classes.txt"
    file.write_text("\n".join("; ".join(names) for names in listed))
    names = [name for names in listed for name in names]
    np.save(folder / "words.npy", vectors(names).numpy())
    (folder / "words.txt").write_text("\n".join(names))
    given = {"class_list": str(file), "vectors": str(folder / "words.npy"), "seen": None}
    return EvalOptions(**{"checkpoint": "best.pt", **given, **options})


def best_scores():
    """Return the scores of the best names, and the labels."""
    samples = [fixed_sample(Random(), index) for index in range(IMAGES)]
    images = torch.stack([image for image, _ in samples])
    labels = np.stack([target.numpy() for _, target in samples])

    columns = []
    for names in LISTED:
        of_names = [Words()(images, vectors([name]))[:, 0].numpy() for name in names]
        columns.append(np.max(of_names, axis=0))
    return np.stack(columns, 1), labels[:, [NAMES.index(names[0]) for names in LISTED]]


def mean_ap(scores, labels, columns):
    return 100 * float(
        np.mean([average_precision_score(labels[:, k], scores[:, k]) for k in columns])
    )


def test_metrics_use_the_best_name_of_a_class(config, tmp_path):
    model, data = with_class_list(loaded(config), module(), listing(tmp_path))
    results = evaluate(model, data, config, device=CPU)
    metrics = results.metrics
    scores, labels = best_scores()

    assert data.val.classes.names == ("bus", "cat", "sofa", "dog", "boat")
    assert results.per_class["unseen"] == [1, 0, 0, 0, 1]
    assert results.images == IMAGES
    seen = mean_ap(scores, labels, SEEN_COLUMNS)
    unseen = mean_ap(scores, labels, UNSEEN_COLUMNS)
    assert metrics["seen_mAP"] == pytest.approx(seen)
    assert metrics["zsl_all_mAP"] == pytest.approx(unseen)
    assert metrics["gzsl_mAP"] == pytest.approx(mean_ap(scores, labels, range(5)))
    assert metrics["harmonic_mAP"] == pytest.approx(2 * seen * unseen / (seen + unseen))

    with_unseen = labels[:, UNSEEN_COLUMNS].any(1)
    assert 0 < with_unseen.sum() < IMAGES
    zsl = mean_ap(scores[with_unseen], labels[with_unseen], UNSEEN_COLUMNS)
    assert metrics["zsl_mAP"] == pytest.approx(zsl)


def test_targets_are_selected():
    class Partial(Random):
        def load(self, index, rng):
            return torch.zeros(3, 4, 4), torch.tensor([0, 1, -1, 1, 1, 0], dtype=torch.int8)

    assert fixed_sample(SelectedClasses(Partial(), [3, 2, 0, 1]), 0)[1].tolist() == [1, -1, 0, 1]


def test_vectors_of_the_checkpoint_have_precedence(config, tmp_path):
    args = listing(tmp_path, (("sofa", "couch"), ("bus",)), vectors=None)
    model, _ = with_class_list(loaded(config), module(word_vectors=-vectors(NAMES)), args)
    expected = torch.stack([-vectors(["sofa"])[0], vectors(["couch"])[0], -vectors(["bus"])[0]])
    assert torch.equal(model.word_vectors, expected)


def test_seen_classes_are_found_ignoring_case_or_from_a_file(config, tmp_path):
    def unseen(checkpoint, **options):
        _, data = with_class_list(checkpoint, module(), listing(tmp_path, **options))
        evaluator = data.evaluator()
        evaluator.update(torch.zeros(1, 5), torch.ones(1, 5))
        evaluator.compute()
        return evaluator.per_class()["unseen"]

    seen = tmp_path / "seen.txt"
    seen.write_text("bus\nCouch\n")
    assert unseen(loaded(config, ("CAT", "Boat", "dog"), unseen=("dog",))) == [1, 0, 1, 1, 0]
    assert unseen(loaded(config, unseen=None), seen=str(seen)) == [0, 1, 0, 1, 1]
    assert unseen(loaded(config, ())) == [1] * 5


KNOWN = {"classes": Classes(TRAINED)}
WIDE = {"classes": Classes(TRAINED, word_vectors=torch.ones(3, 5))}


@pytest.mark.parametrize(
    ("changes", "options", "error", "name"),
    [
        (KNOWN, {}, ConfigError, "--vectors"),
        (KNOWN, {"vectors": None}, DataError, "bus, boat"),
        ({"unseen": None}, {}, CheckpointError, "--seen"),
        (WIDE, {}, CheckpointError, "5-dim"),
        ({}, {"listed": (("cat",), ("sofas",))}, DataError, "'sofa'"),
        ({}, {"vectors": None}, DataError, "bus"),
        ({}, {"vectors": "nowhere.txt"}, DataError, r"nowhere\.txt"),
        ({}, {"exclusive": True}, ConfigError, "--class-list"),
    ],
)
def test_unfitting_class_list_raises_an_error(config, tmp_path, changes, options, error, name):
    evaluator = SingleLabelEvaluator if "exclusive" in options else MultiLabelEvaluator
    data = module(evaluator, exclusive=options.pop("exclusive", False))
    with pytest.raises(error, match=name):
        with_class_list(replace(loaded(config), **changes), data, listing(tmp_path, **options))
