"""Synchronized batch norm with two processes. Run by torchrun: `BACKEND DEVICE FILE`.

On a CPU, formulas replace torch's kernels, which need CUDA.
"""

import os
import sys

import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from mldec.training.sync_batchnorm import synchronize

BATCH = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(0)) * 3 + 1
SIZES = [4, 2]  # images of each process


def results(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return outputs, gradients of the sum of cubes, running mean and running variance."""
    images = images.clone().requires_grad_()
    outputs = model(images)
    (outputs**3).sum().backward()
    [norm] = model.children()
    gradients = [images.grad, norm.weight.grad, norm.bias.grad]
    return [outputs.detach(), *gradients, norm.running_mean, norm.running_var]


def network() -> nn.Sequential:
    """Return a batch norm with an activation and with other weights than 1 and 0."""
    model = nn.Sequential(BatchNormAct2d(4, act_layer=nn.SiLU, inplace=False)).train()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([0.5, 1.0, -1.0, 2.0]))
        model[0].bias.copy_(torch.tensor([0.0, 1.0, 2.0, -1.0]))
    return model


def reference() -> list[Tensor]:
    """Return the results of the whole batch in one process on the CPU."""
    return results(network(), BATCH)


def per_channel(values: Tensor) -> Tensor:
    """Add dimensions to [C], so that it can be multiplied with [B, C, H, W]."""
    return values.view(-1, 1, 1)


def stats(x, eps):
    return x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + eps).rsqrt()


def gather_stats(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    total = counts.sum()
    weights = (counts / total).unsqueeze(1)
    mean = (weights * means).sum(0)
    squares = invstds**-2 - eps + means**2
    variance = (weights * squares).sum(0) - mean**2
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(variance * total / (total - 1), momentum)
    return mean, (variance + eps).rsqrt()


def normalize(x, weight, bias, mean, invstd, eps):
    scaled = (x - per_channel(mean)) * per_channel(invstd * weight)
    return scaled + per_channel(bias)


def backward_sums(gradient, x, mean, invstd, weight, *needed):
    total = gradient.sum((0, 2, 3))
    product = (gradient * (x - per_channel(mean))).sum((0, 2, 3))
    return total, product, product * invstd, total


def input_gradient(gradient, x, mean, invstd, weight, total, product, counts):
    count = counts.sum()
    slope = per_channel(invstd**2 * product / count)
    centered = gradient - per_channel(total / count) - (x - per_channel(mean)) * slope
    return centered * per_channel(invstd * weight)


def main(backend: str, device_type: str, file: str) -> None:
    """Write the results of both parts of the batch."""
    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.batch_norm_stats = stats
        torch.batch_norm_gather_stats_with_counts = gather_stats
        torch.batch_norm_elemt = normalize
        torch.batch_norm_backward_reduce = backward_sums
        torch.batch_norm_backward_elemt = input_gradient
    dist.init_process_group(backend, device_id=None if backend == "gloo" else device)

    model = network()
    synchronize(model)
    part = BATCH.split(SIZES)[rank].to(device)
    outputs, gradient, *sums, mean, variance = results(model.to(device), part)

    # Sum over processes. Images of the other process count as 0.
    for values in (outputs, gradient):
        whole = torch.zeros(BATCH.shape, device=device)
        whole.split(SIZES)[rank].copy_(values)
        sums.append(whole)
    for value in sums:
        dist.all_reduce(value)
    weight_gradient, bias_gradient, outputs, gradient = sums
    if rank == 0:
        found = [outputs, gradient, weight_gradient, bias_gradient, mean, variance]
        torch.save([value.cpu() for value in found], file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
