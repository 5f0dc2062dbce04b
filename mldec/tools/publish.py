"""Publish a checkpoint on the Hugging Face Hub, as `hf:OWNER/NAME`.

Uploads model.safetensors (one set of weights), config.json and README.md (a model card), without
the training state and without local folders. Log in first with `hf auth login`, or set HF_TOKEN.
See MODEL_ZOO.md.
"""

import argparse
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from timm.models import get_pretrained_cfg

from mldec.backbones import TimmBackbone
from mldec.checkpoint import Loaded, load_model, published, sources
from mldec.checkpoint.loading import to_store
from mldec.checkpoint.state import Checkpoint
from mldec.cli import add_weights_options, command, run_command
from mldec.data.readers import public_name
from mldec.errors import ConfigError, DataError, log, naming_errors, printable, say, visible
from mldec.evaluation.output import meaning
from mldec.files.atomic import check_folder, write_file
from mldec.files.text import read_json
from mldec.words.types import PREFIX

UNKNOWN = "unknown"
MAX_CLASSES = 1_000  # rows of the class table
# Metrics in the metadata of the card, in addition to the first one. Its text contains all metrics.
MAIN_METRICS = ("mAP", "CF1", "OF1", "top1", "top5", "zsl_mAP", "gzsl_mAP", "mAP_partial")
TASK = "image-classification"
UNDEFINED = "\N{EN DASH}"
_TEMPLATE = Path(__file__).with_name("model_card.md.j2")
_SEE = "pass a file of mldec report --json or mldec evaluate --json"
_MARKUP = re.compile(r"([\\`*_\[\]<>|~&$]|:(?=//))")  # inline markup of Markdown and HTML
_TIMM = ("mldec.backbones.TimmBackbone", f"{TimmBackbone.__module__}.{TimmBackbone.__qualname__}")


def without_folders(text: str) -> str:
    """Replace the folders of an absolute path by `...`. They may identify the machine or user."""
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
    target = backbone.get("_target_")
    name = without_folders(str(backbone.get("name", target)))
    pretrained = backbone.get("pretrained")
    if pretrained is False:
        return "random weights", "none, because no third-party weights were used", None
    if isinstance(pretrained, str):
        file = without_folders(pretrained)
        return f"the file {file} in {name}", f"{UNKNOWN}: they were read from a file", None
    if target not in _TIMM:
        return f"initial weights of {name}", f"{UNKNOWN}: they are not from timm", None

    license = None
    base_model = None
    # timm raises RuntimeError if it knows the network but not the tag of the weights.
    with suppress(RuntimeError):
        weights = get_pretrained_cfg(str(backbone.get("name")))
        if weights is not None:
            license = weights.license
            base_model = weights.hf_hub_id
    return f"timm's weights of {name}", license or f"{UNKNOWN} to timm", base_model


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


def dataset_of(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the reader of the training data, and the name of the data set."""
    node = checkpoint.config.get("data", {})
    reader = str(node.get("_target_", UNKNOWN)).rpartition(".")[2]
    public = public_name(reader)
    if public is not None:
        return reader, f"{public} {node.get('year', '')}".strip()
    if node.get("root"):
        # The users' own name of their data: the folder or the file.
        return reader, Path(node["root"]).name
    return reader, node.get("name") or reader


def card(
    repository: str,
    checkpoint: Checkpoint,
    loaded: Loaded,
    measured: CardMetrics,
    *,
    license: str | None = None,
    data_name: str | None = None,
    plugins: Sequence[str] = (),
) -> ModelCard:
    """Return the card of a repository: metadata for the hub and the filled model_card.md.j2."""
    kind = "single-label" if loaded.classes.exclusive else "multi-label"
    if loaded.classes.word_vectors is not None:
        kind = "zero-shot"
    head = str(loaded.config.head.get("_target_", UNKNOWN)).rpartition(".")[2]
    reader, data = dataset_of(checkpoint)
    data = visible(data_name or data)
    initial, initial_license, base_model = initial_weights(checkpoint, loaded)

    results = []
    for name, value in measured.metrics.items():
        is_main = name in MAIN_METRICS or name == next(iter(measured.metrics))
        if is_main and value is not None and math.isfinite(value):
            results.append(EvalResult(TASK, reader, data, name, round(value, 4)))
    metadata = ModelCardData(
        license=license,
        library_name="mldec",
        pipeline_tag=TASK,
        tags=["mldec", kind] if head == UNKNOWN else ["mldec", kind, head],
        base_model=base_model,
        model_name=repository.partition("/")[2],
        metrics=sorted({result.metric_type for result in results}) or None,
        eval_results=results or None,
    )

    # A single threshold is for all classes.
    thresholds: tuple[float, ...] = ()
    if checkpoint.calibration is not None:
        thresholds = checkpoint.calibration.thresholds
    columns = next(iter(measured.per_class.values()), {})
    return ModelCard.from_template(
        metadata,
        template_path=str(_TEMPLATE),
        name=metadata.model_name,
        address=f"{sources.HUB}{repository}",
        kind=kind,
        head=head,
        data=data,
        checkpoint=checkpoint,
        loaded=loaded,
        measured=measured,
        initial=initial,
        initial_license=initial_license,
        license=license,
        plugins=plugins,
        # The evaluated classes of a zero-shot model may differ from the training classes.
        classes=list(measured.per_class or loaded.classes.names),
        max_classes=MAX_CLASSES,
        columns=[name for name in columns if name not in ("AP_low", "AP_high", "threshold")],
        thresholds=thresholds,
        threshold_of=dict(zip(loaded.classes.names, thresholds, strict=False)),
        stored_images=len(getattr(loaded.model.head, "support", ())),
        text=escaped,
        number=number,
        meaning=meaning,
    )


def escaped(text: Any) -> str:
    """Return a text as one line of Markdown without markup."""
    return _MARKUP.sub(r"\\\1", printable(str(text)))


def number(value: float | None, digits: int = 2) -> str:
    """Format a number without decimals if it is an integer. Undefined values become a dash."""
    if value is None or not math.isfinite(value):
        return UNDEFINED
    if value == int(value):
        digits = 0
    return f"{value:,.{digits}f}"


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
    text = card(
        args.repository,
        checkpoint,
        loaded,
        measured,
        license=args.license,
        data_name=args.data_name,
        plugins=args.plugin,
    )

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.dry_run or temporary)
        published.write(folder, checkpoint)
        write_file(folder / sources.CARD, f"{text}\n".encode())
        done = f"{folder}: the files for {args.repository}; not uploaded"
        if args.dry_run is None:
            commit = sources.upload(folder, args.repository, private=args.private)
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
