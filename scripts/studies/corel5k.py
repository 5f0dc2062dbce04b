"""Kernel ridge regression for Corel5k: `python scripts/studies/corel5k.py FOLDER`.

FOLDER has the layout of `data=csv` with the splits train and test (benchmarks/corel5k.md). Networks
are EfficientNet-Lite with ImageNet weights (timm's, or files in the folder --weights).

- Features: photos at 384 x 256 or 256 x 384 pixels, and their mirror images. The last feature map
  is averaged over positions, and the square root is taken. The outputs of the last two stages are
  averaged over positions and standardized. Each vector is divided by its norm.
- Kernel: exp(-gamma d / m), where d is the sum of the squared distances of all vectors, and m its
  median over the training photos. Kernel ridge regression predicts the labels, centered by the
  frequencies of the words.
- Decision: the five words with the highest s / (g^power f^tau). s is the prediction for a word, f
  its frequency, and g its mean prediction for the training photos that show it, shrunk toward the
  median of the words. Each training photo is predicted by the regression without this photo.

`--choose` evaluates all combinations of settings on five hold-outs of the training photos. They are
stratified: as in the test photos, nearly all words occur. `--test` trains with the best combination
on all training photos, and evaluates the test photos. Both write benchmarks/corel5k_kernel.json.
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

from mldec import build
from mldec.config.compose import compose
from mldec.data.labels import from_dense
from mldec.data.splits import stratified
from mldec.data.types import DataModule, Split, StoredImages
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.runtime.console import progress_bar
from mldec.runtime.environment import environment

OUT = Path(__file__).resolve().parents[2] / "benchmarks" / "corel5k_kernel.json"
LONG_SIDE, SHORT_SIDE = 384, 256  # twice the size of the photos
HOLD_OUTS = 5
HELD_OUT = 1 / 9  # of the training photos: about 500, as many as the test photos
SMALLEST = 1e-5  # lower bound of predictions
# Settings that --choose compares.
NETWORKS = ("lite2", "lite1 lite2")
GAMMAS = (1.0, 2.0)
ALPHAS = (0.1, 0.3)  # regularization of the kernel ridge regression
RULES = (
    {"power": 0.0, "tau": 0.0},
    {"power": 0.0, "tau": 0.2},
    {"power": 1.0, "tau": 0.0},
    {"power": 1.0, "tau": 0.1},
    {"power": 1.25, "tau": 0.0},
)


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

    def __init__(self, name: str, weights: str | None) -> None:
        super().__init__()
        overlay = {"file": f"{weights}/{name}.safetensors"} if weights else None
        self.network: Any = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map images [B, 3, H, W] to features [B, 1280] and [B, D]."""
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


def unit_vectors(values: np.ndarray) -> np.ndarray:
    """Divide each row of values [n, D] by its norm."""
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def vectors(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the vectors of the training and of the test photos from a file of features."""
    train_last, train_stages, test_last, test_stages = np.load(path).values()
    mean = train_stages.mean(0)
    deviation = train_stages.std(0)
    sides = []
    for last, stages in ((train_last, train_stages), (test_last, test_stages)):
        roots = np.sqrt(np.maximum(last, 0))
        standardized = (stages - mean) / deviation
        sides.append(np.concatenate([unit_vectors(roots), unit_vectors(standardized)], axis=1))
    return sides[0], sides[1]


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the squared distances of the rows of a [n, D] and b [m, D], [n, m]."""
    return (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T


def evaluate(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the metrics at five words per photo, over the words with a photo."""
    shown = labels.any(0)
    evaluator = MultiLabelEvaluator(labels.shape[1], top_k=5)
    evaluator.update(torch.from_numpy(scores), torch.from_numpy(labels.astype(np.int8)))
    metrics = evaluator.compute()
    # Exclude words without photos from the means.
    share = labels.shape[1] / shown.sum()
    return {
        "mAP": metrics["mAP_skip_empty"],
        "P": metrics["CP@5"] * share,
        "R": metrics["CR@5"] * share,
        "N+": metrics["N+@5"] * share,
    }


class Regression:
    """Kernel ridge regression of labels, with predictions that leave one photo out.

    Args:
        photos: Vectors of the n training photos, [n, D].
        labels: Their labels, bool [n, K].
        gamma: Factor of the distances in the kernel.
        alpha: Regularization.
    """

    def __init__(
        self, photos: np.ndarray, labels: np.ndarray, *, gamma: float, alpha: float
    ) -> None:
        self.photos = photos
        # Add-one smoothing keeps all frequencies above 0.
        counts = labels.sum(0)
        self.frequencies = (counts + 1) / (len(labels) + 2)
        d = distances(photos, photos)
        self.scale = gamma / np.median(d)
        inverse = np.linalg.inv(np.exp(-self.scale * d) + alpha * np.eye(len(photos)))
        self.coefficients = inverse @ (labels - self.frequencies)

        # The residual without a photo is its coefficient divided by the diagonal of the inverse.
        left_out = labels - self.coefficients / np.diag(inverse)[:, None]
        left_out = np.maximum(left_out, SMALLEST)
        shown = np.where(labels, left_out, 0).sum(0) / np.maximum(counts, 1)
        # Shrink the means of rare words towards the median, which counts as one photo.
        self.when_shown = (counts * shown + np.median(shown)) / (counts + 1)

    def predict(self, photos: np.ndarray) -> np.ndarray:
        """Return the predicted labels of photos [m, D], [m, K], above 0."""
        kernel = np.exp(-self.scale * distances(photos, self.photos))
        return np.maximum(kernel @ self.coefficients + self.frequencies, SMALLEST)

    def scores(self, predicted: np.ndarray, *, power: float, tau: float) -> np.ndarray:
        """Return the scores of the decision for predicted labels [m, K]."""
        return predicted / (self.when_shown**power * self.frequencies**tau)


def with_f1(metrics: dict[str, float]) -> dict[str, float]:
    """Add the harmonic mean of P and R, and round all values to two decimals."""
    f1 = 2 * metrics["P"] * metrics["R"] / (metrics["P"] + metrics["R"])
    return {name: round(value, 2) for name, value in (metrics | {"F1": f1}).items()}


def hold_outs(labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield masks of the training and of the held-out photos."""
    for seed in range(HOLD_OUTS):
        order = np.random.default_rng(seed).permutation(len(labels))
        held_out = stratified(from_dense(labels.astype(np.int8)), order, HELD_OUT)
        yield ~held_out, held_out


def choose(photos: dict[str, np.ndarray], labels: np.ndarray) -> list[dict[str, Any]]:
    """Return each combination of settings with its mean metrics, the best F1 first."""
    rows = []
    for networks, gamma, alpha in itertools.product(NETWORKS, GAMMAS, ALPHAS):
        vectors = joined(photos, networks)
        found: list[list[dict[str, float]]] = [[] for _ in RULES]
        for train, held_out in hold_outs(labels):
            model = Regression(vectors[train], labels[train], gamma=gamma, alpha=alpha)
            predicted = model.predict(vectors[held_out])
            for rule, metrics in zip(RULES, found, strict=True):
                metrics.append(evaluate(model.scores(predicted, **rule), labels[held_out]))
        for rule, metrics in zip(RULES, found, strict=True):
            means = {name: statistics.fmean(row[name] for row in metrics) for name in metrics[0]}
            row = {"networks": networks, "gamma": gamma, "alpha": alpha} | rule | with_f1(means)
            print(row, flush=True)
            rows.append(row)
    return sorted(rows, key=lambda row: -row["F1"])


def joined(photos: dict[str, np.ndarray], networks: str) -> np.ndarray:
    """Return the vectors of several networks side by side."""
    return np.concatenate([photos[name] for name in networks.split()], axis=1)


def load_data(folder: str) -> DataModule:
    """Return the photos, with the test photos as validation."""
    words = [f"data.root={folder}", "data.fold=null", "data.val=test"]
    return build.data(build.check(compose(["+experiment=corel5k", *words])))


def write_features(data: DataModule, name: str, weights: str | None, path: Path) -> None:
    """Compute the features of a network for all photos."""
    network = Features(name, weights).eval().to(memory_format=torch.channels_last)
    parts = [*features(data.train, network, f"{name}, training photos")]
    parts += features(data.val, network, f"{name}, test photos")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, *parts)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--weights", help="folder with tf_efficientnet_lite1.safetensors, ...")
    parser.add_argument("--features", type=Path, default="outputs/corel5k_features")
    parser.add_argument("--choose", action="store_true", help="compare settings on the hold-outs")
    parser.add_argument("--test", action="store_true", help="evaluate the test photos")
    arguments = parser.parse_args()

    data = load_data(arguments.folder)
    content: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    train: dict[str, np.ndarray] = {}
    test: dict[str, np.ndarray] = {}
    for short in sorted({name for names in NETWORKS for name in names.split()}):
        name = f"tf_efficientnet_{short}"
        path = arguments.features / f"{name}.npz"
        if not path.exists():
            began = time.process_time()
            write_features(data, name, arguments.weights, path)
            content[f"CPU-seconds, {name}"] = round(time.process_time() - began)
        train[short], test[short] = vectors(path)

    labels = dense(data.train)
    if arguments.choose:
        content["hold-outs"] = choose(train, labels)
    if arguments.test:
        best = content["hold-outs"][0]
        began = time.process_time()
        photos = joined(train, best["networks"])
        model = Regression(photos, labels, gamma=best["gamma"], alpha=best["alpha"])
        predicted = model.predict(joined(test, best["networks"]))
        scores = model.scores(predicted, power=best["power"], tau=best["tau"])
        content["test"] = with_f1(evaluate(scores, dense(data.val)))
        content["CPU-seconds, regression"] = round(time.process_time() - began, 1)
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
