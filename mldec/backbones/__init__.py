"""Backbones, which map images to tokens with networks of other libraries."""

from mldec import lazily
from mldec.backbones.timm_backbone import Normalize, TimmBackbone

# Import the other backbones, and their libraries, only if they are used.
__getattr__ = lazily(
    __name__, {"HFBackbone": "hf_backbone", "OpenClipBackbone": "open_clip_backbone"}
)

__all__ = ["HFBackbone", "Normalize", "OpenClipBackbone", "TimmBackbone"]
