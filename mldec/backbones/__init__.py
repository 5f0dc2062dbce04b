"""Backbones: classes that turn images into tokens, with a network of another library."""

from mldec.backbones.hf_backbone import HFBackbone
from mldec.backbones.open_clip_backbone import OpenClipBackbone
from mldec.backbones.timm_backbone import TimmBackbone

# Configs and checkpoints name the classes by these paths, which are older than the modules.
TimmBackbone.__module__ = HFBackbone.__module__ = OpenClipBackbone.__module__ = __name__

__all__ = ["HFBackbone", "OpenClipBackbone", "TimmBackbone"]
