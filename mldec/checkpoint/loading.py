"""Load models from checkpoints of mldec, files of the paper's authors, or open_clip."""

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
from mldec.errors import CheckpointError, ConfigError, log, naming_errors
from mldec.files.run_folder import CALIBRATED, CHECKPOINTS
from mldec.files.torch_files import SUFFIX, read_torch, recorded_hash, versions
from mldec.model import Classifier, Viewed
from mldec.names import format_list
from mldec.runtime import distributed, environment
from mldec.words.types import PREFIX

MOST_VERSIONS = 100  # maximum number of versions of a checkpoint to search
# Suffixes of buffers that third-party checkpoints may omit. They are recomputed, and timm provides
# the input normalization of each network.
COMPUTED = ("num_batches_tracked", "backbone.mean", "backbone.std")
HEAD = "head."  # prefix of the tensors of the head


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and the metadata of its checkpoint."""

    model: Classifier  # images uint8 or float [B, 3, H, W] -> logits [B, K]
    config: Config  # without a loss for third-party files; without a data set if it is unknown
    # Zero-shot files of the official code and open_clip models have no classes. Their word vectors
    # have the shape [0, D_w].
    classes: Classes
    transform: EvalTransform  # PIL image -> input of the model
    metrics: dict[str, float]  # of the last evaluation of the run; empty for third-party files
    weights: str  # "ema" or "raw"
    path: Path  # path of the file of weights
    fingerprint: Fingerprint | None = None  # of the training data; None for third-party files
    val_fingerprint: Fingerprint | None = None  # of the validation data; None if it is unknown
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
        path: A checkpoint or the folder of a run, a `.pth` file of the authors, "zoo:NAME",
            "hf:OWNER/NAME[@REVISION]", or "clip:MODEL[:WEIGHTS]" for open_clip.
        weights: "ema", "raw", or None for the set with the best result. Third-party files have one
            set. None in a run folder uses a valid calibrated.pt, or else best.pt.
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
                checkpoint = _with_names(checkpoint, names)
            tensors, chosen = checkpoint.weights(weights)

            # Validate the backbone and the head only. Renamed arguments of the data in older
            # checkpoints do not affect inference.
            config, parts = _parts_of(checkpoint, plugins, build.MODEL_PARTS)
            model = build.model(parts, checkpoint.classes, pretrained=False)
            load_strict(model, tensors, file, () if of_run else COMPUTED)

    calibration = checkpoint.calibration
    if calibration is not None and calibration.weights != chosen:
        log.warning(
            f"{file} was calibrated with its {calibration.weights} weights; its thresholds are "
            f"not used with the {chosen} weights"
        )
        calibration = None
    if thresholds is not None:
        from mldec.checkpoint.thresholds import with_thresholds

        calibration = with_thresholds(Path(thresholds), checkpoint.classes, chosen, calibration)

    loaded = Loaded(
        model=model,
        config=config,
        classes=checkpoint.classes,
        transform=checkpoint.transform,
        metrics=checkpoint.metrics,
        weights=chosen,
        path=file,
        fingerprint=checkpoint.fingerprint,
        val_fingerprint=checkpoint.val_fingerprint,
        calibration=calibration,
        of_run=of_run,
        unseen=checkpoint.unseen,
    )
    loaded = _with_inputs(loaded, path, image_size, views)
    # Move the model last, so that an error before takes no memory of a GPU.
    loaded.model.to(device).eval()
    return loaded


def _with_inputs(
    loaded: Loaded, path: str | Path, image_size: int | None, views: str | None
) -> Loaded:
    option = f"--image-size {image_size}"
    trained = loaded.transform.image_size
    size = image_size or trained
    if views:
        loaded = replace(loaded, model=Viewed(loaded.model, views, size))
        if views == "scales":
            size = Viewed.larger(size)
            option = "--views scales"
    if size == trained:
        return loaded

    if loaded.config.backbone.get("image_size") is not None:
        raise CheckpointError(f"{option}: {path} has the fixed image size {trained}; remove it")
    # The data of an evaluation is built from this config.
    loaded.config.data["image_size"] = size
    return replace(loaded, transform=replace(loaded.transform, image_size=size))


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
        # Only mldec writes this key.
        if "format" in state:
            return file, Checkpoint.from_state(state, file), True

        from mldec.checkpoint import released

        return file, released.convert(state, file, image_size=image_size, names=names), False


def _read_run(folder: str, best: Path, *, calibrated: bool) -> tuple[Path, dict[str, Any]]:
    """Read best.pt, or with `calibrated` the calibrated.pt that was created from it."""
    path = best.with_name(CALIBRATED)
    if calibrated and path.is_file():
        with naming_errors(path):
            state = _read(path)
            source = (state.get("calibration") or {}).get("source")
        # Thresholds of an older best.pt do not fit the weights of the new one.
        if source == recorded_hash(best):
            log.info(f"{folder}: using {path}")
            return path, state
        log.warning(
            f"{path} is ignored, because {best.name} has changed since; "
            f"mldec calibrate {folder} replaces it"
        )

    log.info(f"{folder}: using {best}")
    return best, _read(best)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint of `mldec train`."""
    return Checkpoint.from_state(_read(path), path)


def load_newest(path: Path) -> tuple[Path, Checkpoint]:
    """Return the path and content of the newest valid version of a checkpoint, such as last.pt."""
    # `load` reports a missing last.pt if no version exists.
    paths = [version for version in versions(path, MOST_VERSIONS) if version.exists()] or [path]
    for candidate, older in pairwise(paths):
        try:
            return candidate, load(candidate)
        except CheckpointError as error:
            log.warning(f"{error}; continuing from {older}")
    return paths[-1], load(paths[-1])


def to_store(loaded: Loaded) -> Checkpoint:
    """Return the checkpoint of a loaded model. Third-party files have no training state."""
    if not loaded.classes.names:
        raise CheckpointError(f"{loaded.path} cannot be stored: it has no class names")
    # Read the file again, because it has both sets of weights and the training state.
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
        versions=environment.installed(),
        git=environment.git_commit(),
    )


def check_start(config: Config) -> Config:
    """Return the config without init=timm, which selects the pretrained weights of timm."""
    if config.start.path != "timm":
        return config

    # The authors' initial weights cannot be downloaded any more, so recipes accept timm's weights.
    if config.backbone.get("pretrained") is not True:
        raise ConfigError("init=timm: pass backbone.pretrained=true with a backbone.name of timm")
    log.warning(
        f"init=timm: the backbone starts from timm's {config.backbone.get('name')}. The authors' "
        f"weights were also trained on Open Images, so expect lower results than theirs."
    )
    return replace(config, init=None)


def initialize(model: nn.Module, start: str | Path | Init, names: Sequence[str] = ()) -> str:
    """Initialize a model in place with the best weights of a checkpoint.

    `start` is any source of `local`, or `Init` settings. `names` are the class names of the model,
    for `init.classes`. Returns a one-line report of the loaded and the other tensors.
    """
    from mldec.checkpoint.sources import local

    if isinstance(start, Init) and start.classes:
        return _initialize_by_name(model, start, names)
    path = local(str(start.path if isinstance(start, Init) else start))
    with naming_errors(path):
        state = _read(path)
        if "format" in state:
            tensors, _ = Checkpoint.from_state(state, path).weights(None)
        else:
            from mldec.checkpoint import released

            tensors = released.tensors(state)
        return _copy_fitting(model, tensors, path)


def _initialize_by_name(model: Any, start: Init, names: Sequence[str]) -> str:
    """Initialize a model from weights, and its classes from the classes with the same names."""
    class_tensors = getattr(model.head, "class_tensors", ())
    if not class_tensors:
        raise ConfigError(
            f"init.classes=by_name: {type(model.head).__name__} has no weights per class; remove it"
        )
    path, checkpoint, _ = _read_any(str(start.path), None, None, calibrated=False)
    # Data sets name the same class differently, such as "tv" and "tvmonitor".
    synonyms: Sequence[Sequence[str]] = ()
    if start.synonyms:
        from mldec.words.vectors import read_class_list

        synonyms = read_class_list(Path(start.synonyms))
    known = checkpoint.classes.names
    sources = same_names(names, known, synonyms)
    if all(source is None for source in sources):
        raise CheckpointError(
            f"init.classes=by_name: {path} shares no class name with the data. Its classes: "
            f"{format_list(known)}; map names with init.synonyms=FILE, or drop init.classes"
        )

    with naming_errors(path):
        tensors, _ = checkpoint.weights(None)
        head_tensors = _inside(tensors, HEAD)

        # Only the tensors with rows per class may have another shape.
        match = _match_tensors(model.head, head_tensors)
        unfit = set(match.missing) | set(match.unexpected)
        unfit |= set(match.other_shape).difference(class_tensors)
        if unfit:
            raise CheckpointError(
                f"init.classes=by_name: the head of {path} differs in {len(unfit)} tensors "
                f"({format_list(sorted(unfit), 3)}); use the same head"
            )
        taken = set(model.head.take_classes(head_tensors, sources, len(known)))

    # `take_classes` has set the tensors with rows per class, so they are copied to themselves.
    state = model.head.state_dict()
    tensors = tensors | {HEAD + name: state[name] for name in class_tensors}
    report = _copy_fitting(model, tensors, path)
    carried = [name for number, name in enumerate(names) if number in taken]
    new = [name for number, name in enumerate(names) if number not in taken]
    report += f"; {len(carried)} classes initialized by name ({format_list(carried, 100)})"
    if new:
        report += f"; {len(new)} new classes ({format_list(new, 100)})"
    return report


def saved_config(checkpoint: Checkpoint, path: Path, plugins: Sequence[str] = ()) -> Config:
    """Return the config of a run's checkpoint with all arguments of its parts."""
    with naming_errors(path):
        return _parts_of(checkpoint, plugins, PARTS)[0]


def _parts_of(
    checkpoint: Checkpoint, plugins: Sequence[str], kinds: Sequence[str]
) -> tuple[Config, build.Parts]:
    """Return the config of a checkpoint and its parts. Plugins in the file are ignored."""
    head = dict(checkpoint.config["head"])
    if "queries" in head:
        head["init_queries"] = head.pop("queries")  # renamed after 1.0.0rc1
    # A checkpoint may name code, but only the user can authorize it.
    changes = {"head": head, "plugins": list(plugins), "resume": None, "init": None}
    config = parse({**checkpoint.config, **changes})
    parts = build.check(config, kinds)
    return build.recorded(config, parts), parts


def _read(path: Path) -> dict[str, Any]:
    """Read an untrusted file of weights. The caller uses its content within `naming_errors`."""
    if path.suffix == SUFFIX:
        from mldec.checkpoint import published

        return published.read(path)

    return read_torch(path)


def _with_names(checkpoint: Checkpoint, names: Sequence[str]) -> Checkpoint:
    check_count(names, len(checkpoint.classes))
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


def _match_tensors(
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


def _inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a part, without its prefix."""
    own = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            own[name.removeprefix(prefix)] = tensor
    return own


def allocate(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Prepare buffers whose shapes depend on the training data for the tensors of a file."""
    for part, module in model.named_children():
        prepare = getattr(module, "allocate", None)
        if prepare is not None:
            prepare(_inside(tensors, f"{part}."))


def load_strict(
    model: nn.Module, tensors: Mapping[str, Tensor], path: Path, optional: tuple[str, ...] = ()
) -> None:
    """Copy tensors from the file `path` to a model.

    `optional` are the suffixes of tensors that may be missing. If another tensor does not fit, this
    raises CheckpointError and the model is unchanged.
    """
    # Compare before the copy, so that a file that does not fit leaves the model unchanged.
    with naming_errors(path):
        allocate(model, tensors)
        match = _match_tensors(model, tensors)
        missing = [name for name in match.missing if not name.endswith(optional)]
        invalid = []
        for name, tensor in tensors.items():
            # Tensors of the device "meta" have a shape only.
            if not tensor.is_meta and tensor.isnan().any():
                invalid.append(name)
        for fault, names in (
            ("missing", missing),
            ("unexpected", match.unexpected),
            ("of another shape", match.other_shape),
            ("NaN", invalid),
        ):
            if names:
                raise CheckpointError(
                    f"{path} does not fit the model: {len(names)} tensors are {fault}: "
                    f"{format_list(names)}"
                )
        model.load_state_dict(dict(tensors), strict=not optional)


def _copy_fitting(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> str:
    """Copy all tensors that fit. The head may differ, but not the backbone. Returns a report."""
    # A head that is fitted in closed form needs no initial weights.
    if model.is_fitted:
        tensors = {name: value for name, value in tensors.items() if not name.startswith(HEAD)}
    allocate(model, tensors)

    # Computed buffers are neither required nor copied. The classifier of the pretrained weights is
    # only in files of models with blocks of features.
    match = _match_tensors(model, tensors, COMPUTED)

    # A partial match is a different backbone, with layers that would stay random.
    others = match.missing + match.other_shape
    unfilled = [name for name in others if name.startswith("backbone.")]
    unfilled = [name for name in unfilled if not name.startswith("backbone.class_")]
    if unfilled or not match.fitting:
        raise CheckpointError(
            f"init={path}: the backbone differs in {len(unfilled)} tensors "
            f"({format_list(sorted(unfilled), 3)}); pass its backbone=NAME"
        )

    model.load_state_dict({name: tensors[name] for name in match.fitting}, strict=False)

    total = len(match.fitting) + len(others)
    report = f"init from {path}: {len(match.fitting)} of {total} tensors loaded"
    for what, names in (
        ("of another shape", match.other_shape),
        ("not in the file", match.missing),
        ("not in the model", match.unexpected),
    ):
        if names:
            report += f"; {len(names)} {what} ({format_list(names, 5)})"
    return report
