"""Load a model: one of our checkpoints, a file of the paper's authors, or a model of open_clip."""

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
from mldec.errors import CheckpointError, ConfigError, DataError, refusing
from mldec.files.run_folder import CALIBRATED, CHECKPOINTS
from mldec.files.torch_files import SUFFIX, read_torch, recorded_hash, versions
from mldec.model import Classifier, Viewed
from mldec.names import listed
from mldec.runtime import distributed
from mldec.runtime import environment as facts
from mldec.words.types import PREFIX

log = logging.getLogger("mldec")

MOST_VERSIONS = 100  # versions of a checkpoint that are looked for: more than a run keeps
# Endings of the names of buffers that a file of others may lack: we count and compute them
# ourselves, and timm knows the normalisation of the input from the name of the network.
COMPUTED = ("num_batches_tracked", "backbone.mean", "backbone.std")


@dataclass(frozen=True)
class Loaded:
    """A model ready for use, and the metadata of its checkpoint."""

    model: Classifier  # in evaluation mode; images uint8 or float [B, 3, H, W] -> logits [B, K]
    config: Config
    # None of them, with word vectors [0, D_w], for a zero-shot file of the official code, which
    # saves neither, and for a model of open_clip.
    classes: Classes
    transform: EvalTransform  # a PIL image -> the model's input
    metrics: dict[str, float]  # of the run's last evaluation; empty for a file of others
    weights: str  # "ema" or "raw"
    path: Path  # of the file of weights
    fingerprint: Fingerprint | None = None  # of the training data; None for a file of others
    calibration: Calibration | None = None  # of these weights, if `mldec calibrate` wrote the file
    of_run: bool = False  # whether the file is one of ours, and not one of others
    unseen: tuple[str, ...] | None = None  # classes that training did not have; None: unknown


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
    """Rebuild the model that a file describes and load its weights, in float32.

    Args:
        path: a file written by `mldec train` or the folder of its run (see `_read_run`), a `.pth`
            file of the authors, anything else that `local` takes, or "clip:MODEL[:WEIGHTS]", a
            model of open_clip.
        weights: "ema", "raw", or None for the set that scored best; a file of others has one set.
            With "ema" or "raw", the folder of a run means its best.pt.
        image_size: pixels per side, instead of what the file or the table of known files says.
        class_names: a text file with other names of the classes, one per line, in their order.
        thresholds: a file of thresholds of the classes, instead of calibrated ones; see
            `mldec.checkpoint.thresholds`.
        device: where to put the model; a name that `distributed.pick_device` takes, or a
            `torch.device`.
        plugins: packages of the caller that may hold parts of the model; the file itself cannot
            allow any.
        views: "flip" or "scales", whose logits the model averages; see `mldec.model.Viewed`.

    Raises:
        UserError: if the file cannot be used, does not fit its model, or an argument is wrong.
    """
    # Refuse wrong arguments first: reading or downloading a large file takes a while.
    if image_size is not None:
        EvalTransform(image_size=image_size)  # raises if the size is out of range
    if isinstance(device, str):
        device = distributed.pick_device(device)
    names = None if class_names is None else read_class_names(Path(class_names))

    # The defaults and random numbers of the caller stay as they are.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        calibrated = weights is None
        file, checkpoint, of_run = _read_any(str(path), image_size, names, calibrated=calibrated)
        with refusing(file):
            if names is not None:
                check_count(names, len(checkpoint.classes))
                checkpoint = _renamed(checkpoint, names)
            tensors, chosen = checkpoint.weights(weights)

            # Inference needs the backbone and the head only: an argument of the data that was
            # renamed since must not make a checkpoint unusable.
            config, parts = _parts_of(checkpoint, plugins, build.MODEL_PARTS)
            optional = () if of_run else COMPUTED

            # A model whose tensors are not those of the file takes no memory. Parts of the caller's
            # own need not support the meta device.
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
    """Return a model for images of another size, or in several views; the config says the size."""
    option = f"--image-size {image_size}"
    if views:
        side = image_size or transform.image_size
        model = Viewed(model, views, side)
        if views == "scales":
            image_size, option = Viewed.larger(side), "--views scales"
    if image_size in (None, transform.image_size):
        return model, transform

    # A network such as ViT fixes its input size when it is built.
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
    """Return the file of weights, what it says as a checkpoint, and whether it is one of ours.

    With `calibrated` the folder of a run may stand for its calibrated.pt, see `_read_run`.
    """
    if path.startswith(PREFIX):
        from mldec.checkpoint import clip

        return *clip.convert(path), False

    from mldec.checkpoint.sources import local

    file = local(path)
    if Path(path).is_dir() and file.name in CHECKPOINTS:
        file, state = _read_run(path, file, calibrated=calibrated)
        return file, Checkpoint.from_state(state, file), True

    with refusing(file):
        state = _read(file)
        if "format" in state:
            return file, Checkpoint.from_state(state, file), True

        from mldec.checkpoint import released

        return file, released.convert(state, file, image_size=image_size, names=names), False


def _read_run(folder: str, best: Path, *, calibrated: bool) -> tuple[Path, dict[str, Any]]:
    """Read the checkpoint that a run's folder stands for; return its path and its content.

    It is calibrated.pt if that was made from the current best.pt, else best.pt.
    """
    path = best.with_name(CALIBRATED)
    if calibrated and path.is_file():
        with refusing(path):
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
    """Read a checkpoint that `mldec train` wrote."""
    return Checkpoint.from_state(_read(path), path)


def load_newest(path: Path) -> tuple[Path, Checkpoint]:
    """Read the newest version of a run's checkpoint that is intact; the log names damaged ones."""
    paths = [version for version in versions(path, MOST_VERSIONS) if version.exists()] or [path]
    for candidate, older in pairwise(paths):
        try:
            return candidate, load(candidate)
        except CheckpointError as error:
            log.warning(f"{error}; going on from {older}")
    return paths[-1], load(paths[-1])


def to_store(loaded: Loaded) -> Checkpoint:
    """Return the checkpoint of a loaded model; that of a file of others has no training state."""
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
    """Check what a run starts from before any file is touched; return its config without init=timm.

    init=timm stands where a recipe names a file of the authors that cannot be had: the backbone
    starts from timm's copy on the Hub, as it does without `init`, and a warning says what differs.
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
    """Start a model from the best weights in what `local` takes; report as `copy_fitting` does.

    The names are those of its classes, for a start with `init.classes`.
    """
    from mldec.checkpoint.sources import local

    if isinstance(start, Init) and start.classes:
        return _initialise_by_name(model, start, names)
    path = local(str(start.path if isinstance(start, Init) else start))
    with refusing(path):
        state = _read(path)
        if "format" in state:
            tensors, _ = Checkpoint.from_state(state, path).weights(None)
        else:
            from mldec.checkpoint import released

            tensors = released.tensors(state)
        return copy_fitting(model, tensors, path)


def _initialise_by_name(model: Any, start: Init, names: Sequence[str]) -> str:
    """Start a model from weights, and its classes from those with the same names."""
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
            f"init.classes=by_name: {path} has no class of the data, but {listed(known)}; name "
            f"those that are the same in init.synonyms=FILE, or leave init.classes out"
        )

    with refusing(path):
        tensors, _ = checkpoint.weights(None)
        prefix = "head."
        of_head = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        # A row of a class is of use with the layers that it was trained with.
        match = match_tensors(model.head, of_head)
        others = {*match.missing, *match.unexpected, *set(match.other_shape).difference(own)}
        if others:
            raise CheckpointError(
                f"init.classes=by_name: {path} has another head: {len(others)} of its tensors are "
                f"absent or of another shape ({', '.join(sorted(others)[:3])}); choose its head"
            )
        taken = set(model.head.take_classes(of_head, sources, len(known)))

    state = model.head.state_dict()
    report = copy_fitting(model, {**tensors, **{prefix + name: state[name] for name in own}}, path)
    carried = [name for number, name in enumerate(names) if number in taken]
    anew = [name for number, name in enumerate(names) if number not in taken]
    report += f"; {len(carried)} classes carried by name ({listed(carried, 100)})"
    if anew:
        report += f"; {len(anew)} start anew ({listed(anew, 100)})"
    crowded = sum(source is not None for source in sources) - len(taken)
    if crowded:
        report += f", {crowded} of them known, in a group that has the query of others"
    return report


def saved_config(checkpoint: Checkpoint, path: Path, plugins: Sequence[str] = ()) -> Config:
    """Return the config of a checkpoint, with every argument of its parts."""
    with refusing(path):
        return _parts_of(checkpoint, plugins, PARTS)[0]


def _parts_of(
    checkpoint: Checkpoint, plugins: Sequence[str], kinds: Sequence[str]
) -> tuple[Config, build.Parts]:
    """Return the config of a checkpoint and its parts; the file cannot choose the plugins."""
    config = parse({**checkpoint.config, "plugins": list(plugins), "resume": None, "init": None})
    parts = build.check(config, kinds)
    return build.recorded(config, parts), parts


def _read(path: Path) -> dict[str, Any]:
    """Read an untrusted file of weights; whoever uses it does so within `refusing`."""
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
    """How the tensors of a file fit a model: four sorted lists of names."""

    fitting: list[str]
    other_shape: list[str]  # in both, but of different shapes
    missing: list[str]  # in the model, not in the file
    unexpected: list[str]  # in the file, not in the model


def match_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], ignored: tuple[str, ...] = ()
) -> Match:
    """Compare tensors with a model's by name and shape; the endings `ignored` are left out."""
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
    """Raise a `DataError` unless all tensors fit; those ending in `optional` may be absent."""
    match = match_tensors(model, tensors)
    missing = [name for name in match.missing if not name.endswith(optional)]
    kinds = {"missing": missing, "unexpected": match.unexpected}

    for what, names in {**kinds, "of another shape": match.other_shape}.items():
        if names:
            # The names come from the file: cut long ones, so that the message stays readable.
            examples = ", ".join(name[:100] for name in names[:10])
            plural = "tensor is" if len(names) == 1 else "tensors are"
            raise DataError(f"it does not fit the model: {len(names)} {plural} {what} ({examples})")


def load_strict(
    model: nn.Module, tensors: Mapping[str, Tensor], path: Path, optional: tuple[str, ...] = ()
) -> None:
    """Copy tensors, of the file at `path`, to a model that they must fit; see `check_fit`."""
    with refusing(path):
        check_fit(model, tensors, optional)
        model.load_state_dict(dict(tensors), strict=not optional)


def copy_fitting(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> str:
    """Copy every tensor that fits by name and shape; return a one-line report of all others too.

    The backbone must fit completely. The head may differ, since a new run may have other classes.
    """
    # Computed buffers are neither required from the file nor taken from it.
    match = match_tensors(model, tensors, COMPUTED)

    # A backbone that fits in part is another network, whose other layers would stay random.
    unfilled = [
        name for name in (*match.missing, *match.other_shape) if name.startswith("backbone.")
    ]
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
