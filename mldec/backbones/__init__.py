"""Backbones: classes that turn images into tokens, with networks of timm or of transformers."""

from mldec.backbones.hf_backbone import HFBackbone
from mldec.backbones.timm_backbone import TimmBackbone

# Configs and checkpoints name the classes by these paths, which are older than the modules.
TimmBackbone.__module__ = HFBackbone.__module__ = __name__

__all__ = ["HFBackbone", "TimmBackbone"]
