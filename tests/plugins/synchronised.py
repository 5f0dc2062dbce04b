"""A synchronised batch norm over two processes on CUDA: run by torchrun, `BACKEND FILE`."""

import os
import sys

import torch
import torch.distributed as dist
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn

BATCH = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(0)) * 3 + 1


def outcome(norm: nn.Module, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs, the gradient of the scale for the sum of cubes, mean and variance."""
    outputs = norm(images)
    (outputs**3).sum().backward()
    batch_norm = next(module for module in norm.modules() if hasattr(module, "running_mean"))
    state = batch_norm.running_mean, batch_norm.running_var
    return outputs.detach(), batch_norm.weight.grad, *state


def reference() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the outcome of the whole batch on the CPU, in one process."""
    return outcome(nn.BatchNorm2d(4).train(), BATCH)


def main(backend: str, file: str) -> None:
    """Join the other process, and write the outcome of both halves of the batch."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=None if backend == "gloo" else device)

    norm = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4))).to(device).train()
    outputs, gradient, mean, variance = outcome(norm, BATCH[rank::2].to(device))

    # The gradients of the processes add up to that of the batch, and so do their outputs if each
    # has zeros in place of those of the other.
    whole = torch.zeros(BATCH.shape, device=device)
    whole[rank::2] = outputs
    for part in (gradient, whole):
        dist.all_reduce(part)
    if rank == 0:
        torch.save([value.cpu() for value in (whole, gradient, mean, variance)], file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
