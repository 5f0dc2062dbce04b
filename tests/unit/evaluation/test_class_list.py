"""Any class list with synonyms, against scikit-learn and the zero-shot task."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import nn

from mldec import build
from mldec.checkpoint import Loaded
from mldec.config.compose import compose
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, DataModule, Split, fixed_sample
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.evaluation.class_list import SelectedClasses, with_class_list
from mldec.evaluation.open import open_for_evaluation
from mldec.evaluation.options import EvalOptions
from mldec.evaluation.run import evaluate
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator

CPU = torch.device("cpu")
IMAGES, WIDTH = 60, 12
NAMES = ("cat", "dog", "bird", "sofa", "boat", "bus")

# Its own class list: bird is left out, and two classes have synonyms.
LISTED = (("bus",), ("cat", "kitten", "pet cat"), ("sofa", "couch"), ("dog",), ("boat",))
TRAINED = ("cat", "dog", "couch")  # sofa is seen by its second name
UNSEEN_COLUMNS, SEEN_COLUMNS = [0, 4], [1, 2, 3]


class Random:
    """Random images, each with random labels of `NAMES`."""

    def __len__(self):
        return IMAGES

    def load(self, index, rng):
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(256, (3, 4, 4), dtype=torch.uint8, generator=generator)
        return image, (torch.rand(len(NAMES), generator=generator) < 0.3).to(torch.int8)

    def name(self, index):
        return f"image {index}"


class Words(nn.Module):
    """The product of an image's pixels and of each word vector."""

    def forward(self, images, word_vectors):
        return images.flatten(1).float()[:, :WIDTH] @ word_vectors.T / 255


def vectors(names):
    """A fixed random vector for each name."""
    rows = [
        torch.randn(WIDTH, generator=torch.Generator().manual_seed(sum(map(ord, name)) + len(name)))
        for name in names
    ]
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
    word_vectors = vectors(names) if names else torch.zeros(0, WIDTH)
    arguments = {"unseen": (), **changes}
    return Loaded(
        Words(),
        config,
        Classes(names, word_vectors=word_vectors),
        EvalTransform(image_size=4),
        {},
        "raw",
        Path("best.pt"),
        **arguments,
    )


def listing(folder, listed=LISTED, **options):
    """Write a class list and the word vectors of its names; return the command line."""
    file = folder / "classes.txt"
    file.write_text("\n".join("; ".join(names) for names in listed))
    names = [name for names in listed for name in names]
    np.save(folder / "words.npy", vectors(names).numpy())
    (folder / "words.txt").write_text("\n".join(names))
    given = {"class_list": str(file), "vectors": str(folder / "words.npy"), "seen": None}
    return EvalOptions(**{"checkpoint": "best.pt", **given, **options})


def best_scores():
    """Return scores and labels of `LISTED`, class by class and name by name."""
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


def test_metrics_are_those_of_the_best_names(config, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        model, data = with_class_list(loaded(config), module(), listing(tmp_path))
    results = evaluate(model, data, config, device=CPU)
    metrics, (scores, labels) = results.metrics, best_scores()

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

    assert "leaves out 1 of 6 classes of the data: bird" in caplog.text
    assert "5 classes by 8 names, 3 seen and 2 unseen by best.pt" in caplog.text


def test_targets_are_those_of_the_classes():
    class Partial(Random):
        def load(self, index, rng):
            return torch.zeros(3, 4, 4), torch.tensor([0, 1, -1, 1, 1, 0], dtype=torch.int8)

    assert fixed_sample(SelectedClasses(Partial(), [3, 2, 0, 1]), 0)[1].tolist() == [1, -1, 0, 1]


def test_vectors_are_those_of_the_checkpoint_and_the_data(config, tmp_path):
    args = listing(tmp_path, (("sofa", "couch"), ("bus",)), vectors=None)
    model, _ = with_class_list(loaded(config), module(word_vectors=-vectors(NAMES)), args)
    # Those of the checkpoint come first: they are the ones that the model was trained with.
    expected = torch.stack([-vectors(["sofa"])[0], vectors(["couch"])[0], -vectors(["bus"])[0]])
    assert torch.equal(model.word_vectors, expected)


def test_names_of_the_training_count_without_case_or_from_a_file(config, tmp_path, caplog):
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

    # A singular of a name of the training is hardly unseen.
    unseen(loaded(config, ("boats", "cat")))
    assert "boat/boats" in caplog.text


@pytest.mark.parametrize(
    ("changes", "options", "error", "part"),
    [
        ({"classes": Classes(TRAINED)}, {}, ConfigError, "best.pt knows its own classes only"),
        (
            {"classes": Classes(TRAINED)},
            {"vectors": None},
            DataError,
            "classes.txt: best.pt knows no name of 2 of 5 classes: bus, boat; add a synonym",
        ),
        ({"unseen": None}, {}, CheckpointError, "are unknown; pass --seen FILE"),
        (
            {"classes": Classes(TRAINED, word_vectors=torch.ones(3, 5))},
            {},
            CheckpointError,
            "the checkpoint asks by word vectors of 5 numbers, the data has vectors of 12",
        ),
        ({}, {"listed": (("cat",), ("sofas",))}, DataError, "'sofas' .*; did you mean 'sofa'?"),
        ({}, {"vectors": None}, DataError, "5 of 8 names have no vector: bus, .* pass --vectors"),
        ({}, {"vectors": "nowhere.txt"}, DataError, "nowhere.txt"),
    ],
)
def test_what_does_not_fit_is_refused(config, tmp_path, changes, options, error, part):
    with pytest.raises(error, match=part):
        with_class_list(replace(loaded(config), **changes), module(), listing(tmp_path, **options))
    data = module(SingleLabelEvaluator, exclusive=True)
    with pytest.raises(ConfigError, match="--class-list: an image of this data has one label"):
        with_class_list(loaded(config), data, listing(tmp_path))


def test_a_model_of_known_classes_is_asked_by_names_and_synonyms(config, tmp_path):
    known = ("zebra", "Pet-Cat", "bus", "Couch", "dog", "kitten", "boat")

    class Tags(nn.Module):
        """The logits of the names as the class list writes them."""

        def forward(self, images, word_vectors=None):
            names = [name.lower().replace("-", " ") for name in known]
            return Words()(images, vectors(names))

    tagger = replace(loaded(config), model=Tags(), classes=Classes(known))
    model, data = with_class_list(tagger, module(), listing(tmp_path, vectors=None))
    results = evaluate(model, data, config, device=CPU)

    scores, labels = best_scores()
    # The tagger does not know "cat" and "sofa", but their synonyms.
    images = torch.stack([fixed_sample(Random(), index)[0] for index in range(IMAGES)])
    for column, names in ((1, ["kitten", "pet cat"]), (2, ["couch"])):
        scores[:, column] = Words()(images, vectors(names)).amax(1)
    assert data.val.classes.names == tuple(names[0] for names in LISTED)
    assert results.metrics["mAP"] == pytest.approx(mean_ap(scores, labels, range(5)))


def test_the_list_of_all_classes_has_the_numbers_of_the_zero_shot_task(tmp_path):
    sizes = ["data.train_images=1", "data.val_images=80", "head.embed_dim=32", "head.mlp_dim=32"]
    config = compose(["+experiment=digits_zsl", *sizes, "train.workers=0", "device=cpu"])
    parts = build.check(config)
    data = build.data(parts)
    trained, classes = data.train.classes, data.val.classes
    torch.manual_seed(0)
    checkpoint = Loaded(
        build.model(parts, trained, pretrained=False).eval(),
        build.recorded(config, parts),
        classes,
        data.transform,
        {},
        "raw",
        Path("best.pt"),
        unseen=tuple(name for name in classes.names if name not in trained.names),
    )

    def results(*settings, **options):
        given = EvalOptions(checkpoint="best.pt", settings=[*settings], **options)
        setup = open_for_evaluation(checkpoint, given)
        threshold = setup.logit_threshold()
        return evaluate(
            setup.network, setup.data, setup.config, device=CPU, logit_threshold=threshold
        )

    class_list = tmp_path / "classes.txt"
    class_list.write_text("\n".join(reversed(classes.names)))
    given = {"class_list": str(class_list), "vectors": None, "seen": None}
    own, listed = results(), results(**given)
    assert listed.per_class["unseen"] == own.per_class["unseen"][::-1]
    # The task leaves out the images without an unseen label, as zsl does here.
    for name in own.metrics:
        if name.startswith("zsl_") and "skip" not in name:
            assert listed.metrics[name] == pytest.approx(own.metrics[name]), name

    # At a threshold of the command line, which is not that of the data.
    strict = results(**given, threshold=0.99).metrics
    assert strict["zsl_mAP"] == listed.metrics["zsl_mAP"]
    assert strict["zsl_CR"] != listed.metrics["zsl_CR"]
