"""Evaluation: open a checkpoint with its data, score images, compute and write metrics."""
