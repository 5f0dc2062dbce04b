"""Deterministic weights, images and labels, to compare two implementations without a file.

Only NumPy's frozen legacy generator is used: the same numbers on every machine and version.
"""

import zlib

import numpy as np


def tensor(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the float32 value of the parameter or buffer `key`, its name in the released layout.

    Norm scales (1-d, not a bias, not a running statistic) have either sign, as in-place ABN allows.
    """
    r = np.random.RandomState(zlib.crc32(key.encode()) & 0xFFFFFFFF)
    if key.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    if key.endswith("running_var"):
        a = r.uniform(0.5, 1.5, shape)
    elif key.endswith("running_mean") or key.endswith("bias"):
        a = 0.1 * r.standard_normal(shape)
    elif len(shape) == 1:
        a = r.uniform(0.3, 0.9, shape) * r.choice([-1.0, 1.0], shape)
    else:
        fan_in = int(np.prod(shape[1:])) if len(shape) != 3 else shape[1]
        a = r.standard_normal(shape) * np.sqrt((2.0 if len(shape) == 4 else 4.0) / fan_in)
    return np.ascontiguousarray(a.astype(np.float32))


def images(size: int, count: int = 2) -> np.ndarray:
    """Return images [count, 3, size, size] float32 in [0, 1], grids of 4 x 4 random colors."""
    coarse = np.random.RandomState(size).uniform(0, 1, (count, 3, 4, 4)).astype(np.float32)
    return coarse.repeat(size // 4, 2).repeat(size // 4, 3)


def features(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return a non-negative float32 feature map, as after a ReLU."""
    return np.maximum(np.random.RandomState(seed).standard_normal(shape), 0).astype(np.float32)


def word_vectors(count: int, width: int = 300) -> np.ndarray:
    """Return [count, width] float32 class vectors."""
    return np.random.RandomState(width).standard_normal((count, width)).astype(np.float32)


def training_set(
    count: int = 40, size: int = 64, classes: int = 80
) -> tuple[np.ndarray, np.ndarray]:
    """Return images [count, 3, size, size] in [0, 1] and multi-hot labels [count, classes].

    Both are float32.
    """
    r = np.random.RandomState(7)
    coarse = r.randint(0, 256, (count, 3, 8, 8)).astype(np.float32) / 255
    labels = (r.uniform(size=(count, classes)) < 0.05).astype(np.float32)
    return coarse.repeat(size // 8, 2).repeat(size // 8, 3), labels
