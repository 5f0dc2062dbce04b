"""Compare losses under a single positive label per photo.

Command: `python scripts/studies/missing_labels.py corel5k=FOLDER voc=FOLDER [--weights FILE]`

Each FOLDER has the layout of `data=csv`. The network is EfficientNet-Lite0 with ImageNet weights.
It is frozen: its tokens are computed once, and a linear layer on their mean is trained. Each
training photo keeps one random positive. A fifth of the training photos is held out with all
labels, as in the published protocol. The seed selects the held-out photos, the observed positives,
the initial weights and the order of the photos.

- Tuning: each loss is trained with three seeds at each learning rate. The mAP of a run is that of
  its best epoch on the held-out photos. The rate with the highest mean over the seeds is selected.
  If it is the lowest or the highest rate so far, the next rate of `RATES` is tried.
- Test: the best epoch of each seed at the selected rate is evaluated on the test photos.

Each finished run is a line of benchmarks/missing_labels.jsonl, so that an interrupted study can be
resumed. `--report` writes benchmarks/missing_labels.json and its plot, and prints the table.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn

from mldec import build
from mldec.config.compose import compose
from mldec.data.labels import Labels, from_dense, random_positives
from mldec.data.loader import Batch, TrainBatches
from mldec.data.splits import stratified
from mldec.data.types import Split, StoredImages
from mldec.evaluation.frozen_features import with_tokens
from mldec.evaluators.average_precision import average_precision
from mldec.model import Classifier
from mldec.runtime.environment import environment
from mldec.runtime.signals import StopRequest
from mldec.tools.summary import paired_difference
from mldec.training import start
from mldec.training.step import Learner

TOP = Path(__file__).resolve().parents[2]
RUNS = TOP / "benchmarks" / "missing_labels.jsonl"
OUT = TOP / "benchmarks" / "missing_labels.json"
CPU = torch.device("cpu")
SEEDS = range(3)
HELD_OUT = 1 / 5
RATES = [1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0]
FIRST = RATES[6:9]  # tried for every loss
TEST_SPLITS = {"corel5k": "test", "voc": "val"}

# Ten epochs at a constant rate without weight decay, as in the experiment coco_single_positive.
COMMON = ["+experiment=finetune_frozen", "name=study", "device=cpu", "train.workers=0", "head=gap"]
COMMON += ["train.precision=fp32", "train.batch_size=32", "train.epochs=10", "train.min_steps=null"]
COMMON += ["train.start_at_frequency=false", "data.image_size=224"]
COMMON += ["backbone=efficientnet_lite0"]
COMMON += ["optim.weight_decay=0", "schedule.name=cosine", "schedule.min_lr=${optim.lr}"]
BOUND = "bce, all labels"
MORE = "an, half of the rest"  # also observes half of the other positives
BASE = "an"
LOSSES = {
    BOUND: ["loss=bce"],
    MORE: ["loss=an"],
    BASE: ["loss=an"],
    "an, start at frequency": ["loss=an", "train.start_at_frequency=true"],
    "hill, start at frequency": ["loss=hill", "train.start_at_frequency=true"],
    "ll_r, start at frequency": ["loss=ll_r", "train.start_at_frequency=true"],
    "an_ls": ["loss=an_ls"],
    "wan": ["loss=wan"],
    "focal": ["loss=focal"],
    "asl": ["loss=asl"],
    "hill": ["loss=hill"],
    "splc": ["loss=splc", "loss.start=0.1"],
    "em": ["loss=em"],
    "ll_r": ["loss=ll_r"],
    "ll_ct": ["loss=ll_ct"],
    "gr": ["loss=gr"],
    "gr, values for COCO": ["loss=gr", "loss.w=[0,10]", "loss.b=[-2,-8]"],
    "role": ["loss=role"],
    "em_apl": ["loss=em_apl"],
    "ll_cp": ["loss=ll_cp"],
    "partial_selective": ["loss=partial_selective"],
    "bce, ignored": ["loss=bce"],
    "ll_r, boosted": ["loss=ll_r", "head.boost=5"],
    "ll_ct, boosted": ["loss=ll_ct", "head.boost=5"],
    "ll_cp, boosted": ["loss=ll_cp", "head.boost=5"],
}
# Values of the authors for VOC, and the mean number of words per photo of Corel5k. All other values
# of the authors are those for COCO.
OF_SET = {
    ("voc", "em"): ["loss.alpha=0.2"],
    ("voc", "em_apl"): ["loss.alpha=0.2", "loss.beta=0.02"],
    ("voc", "role"): ["loss.expected_positives=1.5"],
    ("corel5k", "role"): ["loss.expected_positives=3.4"],
}
UNKNOWN = ("partial_selective", "bce, ignored")  # unobserved labels are -1 instead of 0


@dataclass(frozen=True)
class Photos:
    """Tokens [n, T, C] and labels [n, K] of the training and of the test photos of a set."""

    split: Split  # of the training photos
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@cache
def load(name: str, folder: str, *, all_tokens: bool) -> Photos:
    """Return the photos of a set with all of their tokens, or only with the mean, T = 1."""
    config = compose(COMMON + [f"data.root={folder}", f"data.val={TEST_SPLITS[name]}"])
    parts = build.check(config)
    photos = build.data(parts)
    model = build.model(parts, photos.train.classes)
    data = with_tokens(photos, model, config, device=CPU, stop=StopRequest())
    train = data.train
    return Photos(train, tensors(train, all_tokens), tensors(data.val, all_tokens))


def tensors(split: Split, all_tokens: bool) -> tuple[Tensor, Tensor]:
    """Return tokens [n, T, C] and labels [n, K] of a split."""
    tokens = []
    labels = []
    for index in range(len(split.dataset)):
        photo, target = split.dataset.load(index, None)  # type: ignore[arg-type]
        tokens.append(photo if all_tokens else photo.mean(0, keepdim=True))
        labels.append(target)
    return torch.stack(tokens), torch.stack(labels)


def photos_for(name: str, folder: str, loss: str) -> Photos:
    """Return the photos of a set. Only a boosted head needs all tokens."""
    return load(name, folder, all_tokens="boosted" in loss)


def observed(labels: Labels, loss: str, seed: int) -> Tensor:
    """Return labels [n, K] with one positive per photo, or more for two of the rows."""
    if loss == BOUND:
        return torch.from_numpy(labels.dense())
    share = None
    if loss == MORE:
        share = (1 + len(labels) / labels.counts().sum()) / 2
    kept = labels.select_entries(random_positives(labels, seed, share)).dense()
    if loss in UNKNOWN:
        kept[kept == 0] = -1
    return torch.from_numpy(kept)


def train(config: Any, tokens: Tensor, targets: Tensor, split: Split) -> Iterator[nn.Module]:
    """Train a head, and yield the model after each epoch.

    Args:
        config: Config of head, loss, optimizer and schedule.
        tokens: Tokens of the photos [n, T, C].
        targets: Targets [n, K].
        split: The same photos, for losses with a state per photo.
    """
    parts = build.check(config)
    torch.manual_seed(config.seed)
    head = parts["head"].call(in_features=tokens.shape[2], num_classes=targets.shape[1])
    labels = from_dense(targets.numpy())
    loss = build.loss(parts, lambda: labels, split)
    if config.train.start_at_frequency:
        start.start_at_frequency(head, labels, loss)
    batches = TrainBatches(len(tokens), batch_size=config.train.batch_size, seed=config.seed)
    epochs = config.train.epochs
    config.train.freeze = []

    no_backbone = nn.Identity()
    no_backbone.num_features = tokens.shape[2]  # type: ignore[assignment]
    model = Classifier(no_backbone, head)
    learner = Learner(config, model, loss, device=CPU, steps=epochs * batches.steps)
    for batches.epoch in range(epochs):
        loss.start_epoch(batches.epoch, epochs, lambda: predict(model, tokens))
        learner.train()
        for step, keys in enumerate(batches):
            rows = torch.tensor([index for _, index, _ in keys])
            learner.learn([Batch(tokens[rows], targets[rows], rows)], batches.images_in_step(step))
        learner.read()
        yield model


def predict(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits [n, K] of tokens [n, T, C]."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(block) for block in tokens.split(64)])


def mean_ap(model: nn.Module, tokens: Tensor, labels: Tensor) -> float:
    """Return the mAP in percent over the classes with a photo."""
    precision = average_precision(predict(model, tokens), labels)["none"]
    return 100 * precision.nanmean().item()


@cache
def best_epoch(
    name: str, folder: str, loss: str, rate: float, seed: int
) -> tuple[nn.Module, list[float], float]:
    """Train a loss on a set.

    Returns:
        The model of the epoch with the highest mAP on the held-out photos, the mAP of each epoch,
        and the CPU time in seconds.
    """
    settings = [f"optim.lr={rate}", f"seed={seed}", f"data.root={folder}"]
    config = compose(COMMON + LOSSES[loss] + OF_SET.get((name, loss), []) + settings)
    photos = photos_for(name, folder, loss)
    tokens, labels = photos.train

    # All losses have the same held-out photos and the same observed positives.
    all_labels = from_dense(labels.numpy())
    order = np.random.default_rng(seed).permutation(len(labels))
    held_out = torch.from_numpy(stratified(all_labels, order, HELD_OUT))
    targets = observed(all_labels, loss, seed)[~held_out]
    dataset = photos.split.dataset
    assert isinstance(dataset, StoredImages)
    split = replace(photos.split, dataset=dataset.select((~held_out).numpy()))

    began = time.process_time()
    values: list[float] = []
    best: nn.Module | None = None
    for model in train(config, tokens[~held_out], targets, split):
        value = mean_ap(model, tokens[held_out], labels[held_out])
        if not values or value > max(values):
            best = copy.deepcopy(model)
        values.append(value)
    assert best is not None
    return best, values, time.process_time() - began


def finished() -> dict[str, dict[str, Any]]:
    """Return the finished runs by their keys."""
    lines = RUNS.read_text().splitlines() if RUNS.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def key(name: str, loss: str, rate: float, seed: int, *, test: bool) -> str:
    """Return the key of a run."""
    return f"{name}: {loss}, rate {rate:g}, seed {seed}" + (", test" if test else "")


def record(name: str, folder: str, loss: str, rate: float, *, test: bool) -> None:
    """Do the runs of a loss at a rate, and append their results to the file."""
    for seed in SEEDS:
        title = key(name, loss, rate, seed, test=test)
        if title in finished():
            continue
        # The runs of the tuning are repeated only after a restart.
        model, values, seconds = best_epoch(name, folder, loss, rate, seed)
        line: dict[str, Any] = {"key": title}
        line["held-out mAP by epoch"] = [round(value, 3) for value in values]
        if test:
            line["test mAP"] = round(mean_ap(model, *photos_for(name, folder, loss).test), 3)
        line["cpu_seconds"] = round(seconds, 1)
        with RUNS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{title}: held-out mAP {max(values):.2f}, {seconds:.1f} s", flush=True)


def tuned(name: str, loss: str) -> dict[float, float]:
    """Return the mean mAP of the best epochs for each rate whose runs are finished."""
    runs = finished()
    means = {}
    for rate in RATES:
        keys = [key(name, loss, rate, seed, test=False) for seed in SEEDS]
        if runs.keys() >= set(keys):
            means[rate] = statistics.fmean(max(runs[one]["held-out mAP by epoch"]) for one in keys)
    return means


def selected(name: str, loss: str) -> float:
    """Return the rate with the highest mean."""
    means = tuned(name, loss)
    return max(means, key=lambda rate: means[rate])


def tune(name: str, folder: str, loss: str) -> None:
    """Try rates until the best one has a worse rate on both sides."""
    wanted = set(FIRST)
    while not wanted <= tuned(name, loss).keys():
        for rate in sorted(wanted - tuned(name, loss).keys()):
            record(name, folder, loss, rate, test=False)
        place = RATES.index(selected(name, loss))
        wanted |= set(RATES[max(place - 1, 0) : place + 2])


def tested(name: str, loss: str) -> list[float]:
    """Return the mAP on the test photos of the seeds at the selected rate; empty if unfinished."""
    runs = finished()
    if not tuned(name, loss):
        return []
    rate = selected(name, loss)
    keys = [key(name, loss, rate, seed, test=True) for seed in SEEDS]
    if not runs.keys() >= set(keys):
        return []
    return [runs[one]["test mAP"] for one in keys]


def result(name: str, loss: str) -> dict[str, Any]:
    """Return all results of a finished loss on a set."""
    runs = finished()
    rate = selected(name, loss)
    values = tested(name, loss)
    epochs = []
    for seed in SEEDS:
        by_epoch = runs[key(name, loss, rate, seed, test=True)]["held-out mAP by epoch"]
        epochs.append(by_epoch.index(max(by_epoch)) + 1)
    return {
        "rate": rate,
        "held-out mAP by rate": {f"{rate:g}": mean for rate, mean in tuned(name, loss).items()},
        "best epoch by seed": epochs,
        "test mAP by seed": values,
        f"difference to {BASE}": paired_difference(values, tested(name, BASE)),
    }


def cells(found: dict[str, Any]) -> list[str]:
    """Return mAP, difference to the base and rate as text. Bold: the interval excludes 0."""
    values = found["test mAP by seed"]
    difference = found[f"difference to {BASE}"]
    text = f"{difference['difference']:+.1f}"
    if difference["low"] is None:
        text = "-"
    elif difference["low"] > 0 or difference["high"] < 0:
        text = f"**{text}**"
    mean = f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"
    return [mean, text, f"{found['rate']:g}"]


def report(names: list[str]) -> None:
    """Write the JSON file and the plot, and print the table."""
    content: dict[str, Any] = {"settings": LOSSES, "recipe": COMMON, "environment": environment()}
    content["results"] = {}
    print(f"| loss | {' | '.join(f'{name} | to {BASE} | rate' for name in names)} |")
    print(f"|---|{'---|' * (3 * len(names))}")
    for loss in LOSSES:
        if not all(tested(name, loss) for name in names):
            continue
        row = [f"`{loss}`"]
        for name in names:
            found = result(name, loss)
            content["results"][f"{name}: {loss}"] = found
            row += cells(found)
        print("| " + " | ".join(row) + " |")
    OUT.write_text(json.dumps(content, indent=1) + "\n")
    draw(names, content["results"])


def draw(names: list[str], results: dict[str, Any]) -> None:
    """Plot the results on the test photos, with a panel per set."""
    figure, panels = plt.subplots(1, len(names), figsize=(10, 5), layout="constrained", sharey=True)
    losses = [loss for loss in LOSSES if f"{names[0]}: {loss}" in results]
    for axes, name in zip(panels, names, strict=True):
        for place, loss in enumerate(losses):
            values = results[f"{name}: {loss}"]["test mAP by seed"]
            axes.plot(values, [place] * len(values), "o", color="tab:blue", alpha=0.6)
            if loss == BASE:
                axes.axvline(statistics.fmean(values), color="gray", linewidth=0.8)
        axes.set(title=name, xlabel="mAP on the test photos, three seeds")
    panels[0].set_yticks(range(len(losses)), losses)
    panels[0].invert_yaxis()
    figure.savefig(OUT.with_suffix(".png"), dpi=110)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sets", nargs="+", metavar="SET=FOLDER", help="corel5k=FOLDER, voc=FOLDER")
    parser.add_argument("--weights", help="file with the weights of EfficientNet-Lite0 (timm)")
    parser.add_argument("--losses", nargs="*", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--report", action="store_true", help="only report the finished runs")
    arguments = parser.parse_args()
    sets = dict(text.split("=", 1) for text in arguments.sets)
    if arguments.weights:
        COMMON.append(f"backbone.pretrained={arguments.weights}")

    for loss in [] if arguments.report else arguments.losses:
        for name, folder in sets.items():
            tune(name, folder, loss)
            record(name, folder, loss, selected(name, loss), test=True)
            best_epoch.cache_clear()
    if arguments.report:
        report(list(sets))


if __name__ == "__main__":
    main()
