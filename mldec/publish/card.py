"""The model card: README.md of a repository, with the metadata that the Hub reads at its top.

It says what the checkpoint, its run and a file of results say, and names what is unknown.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from mldec.checkpoint import Calibration, Checkpoint, Loaded
from mldec.checkpoint.hub import SCHEME
from mldec.errors import printable, visible
from mldec.publish.facts import UNKNOWN, Start
from mldec.publish.results import Measured
from mldec.report.statistics import is_count, meaning

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
    address = f"{SCHEME}{known.repository}"
    options = "".join(f" --plugin {name}" for name in known.plugins)
    plugins = f", plugins={[*known.plugins]!r}" if known.plugins else ""
    lines = ["## Use", "", *fenced(f"python -m mldec.predict {address} photo.jpg{options}", "bash")]
    lines += [
        "",
        *fenced(
            "from mldec.checkpoint import load_model\n"
            "from mldec.data.transforms import read_image\n"
            "from mldec.inference.engine import TorchEngine\n"
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
