"""Parts of a user's own, outside the package: what `plugins=[patches]` makes usable."""

import os
import signal

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mldec.backbones import TimmBackbone

forwards = 0  # of all models of this process


def interrupt() -> None:
    """Send this process a signal in a forward pass; PATCHES_SIGNAL=SIGTERM:5 in the fifth one.

    A third part names the only rank that gets it; a process that torchrun restarted gets none.
    """
    global forwards
    forwards += 1
    name, number, *rank = os.environ.get("PATCHES_SIGNAL", "SIGTERM:0").split(":")
    meant = not rank or rank[0] == os.environ.get("RANK")
    if (
        forwards == int(number)
        and meant
        and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    ):
        os.kill(os.getpid(), signal.Signals[name])


class Patches(nn.Module):
    """One linear layer over square patches; without batch norm, so batches may be divided."""

    def __init__(self, *, size: int = 8, width: int = 48) -> None:
        super().__init__()
        self.num_features = width
        self.project = nn.Conv2d(3, width, size, stride=size)

    def forward(self, images: Tensor) -> Tensor:
        if not isinstance(images, FakeTensor):  # which only counts the work
            interrupt()
        images = images if images.is_floating_point() else images.float() / 255
        return self.project(images.to(self.project.weight.dtype)).flatten(2).transpose(1, 2).relu()


class Interruptible(TimmBackbone):
    """A real network that can be stopped at a chosen forward pass."""

    def forward(self, images: Tensor) -> Tensor:
        if not isinstance(images, FakeTensor):  # which only counts the work
            interrupt()
        return super().forward(images)


class Particular(nn.Module):
    """A head that refuses its arguments as ordinary Python code does: with plain `ValueError`s."""

    def __init__(
        self, in_features: int, num_classes: int, *, scale: float = 1.0, bias: bool = True
    ) -> None:
        super().__init__()
        if scale <= 0:
            raise ValueError(f"scale is {scale}: it must be above 0")
        if not bias:
            raise ValueError("a head without a bias\nis of no use")
        raise ValueError(f"num_classes is {num_classes}: too many")


class MeanSquare(nn.Module):
    """A loss of a user's own that averages over the batch."""

    reduction = "mean"

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return (logits.sigmoid() - targets).square().mean()
