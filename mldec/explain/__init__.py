"""Show where a model looked: heat maps per class, and pictures of them."""

from mldec.explain.maps import Explainer

__all__ = ["Explainer"]
