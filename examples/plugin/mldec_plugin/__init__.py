"""A data set, a backbone, a head and a loss for mldec.

Each part is an ordinary function or class. The options in configs/ name it, and its signature
defines the settings: `head.sharpness=4` is the argument `sharpness` of `SmoothMax`.
"""

from mldec_plugin.backbone import ConvNet
from mldec_plugin.data import sidecars
from mldec_plugin.head import SmoothMax
from mldec_plugin.loss import SquaredHinge

__all__ = ["ConvNet", "SmoothMax", "SquaredHinge", "sidecars"]
