"""Evaluate a checkpoint: `mldec evaluate best.pt [data.root=...] [--json FILE]`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from mldec import cli
from mldec.errors import CheckpointError, ConfigError, log, say
from mldec.evaluation.options import EvalOptions, option, whole
from mldec.evaluation.output import is_count, meaning
from mldec.files.atomic import STANDARD_OUTPUT, check_targets, write_json, write_result

# torch is imported late, so that --help and argument errors are fast.
if TYPE_CHECKING:
    from mldec.evaluation.output import Results

MOST_LISTED = 30  # with more classes, per-class values are not printed


def two_counts(value: Sequence[Any]) -> tuple[int, int]:
    """Convert two numbers of images."""
    low, high = map(whole, value)
    return low, high


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(EvalOptions):
    """The options of the command."""

    metrics: str | None = option(
        "all: also compute LRAP, coverage, ranking loss, one-error, AUROC, F1 per image, "
        "exact-match ratio and Hamming loss",
        choices=("all",),
    )
    groups: Sequence[int] | None = option(
        "also compute the mAP of head, medium and tail classes, with at least HIGH, LOW to "
        "HIGH - 1 and fewer than LOW training images; reads the training labels",
        two_counts,
        type=int,
        nargs=2,
        metavar=("LOW", "HIGH"),
    )
    json: str | None = option("write metrics and per-class values", metavar="FILE")
    csv: str | None = option("write one row per class", metavar="FILE")
    write_classes: str | None = option(
        "write the class names of the checkpoint, one per line, without an evaluation",
        metavar="FILE",
    )


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `mldec evaluate`."""
    arguments = cli.command(
        "evaluate", "Evaluate a checkpoint on the data of its config; key=value changes settings."
    )
    cli.add_model_options(arguments)
    cli.add_settings(arguments)
    names = ["views", "compile", "threshold", "class_list", "vectors", "seen"]
    names += ["metrics", "groups", "json", "csv", "write_classes"]
    cli.add_options(arguments, EvaluateOptions, *names)
    return arguments


def evaluate(options: EvaluateOptions) -> dict[str, Any] | None:
    """Evaluate a checkpoint, print the results and write the files.

    Returns:
        The content of --json. None on other ranks than 0, and with --write-classes.
    """
    check_targets(json=options.json, csv=options.csv, txt=options.write_classes)

    from mldec.data.loader import labels_of
    from mldec.evaluation import run as evaluation
    from mldec.evaluation.left_out import SOURCE, StoredLogits
    from mldec.evaluation.open import load_checkpoint, open_for_evaluation
    from mldec.runtime import distributed
    from mldec.runtime.console import progress_bar
    from mldec.runtime.devices import memory_format
    from mldec.runtime.environment import explain_out_of_memory

    loaded = load_checkpoint(options)
    if options.write_classes:
        names = loaded.classes.names
        if not names:
            fault = f"{options.checkpoint} has no class names"
            raise CheckpointError(f"--write-classes: {fault}; leave it out")
        write_result(options.write_classes, "".join(f"{name}\n" for name in names))
        if options.write_classes != STANDARD_OUTPUT:
            count = f"{len(names):,} class names of {options.checkpoint}"
            say(f"wrote {count} to {options.write_classes}")
        return None

    setup = open_for_evaluation(loaded, options)
    config = setup.config
    device = setup.device
    classes = setup.data.val.classes
    if options.groups and (classes.exclusive or setup.data.train.classes.names != classes.names):
        raise ConfigError(
            "--groups: it requires multi-label data with equal classes in both splits; leave it out"
        )
    with distributed.processes(device):
        is_hidden = not distributed.is_main()
        order = memory_format(channels_last=config.train.channels_last)
        with explain_out_of_memory(lambda: evaluation.memory_advice(config, device)):
            scored = setup.scored_data()
            results = evaluation.evaluate(
                setup.network.to(device).to(memory_format=order),
                scored,
                config,
                device=device,
                progress=partial(progress_bar, desc="evaluate", hidden=is_hidden),
                logit_threshold=setup.logit_threshold(),
                compiled=options.compile,
                all_metrics=options.metrics == "all",
            )

        if options.groups:
            positives = labels_of(setup.data.train).counts()
            bounds = sorted(options.groups)
            results.metrics.update(evaluation.metrics_by_frequency(results, positives, *bounds))
        names = classes.names
        if setup.thresholds is not None:
            repeats = len(names) // len(setup.thresholds)
            results.per_class["threshold"] = setup.thresholds * repeats
        if not distributed.is_main():
            return None
        source = SOURCE if isinstance(scored.val.dataset, StoredLogits) else ""
        return print_results(results, loaded.weights, options, names, source)


def print_results(
    results: "Results",
    weights: str,
    options: EvaluateOptions,
    names: tuple[str, ...],
    source: str,
) -> dict[str, Any]:
    """Print the results of K classes, write --json and --csv, and return the content of --json.

    `source` is the origin of the metrics if the model did not score the images, or "".
    """
    from mldec.evaluation.output import left_out, report, to_csv

    for line in left_out(results.bad, results.images):
        log.warning(line)
    images = f"{results.images:,} images{f' ({source})' if source else ''}"
    say(f"{options.checkpoint} ({weights} weights) on {images}, percent:")
    say(*table(results.metrics))
    if len(names) <= MOST_LISTED:
        say(*class_table(results.per_class, names))

    content = report(results, weights, options.checkpoint, names)
    if source:
        content["source"] = source
    if options.views:
        content["views"] = options.views
    if options.class_list:
        content |= {"class_list": options.class_list, "vectors": options.vectors}
    if options.json:
        write_json(options.json, content)
    if options.csv:
        write_result(options.csv, to_csv(results, names))
    return content


def table(metrics: dict[str, float]) -> list[str]:
    """Format the metrics as lines, grouped by heading."""
    width = max(map(len, metrics))
    groups: dict[str, list[str]] = {}
    for name, value in metrics.items():
        decimals = 0 if is_count(name) else 3
        line = f"  {name:<{width}}  {value:7.{decimals}f}"
        heading = ""
        if "@" in name:
            heading = f"of the {name.partition('@')[2]} highest-ranked classes of an image:"
        elif is_count(name):
            heading = "number of classes:"
        else:
            line = f"{line}  {meaning(name)}".rstrip()
        groups.setdefault(heading, [heading]).append(line)
    return [line for line in chain.from_iterable(groups.values()) if line]


def class_table(per_class: dict[str, list[float]], names: tuple[str, ...]) -> list[str]:
    """Format the per-class values as a header and one line per class."""
    from mldec.evaluation.output import as_text

    labels = ("class",) + names
    width = max(map(len, labels))
    lines = [f"  {name:<{width}}" for name in labels]
    for title, values in per_class.items():
        form = ".3f" if title == "threshold" else ".1f"
        cells = [title] + as_text(values, form)
        width = max(map(len, cells))
        for row, cell in enumerate(cells):
            lines[row] += f"  {cell:>{width}}"
    return lines


def main() -> None:
    """Run the command."""
    cli.run_command(parser().parse_intermixed_args, evaluate, EvaluateOptions)


if __name__ == "__main__":
    main()
