"""Resize and crop images inside an exported model, as Pillow does it outside.

`EvalTransform` resizes with Pillow. Here the same filter is a product with two matrices, made of
operations that every runtime has, for images whose size is known only when the model runs.
"""

import torch
from torch import Tensor, nn

from mldec.data.transforms import EvalTransform


class Resize(nn.Module):
    """Apply an `EvalTransform` to a batch of images of one size.

    Values differ from Pillow's by one level of 256 here and there: Pillow rounds the filter too.

    Args:
        transform: of the checkpoint.
    """

    def __init__(self, transform: EvalTransform) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: Tensor) -> Tensor:
        """Map images uint8 [B, 3, H, W] of any size to uint8 [B, 3, S, S]."""
        rows, columns = (torch.arange(side, dtype=torch.float64) for side in images.shape[2:])
        # Tensors, because a side is no number yet when the model is exported.
        height, width = rows.amax(0) + 1, columns.amax(0) + 1
        resized_height, resized_width = self._resized(height, width)

        # First the width and then the height, rounded after each, as in Pillow.
        over_columns = self._filter(columns, width, resized_width)
        over_rows = self._filter(rows, height, resized_height)
        narrow = _rounded(images.float() @ over_columns.T)
        return _rounded(over_rows @ narrow).to(torch.uint8)

    def _resized(self, height: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        """Return height and width of the whole image after the resize; see `EvalTransform`."""
        side = torch.full_like(height, self.transform.image_size)
        if self.transform.crop is None:
            return side, side

        # The product first, as in `EvalTransform`: with a rounded scale it may fall short.
        shorter, shortest = self.transform.shorter_side, torch.minimum(height, width)
        return torch.floor(shorter * height / shortest), torch.floor(shorter * width / shortest)

    def _filter(self, positions: Tensor, length: Tensor, resized: Tensor) -> Tensor:
        """Return the weights of the pixels along one side in each of the S pixels of the square.

        Source: Pillow, src/libImaging/Resample.c: a triangle, or a cubic with a = -0.5, which is
        widened by the scale if the image becomes smaller.

        Args:
            positions: 0 to L - 1.
            length: L.
            resized: length after the resize, of which S pixels in the middle are kept.

        Returns:
            float32 [S, L], rows of sum 1.
        """
        size = self.transform.image_size
        scale = length / resized
        first = torch.round((resized - size) / 2)
        centres = (torch.arange(size, dtype=torch.float64) + first + 0.5) * scale

        distances = (positions[None] + 0.5 - centres[:, None]).abs() / scale.clamp(min=1)
        if self.transform.interpolation == "bicubic":
            weights = _cubic(distances)
        else:
            weights = (1 - distances).clamp(min=0)
        return (weights / weights.sum(1, keepdim=True)).float()


def _cubic(distances: Tensor, a: float = -0.5) -> Tensor:
    """Return the weights of Keys' cubic convolution at distances from 0 on."""
    x = distances
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _rounded(values: Tensor) -> Tensor:
    """Round half up to whole numbers from 0 to 255, as Pillow does."""
    return torch.floor(values + 0.5).clamp(0, 255)
