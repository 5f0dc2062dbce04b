"""Example parts of a user. `plugins=[patches]` allows them."""

import os
import signal

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mldec.backbones import TimmBackbone

forwards = 0  # of all models of this process


def interrupt() -> None:
    """Send this process the signal PATCHES_SIGNAL=NAME:FORWARD[:RANK] in a forward pass.

    Processes that torchrun restarted get no signal.
    """
    global forwards
    forwards += 1
    name, number, *rank = os.environ.get("PATCHES_SIGNAL", "SIGTERM:0").split(":")
    if rank and rank[0] != os.environ.get("RANK"):
        return
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if forwards == int(number) and not is_restarted:
        os.kill(os.getpid(), signal.Signals[name])


class Patches(nn.Module):
    """Linear layer over square patches. It has no batch norm, so batches can be split."""

    def __init__(self, *, size: int = 8, width: int = 48) -> None:
        super().__init__()
        self.num_features = width
        self.project = nn.Conv2d(3, width, size, stride=size)

    def forward(self, images: Tensor) -> Tensor:
        if not isinstance(images, FakeTensor):  # fake tensors measure the cost
            interrupt()
        if not images.is_floating_point():
            images = images.float() / 255
        return self.project(images.to(self.project.weight.dtype)).flatten(2).transpose(1, 2).relu()


class Interruptible(TimmBackbone):
    """timm network that sends a signal in a forward pass."""

    def forward(self, images: Tensor) -> Tensor:
        if not isinstance(images, FakeTensor):
            interrupt()
        return super().forward(images)


class Particular(nn.Module):
    """Head that raises a plain ValueError for each of its arguments."""

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
    """Loss that averages over the batch."""

    reduction = "mean"

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return (logits.sigmoid() - targets).square().mean()
