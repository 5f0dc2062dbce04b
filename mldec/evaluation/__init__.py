"""Evaluation of a checkpoint: load it with its data, score images and compute metrics."""
