"""Choose the images to label next: `mldec next CHECKPOINT FOLDER --count 100 --out next.csv`.

An image is chosen if the model is uncertain about many of its classes, and if it differs from the
labeled images and from those chosen before. See docs/labeling.md.
"""

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from mldec import build, cli
from mldec.checkpoint.sources import is_exported
from mldec.data.types import ImageFiles, StoredImages
from mldec.errors import ConfigError, DataError, print_error, say
from mldec.evaluation.open import DEFAULT_THRESHOLD, chosen_settings
from mldec.evaluation.options import EvalOptions
from mldec.files.atomic import STANDARD_OUTPUT, check_targets, csv_lines, named, write_texts
from mldec.runtime.console import keep_output_clean, progress_bar
from mldec.runtime.signals import listening
from mldec.tools.predict import add_images, add_processing
from mldec.tools.predict.answers import Predictor, Row, Rule, counted
from mldec.tools.predict.decode import Item
from mldec.tools.predict.engine import TorchEngine, open_engine
from mldec.tools.predict.formats import SEPARATOR
from mldec.tools.predict.inputs import Inputs
from mldec.tools.predict.options import PredictOptions

MOST_UNCERTAIN = 5  # classes per image in the result
SMALLEST = 1e-7  # minimum distance of scores and thresholds from 0 and 1
BLOCK = 1024  # labeled images per product of features


def parser() -> argparse.ArgumentParser:
    """Return the parser of `mldec next`."""
    arguments = cli.command("next", "Choose the images to label next.")
    cli.add_model_options(arguments)
    add_images(arguments)
    labeled = arguments.add_argument_group("labeled images")
    labeled.add_argument(
        "--skip-labeled",
        action="store_true",
        help="leave out the images of the checkpoint's data set, and choose images that differ "
        "from them. Both pass through the network",
    )
    labeled.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="key=value",
        help="other settings of this data set, such as data.root=/data/mine",
    )
    results = arguments.add_argument_group("results")
    results.add_argument("--count", type=cli.positive, default=100, help="default 100")
    results.add_argument(
        "--out",
        default="-",
        metavar="FILE",
        help="CSV table, best image first: image, score, and the most uncertain classes with their "
        "scores; default: standard output",
    )
    add_processing(arguments)
    return arguments


def uncertainties(scores: np.ndarray, thresholds: Sequence[float] | None) -> np.ndarray:
    """Return the uncertainty of each class, float [N, K]: 0 is certain, and 1 at the threshold.

    The odds of a score are divided by the odds of the threshold. The uncertainty is twice the
    distance of the resulting probability from the nearer of 0 and 1.

    Scores are [N, K] in [0, 1]. Thresholds are None for one label per image, with a softmax: the
    uncertainty of a class is then its score divided by the highest score of the image, and for the
    highest score the ratio of the second highest to it.
    """
    if thresholds is None:
        order = np.sort(scores, axis=1)
        highest = order[:, -1:]
        second = order[:, -2:-1]
        return np.where(scores == highest, second, scores) / np.maximum(highest, SMALLEST)

    scores = np.clip(scores, SMALLEST, 1 - SMALLEST)
    limits = np.clip(np.asarray(thresholds, scores.dtype), SMALLEST, 1 - SMALLEST)
    odds = scores / (1 - scores) * (1 - limits) / limits
    probabilities = odds / (1 + odds)
    return 2 * np.minimum(probabilities, 1 - probabilities)


def choose(
    uncertainty: np.ndarray, features: np.ndarray, labeled: np.ndarray, count: int
) -> list[int]:
    """Choose images one by one, each with the largest product of uncertainty and distance.

    The distance is the squared distance to the nearest labeled or chosen image, of standardized
    features divided by their norm. This is the greedy k-center algorithm (Sener and Savarese,
    ICLR 2018), weighted by the uncertainty.

    Images have an uncertainty [N] and features [N, C], labeled images have features [M, C].
    Returns `count` indices, the best one first.
    """
    everything = np.concatenate([features, labeled])
    everything -= everything.mean(0)
    everything /= everything.std(0) + 1e-6
    everything /= np.linalg.norm(everything, axis=1, keepdims=True) + 1e-6
    features, labeled = np.split(everything, [len(features)])

    # The squared distance of unit vectors is at most 4, the value if no image is labeled.
    distance = np.full(len(features), 4.0, np.float32)
    for start in range(0, len(labeled), BLOCK):
        similarity = features @ labeled[start : start + BLOCK].T
        distance = np.minimum(distance, 2 - 2 * similarity.max(axis=1))

    chosen: list[int] = []
    for _ in range(count):
        gain = uncertainty * np.maximum(distance, 0)
        gain[chosen] = -1
        best = int(gain.argmax())
        chosen.append(best)
        distance = np.minimum(distance, 2 - 2 * features @ features[best])
    return chosen


def labeled_images(engine: TorchEngine, checkpoint: str, settings: list[str]) -> list[str]:
    """Return the paths of the training and validation images of a checkpoint's data set."""
    options = EvalOptions(checkpoint=checkpoint, settings=settings)
    _, parts = chosen_settings(engine.loaded, options)
    data = build.data(parts)
    paths = []
    for split in (data.train, data.val):
        dataset = split.dataset
        if not isinstance(dataset, StoredImages) or not isinstance(dataset.storage, ImageFiles):
            raise ConfigError("--skip-labeled: this data set has no image files; leave it out")
        paths += [dataset.name(index) for index in range(len(dataset))]
    # Without held-out images, both splits are the same.
    return list(dict.fromkeys(paths))


def table(
    rows: Sequence[Row], chosen: Sequence[int], uncertain: np.ndarray, names: Sequence[str]
) -> Iterator[list[str]]:
    """Yield the header and the row of each chosen image, in the form of predict's table."""
    has_separator = any(SEPARATOR in name for name in names)
    yield ["image", "score", "classes", "scores"]
    for index in chosen:
        scores = rows[index].scores
        assert scores is not None
        most = np.argsort(-uncertain[index], kind="stable")[:MOST_UNCERTAIN].tolist()
        classes = [names[column] for column in most]
        cell = json.dumps(classes) if has_separator else SEPARATOR.join(classes)
        values = SEPARATOR.join(repr(scores[column].item()) for column in most)
        yield [named(rows[index].image)["image"], f"{uncertain[index].sum():.4f}", cell, values]


def score(
    predictor: Predictor, labeled: Sequence[str], inputs: Iterable[Item]
) -> tuple[list[Row], int, int]:
    """Score labeled images and then the input images.

    Returns the rows of readable images, the number of labeled ones, and the number of errors.
    """
    items = chain((Item(path, path) for path in labeled), inputs)
    rows: list[Row] = []
    num_labeled = 0  # readable ones, which are the first rows
    errors = 0
    with listening() as stop:
        bar = progress_bar(predictor.rows(items, stop), desc="next", unit=" images")
        for number, row in enumerate(bar):
            if row.error is not None:
                print_error(row.error)
                errors += 1
                continue
            rows.append(row)
            num_labeled += number < len(labeled)
    return rows, num_labeled, errors


def run(args: argparse.Namespace) -> int:
    """Choose images and write the table; return the exit status, 1 if an image has an error."""
    check_targets(args.out)
    if args.out == STANDARD_OUTPUT:
        keep_output_clean()
    if args.data and not args.skip_labeled:
        raise ConfigError("--data: it has no effect without --skip-labeled; add it")
    if is_exported(args.checkpoint):
        raise ConfigError(f"{args.checkpoint}: exported files have no features; pass a checkpoint")
    options = PredictOptions.of(vars(args))
    inputs = Inputs(options.images, options.list, column=options.column, root=options.root)
    engine = open_engine(options)
    assert isinstance(engine, TorchEngine)
    labeled = []
    if args.skip_labeled:
        labeled = labeled_images(engine, args.checkpoint, args.data)
    known = {os.path.realpath(path) for path in labeled}
    left_out = 0  # number of labeled input images

    def unlabeled() -> Iterator[Item]:
        nonlocal left_out
        for item in inputs:
            if item.is_file and os.path.realpath(item.path) in known:
                left_out += 1
            else:
                yield item

    predictor = Predictor(
        engine,
        Rule(classes=engine.classes, content="scores"),
        batch_size=options.batch_size,
        workers=options.workers,
        draft=options.draft,
        features=True,
    )
    rows, num_labeled, errors = score(predictor, labeled, unlabeled())
    if len(rows) == num_labeled:
        counts = f"{left_out:,} are labeled, and {errors:,} have an error"
        raise DataError(f"no image is left: {counts}; add images, or correct the errors")

    features = np.stack([row.features for row in rows if row.features is not None])
    rows = rows[num_labeled:]
    scores = np.stack([row.scores for row in rows if row.scores is not None])
    thresholds = engine.thresholds
    if thresholds is None and not engine.classes.exclusive:
        thresholds = [DEFAULT_THRESHOLD] * len(engine.classes)
        print_error(
            f"{args.checkpoint} has no thresholds, so {DEFAULT_THRESHOLD} is used; "
            f"calibrate it with mldec calibrate"
        )
    uncertain = uncertainties(scores, thresholds)
    count = min(args.count, len(rows))
    chosen = choose(uncertain.sum(1), features[num_labeled:], features[:num_labeled], count)

    write_texts(args.out, csv_lines(table(rows, chosen, uncertain, engine.classes.names), "\n"))
    if args.out != STANDARD_OUTPUT:
        skipped = f", {left_out:,} others are labeled" if args.skip_labeled else ""
        say(f"{args.out}: {count:,} of {counted(len(rows))}{skipped}")
    if inputs.skipped:
        print_error(str(inputs.skipped))
    return int(errors > 0)


def main() -> None:
    """Run the command."""
    cli.run_command(parser().parse_intermixed_args, run)
