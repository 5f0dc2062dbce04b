"""How tensors of a file fit a model: all of them, or those that a new run starts from."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from mldec.errors import CheckpointError

# Buffers that a released file may lack, because we compute them ourselves.
COMPUTED = (
    "num_batches_tracked",
    "backbone.mean",
    "backbone.std",
)
NAMED, LONGEST = 10, 100  # how many tensors a message names, and the characters of each name


class Match(NamedTuple):
    """How the tensors of a file fit a model: four sorted lists of names."""

    fitting: list[str]
    other_shape: list[str]  # in both, but of different shapes
    missing: list[str]  # in the model, not in the file
    unexpected: list[str]  # in the file, not in the model


def match_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> Match:
    """Compare tensors with the state dict of a model by name and shape."""
    wanted = model.state_dict()
    common = wanted.keys() & tensors.keys()
    fitting = {name for name in common if wanted[name].shape == tensors[name].shape}

    return Match(
        fitting=sorted(fitting),
        other_shape=sorted(common - fitting),
        missing=sorted(wanted.keys() - tensors.keys()),
        unexpected=sorted(tensors.keys() - wanted.keys()),
    )


def check_fit(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    path: Path,
    *,
    optional: tuple[str, ...] = (),
) -> None:
    """Check that tensors match the model's in name and shape, all of them.

    Args:
        model: that is to take the tensors; it may be on the meta device.
        tensors: by the names of the model's state dict.
        path: of their file, for messages.
        optional: endings of the names of tensors that may be missing, and stay as they are.

    Raises:
        CheckpointError: if tensors are missing, unexpected or of another shape; it names up to ten.
    """
    match = match_tensors(model, tensors)
    missing = [name for name in match.missing if not name.endswith(optional)]

    for what, names in (
        ("missing", missing),
        ("unexpected", match.unexpected),
        ("of another shape", match.other_shape),
    ):
        if names:
            # The names come from the file: cut long ones, so that the message stays readable.
            examples = ", ".join(name[:LONGEST] for name in names[:NAMED])
            plural = "tensor is" if len(names) == 1 else "tensors are"
            raise CheckpointError(
                f"{path} does not fit the model: {len(names)} {plural} {what} ({examples})"
            )


def load_strict(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    path: Path,
    *,
    optional: tuple[str, ...] = (),
) -> None:
    """Copy tensors to a model that they must fit; see `check_fit`."""
    check_fit(model, tensors, path, optional=optional)
    model.load_state_dict(dict(tensors), strict=not optional)


def copy_fitting(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> str:
    """Copy every tensor that fits by name and shape.

    The backbone must fit completely. The head may differ, since a new run may have other classes.

    Args:
        model: takes the tensors.
        tensors: by the names of the model's state dict.
        path: of their file, for messages.

    Returns:
        A one-line report of what was loaded, what has another shape, and what is not in the file.

    Raises:
        CheckpointError: if the tensors are of another backbone.
    """
    # Computed buffers are neither required from the file nor taken from it.
    match = match_tensors(model, tensors)
    fitting = {name: tensors[name] for name in match.fitting if not name.endswith(COMPUTED)}
    missing = [name for name in match.missing if not name.endswith(COMPUTED)]
    unexpected = [name for name in match.unexpected if not name.endswith(COMPUTED)]

    # A backbone that fits in part is another network, whose other layers would stay random.
    unfilled = [name for name in (*missing, *match.other_shape) if name.startswith("backbone.")]
    if unfilled or not match.fitting:
        raise CheckpointError(
            f"init={path} is of another backbone: {len(unfilled)} of the model's tensors are "
            f"absent or of another shape ({', '.join(sorted(unfilled)[:3])}); "
            f"choose its backbone=NAME"
        )

    model.load_state_dict(fitting, strict=False)

    wanted = len(fitting) + len(missing) + len(match.other_shape)
    report = f"init from {path}: {len(fitting)} of {wanted} tensors loaded"
    for what, names in (
        ("of another shape", match.other_shape),
        ("not in the file", missing),
        ("not in the model", unexpected),
    ):
        if names:
            more = ", ..." if len(names) > 5 else ""
            report += f"; {len(names)} {what} ({', '.join(names[:5])}{more})"
    return report
