"""Publish a checkpoint on the Hugging Face Hub, as `hf:OWNER/NAME`.

Uploads model.safetensors (one set of weights), config.json and README.md (a model card), without
the training state and without local folders. Log in first with `hf auth login`, or set HF_TOKEN.
See MODEL_ZOO.md.
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
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from timm.models import get_pretrained_cfg

from mldec.backbones import TimmBackbone
from mldec.checkpoint import Loaded, load_model, published, sources
from mldec.checkpoint.loading import to_store
from mldec.checkpoint.state import Checkpoint
from mldec.cli import add_weights_options, command, run_command
from mldec.data.readers import public_name
from mldec.errors import ConfigError, DataError, naming_errors, printable, say, visible
from mldec.evaluation.output import meaning
from mldec.files.atomic import check_folder, write_file
from mldec.files.run_folder import LOG_FILE, folder_of_run, read_facts
from mldec.files.text import read_json
from mldec.model import count_parameters, work_per_image
from mldec.training.log import clock, read_progress
from mldec.words.types import PREFIX

log = logging.getLogger("mldec")

UNKNOWN = "unknown"
MAX_CLASSES = 1_000  # rows of the class table
# Metrics in the metadata of the card, in addition to the first one. Its text contains all metrics.
MAIN_METRICS = ("mAP", "CF1", "OF1", "top1", "top5", "zsl_mAP", "gzsl_mAP", "mAP_partial")
HARDEST = 5  # classes in the limitations
TASK = "image-classification"
UNDEFINED = "\N{EN DASH}"
_TEMPLATE = Path(__file__).with_name("model_card.md.j2")
_SEE = "pass a file of mldec report --json or mldec evaluate --json"
# Absolute paths in the text of a list, with or without quotes.
_PATH_IN_LIST = re.compile(r"""(?<=[\[,'" ])[/~][^,\]'"]*""")
_MARKUP = re.compile(r"([\\`*_\[\]<>|~&$]|:(?=//))")  # inline markup of Markdown and HTML
_TIMM = ("mldec.backbones.TimmBackbone", f"{TimmBackbone.__module__}.{TimmBackbone.__qualname__}")


def without_folders(text: str) -> str:
    """Replace the folders of an absolute path by `...`. They may identify the machine or user."""
    if text.startswith("["):
        return _PATH_IN_LIST.sub(lambda path: without_folders(path[0]), text)
    # The parts of a text encoder are names, folders or files.
    if text.startswith(PREFIX):
        return ":".join(without_folders(part) for part in text.split(":"))

    name = Path(text).name
    if text.startswith(("/", "~")) and name:
        return f".../{name}"
    return text


def published_config(value: Any) -> Any:
    """Copy a tree of settings without the folders of absolute paths."""
    if isinstance(value, str):
        return without_folders(value)
    if isinstance(value, list):
        return [published_config(item) for item in value]
    if not isinstance(value, Mapping):
        return value

    tree = {key: published_config(item) for key, item in value.items()}
    # Class names may look like paths, such as /m/01g317.
    if isinstance(value.get("classes"), list):
        tree["classes"] = value["classes"]
    return tree


def shareable(loaded: Loaded) -> Checkpoint:
    """Return a checkpoint with one set of weights and without local folders."""
    checkpoint = published.with_weights(to_store(loaded), loaded.weights, loaded.path)
    calibration = checkpoint.calibration
    if calibration is not None:
        calibration = replace(calibration, data=published_config(calibration.data))
    classes = checkpoint.classes
    if classes.origin is not None:
        source = without_folders(classes.origin.source)
        classes = replace(classes, origin=replace(classes.origin, source=source))

    # Do not import packages that the user of the checkpoint did not choose.
    config = published_config(checkpoint.config)
    config["plugins"] = []
    return replace(checkpoint, config=config, calibration=calibration, classes=classes)


def initial_weights(checkpoint: Checkpoint, loaded: Loaded) -> tuple[str, str, str | None]:
    """Return the initial weights of a run, their license, and their repository on the hub."""
    if not checkpoint.step:
        return UNKNOWN, f"{UNKNOWN}: the weights are not from a run of mldec", None
    init = checkpoint.config.get("init")
    if init:
        path = init["path"] if isinstance(init, dict) else init
        return f"init={without_folders(str(path))}", f"{UNKNOWN}: see these weights", None

    # The config of `loaded` includes the default arguments of the backbone.
    backbone = loaded.config.backbone
    name = without_folders(str(backbone.get("name")))
    pretrained = backbone.get("pretrained")
    if "pretrained" not in backbone:
        target = backbone.get("_target_")
        return f"initial weights of {target}", f"{UNKNOWN}: the backbone is not from timm", None
    if pretrained is False:
        return "random weights", "none, because no third-party weights were used", None
    if backbone.get("_target_") not in _TIMM:
        return f"published weights of {name}", f"{UNKNOWN}: they are not from timm", None

    timm_license = None
    base_model = None
    # timm raises RuntimeError if it knows the network but not the tag of the weights.
    with suppress(RuntimeError):
        weights = get_pretrained_cfg(str(backbone.get("name")))
        if weights is not None:
            timm_license = weights.license
            base_model = weights.hf_hub_id
    if isinstance(pretrained, str):
        license = f"{UNKNOWN}: they were read from a file"
        if timm_license:
            license += f"; timm states {timm_license} for the weights of that name"
        return f"the file {without_folders(pretrained)} in {name}", license, None
    return f"timm's weights of {name}", timm_license or f"{UNKNOWN} to timm", base_model


def cost_of(loaded: Loaded, path: Path) -> dict[str, str]:
    """Return the cost per image, and the training time if `path` is in the folder of a run."""
    size = loaded.transform.image_size
    macs = UNKNOWN
    count = work_per_image(loaded.model, size, loaded.classes.word_vectors)
    if count is not None:
        macs = f"{count / 1e9:,.3f} billion per image"

    time = UNKNOWN
    folder = folder_of_run(path)
    if folder is not None and (seconds := read_progress(folder / LOG_FILE).seconds):
        time = f"{clock(seconds)} (hours:minutes:seconds)"
    return {
        "Parameters": f"{count_parameters(loaded.model)[1]:,}",
        "Multiply-accumulates": f"{macs}, at {size} x {size} pixels",
        "Training time": f"{time}; the device is not recorded",
    }


def command_of(path: Path) -> str | None:
    """Return the training command of a checkpoint, or None if `path` is not in a run's folder."""
    folder = folder_of_run(path)
    if folder is None:
        return None
    facts = read_facts(folder)
    if facts is None:
        return None

    arguments = []
    for argument in shlex.split(facts.command):
        key, equals, value = argument.partition("=")
        arguments.append(without_folders(key) + equals + without_folders(value))
    return shlex.join(arguments)


@dataclass(frozen=True, kw_only=True)
class CardMetrics:
    """Metrics of a model: percentages and counts, or None if undefined."""

    source: str  # such as "from results.json"
    images: int | None  # number of validation images
    metrics: dict[str, float | None]
    thresholds: str | None = None  # thresholds of precision, recall and F1, as a sentence
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    per_class: dict[str, dict[str, float | None]] = field(default_factory=dict)


def checkpoint_metrics(checkpoint: Checkpoint, weights: str) -> CardMetrics:
    """Return the metrics of the last evaluation, including those stored by `calibrate`."""
    # Runs without a moving average store the metrics of the raw weights as "val".
    prefix = "val/"
    if weights == "raw" and any(name.startswith("val_raw/") for name in checkpoint.metrics):
        prefix = "val_raw/"
    metrics: dict[str, float | None] = {}
    for name, value in checkpoint.metrics.items():
        if name.startswith(prefix):
            metrics[name.removeprefix(prefix)] = value
    source = f"from the evaluation of the run after epoch {checkpoint.epoch}"
    if checkpoint.fingerprint is not None and checkpoint.fingerprint == checkpoint.val_fingerprint:
        source = "from leave-one-out scores of the training images"

    images = None if checkpoint.val_fingerprint is None else checkpoint.val_fingerprint.images
    calibration = checkpoint.calibration
    threshold = checkpoint.config.get("data", {}).get("threshold")
    thresholds = None
    if calibration is not None and calibration.metrics:
        metrics |= calibration.metrics
        thresholds = (
            f"{', '.join(calibration.metrics)} are of mldec calibrate on {calibration.images:,} "
            f"images: out-of-fold, with the calibration and thresholds below"
        )
    elif not checkpoint.classes.exclusive and threshold is not None:
        thresholds = f"Precision, recall and F1 are at the threshold {threshold} (data.threshold)"
    return CardMetrics(source=source, images=images, metrics=metrics, thresholds=thresholds)


def read_results(path: Path, weights: str, checkpoint: str) -> CardMetrics:
    """Read a file of `mldec report --json` or `mldec evaluate --json`."""
    content = read_json(path)
    with naming_errors(path, DataError, remedy=_SEE):
        intervals = {}
        for name, (low, high) in content.get("intervals", {}).items():
            if low is not None:
                intervals[name] = (float(low), float(high))
        measured = CardMetrics(
            source=f"from {path.name}",
            thresholds="Decisions use the thresholds of its command",
            images=int(content["images"]),
            metrics=_numbers(content["metrics"]),
            intervals=intervals,
            per_class={name: _numbers(values) for name, values in content["per_class"].items()},
        )

    if content.get("weights") != weights:
        raise DataError(
            f"--results {path}: results of the {content.get('weights')} weights, but the {weights} "
            f"weights are published; pass --weights"
        )
    if content.get("checkpoint") != checkpoint:
        log.warning(f"--results {path}: results of another path, {content.get('checkpoint')}")
    return measured


def _numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: None if value is None else float(value) for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class CardContent:
    """The content of a model card."""

    repository: str  # owner/name
    checkpoint: Checkpoint  # as published
    loaded: Loaded  # as built
    measured: CardMetrics
    initial: str  # the initial weights
    initial_license: str
    base_model: str | None  # repository of the initial weights on the hub
    cost: dict[str, str]
    command: str | None
    license: str | None
    plugins: Sequence[str]
    data_name: str | None = None


def card(content: CardContent) -> str:
    """Return the text of README.md: metadata for the hub and the filled model_card.md.j2."""
    checkpoint = content.checkpoint
    loaded = content.loaded
    measured = content.measured
    kind = "single-label" if loaded.classes.exclusive else "multi-label"
    if loaded.classes.word_vectors is not None:
        kind = "zero-shot"
    head = str(loaded.config.head.get("_target_", UNKNOWN)).rpartition(".")[2]

    node = checkpoint.config.get("data", {})
    reader = str(node.get("_target_", UNKNOWN)).rpartition(".")[2]
    public = public_name(reader)
    data = reader
    if content.data_name:
        data = content.data_name
    elif public is not None:
        data = f"{public} {node.get('year', '')}".strip()
    elif node.get("root"):
        # The users' own name of their data: the folder or the file.
        data = Path(node["root"]).name
    elif node.get("name"):
        data = node["name"]

    tags = ["mldec", kind] if head == UNKNOWN else ["mldec", kind, head]
    metadata = _metadata(content, tags, reader, visible(data))

    class_ap = []
    for name, values in measured.per_class.items():
        if values.get("AP") is not None:
            class_ap.append((name, values["AP"]))
    columns = next(iter(measured.per_class.values()), {})
    filled = ModelCard.from_template(
        metadata,
        template_path=str(_TEMPLATE),
        **vars(content),
        name=metadata.model_name,
        kind=kind,
        head=head,
        data=data,
        address=f"{sources.HUB}{content.repository}",
        # The evaluated classes of a zero-shot model may differ from the training classes.
        classes=list(measured.per_class or loaded.classes.names),
        max_classes=MAX_CLASSES,
        columns=[column for column in columns if column not in ("AP_low", "AP_high")],
        hardest=sorted(class_ap, key=itemgetter(1))[:HARDEST],
        settings=yaml.safe_dump(checkpoint.config, sort_keys=False, allow_unicode=True),
        text=escaped,
        fenced=fenced,
        number=number,
        interval=interval,
        meaning=meaning,
    )
    return f"{filled}\n"


def _metadata(content: CardContent, tags: list[str], reader: str, data: str) -> ModelCardData:
    metrics = content.measured.metrics
    first_metric = next(iter(metrics), None)
    results = []
    for metric, value in metrics.items():
        is_main = metric in MAIN_METRICS or metric == first_metric
        if is_main and value is not None and math.isfinite(value):
            results.append(EvalResult(TASK, reader, data, metric, round(value, 4)))
    return ModelCardData(
        license=content.license,
        library_name="mldec",
        pipeline_tag=TASK,
        tags=tags,
        base_model=content.base_model,
        model_name=content.repository.partition("/")[2],
        metrics=sorted({result.metric_type for result in results}) or None,
        eval_results=results or None,
    )


def escaped(text: Any) -> str:
    """Return a text as one line of Markdown without markup."""
    return _MARKUP.sub(r"\\\1", printable(str(text)))


def fenced(text: str, language: str) -> str:
    """Return a code block with a fence that is longer than all backticks in the text."""
    fence = max(["``"] + re.findall("`+", text), key=len) + "`"
    lines = [visible(line) for line in text.splitlines()]
    return "\n".join([f"{fence}{language}"] + lines + [fence])


def number(value: float | None, digits: int = 2) -> str:
    """Format a number without decimals if it is an integer. Undefined values become a dash."""
    if value is None or not math.isfinite(value):
        return UNDEFINED
    if value == int(value):
        digits = 0
    return f"{value:,.{digits}f}"


def interval(low: float | None, high: float | None) -> str:
    """Format an interval, or a dash if it is undefined."""
    return UNDEFINED if low is None else f"{number(low)} to {number(high)}"


def publish(args: argparse.Namespace) -> None:
    """Load a checkpoint, write the files of its repository, and upload them."""
    # Check the options before the model is loaded.
    sources.check_repository(args.repository)
    if args.checkpoint.startswith(PREFIX):
        raise ConfigError(f"{args.checkpoint}: a third-party model; publish a calibrated copy")
    if args.dry_run is None:
        sources.require_token()
    else:
        check_folder("--dry-run", args.dry_run)
        if Path(args.dry_run).exists() and any(Path(args.dry_run).iterdir()):
            raise ConfigError(f"--dry-run {args.dry_run}: the folder is not empty; name a new one")

    loaded = load_model(args.checkpoint, args.weights, plugins=args.plugin)
    checkpoint = shareable(loaded)
    measured = checkpoint_metrics(checkpoint, loaded.weights)
    if args.results is not None:
        measured = read_results(Path(args.results), loaded.weights, args.checkpoint)
    initial, initial_license, base_model = initial_weights(checkpoint, loaded)
    content = CardContent(
        repository=args.repository,
        checkpoint=checkpoint,
        loaded=loaded,
        measured=measured,
        initial=initial,
        initial_license=initial_license,
        base_model=base_model,
        cost=cost_of(loaded, loaded.path),
        command=command_of(loaded.path),
        license=args.license,
        plugins=args.plugin,
        data_name=args.data_name,
    )

    if args.dry_run is not None:
        _write(Path(args.dry_run), content)
        done = f"{args.dry_run}: the files for {args.repository}; not uploaded"
    else:
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder), content)
            commit = sources.upload(Path(folder), args.repository, private=args.private)
        done = f"published: {sources.HUB}{args.repository}@{commit}"

    if not measured.intervals:
        say("the card has no intervals; pass --results with a file of mldec report --json")
    support = getattr(loaded.model.head, "support", ())
    if len(support):
        say(
            f"the head stores features of {len(support):,} training images; head.kernel=linear "
            f"trains one without them"
        )
    if args.license is None:
        say("the card has no license of the model; pass --license, such as apache-2.0")
    say(done)


def _write(folder: Path, content: CardContent) -> None:
    published.write(folder, content.checkpoint)
    write_file(folder / sources.CARD, card(content).encode())


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec publish`."""
    arguments = command("publish", str(__doc__))
    add = arguments.add_argument
    add("checkpoint", help="a run's folder, or any other checkpoint")
    add("repository", metavar="OWNER/NAME", help="created if it does not exist")
    place = arguments.add_mutually_exclusive_group()
    place.add_argument("--private", action="store_true", help="create a private repository")
    place.add_argument("--dry-run", metavar="FOLDER", help="write to a new folder, without upload")
    add_weights_options(arguments)
    add("--results", metavar="FILE", help="metrics of the card: JSON of mldec report or evaluate")
    add("--data-name", metavar="TEXT", help="name of the dataset; default: its folder")
    add("--license", metavar="ID", help="license of the model as on the hub, such as apache-2.0")
    return arguments


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, publish)
