"""Publish a checkpoint on the Hugging Face Hub, where `hf:OWNER/NAME` names it.

The repository gets model.safetensors (one set of weights), config.json and README.md, a model card,
without the training state and the folders of this machine. Log in first with `hf auth login`, or
set HF_TOKEN; see MODEL_ZOO.md.
"""

import argparse
import logging
import math
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from timm.models import get_pretrained_cfg

from mldec.backbones import TimmBackbone
from mldec.checkpoint import Loaded, load_model, published, sources
from mldec.checkpoint.loading import to_store
from mldec.checkpoint.state import Checkpoint
from mldec.cli import add_weights_options, command, run_command
from mldec.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    naming_errors,
    printable,
    say,
    visible,
)
from mldec.evaluation.output import meaning
from mldec.files.atomic import check_folder, write_file
from mldec.files.run_folder import LOG_FILE, folder_of_run, read_facts
from mldec.files.text import read_json
from mldec.model import count_parameters, work_per_image
from mldec.training.log import clock, read_progress
from mldec.words.types import PREFIX

log = logging.getLogger("mldec")

UNKNOWN = "unknown"
MOST_CLASSES = 1_000  # rows of the table of classes
# The metrics that the Hub shows beside the first one; the card has all.
SHOWN = ("mAP", "CF1", "OF1", "top1", "top5", "zsl_mAP", "gzsl_mAP", "mAP_partial")
HARDEST = 5  # classes that the limitations name
TASK = "image-classification"
UNDEFINED = "\N{EN DASH}"
_TEMPLATE = Path(__file__).with_name("model_card.md.j2")
_SEE = "pass a file that mldec report --json or mldec evaluate --json wrote"
_IN_LIST = re.compile(r"""(?<=[\[,'" ])[/~][^,\]'"]*""")  # a path in a list
# What Markdown and HTML could take for theirs inside of a line.
_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$]|:(?=//))")
# The names of timm's networks in a config.
_TIMM = ("mldec.backbones.TimmBackbone", f"{TimmBackbone.__module__}.{TimmBackbone.__qualname__}")


def without_folders(text: str) -> str:
    """Replace the folders of an absolute path by `...`: they tell of a machine and a user."""
    # A list of paths is one word of a command.
    if text.startswith("["):
        return _IN_LIST.sub(lambda path: without_folders(path[0]), text)
    # A text encoder is a name, a folder, or a name and a file.
    if text.startswith(PREFIX):
        return ":".join(without_folders(part) for part in text.split(":"))

    name = Path(text).name
    return f".../{name}" if text.startswith(("/", "~")) and name else text


def published_config(value: Any) -> Any:
    """Return a tree of settings without the folders of absolute paths."""
    if isinstance(value, Mapping):
        # Names of classes may begin as they like, such as /m/01g317.
        return {
            key: item if isinstance(item, list) and key == "classes" else published_config(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [published_config(item) for item in value]
    return without_folders(value) if isinstance(value, str) else value


def shareable(loaded: Loaded) -> Checkpoint:
    """Return a checkpoint with one set of weights and without folders of this machine."""
    checkpoint = published.with_weights(to_store(loaded), loaded.weights, loaded.path)
    calibration, origin = checkpoint.calibration, checkpoint.classes.origin
    if calibration is not None:
        calibration = replace(calibration, data=published_config(calibration.data))
    if origin is not None:
        origin = replace(origin, source=without_folders(origin.source))

    # Which packages are imported is the choice of whoever loads it.
    config = {**published_config(checkpoint.config), "plugins": []}
    classes = replace(checkpoint.classes, origin=origin)
    return replace(checkpoint, config=config, calibration=calibration, classes=classes)


class Start(NamedTuple):
    """The weights that a run started from, and their licence, as parts of sentences."""

    weights: str
    licence: str
    base_model: str | None = None  # of the hub


def start_of(checkpoint: Checkpoint, loaded: Loaded) -> Start:
    """Return what a run started from; the config of `loaded` has all arguments of the backbone."""
    backbone, init = loaded.config.backbone, checkpoint.config.get("init")
    name, pretrained = without_folders(str(backbone.get("name"))), backbone.get("pretrained")

    # A file of the authors, which says nothing of its training.
    if not checkpoint.step:
        return Start(UNKNOWN, f"{UNKNOWN}: the weights are not those of a run of mldec")
    if init:
        path = init["path"] if isinstance(init, dict) else init
        return Start(f"init={without_folders(str(path))}", f"{UNKNOWN}: see these weights")
    if "pretrained" not in backbone:
        built = f"those that {backbone.get('_target_')} is built with"
        return Start(built, f"{UNKNOWN}: the backbone is not from timm")
    if pretrained is False:
        return Start("random weights", "none: no weights of others were used")
    if backbone.get("_target_") not in _TIMM:
        return Start(f"published weights of {name}", f"{UNKNOWN}: they are not from timm")

    licence = base_model = None
    # It raises if it knows the network, and no weights of that name.
    with suppress(RuntimeError):
        if of_timm := get_pretrained_cfg(str(backbone.get("name"))):
            licence, base_model = of_timm.license, of_timm.hf_hub_id
    if isinstance(pretrained, str):
        unknown = f"{UNKNOWN}: they were read from a file"
        if licence:
            unknown += f"; timm states {licence} for the weights of that name"
        return Start(f"the file {without_folders(pretrained)} in {name}", unknown)
    return Start(f"timm's weights of {name}", licence or f"{UNKNOWN} to timm", base_model)


def cost_of(loaded: Loaded, path: Path) -> list[tuple[str, str]]:
    """Return the cost of an image, and of the training if its run lies around the file `path`."""
    size = loaded.transform.image_size
    count = work_per_image(loaded.model, size, loaded.classes.word_vectors)
    macs = UNKNOWN if count is None else f"{count / 1e9:,.3f} billion per image"

    folder = folder_of_run(path)
    seconds = 0.0 if folder is None else read_progress(folder / LOG_FILE).seconds
    time = f"{clock(seconds)} (hours:minutes:seconds)" if seconds else UNKNOWN
    return [
        ("Parameters", f"{count_parameters(loaded.model)[1]:,}"),
        ("Multiply-accumulates", f"{macs}, at {size} x {size} pixels"),
        ("Training time", f"{time}; the device is not recorded"),
    ]


def command_of(path: Path) -> str | None:
    """Return the command that trained a checkpoint; None if its run does not lie around it."""
    folder = folder_of_run(path)
    facts = None if folder is None else read_facts(folder)
    if facts is None:
        return None

    words = []
    for word in shlex.split(facts.command):
        key, sign, value = word.partition("=")
        words.append(f"{key}={without_folders(value)}" if sign else without_folders(key))
    return shlex.join(words)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of a model's quality: percentages, and numbers of classes; None: undefined."""

    source: str  # where the numbers are from, such as "from results.json"
    images: int | None  # of the validation
    metrics: dict[str, float | None]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    per_class: dict[str, dict[str, float | None]] = field(default_factory=dict)


def of_checkpoint(checkpoint: Checkpoint, weights: str) -> Measured:
    """Return the metrics of the evaluation that a run made before it wrote a checkpoint."""
    by_prefix: dict[str, dict[str, float | None]] = {"val": {}, "val_raw": {}}
    for name, value in checkpoint.metrics.items():
        prefix, _, metric = name.partition("/")
        by_prefix.setdefault(prefix, {})[metric] = value

    # Without a moving average the raw weights are those of "val".
    raw = by_prefix["val_raw"] if weights == "raw" else {}
    source = f"from the evaluation of the run after epoch {checkpoint.epoch}"
    return Measured(source=source, images=None, metrics=raw or by_prefix["val"])


def read_results(path: Path, weights: str, checkpoint: str) -> Measured:
    """Read a file of `mldec report --json` or `mldec evaluate --json` for the published weights."""
    content = read_json(path)
    with naming_errors(path, DataError, remedy=_SEE):
        measured = Measured(
            source=f"from {path.name}",
            images=int(content["images"]),
            metrics=_numbers(content["metrics"]),
            intervals={
                name: (float(low), float(high))
                for name, (low, high) in content.get("intervals", {}).items()
                if low is not None
            },
            per_class={name: _numbers(values) for name, values in content["per_class"].items()},
        )

    if content.get("weights") != weights:
        raise DataError(
            f"--results {path}: it is of the {content.get('weights')} weights, and the {weights} "
            f"ones are published; choose with --weights"
        )
    if content.get("checkpoint") != checkpoint:
        log.warning(
            f"--results {path} is of {content.get('checkpoint')}, and {checkpoint} is published"
        )
    return measured


def _numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of an object in JSON; null is an undefined one."""
    return {name: None if value is None else float(value) for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class Known:
    """All that a card is made of, and the checkpoint as it is published and as it is built."""

    repository: str  # owner/name
    checkpoint: Checkpoint
    loaded: Loaded
    measured: Measured
    start: Start
    cost: list[tuple[str, str]]
    command: str | None
    license: str | None
    plugins: Sequence[str]
    data_name: str | None = None


def card(known: Known) -> str:
    """Return the text of README.md: what the Hub reads, and model_card.md.j2 filled in."""
    checkpoint, loaded, measured = known.checkpoint, known.loaded, known.measured
    kind = "single-label" if loaded.classes.exclusive else "multi-label"
    if loaded.classes.word_vectors is not None:
        kind = "zero-shot"
    head = str(loaded.config.head.get("_target_", UNKNOWN)).rpartition(".")[2]

    # The reader of the data, with the last part of their folder.
    node = checkpoint.config.get("data", {})
    reader = str(node.get("_target_", UNKNOWN)).rpartition(".")[2]
    data = known.data_name or (f"{reader} in {node['root']}" if node.get("root") else reader)

    main = (*SHOWN, next(iter(measured.metrics), None))
    results = []
    for metric, value in measured.metrics.items():
        if metric in main and value is not None and math.isfinite(value):
            result = EvalResult(TASK, reader, visible(data), metric, round(value, 4))
            results.append(result)
    metadata = ModelCardData(
        license=known.license,
        library_name="mldec",
        pipeline_tag=TASK,
        tags=["mldec", kind, *([head] if head != UNKNOWN else [])],
        base_model=known.start.base_model,
        model_name=known.repository.partition("/")[2],
        metrics=sorted({result.metric_type for result in results}) or None,
        eval_results=results or None,
    )

    # Of a zero-shot model, the classes that it was evaluated on.
    listed = list(measured.per_class or loaded.classes.names)
    columns = next(iter(measured.per_class.values()), {})
    of_classes = [(name, values.get("AP")) for name, values in measured.per_class.items()]
    precision = [(name, value) for name, value in of_classes if value is not None]
    filled = ModelCard.from_template(
        metadata,
        template_path=str(_TEMPLATE),
        **vars(known),
        name=metadata.model_name,
        kind=kind,
        head=head,
        data=data,
        address=f"{sources.HUB}{known.repository}",
        listed=listed,
        most_classes=MOST_CLASSES,
        columns=[column for column in columns if column not in ("AP_low", "AP_high")],
        hardest=sorted(precision, key=itemgetter(1))[:HARDEST],
        settings=yaml.safe_dump(checkpoint.config, sort_keys=False, allow_unicode=True),
        text=escaped,
        fenced=fenced,
        number=number,
        interval=interval,
        meaning=meaning,
    )
    return f"{filled}\n"


def escaped(text: Any) -> str:
    """Return a text in one line of Markdown that shows it as it is."""
    return _SPECIAL.sub(r"\\\1", printable(str(text)))


def fenced(text: str, language: str) -> str:
    """Return a block of code, which the text cannot end."""
    fence = max(["``", *re.findall("`+", text)], key=len) + "`"
    return "\n".join([f"{fence}{language}", *map(visible, text.splitlines()), fence])


def number(value: float | None, digits: int = 2) -> str:
    """Return a number as text, whole ones without decimals; a dash if it is undefined."""
    if value is None or not math.isfinite(value):
        return UNDEFINED
    return f"{value:,.0f}" if value == int(value) else f"{value:,.{digits}f}"


def interval(low: float | None, high: float | None) -> str:
    """Return two bounds as text, or a dash."""
    return UNDEFINED if low is None else f"{number(low)} to {number(high)}"


def publish(args: argparse.Namespace) -> None:
    """Load a checkpoint, gather what is known of it, write the files, and upload them."""
    # Everything that can be refused at once comes before the model.
    sources.check_repository(args.repository)
    if args.checkpoint.startswith(PREFIX):
        raise CheckpointError(
            f"{args.checkpoint} is a model of others: publish the copy that mldec calibrate makes"
        )
    if args.dry_run is None:
        sources.require_token()
    else:
        check_folder("--dry-run", args.dry_run)
        if Path(args.dry_run).exists() and any(Path(args.dry_run).iterdir()):
            raise ConfigError(f"--dry-run {args.dry_run}: it holds files; name a new folder")

    loaded = load_model(args.checkpoint, args.weights, plugins=args.plugin)
    checkpoint = shareable(loaded)
    measured = of_checkpoint(checkpoint, loaded.weights)
    if args.results is not None:
        measured = read_results(Path(args.results), loaded.weights, args.checkpoint)
    known = Known(
        repository=args.repository,
        checkpoint=checkpoint,
        loaded=loaded,
        measured=measured,
        start=start_of(checkpoint, loaded),
        cost=cost_of(loaded, loaded.path),
        command=command_of(loaded.path),
        license=args.license,
        plugins=args.plugin,
        data_name=args.data_name,
    )

    if args.dry_run is not None:
        _write(Path(args.dry_run), known)
        done = f"{args.dry_run}: the files for {args.repository}; not uploaded"
    else:
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder), known)
            commit = sources.upload(Path(folder), args.repository, private=args.private)
        done = f"published: {sources.HUB}{args.repository}@{commit}"

    # What options would have told the card more.
    if not measured.intervals:
        lacks = "no intervals" if measured.per_class else "neither intervals nor a table of classes"
        say(f"the card has {lacks}: pass --results with a file of mldec report --json")
    if args.license is None:
        say("the card states no licence of the model: pass --license, such as apache-2.0")
    say(done)


def _write(folder: Path, known: Known) -> None:
    published.write(folder, known.checkpoint)
    write_file(folder / sources.CARD, card(known).encode())


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec publish`."""
    arguments = command("publish", str(__doc__))
    arguments.add_argument(
        "checkpoint", help="a run's folder, such as outputs/digits, or any other checkpoint"
    )
    arguments.add_argument("repository", metavar="OWNER/NAME", help="made if it does not exist")
    place = arguments.add_mutually_exclusive_group()
    place.add_argument(
        "--private", action="store_true", help="so that only its owner and guests see it"
    )
    place.add_argument(
        "--dry-run", metavar="FOLDER", help="write the files to a new folder, and upload nothing"
    )
    add_weights_options(arguments)
    arguments.add_argument(
        "--results", metavar="FILE", help="the JSON of mldec report or mldec evaluate, for the card"
    )
    arguments.add_argument(
        "--data-name", metavar="TEXT", help="of the data set, for the card; default: its reader"
    )
    arguments.add_argument(
        "--license", metavar="ID", help="of the model, as the Hub writes it, such as apache-2.0"
    )
    return arguments


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, publish)


if __name__ == "__main__":
    main()
