"""Backbones: classes that turn images into tokens, with a network of another library."""

from mldec import lazily
from mldec.backbones.timm_backbone import Normalize, TimmBackbone

# A run has one backbone: it does not import the others.
__getattr__ = lazily(
    __name__, {"HFBackbone": "hf_backbone", "OpenClipBackbone": "open_clip_backbone"}
)

__all__ = ["HFBackbone", "Normalize", "OpenClipBackbone", "TimmBackbone"]
