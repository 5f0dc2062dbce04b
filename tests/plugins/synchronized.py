"""Synchronized batch norm with two processes on CUDA. Run by torchrun: `BACKEND FILE`."""

import os
import sys

import torch
import torch.distributed as dist
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn

BATCH = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(0)) * 3 + 1


def batch_norm_results(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return outputs, weight gradient of the sum of cubes, running mean and running variance."""
    outputs = model(images)
    (outputs**3).sum().backward()
    norm = next(module for module in model.modules() if hasattr(module, "running_mean"))
    return [outputs.detach(), norm.weight.grad, norm.running_mean, norm.running_var]


def reference() -> list[Tensor]:
    """Return the results of the whole batch in one process on the CPU."""
    return batch_norm_results(nn.BatchNorm2d(4).train(), BATCH)


def main(backend: str, file: str) -> None:
    """Write the results of both halves of the batch."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=None if backend == "gloo" else device)

    norm = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4))).to(device).train()
    outputs, gradient, mean, variance = batch_norm_results(norm, BATCH[rank::2].to(device))

    # Sum the gradients, and the outputs, which are zero for the images of the other process.
    whole = torch.zeros(BATCH.shape, device=device)
    whole[rank::2] = outputs
    for part in (gradient, whole):
        dist.all_reduce(part)
    if rank == 0:
        torch.save([value.cpu() for value in (whole, gradient, mean, variance)], file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
