"""Load models from checkpoints of mldec, files of the paper's authors, or open_clip."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mldec import build
from mldec.checkpoint.classes import check_count, read_class_names, same_names
from mldec.checkpoint.state import Calibration, Checkpoint
from mldec.config.compose import parse, to_dict
from mldec.config.schema import PARTS, Config, Init
from mldec.data.fingerprint import Fingerprint
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes
from mldec.errors import CheckpointError, ConfigError, DataError, naming_errors
from mldec.files.run_folder import CALIBRATED, CHECKPOINTS
from mldec.files.torch_files import SUFFIX, read_torch, recorded_hash, versions
from mldec.model import Classifier, Viewed
from mldec.names import format_list
from mldec.runtime import distributed
from mldec.runtime import environment as facts
from mldec.words.types import PREFIX

log = logging.getLogger("mldec")

MOST_VERSIONS = 100  # maximum number of versions of a checkpoint to search
# Suffixes of buffers that third-party checkpoints may omit. They are recomputed, and timm provides
# the input normalization of each network.
COMPUTED = ("num_batches_tracked", "backbone.mean", "backbone.std")


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and the metadata of its checkpoint."""

    model: Classifier  # images uint8 or float [B, 3, H, W] -> logits [B, K]
    config: Config
    # Zero-shot files of the official code and open_clip models have no classes. Their word vectors
    # have the shape [0, D_w].
    classes: Classes
    transform: EvalTransform  # PIL image -> input of the model
    metrics: dict[str, float]  # of the last evaluation of the run; empty for third-party files
    weights: str  # "ema" or "raw"
    path: Path  # path of the file of weights
    fingerprint: Fingerprint | None = None  # of the training data; None for third-party files
    calibration: Calibration | None = None  # of these weights, if `mldec calibrate` wrote the file
    of_run: bool = False  # whether mldec wrote the file
    unseen: tuple[str, ...] | None = None  # classes without training images; None: unknown


def load_model(
    path: str | Path,
    weights: str | None = None,
    *,
    image_size: int | None = None,
    class_names: str | Path | None = None,
    thresholds: str | Path | None = None,
    device: str | torch.device = "cpu",
    plugins: Sequence[str] = (),
    views: str | None = None,
) -> Loaded:
    """Build the model of a checkpoint and load its weights in float32.

    Args:
        path: File written by `mldec train` or folder of its run (see `_read_run`), `.pth` file of
            the authors, any other source of `local`, or "clip:MODEL[:WEIGHTS]" for open_clip.
        weights: "ema", "raw", or None for the set with the best result. Third-party files have one
            set. The folder of a run always selects best.pt for "ema" and "raw".
        image_size: Pixels per side. Overrides the size of the checkpoint.
        class_names: Text file with new class names, one per line, in the checkpoint's order.
        thresholds: File with thresholds that replace the calibrated ones; see
            `mldec.checkpoint.thresholds`.
        device: Device of the model: a `torch.device`, or a name for `distributed.pick_device`.
        plugins: Third-party packages that may define parts of the model. Plugins in the file are
            ignored.
        views: "flip" or "scales" to average the logits of two views; see `mldec.model.Viewed`.

    Returns:
        The model in evaluation mode with its metadata.

    Raises:
        UserError: If the file is invalid or does not fit its model, or an argument is invalid.
    """
    # Validate the arguments first, because reading or downloading a large file is slow.
    if image_size is not None:
        EvalTransform(image_size=image_size)  # raises if the size is out of range
    if isinstance(device, str):
        device = distributed.pick_device(device)
    names = None if class_names is None else read_class_names(Path(class_names))

    # Restore the default device and the random state of the caller afterward.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        calibrated = weights is None
        file, checkpoint, of_run = _read_any(str(path), image_size, names, calibrated=calibrated)
        with naming_errors(file):
            if names is not None:
                check_count(names, len(checkpoint.classes))
                checkpoint = _renamed(checkpoint, names)
            tensors, chosen = checkpoint.weights(weights)

            # Validate the backbone and the head only. Renamed arguments of the data in older
            # checkpoints do not affect inference.
            config, parts = _parts_of(checkpoint, plugins, build.MODEL_PARTS)
            optional = () if of_run else COMPUTED

            # Check the tensors on the meta device before memory is allocated. Third-party parts may
            # not support the meta device.
            if not plugins:
                with torch.device("meta"):
                    outline = build.model(parts, checkpoint.classes, pretrained=False)
                check_fit(outline, tensors, optional)
            model = build.model(parts, checkpoint.classes, pretrained=False)
            load_strict(model, tensors, file, optional)

    calibration = _calibration(checkpoint, chosen, file)
    if thresholds is not None:
        from mldec.checkpoint.thresholds import with_thresholds

        calibration = with_thresholds(Path(thresholds), checkpoint.classes, chosen, calibration)

    model, transform = _as_seen(model, checkpoint.transform, config, path, image_size, views)
    return Loaded(
        model=model.to(device).eval(),
        config=config,
        classes=checkpoint.classes,
        transform=transform,
        metrics=checkpoint.metrics,
        weights=chosen,
        path=file,
        fingerprint=checkpoint.fingerprint,
        calibration=calibration,
        of_run=of_run,
        unseen=checkpoint.unseen,
    )


def _as_seen(
    model: Classifier,
    transform: EvalTransform,
    config: Config,
    path: str | Path,
    image_size: int | None,
    views: str | None,
) -> tuple[Classifier, EvalTransform]:
    """Apply `image_size` and `views` to a model and its transform; update the config in place."""
    option = f"--image-size {image_size}"
    if views:
        side = image_size or transform.image_size
        model = Viewed(model, views, side)
        if views == "scales":
            image_size = Viewed.larger(side)
            option = "--views scales"
    if image_size in (None, transform.image_size):
        return model, transform

    # The input size of some networks, such as ViT, is fixed.
    if config.backbone.get("image_size") is not None:
        raise CheckpointError(f"{option}: {path} was trained for one size only; leave it out")
    config.data["image_size"] = image_size
    return model, replace(transform, image_size=image_size)


def _calibration(checkpoint: Checkpoint, chosen: str, file: Path) -> Calibration | None:
    calibration = checkpoint.calibration
    if calibration is None or calibration.weights == chosen:
        return calibration
    log.warning(
        f"{file} was calibrated with its {calibration.weights} weights: its thresholds are "
        f"not used with the {chosen} ones"
    )
    return None


def _read_any(
    path: str, image_size: int | None, names: Sequence[str] | None, *, calibrated: bool
) -> tuple[Path, Checkpoint, bool]:
    """Return the path of the weights, their checkpoint, and whether mldec wrote it."""
    if path.startswith(PREFIX):
        from mldec.checkpoint import clip

        file, checkpoint = clip.convert(path)
        return file, checkpoint, False

    from mldec.checkpoint.sources import local

    file = local(path)
    if Path(path).is_dir() and file.name in CHECKPOINTS:
        file, state = _read_run(path, file, calibrated=calibrated)
        return file, Checkpoint.from_state(state, file), True

    with naming_errors(file):
        state = _read(file)
        if "format" in state:
            return file, Checkpoint.from_state(state, file), True

        from mldec.checkpoint import released

        return file, released.convert(state, file, image_size=image_size, names=names), False


def _read_run(folder: str, best: Path, *, calibrated: bool) -> tuple[Path, dict[str, Any]]:
    """Read the checkpoint of a run's folder; return its path and its content.

    With `calibrated`, calibrated.pt is preferred if it was created from the current best.pt.
    """
    path = best.with_name(CALIBRATED)
    if calibrated and path.is_file():
        with naming_errors(path):
            state = _read(path)
            source = (state.get("calibration") or {}).get("source")
        if source == recorded_hash(best):
            log.info(f"{folder}: using {path}")
            return path, state
        log.warning(
            f"{path} is ignored: it was not made from the current {best.name}; "
            f"mldec calibrate {folder} replaces it"
        )

    log.info(f"{folder}: using {best}")
    return best, _read(best)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint of `mldec train`."""
    return Checkpoint.from_state(_read(path), path)


def load_newest(path: Path) -> tuple[Path, Checkpoint]:
    """Read the newest valid version of a checkpoint. Log a warning for each damaged version.

    Args:
        path: Path of the newest version, such as last.pt.

    Returns:
        The path and the content of the version.

    Raises:
        CheckpointError: If no version is valid.
    """
    paths = [version for version in versions(path, MOST_VERSIONS) if version.exists()] or [path]
    for candidate, older in pairwise(paths):
        try:
            return candidate, load(candidate)
        except CheckpointError as error:
            log.warning(f"{error}; going on from {older}")
    return paths[-1], load(paths[-1])


def to_store(loaded: Loaded) -> Checkpoint:
    """Return the checkpoint of a loaded model. Third-party files have no training state.

    Raises:
        CheckpointError: If the model has no class names.
    """
    if not loaded.classes.names:
        raise CheckpointError(
            f"{loaded.path} names no classes and holds no word vectors: it cannot be stored"
        )
    if loaded.of_run:
        stored = load(loaded.path)
        return replace(
            stored, calibration=loaded.calibration, classes=loaded.classes, unseen=loaded.unseen
        )

    return Checkpoint(
        config=to_dict(loaded.config),
        classes=loaded.classes,
        transform=loaded.transform,
        model=loaded.model.state_dict(),
        calibration=loaded.calibration,
        versions=facts.installed(),
        git=facts.git_commit(),
    )


def check_start(config: Config) -> Config:
    """Validate `init` before any file is read. Returns the config without init=timm.

    init=timm replaces unavailable files of the authors in the recipes. The backbone starts from
    the weights of timm, as it does without `init`.

    Raises:
        ConfigError: If init=timm is used without pretrained weights.
    """
    if config.start.path != "timm":
        return config

    if config.backbone.get("pretrained") is not True:
        raise ConfigError(
            "init=timm takes the weights that timm has: pass backbone.pretrained=true with its name"
        )
    log.warning(
        f"init=timm: the backbone starts from timm's {config.backbone.get('name')}; files of the "
        f"authors were trained further, on Open Images, so expect less than their figures"
    )
    return replace(config, init=None)


def initialise(model: nn.Module, start: str | Path | Init, names: Sequence[str] = ()) -> str:
    """Initialize a model with the best weights of a checkpoint.

    Args:
        model: Model to initialize in place.
        start: Any source of `local`, or `Init` settings.
        names: Class names of the model, for `init.classes`.

    Returns:
        A one-line report, see `copy_fitting`.

    Raises:
        UserError: If the checkpoint does not fit the model.
    """
    from mldec.checkpoint.sources import local

    if isinstance(start, Init) and start.classes:
        return _initialise_by_name(model, start, names)
    path = local(str(start.path if isinstance(start, Init) else start))
    with naming_errors(path):
        state = _read(path)
        if "format" in state:
            tensors, _ = Checkpoint.from_state(state, path).weights(None)
        else:
            from mldec.checkpoint import released

            tensors = released.tensors(state)
        return copy_fitting(model, tensors, path)


def _initialise_by_name(model: Any, start: Init, names: Sequence[str]) -> str:
    """Initialize a model from weights, and its classes from the classes with the same names."""
    path, checkpoint, _ = _read_any(str(start.path), None, None, calibrated=False)
    synonyms: Sequence[Sequence[str]] = ()
    if start.synonyms:
        from mldec.words.vectors import read_class_list

        synonyms = read_class_list(Path(start.synonyms)).classes

    own = getattr(model.head, "class_tensors", ())
    if not own:
        raise ConfigError(
            f"init.classes=by_name: {type(model.head).__name__} has nothing per class: leave it out"
        )
    known = checkpoint.classes.names
    sources = same_names(names, known, synonyms)
    if not any(source is not None for source in sources):
        raise CheckpointError(
            f"init.classes=by_name: {path} shares no class name with the data. Its classes: "
            f"{format_list(known)}; map names with init.synonyms=FILE, or drop init.classes"
        )

    with naming_errors(path):
        tensors, _ = checkpoint.weights(None)
        prefix = "head."
        of_head = {}
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                of_head[name.removeprefix(prefix)] = tensor

        # The rows of a class require all other layers of the head.
        match = match_tensors(model.head, of_head)
        others = set(match.missing) | set(match.unexpected)
        others |= set(match.other_shape).difference(own)
        if others:
            raise CheckpointError(
                f"init.classes=by_name: {path} has another head: {len(others)} of its tensors are "
                f"absent or of another shape ({', '.join(sorted(others)[:3])}); choose its head"
            )
        taken = set(model.head.take_classes(of_head, sources, len(known)))

    # `take_classes` has set the tensors with rows per class, so they are copied to themselves.
    state = model.head.state_dict()
    tensors = dict(tensors)
    for name in own:
        tensors[prefix + name] = state[name]
    report = copy_fitting(model, tensors, path)
    carried = [name for number, name in enumerate(names) if number in taken]
    anew = [name for number, name in enumerate(names) if number not in taken]
    report += f"; {len(carried)} classes carried by name ({format_list(carried, 100)})"
    if anew:
        report += f"; {len(anew)} start anew ({format_list(anew, 100)})"
    crowded = sum(source is not None for source in sources) - len(taken)
    if crowded:
        report += f", {crowded} of them known, in a group that has the query of others"
    return report


def saved_config(checkpoint: Checkpoint, path: Path, plugins: Sequence[str] = ()) -> Config:
    """Return the config of a checkpoint with all arguments of its parts.

    Args:
        checkpoint: Checkpoint of a run.
        path: Path of the checkpoint, for messages.
        plugins: Third-party packages that may define parts.

    Raises:
        CheckpointError: If the config is invalid.
    """
    with naming_errors(path):
        return _parts_of(checkpoint, plugins, PARTS)[0]


def _parts_of(
    checkpoint: Checkpoint, plugins: Sequence[str], kinds: Sequence[str]
) -> tuple[Config, build.Parts]:
    """Return the config of a checkpoint and its parts. Plugins in the file are ignored."""
    config = parse({**checkpoint.config, "plugins": list(plugins), "resume": None, "init": None})
    parts = build.check(config, kinds)
    return build.recorded(config, parts), parts


def _read(path: Path) -> dict[str, Any]:
    """Read an untrusted file of weights. The caller uses its content within `naming_errors`."""
    if path.suffix == SUFFIX:
        from mldec.checkpoint import published

        return published.read(path)

    return read_torch(path)


def _renamed(checkpoint: Checkpoint, names: Sequence[str]) -> Checkpoint:
    unseen = checkpoint.unseen
    if unseen is not None:
        new_name = dict(zip(checkpoint.classes.names, names, strict=True))
        unseen = tuple(new_name[name] for name in unseen)
    classes = replace(checkpoint.classes, names=tuple(names))
    return replace(checkpoint, classes=classes, unseen=unseen)


class Match(NamedTuple):
    """Comparison of the tensors in a file and in a model: sorted lists of names."""

    fitting: list[str]
    other_shape: list[str]  # in both, with different shapes
    missing: list[str]  # only in the model
    unexpected: list[str]  # only in the file


def match_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], ignored: tuple[str, ...] = ()
) -> Match:
    """Compare tensors with a model by name and shape. Suffixes in `ignored` are skipped."""
    wanted = {name: t for name, t in model.state_dict().items() if not name.endswith(ignored)}
    given = {name for name in tensors if not name.endswith(ignored)}
    common = wanted.keys() & given
    fitting = {name for name in common if wanted[name].shape == tensors[name].shape}

    return Match(
        fitting=sorted(fitting),
        other_shape=sorted(common - fitting),
        missing=sorted(wanted.keys() - given),
        unexpected=sorted(given - wanted.keys()),
    )


def check_fit(
    model: nn.Module, tensors: Mapping[str, Tensor], optional: tuple[str, ...] = ()
) -> None:
    """Raise DataError unless all tensors fit the model.

    Args:
        model: Model, which may be on the meta device.
        tensors: Tensors by name.
        optional: Suffixes of tensors that may be missing.
    """
    match = match_tensors(model, tensors)
    missing = [name for name in match.missing if not name.endswith(optional)]
    kinds = {"missing": missing, "unexpected": match.unexpected}

    for what, names in {**kinds, "of another shape": match.other_shape}.items():
        if names:
            # The names are untrusted, so long names are truncated.
            examples = ", ".join(name[:100] for name in names[:10])
            plural = "tensor is" if len(names) == 1 else "tensors are"
            raise DataError(f"it does not fit the model: {len(names)} {plural} {what} ({examples})")


def load_strict(
    model: nn.Module, tensors: Mapping[str, Tensor], path: Path, optional: tuple[str, ...] = ()
) -> None:
    """Copy tensors to a model.

    Args:
        model: Model to load in place.
        tensors: Tensors by name. All of them must fit.
        path: Path of their file, for messages.
        optional: Suffixes of tensors that may be missing.

    Raises:
        CheckpointError: If a tensor does not fit; see `check_fit`.
    """
    with naming_errors(path):
        check_fit(model, tensors, optional)
        model.load_state_dict(dict(tensors), strict=not optional)


def copy_fitting(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> str:
    """Copy all tensors that fit by name and shape. The backbone must fit completely.

    Args:
        model: Model to initialize in place. Its head may differ, such as for new classes.
        tensors: Tensors by name.
        path: Path of their file, for messages.

    Returns:
        A one-line report of the loaded and the other tensors.

    Raises:
        CheckpointError: If the backbone does not fit.
    """
    # Computed buffers are neither required nor copied.
    match = match_tensors(model, tensors, COMPUTED)

    # A partial match is a different backbone, with layers that would stay random.
    unfit = match.missing + match.other_shape
    unfilled = [name for name in unfit if name.startswith("backbone.")]
    if unfilled or not match.fitting:
        raise CheckpointError(
            f"init={path} is of another backbone: {len(unfilled)} tensors are absent or of another "
            f"shape ({', '.join(sorted(unfilled)[:3])}); choose its backbone=NAME"
        )

    model.load_state_dict({name: tensors[name] for name in match.fitting}, strict=False)

    wanted = len(match.fitting) + len(match.missing) + len(match.other_shape)
    report = f"init from {path}: {len(match.fitting)} of {wanted} tensors loaded"
    for what, names in (
        ("of another shape", match.other_shape),
        ("not in the file", match.missing),
        ("not in the model", match.unexpected),
    ):
        if names:
            more = ", ..." if len(names) > 5 else ""
            report += f"; {len(names)} {what} ({', '.join(names[:5])}{more})"
    return report
