"""Batch norm with the statistics of all ranks, without host syncs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from mldec.runtime import distributed


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the images of all ranks in training. It replaces another batch norm.

    torch.nn.SyncBatchNorm leaves out ranks without images, for which the host waits three times per
    layer. Each rank has images in training, so all ranks count here, with the same kernels.

    Args:
        norm: A batch norm of torch or timm. Its parameters, buffers and activation are shared.
    """

    def __init__(self, norm: _BatchNorm) -> None:
        options = {"affine": norm.affine, "track_running_stats": norm.track_running_stats}
        super().__init__(norm.num_features, norm.eps, norm.momentum, **options)
        # The tensors keep their values and their names, so checkpoints do not depend on the class.
        for name, parameter in norm.named_parameters(recurse=False):
            setattr(self, name, parameter)
        for name, buffer in norm.named_buffers(recurse=False):
            setattr(self, name, buffer)
        self.training = norm.training

        # timm's BatchNormAct2d includes dropout and an activation.
        self.drop = getattr(norm, "drop", None) or nn.Identity()
        self.act = getattr(norm, "act", None) or nn.Identity()

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept all numbers of dimensions, as torch.nn.SyncBatchNorm."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [B, C, ...], and apply the activation."""
        if self.training and distributed.world_size() > 1:
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            output = _Normalize.apply(input, self.weight, self.bias, self)
        else:
            output = super().forward(input)
        return self.act(self.drop(output))


class _Normalize(torch.autograd.Function):
    """Normalize by the statistics of all ranks, and update the running statistics."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, norm: Any) -> Tensor:
        input = _dense(input)
        mean, invstd = torch.batch_norm_stats(input, norm.eps)
        count = mean.new_full((1,), input.numel() // input.shape[1])

        # One collective for all three saves two round trips per layer.
        gathered = distributed.gather_rows(torch.cat([mean, invstd, count]))
        means, invstds, counts = gathered.split(len(mean), dim=1)
        counts = counts.flatten()
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            input,
            means,
            invstds,
            norm.running_mean,
            norm.running_var,
            norm.momentum,
            norm.eps,
            counts,
        )
        # The kernel of the backward pass takes the counts as int32.
        ctx.save_for_backward(input, weight, mean, invstd, counts.to(torch.int32))
        return torch.batch_norm_elemt(input, weight, bias, mean, invstd, norm.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd, counts = ctx.saved_tensors
        gradient = _dense(gradient)
        input_gradient = None
        total, product, weight_gradient, bias_gradient = torch.batch_norm_backward_reduce(
            gradient, input, mean, invstd, weight, *ctx.needs_input_grad[:3]
        )

        # DistributedDataParallel reduces the gradients of weight and bias.
        if ctx.needs_input_grad[0]:
            sums = distributed.total(torch.cat([total, product]))
            total, product = sums.split(len(mean))
            input_gradient = torch.batch_norm_backward_elemt(
                gradient, input, mean, invstd, weight, total, product, counts
            )
        return input_gradient, weight_gradient, bias_gradient, None


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor in one of the two memory formats that the kernels support."""
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return tensor.contiguous()


def synchronize(module: nn.Module) -> None:
    """Replace all batch norms in a module by SyncBatchNorm."""
    for name, child in module.named_children():
        if isinstance(child, _BatchNorm):
            setattr(module, name, SyncBatchNorm(child))
        else:
            synchronize(child)
