"""Why does the official zero-shot head learn slowly? `python scripts/studies/zero_shot.py`.

Four heads that take word vectors are compared: the official one, whose pooling row all classes
share; ML-Decoder with a query and a pooling row per class, both made of its vector; the same with
groups of four classes; and GAP, whose pooled features are mapped to the vectors.

- causes: the official head on the digits of +experiment=digits_zsl, in the way in which it does
  not learn there, with one thing changed at a time.
- digits: all heads on the same data. Optimiser and rate of each head are tuned on the same grid,
  by the mAP of the *seen* classes, on a seed that is not in the table. Then three seeds, with other
  unseen classes, are trained for longer, and evaluated after each epoch.
- photos (with --photos PHOTOS): all heads on photos of Pascal VOC in the form of data=csv, see
  docs/results.md, with the tokens of a frozen EfficientNet-Lite0 (--weights) and the vectors of
  --vectors. The 12 classes are held out in four folds of three; tuned likewise.

Dropout is 0 in all decoders of digits and photos. Each finished run is a line of
outputs/zero_shot/runs.jsonl, so that an interrupted study goes on where it stopped. At the end
benchmarks/zero_shot.json gets the rows and a verdict on each claim, and benchmarks/zero_shot.png
the curves, which need matplotlib (`pip install -e ".[plot]"`).
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from verdicts import Claim, judge, verdict_line

from mldec import build
from mldec.benchmark import environment
from mldec.config.compose import compose
from mldec.config.schema import Config
from mldec.data.loader import training_labels
from mldec.data.settings import assemble
from mldec.data.tasks import ZeroShot, split_classes
from mldec.data.types import DataModule, Split
from mldec.data.word_vectors import read_vectors
from mldec.errors import ConfigError, one_line
from mldec.figures import new_figure, require_matplotlib, save, set_title
from mldec.model import Classifier, TokenClassifier
from mldec.runtime.signals import StopRequest
from mldec.training.frozen_features import with_tokens
from mldec.training.log import RunLog
from mldec.training.trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP = Path(__file__).resolve().parents[2]
WORK, OUT = TOP / "outputs" / "zero_shot", TOP / "benchmarks" / "zero_shot.json"
RUNS = WORK / "runs.jsonl"
CPU = torch.device("cpu")

SEEDS = (0, 1, 2)
TUNING_SEED = 100
GRID = (("adamw", 1e-3), ("muon", 3e-3), ("muon", 1e-2))
EPOCHS = {"digits": 3, "photos": 6}
TUNING_EPOCHS = {"digits": 2, "photos": 6}
METRICS = ("zsl_mAP", "seen_mAP", "gzsl_mAP", "harmonic_mAP")

DIGITS = ["+experiment=digits_zsl", "train.workers=0", "train.ema_decay=null", "device=cpu"]
OFFICIAL = ["head=ml_decoder_zsl_small"]
PER_CLASS = ["head=ml_decoder_zsl_single_small"]
NO_DROPOUT = ["head.dropout=0"]
HEADS = {
    "official": ("official: one pooling row for all", [*OFFICIAL, *NO_DROPOUT]),
    "per_class": ("a pooling row per class", [*PER_CLASS, *NO_DROPOUT]),
    "groups": ("groups of four", ["head=ml_decoder_zsl_groups_small", *NO_DROPOUT]),
    "gap": ("GAP", ["head=gap_words"]),
}

# How the official head was trained when it did not learn: the settings that the causes change.
SHORT = ["train.batch_size=16", "train.epochs=2"]
BEFORE = [*OFFICIAL, *SHORT, "optim.name=adamw", "optim.lr=1e-3"]
MUON = [*SHORT, "optim.name=muon", "optim.lr=1e-2"]
CAUSES = {
    "before": ("as before: AdamW, dropout 0.1", BEFORE),
    "dropout": ("dropout 0", [*BEFORE, *NO_DROPOUT]),
    "rate": ("three times the rate", [*BEFORE, "optim.lr=3e-3"]),
    "unit": ("vectors of length 1", BEFORE),
    "one_hot": (
        "vectors of 14 ones and zeros",
        [*BEFORE, "data.vectors=one_hot", "head.word_dim=14"],
    ),
    "single_query": ("query not doubled", [*BEFORE, "head.doubled_query=false"]),
    "layers": ("two layers", [*BEFORE, "head.num_layers=2"]),
    "wide": ("twice the width", [*BEFORE, "head.embed_dim=256", "head.mlp_dim=512"]),
    "classes": ("72 seen classes of 80", [*BEFORE, "data.colours=8"]),
    "budget": ("five times the images", [*BEFORE, "train.epochs=10"]),
    "row": ("a pooling row per class", [*BEFORE, *PER_CLASS, "head.dropout=0.1"]),
    "muon": ("Muon", [*MUON, *OFFICIAL]),
    "muon_dropout": ("Muon, dropout 0", [*MUON, *OFFICIAL, *NO_DROPOUT]),
}

PHOTOS = [
    "name=zero_shot",
    "data=csv",
    "backbone=efficientnet_lite0",
    "loss=asl",
    "device=cpu",
    "data.augment=none",
    "data.cutout=0",
    "data.image_size=224",
    "train.batch_size=32",
    "train.workers=0",
    "train.freeze=[backbone]",
    "train.ema_decay=null",
]
FOLDS = 4

CLAIMS = [
    Claim(
        "a pooling row per class beats the shared row (not in the paper)",
        "per_class",
        "official",
        True,
    ),
    Claim(
        "group decoding is as good as a query per class (section 2.4)", "groups", "per_class", False
    ),
    Claim("the official head beats GAP with words", "official", "gap", True),
    Claim("ML-Decoder with a row per class beats GAP with words", "per_class", "gap", True),
]


class Run(NamedTuple):
    """One training of the study; its fields identify it."""

    part: str  # causes, digits or photos
    row: str  # a key of CAUSES or HEADS
    optimiser: str
    rate: float
    seed: int  # of the photos: also the fold
    tuning: bool

    @property
    def settings(self) -> list[str]:
        """Return the settings of the row, the optimiser and the seed."""
        seeded = [f"seed={self.seed}"]
        if self.part == "causes":
            return [*DIGITS, *CAUSES[self.row][1], *seeded, f"data.seed={self.seed}"]

        chosen = [f"optim.name={self.optimiser}", f"optim.lr={self.rate}"]
        epochs = (TUNING_EPOCHS if self.tuning else EPOCHS)[self.part]
        common = [*HEADS[self.row][1], *chosen, *seeded, f"train.epochs={epochs}"]
        if self.part == "digits":
            return [*DIGITS, *common, f"data.seed={self.seed}"]
        return [*PHOTOS, *common]


class Photos:
    """The photos, with the tokens of a frozen backbone.

    Args:
        root: folder of the photos, in the form of data=csv.
        weights: file of the backbone's weights; None for those that timm publishes.
        vectors: file of the word vectors of the classes.
    """

    def __init__(self, root: Path, weights: Path | None, vectors: Path) -> None:
        self.vectors = vectors
        self.settings = [f"data.root={root}"]
        if weights:
            self.settings.append(f"backbone.pretrained={weights}")

    @cached_property
    def backbone(self) -> nn.Module:
        """Return the frozen backbone, which all runs share."""
        return build.backbone(build.check(compose([*PHOTOS, *HEADS["gap"][1], *self.settings])))

    def data(self, config: Config) -> DataModule:
        """Return the data, with every fourth class unseen from the one that the seed counts off."""
        part = build.check(config, ["data"])["data"]
        fold = config.seed % FOLDS
        task = ZeroShot(
            roles=lambda names: split_classes(
                names, unseen=names[fold::FOLDS], seen=None, where="the photos"
            ),
            vectors=partial(read_vectors, self.vectors),
            val_images="all",
            where="the photos",
        )

        view, files, sampling = (part.shared(kind) for kind in build.SHARED)
        images = assemble(replace(part.call(), task=task), view, files, sampling)
        return with_tokens(images, self.backbone, config, device=CPU, stop=StopRequest())


def with_unit_vectors(data: DataModule) -> DataModule:
    """Return a dataset whose word vectors are scaled to length 1."""

    def scaled(split: Split) -> Split:
        assert split.classes.queries is not None
        queries = F.normalize(split.classes.queries, dim=1)
        return Split(split.dataset, replace(split.classes, queries=queries))

    return replace(data, load_train=lambda: scaled(data.train), load_val=lambda: scaled(data.val))


def measure(run: Run, photos: Photos | None) -> dict[str, Any]:
    """Train once, evaluating after every epoch, and return the metrics and the time."""
    config = compose([*run.settings, *(photos.settings if photos else []), "name=zero_shot"])
    parts = build.check(config)
    config = build.recorded(config, parts)
    torch.manual_seed(config.seed)

    if run.part == "photos":
        assert photos is not None
        data = photos.data(config)
        head = parts["head"].call(
            in_features=photos.backbone.num_features, num_classes=len(data.train.classes)
        )
        model: Classifier = TokenClassifier(photos.backbone, head)
    else:
        data = build.data(parts)
        if run.row == "unit":
            data = with_unit_vectors(data)
        model = build.model(parts, data.train.classes)

    began = time.process_time()
    with TemporaryDirectory() as folder:
        log = RunLog(Path(folder))
        loss = build.loss(parts, partial(training_labels, data, config.seed))
        Trainer(config, model, loss, data, folder=Path(folder), device=CPU).fit(log)
        log.close()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    cpu_seconds = time.process_time() - began

    curve = [
        {name: entry[f"val/{name}"] for name in METRICS}
        for entry in map(json.loads, lines)
        if f"val/{METRICS[0]}" in entry
    ]
    return {"curve": curve, "cpu_seconds": round(cpu_seconds, 1)}


def finished() -> dict[Run, dict[str, Any]]:
    """Return the result of each finished run."""
    lines = RUNS.read_text().splitlines() if RUNS.exists() else []
    entries = [json.loads(line) for line in lines]
    return {Run(**{name: entry.pop(name) for name in Run._fields}): entry for entry in entries}


def do(run: Run, photos: Photos | None) -> dict[str, Any]:
    """Return the result of a run, which is done unless it is finished."""
    done = finished()
    if run in done:
        return done[run]

    # Written at once, so that an interruption costs one run.
    result = measure(run, photos)
    with RUNS.open("a") as file:
        file.write(json.dumps({**run._asdict(), **result}) + "\n")

    figures = " ".join(f"{name} {value:.1f}" for name, value in result["curve"][-1].items())
    print(*run, figures, f"{result['cpu_seconds']:.0f} CPU-seconds", flush=True)
    return result


def tuned(part: str, head: str, photos: Photos | None) -> tuple[str, float]:
    """Return the optimiser and the rate with which a head learns the seen classes best."""
    results = {
        (optimiser, rate): do(Run(part, head, optimiser, rate, TUNING_SEED, True), photos)
        for optimiser, rate in GRID
    }
    return max(results, key=lambda choice: results[choice]["curve"][-1]["seen_mAP"])


def do_part(part: str, photos: Photos | None) -> None:
    """Do the runs of a part, all rows with one seed before the next seed."""
    if part == "causes":
        for seed in SEEDS:
            for row in CAUSES:
                do(Run(part, row, "", 0.0, seed, False), photos)
        return

    choices = {head: tuned(part, head, photos) for head in HEADS}
    for seed in range(FOLDS) if part == "photos" else SEEDS:
        for head, (optimiser, rate) in choices.items():
            do(Run(part, head, optimiser, rate, seed, False), photos)


def summarise(part: str) -> dict[str, Any]:
    """Return the rows of a part: settings, mean and standard deviation, and the curves."""
    rows = {}
    for row, (label, _) in (CAUSES if part == "causes" else HEADS).items():
        own = {run: result for run, result in finished().items() if run[:2] == (part, row)}
        final = {run.seed: (run, result) for run, result in own.items() if not run.tuning}
        if not final:
            rows[row] = {"label": label, "runs": 0}
            continue

        last = {seed: result["curve"][-1] for seed, (_, result) in sorted(final.items())}
        means = {
            name: [statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None]
            for name in METRICS
            for values in [[metrics[name] for metrics in last.values()]]
        }
        rows[row] = {
            "label": label,
            "runs": len(final),
            "settings": next(iter(final.values()))[0].settings,
            "tuning": {
                f"{run.optimiser} {run.rate:g}": result["curve"][-1]["seen_mAP"]
                for run, result in own.items()
                if run.tuning
            },
            "mean_and_std": means,
            "values": last,
            "curves": {seed: result["curve"] for seed, (_, result) in sorted(final.items())},
            "cpu_seconds": [result["cpu_seconds"] for _, result in final.values()],
        }
    return rows


def report() -> None:
    """Write the JSON file and the plot, and print the rows and the verdicts."""
    parts = {part: summarise(part) for part in ("causes", "digits", "photos")}
    claims = []
    for part in ("digits", "photos"):
        values = {
            row: {seed: last["zsl_mAP"] for seed, last in entry.get("values", {}).items()}
            for row, entry in parts[part].items()
        }
        claims += [{"part": part, **judge(claim, values)} for claim in CLAIMS]

    content = {"parts": parts, "claims": claims, "grid": GRID, "environment": environment()}
    OUT.write_text(json.dumps(content, indent=1) + "\n")
    save(draw(parts), OUT.with_suffix(".png"))

    for part, rows in parts.items():
        for row in rows.values():
            result = "not run"
            if row["runs"]:
                (zsl, zsl_std), (seen, _) = (
                    row["mean_and_std"][name] for name in ("zsl_mAP", "seen_mAP")
                )
                result = f"zsl_mAP {zsl:.1f} +- {zsl_std or 0:.1f}, seen_mAP {seen:.1f}"
            print(f"{part:<8} {row['label']:<34} {row['runs']} runs  {result}")
    for claim in claims:
        print(f"{claim['part']:<8} {verdict_line(claim)}")


def draw(parts: dict[str, dict[str, Any]]) -> "Figure":
    """Draw the zero-shot mAP of the heads against training time, a panel for each data set."""
    figure = new_figure(width=10, height=4)
    panels = figure.subplots(1, 2)
    for axes, part in zip(panels, ("digits", "photos"), strict=True):
        for row in parts[part].values():
            if not row["runs"]:
                continue

            curves = [[epoch["zsl_mAP"] for epoch in curve] for curve in row["curves"].values()]
            means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            per_epoch = statistics.fmean(row["cpu_seconds"]) / len(means)
            seconds = [per_epoch * (epoch + 1) for epoch in range(len(means))]
            axes.plot(seconds, means, marker="o", label=row["label"])

        set_title(axes, f"{part}: zero-shot mAP in percent")
        axes.set_xlabel("CPU-seconds of training, with evaluations")
        if axes.lines:
            axes.legend(fontsize=8)
    return figure


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("causes", "digits", "photos"), help="only this part")
    parser.add_argument("--photos", type=Path, help="folder of the photos")
    parser.add_argument("--weights", type=Path, help="of EfficientNet-Lite0; default: timm's")
    parser.add_argument("--vectors", type=Path, help="word vectors of the classes of the photos")
    parser.add_argument("--report", action="store_true", help="only write the report")
    args = parser.parse_args()

    with one_line():
        # The plots come last: whether they can be drawn is known before hours of training.
        require_matplotlib("zero_shot.py")
        if (args.photos is None) != (args.vectors is None):
            raise ConfigError("--photos and --vectors need each other")
        if args.part == "photos" and args.photos is None:
            raise ConfigError("--part photos needs --photos and --vectors")

        WORK.mkdir(parents=True, exist_ok=True)
        photos = Photos(args.photos, args.weights, args.vectors) if args.photos else None
        for part in ("causes", "digits", "photos"):
            is_chosen = args.part in (None, part) and (part != "photos" or photos)
            if is_chosen and not args.report:
                do_part(part, photos if part == "photos" else None)
        report()


if __name__ == "__main__":
    main()
