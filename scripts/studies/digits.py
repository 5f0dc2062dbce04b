"""Train the paper's ablations on handwritten digits: `python scripts/studies/digits.py`.

They run on any machine. All rows have the same backbone, schedule and number of scenes, with three
seeds each; a row differs in its head or its loss only. As the paper's networks are, the backbone is
pretrained: once, with a GAP head, on scenes of at most one digit, and every run starts from it.

Each finished run is a line of outputs/small/runs.jsonl, so that an interrupted study goes on where
it stopped. At the end benchmarks/small_study.json gets mean and standard deviation of each row and
a verdict on each claim of the paper, and benchmarks/small_study.png a plot of the metric against
the multiply-accumulates per image. The plot needs matplotlib (`pip install -e ".[plot]"`).

  --list         print the rows and their settings
  --row NAME     run one row again
  --report       only write the report on the finished runs
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from charts import Panel, Point, scatter_plots
from verdicts import Claim, judge, verdict_line

from mldec import build, checkpoint
from mldec.benchmark import environment
from mldec.config.compose import compose
from mldec.errors import ConfigError, one_line
from mldec.figures import save
from mldec.runtime.cli import require
from mldec.runtime.facts import count_parameters, multiply_accumulates
from mldec.training.log import RunLog
from mldec.training.trainer import Trainer

TOP = Path(__file__).resolve().parents[2]
WORK, OUT = TOP / "outputs" / "small", TOP / "benchmarks" / "small_study.json"
SEEDS = (0, 1, 2)
COMMON = [
    "+experiment=digits",
    "device=cpu",
    "backbone.model_args.channels=[16,32,64,128]",
    "backbone.model_args.stem_width=8",
    "train.workers=0",
    "train.batch_size=32",
    "train.channels_last=false",
    "optim.name=adamw",
    "train.save_every_minutes=null",
    "train.log_every=100000",
]
PRETRAINING = [
    "head=gap",
    "data.max_digits=1",
    "data.train_images=16384",
    "train.epochs=3",
    "optim.lr=4e-3",
]
BUDGET = ["data.val_images=1024", "train.epochs=1", "train.ema_decay=null", "optim.lr=2e-3"]
# Per dataset: what an image shows, and the settings, with the number of training scenes.
DATA = {
    "scenes": ("up to 4 digits in a scene, 10 classes", ["data.train_images=6400"]),
    "coloured": (
        "up to 3 coloured digits in a scene, 100 classes",
        ["data=coloured_digits", "data.colours=10", "data.max_digits=3", "data.train_images=12800"],
    ),
    "single": (
        "one digit in a scene, 10 classes",
        ["data=digits_single", "data.image_size=64", "data.train_images=3200"],
    ),
}
GAP = ["head=gap"]
DECODER = ["head=ml_decoder_small", "head.num_groups=null"]  # one query per class
TRANSFORMER = [*DECODER, "head.self_attention=true", "head.queries=learned"]
BCE = ["loss=bce"]


class Row(NamedTuple):
    """A model of the study."""

    name: str
    data: str  # a key of DATA
    label: str
    own_settings: list[str]

    def settings(self, seed: int) -> list[str]:
        """Return all settings of a run."""
        return [*COMMON, *BUDGET, *DATA[self.data][1], *self.own_settings, f"seed={seed}"]


ROWS = [
    Row("gap", "scenes", "GAP", GAP),
    Row("transformer", "scenes", "transformer decoder", TRANSFORMER),
    Row("ml_decoder", "scenes", "ML-Decoder, K = 10", DECODER),
    Row("groups_5", "scenes", "ML-Decoder, K = 5", [*DECODER, "head.num_groups=5"]),
    Row("self_attention", "scenes", "with self-attention", [*DECODER, "head.self_attention=true"]),
    Row("learned", "scenes", "learned queries", [*DECODER, "head.queries=learned"]),
    Row("orthogonal", "scenes", "orthogonal queries", [*DECODER, "head.queries=orthogonal"]),
    Row("single_residual", "scenes", "query not doubled", [*DECODER, "head.doubled_query=false"]),
    Row("gap_bce", "scenes", "GAP, BCE", [*GAP, *BCE]),
    Row("ml_decoder_bce", "scenes", "ML-Decoder, BCE", [*DECODER, *BCE]),
    Row("many_gap", "coloured", "GAP", GAP),
    Row("many_transformer", "coloured", "transformer decoder", TRANSFORMER),
    Row("many_10", "coloured", "ML-Decoder, K = 10", [*DECODER, "head.num_groups=10"]),
    Row("many_20", "coloured", "ML-Decoder, K = 20", [*DECODER, "head.num_groups=20"]),
    Row("many_50", "coloured", "ML-Decoder, K = 50", [*DECODER, "head.num_groups=50"]),
    Row("many_100", "coloured", "ML-Decoder, K = 100", DECODER),
    Row("single_gap", "single", "GAP, BCE", [*GAP, *BCE]),
    Row("single_ml_decoder", "single", "ML-Decoder, BCE", [*DECODER, *BCE]),
]


CLAIMS = [
    Claim("ML-Decoder beats GAP (table 1)", "ml_decoder", "gap", True),
    Claim(
        "ML-Decoder is as good as the transformer decoder (table 1)",
        "ml_decoder",
        "transformer",
        False,
    ),
    Claim("half as many queries as classes are as good (table 1)", "groups_5", "ml_decoder", False),
    Claim(
        "self-attention among the queries is not needed (section 2)",
        "ml_decoder",
        "self_attention",
        False,
    ),
    Claim("fixed queries are as good as learned ones (section 2)", "ml_decoder", "learned", False),
    Claim(
        "random fixed queries are as good as orthogonal ones (not in the paper)",
        "ml_decoder",
        "orthogonal",
        False,
    ),
    Claim("the doubled query does no harm (official code)", "ml_decoder", "single_residual", False),
    Claim("ASL beats BCE, ML-Decoder (ASL paper)", "ml_decoder", "ml_decoder_bce", True),
    Claim("ASL beats BCE, GAP (ASL paper)", "gap", "gap_bce", True),
    Claim(
        "ML-Decoder with few groups beats GAP, many classes (table 2)", "many_10", "many_gap", True
    ),
    Claim(
        "a tenth of the queries is as good, many classes (table 2)", "many_10", "many_100", False
    ),
    Claim(
        "as good as the transformer decoder, many classes", "many_100", "many_transformer", False
    ),
    Claim(
        "ML-Decoder beats GAP, one label per image (figure 6)",
        "single_ml_decoder",
        "single_gap",
        True,
    ),
]


def pretrained() -> Path:
    """Return the checkpoint that every run starts from, and train it before the first run."""
    path = WORK / "pretrained" / "checkpoints" / "best.pt"
    if not path.exists():
        settings = [*COMMON, *PRETRAINING, "data.val_images=512", "seed=100"]
        train(settings, WORK / "pretrained", None)
    return path


def train(settings: list[str], folder: Path, start: Path | None) -> tuple[str, float]:
    """Train in this process.

    Args:
        settings: of the run.
        folder: of the run.
        start: a checkpoint to take the backbone from.

    Returns:
        The main metric's name, and its value after the last step.
    """
    config = compose(settings)
    parts = build.check(config)
    torch.manual_seed(config.seed)
    data = build.data(parts)
    model = build.model(parts, data.train.classes)

    # Not the head of the checkpoint, which would favour the rows that have the same one.
    if start:
        model.backbone.load_state_dict(checkpoint.load_model(start).model.backbone.state_dict())

    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    log = RunLog(folder)
    trainer = Trainer(
        config,
        model,
        build.loss(parts),
        data,
        folder=folder / "checkpoints",
        device=torch.device("cpu"),
    )
    metrics = trainer.fit(log)
    log.close()

    # The evaluator reports its main metric first.
    name, value = next(iter(metrics.items()))
    return name.removeprefix("val/"), value


def run(row: Row, seed: int) -> dict[str, Any]:
    """Train one row with one seed, and return its line of runs.jsonl."""
    began = time.process_time()
    with TemporaryDirectory() as folder:
        metric, value = train(row.settings(seed), Path(folder), pretrained())
    seconds = round(time.process_time() - began, 1)
    return {"row": row.name, "seed": seed, "metric": metric, "value": value, "cpu_seconds": seconds}


def finished() -> list[dict[str, Any]]:
    """Return the lines of the finished runs."""
    path = WORK / "runs.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def forget(row: str) -> None:
    """Drop the runs of a row, so that they are done again."""
    lines = [json.dumps(result) + "\n" for result in finished() if result["row"] != row]
    (WORK / "runs.jsonl").write_text("".join(lines))


def study(rows: list[Row]) -> None:
    """Do the runs that are not finished yet, all rows with one seed before the next seed."""
    done = {(result["row"], result["seed"]) for result in finished()}
    for seed in SEEDS:
        for row in rows:
            if (row.name, seed) in done:
                continue

            # Written at once, so that an interruption costs one run.
            result = run(row, seed)
            with (WORK / "runs.jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")

            metric = f"{result['metric']} {result['value']:.2f}"
            print(f"{row.name} seed {seed}: {metric}, {result['cpu_seconds']} s", flush=True)


def summarise(row: Row, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of a row in the report.

    Args:
        row: the row.
        results: the finished runs of all rows.
    """
    own = sorted(
        (result for result in results if result["row"] == row.name),
        key=lambda result: result["seed"],
    )
    values = [result["value"] for result in own]

    # Built anew only to count its work and parameters.
    config = compose(row.settings(0))
    parts = build.check(config)
    model = build.model(parts, build.data(parts).train.classes)

    return {
        "row": row.name,
        "data": row.data,
        "label": row.label,
        "words": row.own_settings,
        "metric": own[0]["metric"] if own else None,
        "mean": statistics.fmean(values) if values else None,
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "values": {str(result["seed"]): result["value"] for result in own},
        "gmac": multiply_accumulates(model, int(config.data["image_size"])) / 1e9,
        "parameters": count_parameters(model)[0],
        "cpu_seconds": sum(result["cpu_seconds"] for result in own),
    }


def report() -> None:
    """Write the JSON file and the plot, and print both tables."""
    results = finished()
    rows = {row.name: summarise(row, results) for row in ROWS}

    # A study that was interrupted gets a report too, which says that it is not complete.
    values = {name: row["values"] for name, row in rows.items()}
    claims = [judge(claim, values) for claim in CLAIMS]
    done = sum(len(row["values"]) for row in rows.values())

    content = {
        "complete": done == len(ROWS) * len(SEEDS),
        "runs": [done, len(ROWS) * len(SEEDS)],
        "common": COMMON,
        "pretraining": PRETRAINING,
        "budget": BUDGET,
        "data": {name: text for name, (text, _) in DATA.items()},
        "rows": list(rows.values()),
        "claims": claims,
        "environment": environment(),
    }
    OUT.write_text(json.dumps(content, indent=1) + "\n")
    plot(list(rows.values()), OUT.with_suffix(".png"))

    for row in rows.values():
        work = f"{row['gmac'] * 1e3:6.2f} MMAC"
        print(f"{row['data']:<9} {row['label']:<22} {mean_and_deviation(row):<22} {work}")
    for claim in claims:
        print(verdict_line(claim))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the plot of a report's rows: one panel per dataset that has a finished run."""
    panels = []
    for data in DATA:
        shown = [row for row in rows if row["data"] == data and row["mean"] is not None]
        if shown:
            panels.append(panel(data, shown))
    if panels:
        save(scatter_plots(panels), path)


def panel(data: str, rows: list[dict[str, Any]]) -> Panel:
    """Return the metric of a dataset's rows against their work, with bars of one std each way."""
    points = [
        Point(row["gmac"] * 1e3, row["mean"], row["std"] or 0.0, row["label"]) for row in rows
    ]
    return Panel(
        title=DATA[data][0],
        x_label="million multiply-accumulates per image",
        y_label=f"{rows[0]['metric']} in percent",
        points=points,
    )


def mean_and_deviation(row: dict[str, Any]) -> str:
    """Return the result of a report's row as text."""
    if row["mean"] is None:
        return "not run"
    text = f"{row['metric']} {row['mean']:.1f}"
    return text if row["std"] is None else f"{text} +- {row['std']:.1f}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", metavar="NAME", help="run this row again")
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--report", action="store_true", help="only write the report")
    args = parser.parse_args()

    rows = {row.name: row for row in ROWS}
    with one_line():
        if args.list:
            for row in ROWS:
                print(f"{row.name:<18} {row.data:<9} {' '.join(row.own_settings)}")
            return
        if args.row and args.row not in rows:
            raise ConfigError(f"--row {args.row}: there is no such row; see --list")

        # The plot comes last: whether it can be drawn is known before hours of training.
        require(OUT.with_suffix(".png").name, "plot", "matplotlib")

        WORK.mkdir(parents=True, exist_ok=True)
        if args.row:
            forget(args.row)
        if not args.report:
            study([rows[args.row]] if args.row else ROWS)
        report()


if __name__ == "__main__":
    main()
