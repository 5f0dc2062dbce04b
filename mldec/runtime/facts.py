"""Facts about a model and the software that runs it, and what is done about memory."""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

# Documented, though the module has an underscore.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mldec
from mldec.errors import UserError

# Options of glibc's mallopt, from malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
# Larger blocks go back to the system one by one. Older versions of glibc take at most the second.
LARGEST_KEPT = (2**30, 2**25)  # bytes
OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def multiply_accumulates(
    model: nn.Module, image_size: int, queries: tuple[int, ...] | None = None
) -> float:
    """Count the multiply-accumulates per image in evaluation mode, without computing anything.

    The GFLOPs of the paper are these: of convolutions, linear layers and attention only; work that
    does not depend on the image counts in full. The model may be on any device, including meta;
    `queries` is the shape [K, D_w] of its word vectors.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # Fake tensors claim to be on the CPU: the heads switch autocast off, which has no "meta".
        # Attention as two products: the counter of torch 2.11 misses the fused form on a CPU.
        math = sdpa_kernel(SDPBackend.MATH)
        with FakeTensorMode(), torch.no_grad(), math, FlopCounterMode(display=False) as counter:
            named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
            state = {
                name: torch.empty(value.shape, dtype=value.dtype, device="cpu")
                for name, value in named
            }

            shapes: list[tuple[int, ...]] = [(1, 3, image_size, image_size)]
            if queries:
                shapes.append(queries)
            inputs = tuple(torch.empty(shape, device="cpu") for shape in shapes)
            functional_call(model, state, inputs)
    finally:
        # Module by module: a part that was frozen in evaluation mode stays there.
        for module in training:
            module.training = True

    # torch counts a product and a sum as two.
    return counter.get_total_flops() / 2


def work_per_image(model: nn.Module, image_size: int, queries: Tensor | None) -> float | None:
    """Return the multiply-accumulates, with word vectors [K, D_w]; None if they are unknown."""
    try:
        return multiply_accumulates(model, image_size, None if queries is None else queries.shape)
    except Exception:
        # A part of the user's own may fail on tensors without values.
        return None


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count the trainable parameters, and all, the frozen queries of a head (a buffer) included."""
    trainable = sum(value.numel() for value in model.parameters() if value.requires_grad)
    frozen = sum(value.numel() for value in model.parameters() if not value.requires_grad)

    queries = sum(
        value.numel()
        for name, value in model.named_buffers()
        if name.rpartition(".")[2] == "queries"
    )
    return trainable, trainable + frozen + queries


def installed() -> dict[str, str]:
    """Return the installed versions of mldec, torch and timm."""
    import timm  # slow to import, and of no use to most who import this module

    return {"mldec": mldec.__version__, "torch": str(torch.__version__), "timm": timm.__version__}


def git_commit() -> str | None:
    """Return the commit of the checkout that this package runs from, or None if there is none.

    "+dirty" is appended if tracked files of the checkout have changes.
    """
    # Without the lock that git takes to refresh its index: of a run that is killed it would stay,
    # and block the user's own commands.
    git = ["git", "--no-optional-locks", "-C", str(Path(mldec.__file__).parent)]
    # An installed package may lie inside somebody else's repository, whose commit says nothing
    # about it: git must track this very file.
    commands = (
        ["ls-files", "--error-unmatch", mldec.__file__],
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no"],
    )
    try:
        tracked, commit, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True) for command in commands
        )
    except OSError:
        return None
    if tracked.returncode or commit.returncode:
        return None
    mark = "+dirty" if changes.stdout else ""
    return commit.stdout.strip() + mark


@contextmanager
def explain_out_of_memory(advice: Callable[[], str]) -> Iterator[None]:
    """Raise a `UserError` with this advice in place of those of torch and Python."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # On a CPU torch raises a plain RuntimeError.
        is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_known and "can't allocate memory" not in str(error):
            raise

        raise UserError(advice()) from error


def keep_freed_memory() -> bool:
    """Keep what torch frees for the tensors of the next step; tell whether it is so now.

    By default glibc returns large blocks to the system, which clears each page again when the next
    step touches it: 2 to 18 percent of a training step on a CPU. Settings of the user stay.
    """
    # Windows has no library of the process itself.
    mallopt = None if os.name == "nt" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in OF_THE_USER):
        return False

    takes_threshold = any(mallopt(MMAP_THRESHOLD, size) for size in LARGEST_KEPT)
    return bool(takes_threshold and mallopt(TRIM_THRESHOLD, 2**31 - 1))
