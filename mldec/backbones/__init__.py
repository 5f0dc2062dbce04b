"""Backbones, which map images to tokens with networks of other libraries.

A constructor raises ConfigError if an argument is not valid, the network cannot be built, or its
weights cannot be loaded.
"""

from mldec import lazily
from mldec.backbones.timm_backbone import Normalize, TimmBackbone

# Import the other backbones, and their libraries, only if they are used.
__getattr__ = lazily(
    __name__, {"HFBackbone": "hf_backbone", "OpenClipBackbone": "open_clip_backbone"}
)

__all__ = ["HFBackbone", "Normalize", "OpenClipBackbone", "TimmBackbone"]
