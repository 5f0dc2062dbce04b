"""A small convolutional network."""

from torch import Tensor, nn

from mldec.backbones import Normalize


class ConvNet(nn.Module):
    """Three convolutions with an output stride of 8.

    Args:
        width: Number of output channels C.
    """

    def __init__(self, *, width: int = 64) -> None:
        super().__init__()
        self.num_features = width  # mldec passes it to the head
        self.normalize = Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, kernel_size=4, stride=4),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, kernel_size=3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, kernel_size=3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map RGB images uint8 [B, 3, H, W] to tokens [B, N, C]."""
        features = self.layers(self.normalize(images))
        return features.flatten(2).transpose(1, 2)
