"""Weights of the official layout, rebuilt from names and shapes, under our names."""

import json
from pathlib import Path

import fill
import torch
from torch import Tensor

from mldec.checkpoint import released
from mldec.heads.official import renamed

NUMBERS = Path(__file__).parents[1] / "parity" / "numbers"


def read(name: str) -> dict:
    """Return a JSON file of numbers."""
    return json.loads((NUMBERS / f"{name}.json").read_text())


def rebuilt(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return the rebuilt weights under their official names."""
    return {key: torch.from_numpy(fill.tensor(key, tuple(shape))) for key, shape in shapes.items()}


def head_weights(shapes: dict[str, list[int]], pairs: list[tuple[str, str]]) -> dict[str, Tensor]:
    """Return the rebuilt weights of a head alone, under our names."""
    return {renamed(key, pairs): value for key, value in rebuilt(shapes).items()}


def model_weights(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return the rebuilt weights of a whole model, under our names."""
    # In float64: a rounded 1e-5 in the scales is enough to leave the official trajectory.
    return released.tensors(
        {key: value.double() for key, value in rebuilt(shapes).items()}, Path("rebuilt")
    )
