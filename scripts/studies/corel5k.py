"""Kernel ridge regression for Corel5k: `python scripts/studies/corel5k.py FOLDER`.

FOLDER has the layout of `data=csv` with the splits train and test (docs/corel5k.md). The network is
EfficientNet-Lite2 with ImageNet weights (from a file with --weights FILE).

- Features: photos at 384 x 256 or 256 x 384 pixels, and their mirror images. The last feature map
  is averaged over positions, and the square root is taken. The outputs of the last two stages are
  averaged over positions and standardized. Both vectors are divided by their norm.
- Kernel: exp(-gamma d / m), where d is the sum of the squared distances of both vectors, and m its
  median over the training photos. Kernel ridge regression predicts the labels minus the frequencies
  of the words.
- Decision: the five words with the highest (prediction + frequency) / frequency^tau.

`--choose` evaluates all combinations of gamma, alpha and tau on nine folds of the training photos.
`--test` trains with the best combination on all training photos, and evaluates the test photos.
Both write benchmarks/corel5k_kernel.json.
"""

import argparse
import io
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from sklearn.kernel_ridge import KernelRidge

from mldec import build
from mldec.config.compose import compose
from mldec.data.types import Split, StoredImages
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.runtime.console import progress_bar
from mldec.tools.benchmark import environment

OUT = Path(__file__).resolve().parents[2] / "benchmarks" / "corel5k_kernel.json"
NETWORK = "tf_efficientnet_lite2"
LONG_SIDE, SHORT_SIDE = 384, 256  # twice the size of the photos
FOLDS = 9  # of 500 photos, as many as the test photos
SEED = 0
GAMMAS = (1.0, 2.0, 4.0)
ALPHAS = (0.05, 0.2)  # regularization of the kernel ridge regression
TAUS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)


def pixels(photo: bytes) -> torch.Tensor:
    """Return a photo as float32 [3, H, W] in [-1, 1], with sides of 384 and 256 pixels."""
    with Image.open(io.BytesIO(photo)) as image:
        is_wide = image.width > image.height
        size = (LONG_SIDE, SHORT_SIDE) if is_wide else (SHORT_SIDE, LONG_SIDE)
        resized = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    array = np.asarray(resized, dtype=np.float32)
    return torch.from_numpy(array).permute(2, 0, 1) / 127.5 - 1


class Features(torch.nn.Module):
    """Mean of the last feature map, and means of the outputs of the last two stages."""

    def __init__(self, weights: str | None) -> None:
        super().__init__()
        overlay = {"file": weights} if weights else None
        self.network: Any = timm.create_model(
            NETWORK, pretrained=True, pretrained_cfg_overlay=overlay
        )

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map images [B, 3, H, W] to features [B, 1280] and [B, 560]."""
        network = self.network
        maps = network.bn1(network.conv_stem(images))
        stages = []
        for stage in network.blocks:
            maps = stage(maps)
            stages.append(maps.mean((2, 3)))
        last = network.bn2(network.conv_head(maps)).mean((2, 3))
        return last, torch.cat(stages[-2:], dim=1)


@torch.inference_mode()
def features(split: Split, network: Features, title: str) -> tuple[np.ndarray, np.ndarray]:
    """Return both features of all photos of a split, averaged over a photo and its mirror image."""
    dataset = stored(split)
    rows = []
    for index in progress_bar(range(len(dataset)), desc=title):
        photo = pixels(dataset.storage.content(index))
        both = torch.stack([photo, photo.flip(2)]).contiguous(memory_format=torch.channels_last)
        rows.append([part.mean(0).numpy() for part in network(both)])
    last, stages = zip(*rows, strict=True)
    return np.stack(last), np.stack(stages)


def vectors(
    last: np.ndarray, stages: np.ndarray, mean: np.ndarray, deviation: np.ndarray
) -> np.ndarray:
    """Return the normalized features of n photos side by side, float32 [n, D]."""
    roots = np.sqrt(np.maximum(last, 0))
    standardized = (stages - mean) / deviation
    parts = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (roots, standardized)]
    return np.concatenate(parts, axis=1).astype(np.float32)


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the squared distances of the rows of a [n, D] and b [m, D], float32 [n, m].

    The squared norm of each row is 2, because each row contains two unit vectors.
    """
    return 4 - 2 * a @ b.T


def evaluate(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the metrics at five words per photo, over the words with a photo."""
    shown = labels.any(0)
    evaluator = MultiLabelEvaluator(labels.shape[1], top_k=5)
    evaluator.update(torch.from_numpy(scores), torch.from_numpy(labels.astype(np.int8)))
    metrics = evaluator.compute()
    # Words that no photo shows have recall 0 and cannot be right.
    share = labels.shape[1] / shown.sum()
    return {
        "mAP": metrics["mAP_skip_empty"],
        "P": metrics["CP@5"] * share,
        "R": metrics["CR@5"] * share,
        "N+": metrics["N+@5"] * share,
    }


def predictions(
    train: np.ndarray, labels: np.ndarray, others: np.ndarray, gamma: float, alpha: float
) -> np.ndarray:
    """Return the predicted labels of other photos, float64 [m, K], without the frequencies."""
    d = distances(train, train)
    scale = gamma / np.median(d)
    model = KernelRidge(alpha=alpha, kernel="precomputed")
    model.fit(np.exp(-scale * d), labels - frequencies(labels))
    return model.predict(np.exp(-scale * distances(others, train)))


def frequencies(labels: np.ndarray) -> np.ndarray:
    """Return the frequencies of the words [K], with one photo more that shows each word."""
    return (labels.sum(0) + 1) / (len(labels) + 2)


def adjusted(predicted: np.ndarray, frequency: np.ndarray, tau: float) -> np.ndarray:
    """Return the scores of the decision: tau > 0 favors rare words."""
    return (predicted + frequency) / frequency**tau


def with_f1(metrics: dict[str, float]) -> dict[str, float]:
    """Add the harmonic mean of P and R, and round all values to two decimals."""
    f1 = 2 * metrics["P"] * metrics["R"] / (metrics["P"] + metrics["R"])
    return {name: round(value, 2) for name, value in (metrics | {"F1": f1}).items()}


def fold_parts(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the training and the held-out rows of each fold."""
    numbers = np.random.default_rng(SEED).permutation(count) % FOLDS
    for fold in range(FOLDS):
        yield np.flatnonzero(numbers != fold), np.flatnonzero(numbers == fold)


def choose(photos: np.ndarray, labels: np.ndarray) -> list[dict[str, Any]]:
    """Return each combination of settings with its means over the folds, the best F1 first."""
    rows = []
    for gamma, alpha in itertools.product(GAMMAS, ALPHAS):
        found: dict[float, list[dict[str, float]]] = {tau: [] for tau in TAUS}
        for train, held_out in fold_parts(len(photos)):
            frequency = frequencies(labels[train])
            predicted = predictions(photos[train], labels[train], photos[held_out], gamma, alpha)
            for tau in TAUS:
                scores = adjusted(predicted, frequency, tau)
                found[tau].append(evaluate(scores, labels[held_out]))
        for tau, metrics in found.items():
            means = {name: statistics.fmean(row[name] for row in metrics) for name in metrics[0]}
            row = {"gamma": gamma, "alpha": alpha, "tau": tau} | with_f1(means)
            print(row, flush=True)
            rows.append(row)
    return sorted(rows, key=lambda row: -row["F1"])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--weights", help="file with the weights of EfficientNet-Lite2 (timm)")
    parser.add_argument("--cache", help="file of the features; it is written if it is absent")
    parser.add_argument("--choose", action="store_true", help="compare settings on the folds")
    parser.add_argument("--test", action="store_true", help="evaluate the test photos")
    arguments = parser.parse_args()

    words = [f"data.root={arguments.folder}", "data.fold=null", "data.val=test"]
    data = build.data(build.check(compose(["+experiment=corel5k", *words])))
    cache = Path(arguments.cache or "corel5k_features.npz")
    content: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    if not cache.exists():
        began = time.perf_counter()
        network = Features(arguments.weights).eval().to(memory_format=torch.channels_last)
        parts = [*features(data.train, network, "training photos")]
        parts += features(data.val, network, "test photos")
        np.savez(cache, *parts)
        content["seconds for the features"] = round(time.perf_counter() - began)
    train_last, train_stages, test_last, test_stages = np.load(cache).values()
    mean = train_stages.mean(0)
    deviation = train_stages.std(0)
    photos = vectors(train_last, train_stages, mean, deviation)
    labels = dense(data.train)

    if arguments.choose:
        content["folds"] = choose(photos, labels)
    if arguments.test:
        best = content["folds"][0]
        began = time.perf_counter()
        test = vectors(test_last, test_stages, mean, deviation)
        predicted = predictions(photos, labels, test, best["gamma"], best["alpha"])
        scores = adjusted(predicted, frequencies(labels), best["tau"])
        content["test"] = with_f1(evaluate(scores, dense(data.val)))
        content["seconds for the regression"] = round(time.perf_counter() - began, 1)
        print(content["test"])
    content["environment"] = environment()
    OUT.write_text(json.dumps(content, indent=1) + "\n")


def dense(split: Split) -> np.ndarray:
    """Return the labels of a split, bool [n, K]."""
    dataset = stored(split)
    return np.stack([dataset.labels.row(index).numpy() == 1 for index in range(len(dataset))])


def stored(split: Split) -> StoredImages:
    """Return the photos of a split, which are files."""
    assert isinstance(split.dataset, StoredImages)
    return split.dataset


if __name__ == "__main__":
    main()
