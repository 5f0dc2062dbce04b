"""Models of open_clip, from a name or from local files: CLIP, SigLIP, SigLIP 2 and their kin."""

from mldec.clip.model import PREFIX, ClipModel, ClipSource, open_model
from mldec.clip.text_encoder import TextEncoder

__all__ = ["PREFIX", "ClipModel", "ClipSource", "TextEncoder", "open_model"]
