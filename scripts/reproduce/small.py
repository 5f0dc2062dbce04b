"""The paper's ablations on handwritten digits, which run anywhere: `python scripts/reproduce/small.py [--row NAME]`.

One backbone, one schedule and one number of scenes for every row, three seeds each; a row differs in its head or its
loss only. As the paper's networks are, the backbone is trained beforehand: once, with a GAP head, on scenes of at most
one digit, and every run starts from it.

Each finished run is a line of outputs/small/runs.jsonl, so that an interrupted study goes on where it stopped. At the
end benchmarks/small_study.json gets mean and standard deviation of each row and a verdict on each claim of the paper,
benchmarks/small_study.png a plot of the metric against the work of one image.

  --list         print the rows and their settings
  --row NAME     run one row again
  --report       only write the report, of what is there
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from mldec import build, checkpoint
from mldec.benchmark import environment
from mldec.check_data.charts import scatter, stacked
from mldec.config.compose import compose
from mldec.errors import ConfigError, one_line
from mldec.runtime.cost import count_parameters, multiply_accumulates
from mldec.training.runlog import RunLog
from mldec.training.trainer import Trainer

TOP = Path(__file__).resolve().parents[2]
WORK, OUT = TOP / "outputs" / "small", TOP / "benchmarks" / "small_study.json"
SEEDS = (0, 1, 2)
NOTHING = 0.1  # a difference in points that table 1 calls none: 88.0 with 20 queries, 88.1 with 80
COMMON = [
    "+experiment=digits",
    "device=cpu",
    "backbone.model_args.channels=[16,32,64,128]",
    "backbone.model_args.stem_width=8",
    "train.workers=0",
    "train.batch_size=32",
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
DATA = {  # what it shows, and its settings: the scenes that a run trains on among them
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
DECODER = ["head=ml_decoder_small", "head.num_groups=null"]  # a query for each class
TRANSFORMER = [*DECODER, "head.self_attention=true", "head.queries=learned"]
BCE = ["loss=bce"]


class Row(NamedTuple):
    """A model of the study."""

    name: str
    data: str  # a key of DATA
    label: str
    words: list[str]

    def settings(self, seed: int) -> list[str]:
        """The words that compose a run."""
        return [*COMMON, *BUDGET, *DATA[self.data][1], *self.words, f"seed={seed}"]


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


class Claim(NamedTuple):
    """What the paper says of two rows: the first is better, or as good."""

    text: str
    first: str
    second: str
    better: bool


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
        "ML-Decoder beats GAP, one label an image (figure 6)",
        "single_ml_decoder",
        "single_gap",
        True,
    ),
]


def pretrained() -> Path:
    """Return the checkpoint that every run starts from, trained before the first one."""
    path = WORK / "pretrained" / "checkpoints" / "best.pt"
    if not path.exists():
        train([*COMMON, *PRETRAINING, "data.val_images=512", "seed=100"], WORK / "pretrained", None)
    return path


def train(words: list[str], folder: Path, start: Path | None) -> tuple[str, float]:
    """Do a run in this process, and return its metric and the value of it after the last step."""
    config = compose(words)
    parts = build.check(config)
    torch.manual_seed(config.seed)
    data = build.data(parts)
    model = build.model(parts, data.train.classes)
    if start:
        # The backbone alone: the head of the file would favour the rows that have the same one.
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
    values = trainer.fit(log)
    log.close()
    return next(iter(values)).removeprefix("val/"), next(iter(values.values()))


def run(row: Row, seed: int) -> dict[str, Any]:
    """Train one row with one seed, and return its line of runs.jsonl."""
    began = time.process_time()
    with TemporaryDirectory() as folder:
        metric, value = train(row.settings(seed), Path(folder), pretrained())
    seconds = round(time.process_time() - began, 1)
    return {"row": row.name, "seed": seed, "metric": metric, "value": value, "cpu_seconds": seconds}


def finished() -> list[dict[str, Any]]:
    """Return the runs that are done."""
    path = WORK / "runs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def forget(row: str) -> None:
    """Drop the runs of a row, so that they are done again."""
    kept = [json.dumps(found) + "\n" for found in finished() if found["row"] != row]
    (WORK / "runs.jsonl").write_text("".join(kept))


def study(rows: list[Row]) -> None:
    """Do the runs that are not done yet, all rows with one seed before the next seed."""
    done = {(found["row"], found["seed"]) for found in finished()}
    for seed in SEEDS:
        for row in rows:
            if (row.name, seed) in done:
                continue
            found = run(row, seed)
            with (WORK / "runs.jsonl").open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(
                f"{row.name} seed {seed}: {found['metric']} {found['value']:.2f}, {found['cpu_seconds']} s",
                flush=True,
            )


def summarise(row: Row, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the report says of a row."""
    own = sorted(
        (found for found in runs if found["row"] == row.name), key=lambda found: found["seed"]
    )
    config = compose(row.settings(0))
    parts = build.check(config)
    model = build.model(parts, build.data(parts).train.classes)
    values = [found["value"] for found in own]
    return {
        "row": row.name,
        "data": row.data,
        "label": row.label,
        "words": row.words,
        "metric": own[0]["metric"] if own else None,
        "mean": statistics.fmean(values) if values else None,
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "values": {str(found["seed"]): found["value"] for found in own},
        "gmac": multiply_accumulates(model, int(config.data["image_size"])) / 1e9,
        "parameters": count_parameters(model)[0],
        "cpu_seconds": sum(found["cpu_seconds"] for found in own),
    }


def judge(claim: Claim, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Hold a claim against the differences of the two rows, seed by seed.

    The spread is two standard errors of their mean, and never less than what the paper takes for nothing.
    """
    one, other = rows[claim.first]["values"], rows[claim.second]["values"]
    gaps = [one[seed] - other[seed] for seed in one.keys() & other.keys()]
    if len(gaps) < 2:
        return {**claim._asdict(), "difference": None, "spread": None, "verdict": "not run"}
    mean, spread = (
        statistics.fmean(gaps),
        max(NOTHING, 2 * statistics.stdev(gaps) / len(gaps) ** 0.5),
    )
    if claim.better:
        verdict = (
            "holds"
            if mean > spread
            else "does not hold"
            if mean < -spread
            else "open: within the spread"
        )
    else:
        verdict = (
            "does not hold"
            if mean < -spread
            else "holds"
            if mean > spread
            else "holds within the spread"
        )
    return {**claim._asdict(), "difference": mean, "spread": spread, "verdict": verdict}


def report() -> None:
    """Write the JSON and the plot, and print both tables."""
    runs = finished()
    rows = {row.name: summarise(row, runs) for row in ROWS}
    claims = [judge(claim, rows) for claim in CLAIMS]
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
    stacked(
        [panel(name, rows) for name in DATA if any(plotted(row, name) for row in rows.values())]
    ).save(OUT.with_suffix(".png"), optimize=True)
    for row in rows.values():
        print(
            f"{row['data']:<9} {row['label']:<22} {_value(row):<22} {row['gmac'] * 1e3:6.2f} MMAC"
        )
    for claim in claims:
        gap = (
            ""
            if claim["difference"] is None
            else f" ({claim['difference']:+.2f}, spread {claim['spread']:.2f})"
        )
        print(f"{claim['verdict']:<24} {claim['text']}{gap}")


def plotted(row: dict[str, Any], data: str) -> bool:
    """Tell whether a row belongs into the panel of a data set."""
    return row["data"] == data and row["mean"] is not None


def panel(data: str, rows: dict[str, dict[str, Any]]) -> Any:
    """Return the plot of a data set: the metric against million multiply-accumulates, a bar of one std each way."""
    shown = [row for row in rows.values() if plotted(row, data)]
    points = [(row["gmac"] * 1e3, row["mean"], row["std"] or 0.0) for row in shown]
    title = f"{DATA[data][0]}: {shown[0]['metric']} against million multiply-accumulates an image"
    return scatter(points, [row["label"] for row in shown], title)


def _value(row: dict[str, Any]) -> str:
    if row["mean"] is None:
        return "not run"
    return f"{row['metric']} {row['mean']:.1f}" + (
        "" if row["std"] is None else f" +- {row['std']:.1f}"
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {row.name: row for row in ROWS}
    parser.add_argument("--row", metavar="NAME", help="run this row again")
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--report", action="store_true", help="only write the report")
    words = parser.parse_args()
    with one_line():
        if words.list:
            print("\n".join(f"{row.name:<18} {row.data:<9} {' '.join(row.words)}" for row in ROWS))
            return
        if words.row and words.row not in names:
            raise ConfigError(f"--row {words.row}: there is no such row; see --list")
        WORK.mkdir(parents=True, exist_ok=True)
        if words.row:
            forget(words.row)
        if not words.report:
            study([names[words.row]] if words.row else ROWS)
        report()


if __name__ == "__main__":
    main()
