"""Self-contained checkpoints with the model, its classes and its input transform."""

from mldec.checkpoint.loading import Loaded, load_model

__all__ = ["Loaded", "load_model"]
