"""Publish a checkpoint on the Hugging Face Hub, where `hf:OWNER/NAME` names it ever after.

The repository gets three files: model.safetensors (one set of weights), config.json (classes, input
transform, thresholds, settings and the sha256 of the weights) and README.md, a model card of what
is known. Nothing of the training state is in them, and of paths of this machine the last part only.

Metrics with intervals and a table of classes come from --results, a file that
`mldec.report --json` wrote (without intervals also that of `mldec.evaluate --json`).

Log in first with `hf auth login`, or set HF_TOKEN. --dry-run FOLDER writes the files there, asks no
network, and the folder can be used as a checkpoint.
"""

import argparse
import logging
import math
import re
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import EvalResult, ModelCardData
from timm.models import get_pretrained_cfg

from mldec.backbones import TimmBackbone
from mldec.checkpoint import (
    Calibration,
    Checkpoint,
    Loaded,
    is_tower,
    load_model,
    published,
    sources,
    to_store,
)
from mldec.checkpoint.sources import HUB
from mldec.data.text_encoder import PREFIX
from mldec.data.types import Classes, VectorOrigin
from mldec.errors import CheckpointError, ConfigError, DataError, printable, say, visible
from mldec.files.results import check_folder, write_file
from mldec.files.run_folder import LOG_FILE, read_facts
from mldec.files.text import read_json
from mldec.report.statistics import is_count, meaning
from mldec.report.training import folder_of_run
from mldec.runtime.cli import command, run_command
from mldec.runtime.facts import count_parameters, multiply_accumulates
from mldec.training.log import clock, read_progress

UNKNOWN = "unknown"
_IN_LIST = re.compile(r"""(?<=[\[,'" ])[/~][^,\]'"]*""")  # a path in a list
# The names of timm's networks in a config.
_TIMM = ("mldec.backbones.TimmBackbone", f"{TimmBackbone.__module__}.{TimmBackbone.__qualname__}")


class Start(NamedTuple):
    """The weights that a run started from, and their licence, as parts of sentences."""

    weights: str
    licence: str
    base_model: str | None  # of the hub


def without_folders(text: str) -> str:
    """Replace the folders of an absolute path by `...`: they tell of a machine and a user.

    Args:
        text: a setting or a word of a command; anything but an absolute path stays as it is.
    """
    # A list of paths is one word of a command.
    if text.startswith("["):
        return _IN_LIST.sub(lambda path: without_folders(path[0]), text)
    # A text encoder is a name, a folder, or a name and a file.
    if text.startswith(PREFIX):
        return ":".join(without_folders(part) for part in text.split(":"))

    name = Path(text).name
    return f".../{name}" if text.startswith(("/", "~")) and name else text


def published_config(value: Any) -> Any:
    """Return a tree of settings without the folders of absolute paths; see `without_folders`."""
    if isinstance(value, Mapping):
        # Names of classes may begin as they like.
        return {
            key: item if isinstance(item, list) and key == "classes" else published_config(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [published_config(item) for item in value]
    return without_folders(value) if isinstance(value, str) else value


def published_origin(origin: VectorOrigin | None) -> VectorOrigin | None:
    """Return how word vectors were made, without the folders of a text encoder's files."""
    return None if origin is None else replace(origin, source=without_folders(origin.source))


def start_of(checkpoint: Checkpoint, loaded: Loaded) -> Start:
    """Return what a run started from.

    Args:
        checkpoint: of the run.
        loaded: the same, whose config has every argument of the backbone.
    """
    backbone, init = loaded.config.backbone, checkpoint.config.get("init")
    name, pretrained = backbone.get("name"), backbone.get("pretrained")

    # A file of the authors, which says nothing of its training.
    if not checkpoint.step:
        return Start(UNKNOWN, f"{UNKNOWN}: the weights are not those of a run of mldec", None)
    if init:
        return Start(f"init={without_folders(str(init))}", f"{UNKNOWN}: see these weights", None)
    if "pretrained" not in backbone:
        built = f"those that {backbone.get('_target_')} is built with"
        return Start(built, f"{UNKNOWN}: the backbone is not from timm", None)
    if pretrained is False:
        return Start("random weights", "none: no weights of others were used", None)
    if backbone.get("_target_") not in _TIMM:
        weights = f"published weights of {without_folders(str(name))}"
        return Start(weights, f"{UNKNOWN}: they are not from timm", None)

    try:
        published = get_pretrained_cfg(str(name))
    except RuntimeError:
        # timm knows the network, and no weights of that name.
        published = None
    licence = None if published is None else published.license
    if isinstance(pretrained, str):
        of_name = f"; timm states {licence} for the weights of that name" if licence else ""
        return Start(
            f"the file {without_folders(pretrained)} in {name}",
            f"{UNKNOWN}: they were read from a file{of_name}",
            None,
        )
    base_model = None if published is None else published.hf_hub_id
    return Start(f"timm's weights of {name}", licence or f"{UNKNOWN} to timm", base_model)


def cost_of(loaded: Loaded, path: Path) -> list[tuple[str, str]]:
    """Return what a model costs per image, and what its training has cost, as headings and texts.

    Args:
        loaded: the checkpoint.
        path: of its file; run.json and metrics.jsonl are looked for in its run.

    Raises:
        CheckpointError: if they are not what a run writes.
    """
    classes, size = loaded.classes, loaded.transform.image_size
    queries = None if classes.queries is None else (len(classes), classes.queries.shape[1])
    try:
        macs = f"{multiply_accumulates(loaded.model, size, queries) / 1e9:,.3f} billion per image"
    except Exception:
        # A part of the user's own may fail on tensors without values.
        macs = UNKNOWN

    folder = folder_of_run(path)
    seconds = 0.0 if folder is None else read_progress(folder / LOG_FILE).seconds
    time = f"{clock(seconds)} (hours:minutes:seconds)" if seconds else UNKNOWN
    return [
        ("Parameters", f"{count_parameters(loaded.model)[1]:,}"),
        ("Multiply-accumulates", f"{macs}, at {size} x {size} pixels"),
        ("Training time", f"{time}; the device is not recorded"),
    ]


def command_of(path: Path) -> str | None:
    """Return the command that trained a checkpoint; None if its run does not lie around its file.

    Raises:
        CheckpointError: if run.json is not what a run writes.
    """
    folder = folder_of_run(path)
    facts = None if folder is None else read_facts(folder)
    if facts is None:
        return None

    words = []
    for word in shlex.split(facts.command):
        key, sign, value = word.partition("=")
        words.append(f"{key}={without_folders(value)}" if sign else without_folders(key))
    return shlex.join(words)


log = logging.getLogger("mldec")

_SEE = "pass a file that mldec.report --json or mldec.evaluate --json wrote"
# Validation metrics in a checkpoint; the second is there if the run has a moving average too.
_AVERAGE, _RAW = "val/", "val_raw/"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of a model's quality.

    Attributes:
        source: where the numbers are from, a clause such as "from the file results.json".
        images: number of validation images; None if it is not known.
        metrics: percentages by name, and numbers of classes. None is an undefined value.
        intervals: lowest and highest value of some metrics, in percent.
        per_class: values by name of the class and of the value; empty without a table.
    """

    source: str
    images: int | None
    metrics: dict[str, float | None]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    per_class: dict[str, dict[str, float | None]] = field(default_factory=dict)


def of_checkpoint(checkpoint: Checkpoint, weights: str) -> Measured:
    """Return the metrics of the evaluation that a run made before it wrote a checkpoint.

    Args:
        checkpoint: of the run.
        weights: "ema" or "raw": those whose metrics are returned.
    """
    has_both = any(name.startswith(_RAW) for name in checkpoint.metrics)
    prefix = _RAW if weights == "raw" and has_both else _AVERAGE
    return Measured(
        source=f"from the evaluation of the run after epoch {checkpoint.epoch}",
        images=None,
        metrics={
            name.removeprefix(prefix): value
            for name, value in checkpoint.metrics.items()
            if name.startswith(prefix)
        },
    )


def read_results(path: Path, classes: Classes, weights: str, checkpoint: str) -> Measured:
    """Read a file of `mldec.report --json` or `mldec.evaluate --json`.

    A file of a checkpoint of another name is used, with a warning.

    Args:
        path: of the file.
        classes: of the checkpoint.
        weights: "ema" or "raw": those that are published.
        checkpoint: as the user names it.

    Raises:
        DataError: if it cannot be read, is not such a file, or is of another model.
    """
    content = read_json(path, _SEE)
    if not isinstance(content, dict) or not {"metrics", "images", "per_class"} <= content.keys():
        raise DataError(f"--results {path}: it has no metrics, images and per_class; {_SEE}")

    if content.get("weights") != weights:
        raise DataError(
            f"--results {path}: it is of the {content.get('weights')} weights, and the {weights} "
            f"ones are published; choose with --weights"
        )
    per_class = content["per_class"]
    same_classes = isinstance(per_class, dict) and set(per_class) == set(classes.names)
    # A zero-shot model is evaluated on any classes.
    if classes.queries is None and not same_classes:
        raise DataError(f"--results {path}: it is of other classes; evaluate this checkpoint")

    intervals = content.get("intervals", {})
    is_whole = (
        _are_numbers(content["metrics"])
        and type(content["images"]) is int
        and isinstance(per_class, dict)
        and all(map(_are_numbers, per_class.values()))
        and isinstance(intervals, dict)
        and all(isinstance(bounds, list) and len(bounds) == 2 for bounds in intervals.values())
        and all(_is_number(bound) for bounds in intervals.values() for bound in bounds)
    )
    if not is_whole:
        raise DataError(f"--results {path}: a value in it is no number; {_SEE}")

    evaluated = str(content.get("checkpoint"))
    if evaluated != checkpoint:
        log.warning(
            f"--results {path} is of {evaluated}, and {checkpoint} is published: check that they "
            f"are the same model"
        )
    return Measured(
        source=f"from {path.name}",
        images=content["images"],
        metrics=content["metrics"],
        intervals={name: (low, high) for name, (low, high) in intervals.items() if low is not None},
        per_class=per_class,
    )


def _is_number(value: Any) -> bool:
    """Tell whether a value is a number, or null, which stands for an undefined one."""
    return value is None or type(value) in (int, float)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


MOST_CLASSES = 1_000  # rows of the table of classes
HARDEST = 5  # classes that the limitations name
TASK = "image-classification"
UNDEFINED = "\N{EN DASH}"
# What Markdown and HTML could take for theirs inside of a line.
_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$]|:(?=//))")


@dataclass(frozen=True, kw_only=True)
class Known:
    """All that a card is made of.

    Attributes:
        repository: owner/name.
        checkpoint: as it is published.
        loaded: the same, built.
        measured: its quality.
        start: of its run.
        cost: headings and texts.
        command: that trained it; None if it is not known.
        license: of the model, as the Hub writes it; None if it is not stated.
        plugins: packages that its user must name.
    """

    repository: str
    checkpoint: Checkpoint
    loaded: Loaded
    measured: Measured
    start: Start
    cost: list[tuple[str, str]]
    command: str | None
    license: str | None
    plugins: Sequence[str]

    @property
    def kind(self) -> str:
        """Return the kind of task."""
        if self.loaded.classes.queries is not None:
            return "zero-shot"
        return "single-label" if self.loaded.classes.exclusive else "multi-label"

    @property
    def data(self) -> str:
        """Return the name of the reader of its data, with the last part of their folder."""
        node = self.checkpoint.config.get("data", {})
        reader = str(node.get("_target_", UNKNOWN)).rpartition(".")[2]
        return f"{reader} in {node['root']}" if node.get("root") else reader


def card(known: Known) -> str:
    """Return the text of README.md."""
    sections = (
        _introduction,
        _usage,
        _data,
        _metrics,
        _classes,
        _thresholds,
        _recipe,
        _cost,
        _licences,
        _limitations,
    )
    body = "\n\n".join("\n".join(section(known)) for section in sections)
    return f"---\n{metadata(known).to_yaml()}\n---\n\n{body}\n"


def metadata(known: Known) -> ModelCardData:
    """Return what the Hub reads: licence, library, tags, task and metrics."""
    name = known.repository.partition("/")[2]
    results = [
        EvalResult(
            task_type=TASK,
            dataset_type=known.data.partition(" ")[0],
            dataset_name=visible(known.data),
            metric_type=metric,
            metric_value=round(value, 4),
        )
        for metric, value in known.measured.metrics.items()
        if not is_count(metric) and value is not None and math.isfinite(value)
    ]
    head = str(known.loaded.config.head.get("_target_", "")).rpartition(".")[2]
    return ModelCardData(
        license=known.license,
        library_name="mldec",
        pipeline_tag=TASK,
        tags=["mldec", known.kind, *([head] if head else [])],
        base_model=known.start.base_model,
        model_name=name,
        metrics=sorted({result.metric_type for result in results}) or None,
        eval_results=results or None,
    )


def escaped(text: Any) -> str:
    """Return a text in one line of Markdown that shows it as it is."""
    return _SPECIAL.sub(r"\\\1", printable(str(text)))


def fenced(text: str, language: str = "") -> list[str]:
    """Return the lines of a block of code, which the text cannot end."""
    lines = [visible(line) for line in text.splitlines()]
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", *lines, fence]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, from cells that are Markdown already."""
    lines = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def number(value: float | None, digits: int = 2) -> str:
    """Return a number as text, whole ones without decimals; a dash if it is undefined."""
    if value is None or not math.isfinite(value):
        return UNDEFINED
    return f"{value:,.0f}" if value == int(value) else f"{value:,.{digits}f}"


def _introduction(known: Known) -> list[str]:
    checkpoint, loaded = known.checkpoint, known.loaded
    head = str(loaded.config.head.get("_target_", UNKNOWN)).rpartition(".")[2]
    side = loaded.transform.image_size
    best = checkpoint.best
    chosen = f"{loaded.weights} weights after epoch {checkpoint.epoch}"
    if best.metric is not None:
        chosen += f", with {number(best.value)} {escaped(best.metric)} in its run"
    return [
        f"# {escaped(known.repository.partition('/')[2])}",
        "",
        f"A {known.kind} image classifier of {len(loaded.classes):,} classes: the head "
        f"{escaped(head)} on the backbone {escaped(loaded.config.backbone.get('name', UNKNOWN))}, "
        f"for images of {side} x {side} pixels ({chosen}). This card was written by "
        f"`mldec.publish` from what the checkpoint and its run say.",
    ]


def _usage(known: Known) -> list[str]:
    address = f"{HUB}{known.repository}"
    options = "".join(f" --plugin {name}" for name in known.plugins)
    plugins = f", plugins={[*known.plugins]!r}" if known.plugins else ""
    lines = ["## Use", "", *fenced(f"python -m mldec.predict {address} photo.jpg{options}", "bash")]
    lines += [
        "",
        *fenced(
            "from mldec.checkpoint import load_model\n"
            "from mldec.data.transforms import read_image\n"
            "from mldec.predict.engine import TorchEngine\n"
            "\n"
            f'engine = TorchEngine(load_model("{address}"{plugins}))\n'
            'scores = engine.answer([engine.transform(read_image("photo.jpg"))]).scores[0]\n'
            "print(sorted(zip(scores.tolist(), engine.classes.names), reverse=True)[:5])",
            "python",
        ),
        "",
        "Pin a commit, which cannot change, with `@` and its name behind the address.",
    ]
    if known.plugins:
        lines += ["", f"It needs the package {escaped(', '.join(known.plugins))} of its author."]
    return lines


def _data(known: Known) -> list[str]:
    fingerprint = known.checkpoint.fingerprint
    trained = UNKNOWN if fingerprint is None else f"{fingerprint.images:,}"
    validated = known.measured.images
    return [
        "## Data",
        "",
        f"- Read by: {escaped(known.data)}",
        f"- Training images: {trained}",
        f"- Validation images: {UNKNOWN if validated is None else f'{validated:,}'}",
        f"- Licence of the images: {UNKNOWN}",
    ]


def _metrics(known: Known) -> list[str]:
    measured = known.measured
    if not measured.metrics:
        return ["## Metrics", "", f"{UNKNOWN.capitalize()}: the checkpoint holds none."]

    heading = "95 % interval"
    rows = []
    for name, value in measured.metrics.items():
        low, high = measured.intervals.get(name, (None, None))
        interval = UNDEFINED if low is None else f"{number(low)} to {number(high)}"
        rows.append([escaped(name), number(value), interval, escaped(meaning(name))])

    lines = [
        "## Metrics",
        "",
        f"In percent, on validation images, {escaped(measured.source)}.",
        "",
        *table(["Metric", "Value", heading, "Meaning"], rows),
    ]
    if measured.intervals:
        lines += ["", "Intervals: over the images, by the Bayesian bootstrap of `mldec.report`."]
    else:
        lines += ["", f"The intervals are {UNKNOWN}: no report of `mldec.report` was at hand."]
    return lines


def _classes(known: Known) -> list[str]:
    names, per_class = known.loaded.classes.names, known.measured.per_class
    # Of a zero-shot model, the classes that it was evaluated on.
    shown = [*(per_class or names)][:MOST_CLASSES]
    lines = ["## Classes", ""]

    if per_class:
        columns = [
            name for name in next(iter(per_class.values())) if name not in ("AP_low", "AP_high")
        ]
        lines += table(
            ["Class", *map(escaped, columns)],
            (
                [escaped(name), *(_cell(per_class[name], column) for column in columns)]
                for name in shown
            ),
        )
    else:
        lines += [f"- {escaped(name)}" for name in shown]
        lines += ["", f"How well each is recognised is {UNKNOWN}: no file of results was at hand."]

    left_out = len(per_class or names) - len(shown)
    if left_out:
        lines += ["", f"{left_out:,} more classes are in config.json, or in the results."]
    return lines


def _cell(values: dict[str, float | None], column: str) -> str:
    """Return a value of a class, and the interval of an average precision."""
    digits = 3 if column == "threshold" else 2
    text = number(values.get(column), digits)
    low, high = values.get("AP_low"), values.get("AP_high")
    if column == "AP" and low is not None:
        text += f" ({number(low)} to {number(high)})"
    return text


def _thresholds(known: Known) -> list[str]:
    lines = ["## Thresholds", ""]
    calibration = known.checkpoint.calibration
    if calibration is None:
        setting = known.checkpoint.config.get("data", {}).get("threshold")
        lines.append(
            "The checkpoint is not calibrated: its scores are no probabilities, and it holds no "
            "thresholds."
        )
        if not known.loaded.classes.exclusive:
            lines.append(f"The threshold of its settings is {number(setting, 3)}.")
        return lines

    lines.append(
        f"Calibrated on {calibration.images:,} images on {escaped(calibration.date)}"
        + (f", for {escaped(calibration.objective)}" if calibration.objective else "")
        + f". Calibrated logit: {_scaling(calibration)}."
    )
    if len(calibration.thresholds) == 1:
        lines += ["", f"One threshold for all classes: {number(calibration.thresholds[0], 3)}."]
    elif calibration.thresholds:
        pairs = zip(known.loaded.classes.names, calibration.thresholds, strict=True)
        rows = [[escaped(name), number(value, 3)] for name, value in pairs][:MOST_CLASSES]
        lines += ["", *table(["Class", "Threshold"], rows)]
    return lines


def _scaling(calibration: Calibration) -> str:
    """Return how a calibrated logit is computed."""
    if len(calibration.slopes) > 1:
        return "a slope and an offset per class (Platt scaling), in config.json"
    return f"the logit divided by the temperature {number(1 / calibration.slopes[0], 3)}"


def _recipe(known: Known) -> list[str]:
    versions = known.checkpoint.versions
    used = ", ".join(f"{escaped(name)} {escaped(versions[name])}" for name in versions)
    lines = [
        "## Recipe",
        "",
        f"Start: {escaped(known.start.weights)}. Versions: {used or UNKNOWN}.",
    ]
    lines += [f"Commit of mldec: {escaped(known.checkpoint.git or UNKNOWN)}.", ""]
    if known.command is None:
        lines.append(f"The command is {UNKNOWN}: no run.json lies beside the checkpoint.")
    else:
        lines += fenced(known.command, "bash")

    config = yaml.safe_dump(known.checkpoint.config, sort_keys=False, allow_unicode=True)
    return [*lines, "", "All settings; of paths the last part only:", "", *fenced(config, "yaml")]


def _cost(known: Known) -> list[str]:
    return ["## Cost", "", *(f"- {name}: {escaped(text)}" for name, text in known.cost)]


def _licences(known: Known) -> list[str]:
    return [
        "## Licences",
        "",
        f"- This model: {escaped(known.license or 'not stated by its author')}",
        f"- Weights that the backbone started from: {escaped(known.start.licence)}",
        f"- Images: {UNKNOWN}",
    ]


def _limitations(known: Known) -> list[str]:
    lines = ["## Limitations", ""]
    if known.loaded.classes.queries is None:
        lines.append(
            "- It knows the classes above and no others: whatever an image shows, they are scored."
        )
    else:
        lines.append(
            "- It scores any classes that have word vectors of the same kind; of classes "
            "that are neither in its training nor in the table nothing was measured."
        )
    lines.append(
        "- Its metrics are of validation images of the data that it was trained for; on images of "
        "another origin it was not measured."
    )
    lines.append("- Whether it errs more for some groups of people or places was not measured.")

    calibration, measured = known.checkpoint.calibration, known.measured
    if calibration is not None and calibration.images == measured.images:
        lines.append(
            f"- Its thresholds were fitted on {calibration.images:,} images, as many as the "
            f"metrics are of. If they are the same, precision, recall and F1 are too good."
        )
    precision = {
        name: values["AP"]
        for name, values in measured.per_class.items()
        if values.get("AP") is not None
    }
    if precision:
        hardest = sorted(precision, key=lambda name: precision[name] or 0.0)[:HARDEST]
        worst = ", ".join(f"{escaped(name)} ({number(precision[name])})" for name in hardest)
        lines.append(f"- The lowest average precision (percent) is that of {worst}.")
    return lines


def run(args: argparse.Namespace) -> None:
    """Do the work of `mldec.publish`: load, describe, write the files, and upload them.

    Args:
        args: the command line; see `mldec.publish.parser`.

    Raises:
        UserError: for a wrong option, a checkpoint or results that cannot be used, or an upload
            that the hub refuses.
    """
    # Everything that can be refused at once comes before the model.
    sources.check_repository(args.repository)
    if is_tower(args.checkpoint):
        raise CheckpointError(
            f"{args.checkpoint} is a model of others, to which nothing was added: name it where "
            f"it is used, or publish the copy that mldec.calibrate makes"
        )
    if args.dry_run is None:
        sources.require_token()
    else:
        check_new_folder(args)

    known = gather(args)
    if args.dry_run is not None:
        write(Path(args.dry_run), known)
        say(*missing(known), f"{args.dry_run}: the files for {args.repository}; not uploaded")
        return

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), known)
        commit = sources.upload(Path(folder), args.repository, private=args.private)
    say(*missing(known), f"published: {sources.HUB}{args.repository}@{commit}")


def check_new_folder(args: argparse.Namespace) -> None:
    """Check that the folder of --dry-run can be made, or is empty.

    Raises:
        ConfigError: if it is not, or an option has no effect.
    """
    if args.private:
        raise ConfigError("--private has no effect with --dry-run: leave one of them out")
    check_folder("--dry-run", args.dry_run)

    folder = Path(args.dry_run)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--dry-run {folder}: it holds files; name a new folder, or empty it")


def gather(args: argparse.Namespace) -> Known:
    """Load a checkpoint, and gather what is known of it.

    Args:
        args: the command line.

    Raises:
        UserError: if the checkpoint or the results cannot be used.
    """
    loaded = load_model(args.checkpoint, args.weights, plugins=args.plugin)
    path = loaded.path
    if not loaded.classes.names:
        raise CheckpointError(
            f"{args.checkpoint} names no classes and holds no word vectors: it cannot be published"
        )

    checkpoint = published.with_weights(to_store(loaded), loaded.weights, path)
    calibration = checkpoint.calibration
    if calibration is not None:
        calibration = replace(calibration, data=published_config(calibration.data))
    # Which packages are imported is the choice of whoever loads it.
    config = {**published_config(checkpoint.config), "plugins": []}
    classes = replace(checkpoint.classes, origin=published_origin(checkpoint.classes.origin))
    checkpoint = replace(checkpoint, config=config, calibration=calibration, classes=classes)

    measured = of_checkpoint(checkpoint, loaded.weights)
    if args.results is not None:
        measured = read_results(Path(args.results), loaded.classes, loaded.weights, args.checkpoint)
    return Known(
        repository=args.repository,
        checkpoint=checkpoint,
        loaded=loaded,
        measured=measured,
        start=start_of(checkpoint, loaded),
        cost=cost_of(loaded, path),
        command=command_of(path),
        license=args.license,
        plugins=args.plugin,
    )


def write(folder: Path, known: Known) -> None:
    """Write the files of a repository.

    Args:
        folder: for the files; it is created.
        known: of the checkpoint.

    Raises:
        DataError: if a file cannot be written.
        CheckpointError: if the checkpoint could not be read back.
    """
    published.write(folder, known.checkpoint)
    write_file(folder / sources.CARD, card(known).encode())


def missing(known: Known) -> list[str]:
    """Return a line per option that would have told the card more."""
    lines = []
    if not known.measured.intervals:
        lines.append(
            "the card has no intervals: pass --results with a file of mldec.report --json"
            if known.measured.per_class
            else "the card has neither intervals nor a table of classes: pass --results with a "
            "file of mldec.report --json"
        )
    if known.license is None:
        lines.append("the card states no licence of the model: pass --license, such as apache-2.0")
    return lines


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec.publish`."""
    arguments = command("publish", str(__doc__))
    arguments.add_argument(
        "checkpoint", help="a run's folder, such as outputs/digits, or any other checkpoint"
    )
    arguments.add_argument("repository", metavar="OWNER/NAME", help="made if it does not exist")
    arguments.add_argument(
        "--private", action="store_true", help="so that only its owner and guests see it"
    )
    arguments.add_argument(
        "--dry-run", metavar="FOLDER", help="write the files to a new folder, and upload nothing"
    )
    arguments.add_argument(
        "--weights", choices=("ema", "raw"), help="default: those that scored best in the run"
    )
    arguments.add_argument(
        "--results", metavar="FILE", help="the JSON of mldec.report or mldec.evaluate, for the card"
    )
    arguments.add_argument(
        "--license",
        metavar="ID",
        help="of the model, as the Hub writes it, such as apache-2.0; default: not stated",
    )
    arguments.add_argument(
        "--plugin", action="append", default=[], help="a package of yours that may hold its parts"
    )
    return arguments


def publish(args: argparse.Namespace) -> None:
    """Publish what the command line names."""
    # Imported late: --help and a wrong argument need not wait for torch.

    run(args)


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, publish)


if __name__ == "__main__":
    main()
