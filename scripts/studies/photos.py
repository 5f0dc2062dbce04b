"""Train heads on real photographs: `python scripts/studies/photos.py PHOTOS [--weights FILE]`.

PHOTOS is a folder in the form of `data=csv`: 3,576 photos of Pascal VOC 2012 with 12 of its
classes, see docs/results.md. The backbone is EfficientNet-Lite0 with its ImageNet weights.

- Frozen, at 224 pixels: its tokens are computed once, and only the head is trained.
- Trained, at 160 pixels: the whole network is trained.

All rows of a part have the same budget. The learning rate of each head is tuned on the training
photos alone, on the same grid: trained on four fifths of them and judged on the fifth. If the best
rate is at the end of the grid, the grid is extended there. Then three seeds are trained on all
training photos and judged on the validation photos, after the last epoch.

Each finished run is a line of outputs/photos/runs.jsonl, so that an interrupted study goes on where
it stopped. At the end benchmarks/photos.json gets the rows, their classes and a verdict on each
claim, and benchmarks/photos.png the plots, which need matplotlib (`pip install -e ".[plot]"`).

  --part NAME    only this part: frozen, imbalance, trained or small
  --cost         time a training step of each row, in turn: on a machine that does nothing else
  --report       only write the report on the finished runs
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from charts import Panel, Point, scatter_plots
from torch import nn
from verdicts import Claim, judge, verdict_line

from mldec import build
from mldec.benchmark import environment
from mldec.config.compose import compose
from mldec.config.schema import Config
from mldec.data.loader import training_labels
from mldec.data.types import DataModule
from mldec.errors import one_line
from mldec.evaluation import evaluate
from mldec.figures import save
from mldec.model import Classifier, TokenClassifier
from mldec.runtime.cli import require
from mldec.runtime.facts import count_parameters, multiply_accumulates
from mldec.runtime.signals import StopRequest
from mldec.training.frozen_features import with_tokens
from mldec.training.log import RunLog
from mldec.training.trainer import Trainer

TOP = Path(__file__).resolve().parents[2]
WORK, OUT = TOP / "outputs" / "photos", TOP / "benchmarks" / "photos.json"
RUNS, COSTS = WORK / "runs.jsonl", WORK / "costs.json"
CPU = torch.device("cpu")

SEEDS = (0, 1, 2)
# Learning rates: the grid is the middle three, and the others are tried if the best is at its end.
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
GRID = (3e-4, 1e-3, 3e-3)
TUNING = ["data.fold=1/5", "seed=0"]

COMMON = [
    "name=photos",
    "data=csv",
    "backbone=efficientnet_lite0",
    "device=cpu",
    "data.augment=none",
    "data.cutout=0",
    "train.workers=0",
    "train.ema_decay=null",
    "train.save_every_minutes=null",
    "train.log_every=100000",
    "optim.name=adamw",
    "optim.weight_decay=1e-2",
]
# Half precision halves the time of a decoder here, and is the same for all rows. The tokens are
# computed in single precision.
FROZEN = [
    "data.image_size=224",
    "train.freeze=[backbone]",
    "train.batch_size=64",
    "train.epochs=6",
    "train.eval_every=6",
    "train.precision=bf16",
]
TRAINED = [
    "data.image_size=160",
    "data.flip=true",
    "data.crop=0.6",
    "train.batch_size=32",
    "train.epochs=4",
    "train.eval_every=4",
    "train.channels_last=true",
]
# 60 photos, so that an epoch has few steps.
SMALL = [*FROZEN, "data=coco", "train.batch_size=20", "train.epochs=40", "train.eval_every=40"]

GAP = ["head=gap"]
DECODER = ["head=ml_decoder", "head.num_groups=null"]  # one query per class
TRANSFORMER = ["head=transformer_decoder"]
# As Query2Label's heads, one encoder and two decoder layers, but of a width with which they are
# about as much work as the other decoders.
QUERY2LABEL = [
    "head=query2label",
    "head.input_proj=true",
    "head.embed_dim=384",
    "head.num_heads=8",
    "head.mlp_dim=1024",
]
ASL, BCE = ["loss=asl"], ["loss=bce"]
# The threshold of LVIS, 0.001, is below the share of every class here.
REPEATED = ["data.sampler=repeat_factor", "data.repeat_threshold=0.05"]
RARE = ("bottle", "car", "pottedplant", "tvmonitor")  # classes with fewer than 100 photos


class Row(NamedTuple):
    """A model of the study."""

    name: str
    part: str  # a key of PARTS
    label: str
    own_settings: list[str]
    # The row whose tuned rate it takes, because the two differ in one detail of the head.
    rate_of: str | None = None


# Per part: what is done, and its settings.
PARTS = {
    "frozen": ("frozen backbone, 224 pixels", FROZEN),
    "imbalance": ("losses and sampling, frozen backbone, GAP", [*FROZEN, *GAP]),
    "trained": ("trained backbone, 160 pixels", TRAINED),
    "small": ("60 COCO photos, frozen backbone", SMALL),
}
ROWS = [
    Row("gap", "frozen", "GAP", [*GAP, *ASL]),
    Row("gap_bce", "frozen", "GAP, BCE", [*GAP, *BCE]),
    Row("ml_decoder", "frozen", "ML-Decoder, K = 12", [*DECODER, *ASL]),
    Row(
        "groups_6",
        "frozen",
        "ML-Decoder, K = 6",
        [*DECODER, "head.num_groups=6", *ASL],
        "ml_decoder",
    ),
    Row(
        "groups_3",
        "frozen",
        "ML-Decoder, K = 3",
        [*DECODER, "head.num_groups=3", *ASL],
        "ml_decoder",
    ),
    Row("transformer", "frozen", "transformer decoder", [*TRANSFORMER, *ASL]),
    Row("ml_decoder_bce", "frozen", "ML-Decoder, BCE", [*DECODER, *BCE]),
    Row(
        "learned",
        "frozen",
        "learned queries",
        [*DECODER, "head.queries=learned", *ASL],
        "ml_decoder",
    ),
    Row("query2label", "frozen", "Query2Label, width 384", [*QUERY2LABEL, *ASL]),
    Row("pos_weight", "imbalance", "BCE, pos_weight=auto", [*BCE, "loss.pos_weight=auto"]),
    Row("asl_pos_weight", "imbalance", "ASL, pos_weight=auto", [*ASL, "loss.pos_weight=auto"]),
    Row("balanced", "imbalance", "distribution-balanced", ["loss=distribution_balanced"]),
    Row("zlpr", "imbalance", "ZLPR", ["loss=zlpr"]),
    Row("two_way", "imbalance", "two-way", ["loss=two_way"]),
    Row("bce_repeated", "imbalance", "BCE, repeat factor", [*BCE, *REPEATED], "gap_bce"),
    Row("asl_repeated", "imbalance", "ASL, repeat factor", [*ASL, *REPEATED], "gap"),
    Row("trained_gap", "trained", "GAP", [*GAP, *ASL]),
    Row("trained_ml_decoder", "trained", "ML-Decoder, K = 12", [*DECODER, *ASL]),
    Row("small_gap", "small", "GAP", [*GAP, *ASL], "gap"),
    Row("small_ml_decoder", "small", "ML-Decoder, K = 80", [*DECODER, *ASL], "ml_decoder"),
]

CLAIMS = [
    Claim("ML-Decoder beats GAP, frozen backbone (table 1)", "ml_decoder", "gap", True),
    Claim(
        "ML-Decoder beats GAP, trained backbone (table 1)",
        "trained_ml_decoder",
        "trained_gap",
        True,
    ),
    Claim(
        "ML-Decoder is as good as the transformer decoder (table 1)",
        "ml_decoder",
        "transformer",
        False,
    ),
    Claim(
        "ML-Decoder is as good as Query2Label's decoder (section 3)",
        "ml_decoder",
        "query2label",
        False,
    ),
    Claim("half as many queries as classes are as good (table 1)", "groups_6", "ml_decoder", False),
    Claim(
        "a quarter as many queries as classes are as good (table 1)",
        "groups_3",
        "ml_decoder",
        False,
    ),
    Claim("fixed queries are as good as learned ones (section 2)", "ml_decoder", "learned", False),
    Claim("pos_weight=auto beats BCE without it (not in the paper)", "pos_weight", "gap_bce", True),
    Claim("repeat-factor sampling beats BCE without it (LVIS)", "bce_repeated", "gap_bce", True),
    Claim("repeat-factor sampling beats ASL without it (LVIS)", "asl_repeated", "gap", True),
    Claim("ASL beats BCE, ML-Decoder (ASL paper)", "ml_decoder", "ml_decoder_bce", True),
    Claim("ASL beats BCE, GAP (ASL paper)", "gap", "gap_bce", True),
]


class Study:
    """The runs of the study on one machine.

    Args:
        photos: folder of the photos.
        weights: file of the backbone's weights; None for those that timm publishes.
        coco: folder with a few photos of COCO, for the part "small".
    """

    def __init__(self, photos: Path, weights: Path | None, coco: Path | None) -> None:
        self.photos, self.weights, self.coco = photos, weights, coco
        # Data with tokens, by the settings that they depend on.
        self._tokens = cache(self._load_tokens)

    def config(self, row: Row, more: list[str]) -> Config:
        """Return the config of a run, with all arguments of its parts."""
        root = self.coco if row.part == "small" else self.photos
        settings = [*COMMON, *PARTS[row.part][1], *row.own_settings, f"data.root={root}", *more]
        if self.weights:
            settings.append(f"backbone.pretrained={self.weights}")
        config = compose(settings)
        return build.recorded(config, build.check(config))

    def run(self, row: Row, rate: float, more: list[str]) -> dict[str, Any]:
        """Train a row once and judge it after its last epoch."""
        config = self.config(row, [*more, f"optim.lr={rate}"])
        model, data = self.prepared(row, config, more)

        began, cpu_began = time.monotonic(), time.process_time()
        with TemporaryDirectory() as folder:
            log = RunLog(Path(folder))
            trainer = Trainer(
                config, model, loss_of(config, data), data, folder=Path(folder), device=CPU
            )
            trainer.fit(log)
            log.close()
        seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began

        results = evaluate(model, data, config, device=CPU)
        record = {
            "row": row.name,
            "rate": rate,
            "seed": config.seed,
            "tuning": config.data["fold"] is not None,
            "mAP": results.metrics["mAP"],
            "AP": dict(zip(data.val.classes.names, results.per_class["AP"], strict=True)),
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu_seconds, 1),
        }
        # On so few photos the question is first whether they can be learned at all.
        if row.part == "small":
            seen = replace(data, load_val=data.load_train)
            record["mAP_on_training"] = evaluate(model, seen, config, device=CPU).metrics["mAP"]
        return record

    def prepared(self, row: Row, config: Config, more: list[str]) -> tuple[Classifier, DataModule]:
        """Return the model of a row at its start, and its data."""
        parts = build.check(config)
        torch.manual_seed(config.seed)
        data = build.data(parts)
        if row.part == "trained":
            return build.model(parts, data.train.classes), data

        tokens = self._tokens(row.part, next(filter(is_fold, more), None))
        data = replace(tokens, sampling=data.sampling)
        model = build.model(parts, data.train.classes)
        return TokenClassifier(model.backbone, model.head), data

    def _load_tokens(self, part: str, fold: str | None) -> DataModule:
        """Return the data of a part with the tokens of the frozen backbone."""
        row = next(row for row in ROWS if row.part == part)
        config = self.config(row, ["train.precision=fp32", *([fold] if fold else [])])
        parts = build.check(config)
        return with_tokens(
            build.data(parts), build.backbone(parts), config, device=CPU, stop=StopRequest()
        )

    def do(self, rows: list[Row]) -> None:
        """Do the runs that are not finished, row by row."""
        for row in rows:
            rate = self.tuned(
                next(other for other in ROWS if other.name == (row.rate_of or row.name))
            )
            for seed in SEEDS:
                if finished(row, rate, seed, tuning=False) is None:
                    self.record(row, rate, [f"seed={seed}"])

    def tuned(self, row: Row) -> float:
        """Return the best learning rate of a row; see the description of the study."""
        rates = list(GRID)
        while True:
            values = {
                rate: finished(row, rate, 0, tuning=True) or self.record(row, rate, TUNING)
                for rate in rates
            }
            best = max(rates, key=lambda rate: values[rate]["mAP"])

            index = RATES.index(best)
            beyond = set(RATES[max(0, index - 1) : index + 2]) - set(rates)
            if not beyond:
                return best
            rates += beyond

    def record(self, row: Row, rate: float, more: list[str]) -> dict[str, Any]:
        """Do a run, and write its line at once, so that an interruption costs one run."""
        record = self.run(row, rate, more)
        with RUNS.open("a") as file:
            file.write(json.dumps(record) + "\n")

        kind = "tuning" if record["tuning"] else f"seed {record['seed']}"
        print(
            f"{row.name} {kind} lr {rate:g}: mAP {record['mAP']:.2f}, {record['seconds']} s",
            flush=True,
        )
        return record

    def time_steps(self, rows: list[Row], *, rounds: int = 5) -> None:
        """Time training steps of each row in turn, and write the seconds per image."""
        steps = {row.name: self._step(row) for row in rows}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds + 1):
            for name, (step, images) in steps.items():
                began = time.perf_counter()
                step()
                seconds[name].append((time.perf_counter() - began) / images)

        # The first round warms up.
        costs = {name: statistics.median(values[1:]) for name, values in seconds.items()}
        COSTS.write_text(json.dumps({"threads": torch.get_num_threads(), "seconds": costs}) + "\n")
        for name, value in costs.items():
            print(f"{name}: {value * 1e3:.2f} ms per image")

    def _step(self, row: Row) -> tuple[Callable[[], object], int]:
        """Return a function that does a training step of a row, and its number of images."""
        config = self.config(row, ["optim.lr=1e-4"])
        model, data = self.prepared(row, config, [])
        with TemporaryDirectory() as folder:
            trainer = Trainer(
                config, model, loss_of(config, data), data, folder=Path(folder), device=CPU
            )

        batch = next(iter(trainer.loader))
        images = len(batch.images)
        trainer.learner.train()
        return lambda: trainer.learner.learn([batch], images), images


def loss_of(config: Config, data: DataModule) -> nn.Module:
    """Return the loss of a run."""
    return build.loss(build.check(config), partial(training_labels, data, config.seed))


def is_fold(setting: str) -> bool:
    """Tell whether a setting chooses a fold."""
    return setting.startswith("data.fold=")


def all_finished() -> list[dict[str, Any]]:
    """Return the lines of the finished runs."""
    return [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.exists() else []


def finished(row: Row, rate: float, seed: int, *, tuning: bool) -> dict[str, Any] | None:
    """Return the line of a run; None if it is not finished."""
    wanted = {"row": row.name, "rate": rate, "seed": seed, "tuning": tuning}
    return next((run for run in all_finished() if wanted.items() <= run.items()), None)


def summarise(row: Row, runs: list[dict[str, Any]], costs: dict[str, float]) -> dict[str, Any]:
    """Return the entry of a row in the report."""
    own = [run for run in runs if run["row"] == row.name]
    tuning = {run["rate"]: run["mAP"] for run in own if run["tuning"]}
    final = sorted((run for run in own if not run["tuning"]), key=lambda run: run["seed"])
    values = [run["mAP"] for run in final]

    entry = {
        "row": row.name,
        "part": row.part,
        "label": row.label,
        "settings": row.own_settings,
        "rate": final[0]["rate"] if final else None,
        "rate_of": row.rate_of,
        "tuning": {f"{rate:g}": value for rate, value in sorted(tuning.items())},
        "mean": statistics.fmean(values) if values else None,
        "std": deviation(values) if len(values) > 1 else None,
        "values": {str(run["seed"]): run["mAP"] for run in final},
        "AP": {
            name: [run["AP"][name] for run in final]
            for name in (final[0]["AP"] if final and row.part != "small" else ())
        },
        "mAP_rare": [statistics.fmean(run["AP"][name] for name in RARE) for run in final]
        if row.part != "small"
        else None,
        "cpu_seconds": [run["cpu_seconds"] for run in final],
        "training_ms_per_image": costs[row.name] * 1e3 if row.name in costs else None,
    }
    if row.part == "small":
        entry["mAP_on_training"] = [run["mAP_on_training"] for run in final]
    return entry


def deviation(values: list[float]) -> float:
    """Return the standard deviation of the values of several seeds; 0 of one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def work(row: Row) -> dict[str, Any]:
    """Return the multiply-accumulates per image and the parameters of a row's head."""
    settings = [*COMMON, *PARTS[row.part][1], *row.own_settings, "data.root=."]
    config = compose([*settings, "backbone.pretrained=false"])
    parts = build.check(config)
    size, classes = config.data["image_size"], 80 if row.part == "small" else 12

    backbone = build.backbone(parts)
    head = parts["head"].call(in_features=backbone.num_features, num_classes=classes)
    total = multiply_accumulates(Classifier(backbone, head), size)
    return {
        "head_gmac": (total - multiply_accumulates(backbone, size)) / 1e9,
        "gmac": total / 1e9,
        "head_parameters": count_parameters(head)[1],
    }


def report() -> None:
    """Write the JSON file and the plot, and print the rows and the verdicts."""
    runs = all_finished()
    cost = json.loads(COSTS.read_text()) if COSTS.exists() else {"threads": None, "seconds": {}}
    rows = {row.name: {**summarise(row, runs, cost["seconds"]), **work(row)} for row in ROWS}

    # A study that was interrupted gets a report too, which says that it is not complete.
    claims = [judge(claim, {name: row["values"] for name, row in rows.items()}) for claim in CLAIMS]
    done = sum(len(row["values"]) for row in rows.values())
    content = {
        "complete": done == len(ROWS) * len(SEEDS),
        "runs": [done, len(ROWS) * len(SEEDS)],
        "common": COMMON,
        "parts": {name: {"text": text, "settings": own} for name, (text, own) in PARTS.items()},
        "grid": GRID,
        "tuning": TUNING,
        "threads_of_cost": cost["threads"],
        "rows": list(rows.values()),
        "claims": claims,
        "environment": environment(),
    }
    OUT.write_text(json.dumps(content, indent=1) + "\n")
    save(scatter_plots(panels(rows)), OUT.with_suffix(".png"))

    for row in rows.values():
        result = "not run"
        if row["mean"] is not None:
            result = f"mAP {row['mean']:.1f} +- {row['std'] or 0:.1f}, lr {row['rate']:g}"
        print(f"{row['part']:<8} {row['label']:<22} {result}")
    for claim in claims:
        print(verdict_line(claim))


def panels(rows: dict[str, dict[str, Any]]) -> list[Panel]:
    """Return the plots: mAP against the work of the head, and the classes of the two heads."""
    shown = [row for row in rows.values() if row["part"] == "frozen" and row["mean"] is not None]
    work_panel = Panel(
        title=PARTS["frozen"][0],
        x_label="billion multiply-accumulates of the head per image",
        y_label="mAP in percent",
        points=[
            Point(row["head_gmac"], row["mean"], row["std"] or 0.0, row["label"]) for row in shown
        ],
    )
    pairs = [("gap", "ml_decoder"), ("trained_gap", "trained_ml_decoder")]
    return [
        work_panel,
        *(
            Panel(
                title=f"AP per class, {PARTS[rows[gap]['part']][0]}",
                x_label="AP of GAP in percent",
                y_label="AP of ML-Decoder in percent",
                points=[
                    Point(
                        statistics.fmean(values),
                        statistics.fmean(rows[decoder]["AP"][name]),
                        deviation(rows[decoder]["AP"][name]),
                        name,
                    )
                    for name, values in rows[gap]["AP"].items()
                ],
            )
            for gap, decoder in pairs
            if rows[gap]["AP"] and rows[decoder]["AP"]
        ),
    ]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path, metavar="PHOTOS", help="folder of the photos")
    parser.add_argument("--weights", type=Path, help="of EfficientNet-Lite0; default: timm's")
    parser.add_argument("--coco", type=Path, help="folder of a few COCO photos, for the part small")
    parser.add_argument("--part", choices=PARTS, help="only this part")
    parser.add_argument("--cost", action="store_true", help="only time the training steps")
    parser.add_argument("--report", action="store_true", help="only write the report")
    args = parser.parse_args()

    with one_line():
        # The plots come last: whether they can be drawn is known before hours of training.
        require("photos.py", "plot", "matplotlib")
        WORK.mkdir(parents=True, exist_ok=True)
        study = Study(args.photos, args.weights, args.coco)
        parts = (
            [args.part] if args.part else [part for part in PARTS if part != "small" or args.coco]
        )
        rows = [row for row in ROWS if row.part in parts]

        if args.cost:
            study.time_steps(rows)
        elif not args.report:
            study.do(rows)
        report()


if __name__ == "__main__":
    main()
