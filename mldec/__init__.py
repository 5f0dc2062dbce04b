"""Train, evaluate and use image classifiers with the ML-Decoder head (arXiv 2111.12933)."""

__version__ = "0.1.0"
