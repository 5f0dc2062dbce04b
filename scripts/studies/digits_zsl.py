#!/usr/bin/env python
"""Measure `+experiment=digits_zsl`: the rows of the paper's table 3, GAP, and other decoders.

    python scripts/studies/digits_zsl.py benchmarks/cpu_digits_zsl.json [--seeds 3] [key=value]

Each seed has its own unseen classes, writings, scenes and start. A run is added to the file as
soon as it is done, and is not repeated when the script is started again. The settings after the
file hold for all runs.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from mldec import build
from mldec.benchmark import environment
from mldec.config.compose import compose
from mldec.config.schema import Config
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError, one_line
from mldec.train import run

# The rows were compared before the experiment went over to Muon and a third epoch.
BEFORE = ["optim.name=adamw", "optim.lr=1e-3", "train.epochs=2"]
NOISE = ["train.query_noise=0.3"]
RANDOM = ["train.random_queries=1"]
ROWS = {  # the most informative first, in case the study is broken off
    "no augmentation": [],
    "GAP and word vectors": ["head=gap_words"],
    "noise": NOISE,
    "random query": RANDOM,
    "both": [*NOISE, *RANDOM],
    "groups of 4 classes": ["head=ml_decoder_zsl_groups_small"],
    "shared pooling row": ["head=ml_decoder_zsl_small"],  # as the released code
}
METRICS = ("zsl_mAP", "gzsl_mAP", "seen_mAP", "harmonic_mAP", "zsl_F1@3", "gzsl_F1@3")
REFERENCES = ("chance", "colours_only", "digits_only")


def measure(config: Config) -> dict[str, Any]:
    """Train, and return the last metrics and the time; `cpu_seconds` excludes loader workers."""
    with tempfile.TemporaryDirectory() as folder:
        start, cpu_start = time.perf_counter(), time.process_time()
        run(config, Path(folder))
        text = (Path(folder) / "metrics.jsonl").read_text()
        times = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu_start,
        }

    lines = [json.loads(line) for line in text.splitlines()]
    last = [line for line in lines if "val/zsl_mAP" in line][-1]
    return {name: last[f"val/{name}"] for name in METRICS} | times


def references(config: Config) -> dict[str, float]:
    """Return the zsl_mAP in percent of models that know part of a scene.

    Returns:
        `chance`, of a model that knows nothing: the mean share of the evaluated images that show an
        unseen class; `colours_only` and `digits_only`, of models that know every colour, or digit.
    """
    data = build.data(build.check(config, ["data"]))
    dataset = data.val.dataset
    targets = torch.stack([fixed_sample(dataset, i)[1] for i in range(len(dataset))])

    # Each answer scores a class by the part of its name that the model knows.
    shown = targets.unflatten(1, (-1, 10))  # [N, colours, digits]
    answers = {
        "chance": torch.zeros_like(shown),
        "colours_only": shown.amax(2, keepdim=True).expand_as(shown),
        "digits_only": shown.amax(1, keepdim=True).expand_as(shown),
    }

    figures = {}
    for name, answer in answers.items():
        evaluator = data.evaluator()
        evaluator.update(answer.flatten(1).float(), targets)
        figures[name] = evaluator.compute()["zsl_mAP"]
    return figures


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean and standard deviation over the seeds of each row."""
    table: dict[str, Any] = {}
    for row in ROWS:
        own = [run for run in runs if run["row"] == row]
        if not own:
            continue

        table[row] = {"seeds": [run["seed"] for run in own]}
        for name in (*METRICS, *REFERENCES, "times_chance"):
            values = [run[name] for run in own]
            std = statistics.stdev(values) if len(values) > 1 else None
            table[row][name] = {"mean": statistics.mean(values), "std": std}
    return table


def show(table: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'row':<22}{'seeds':>6}{'zsl mAP':>16}{'x chance':>10}{'gzsl mAP':>16}")
    for row, figures in table.items():
        zsl, gzsl = (
            f"{figures[name]['mean']:.1f} +- {figures[name]['std'] or 0:.1f}"
            for name in ("zsl_mAP", "gzsl_mAP")
        )
        times = f"{figures['times_chance']['mean']:.1f}"
        print(f"{row:<22}{len(figures['seeds']):>6}{zsl:>16}{times:>10}{gzsl:>16}", flush=True)


def measure_row(row: str, seed: int, settings: list[str]) -> dict[str, Any]:
    """Train one row with one seed, and return its entry in the file."""
    choice = ROWS[row]
    seeded = [f"name=digits_zsl_{seed}", f"seed={seed}", f"data.seed={seed}"]
    once = ["train.eval_every=1000"]  # only at the end
    config = compose(["+experiment=digits_zsl", *BEFORE, *seeded, *once, *choice, *settings])

    figures = measure(config) | references(config)
    figures["times_chance"] = figures["zsl_mAP"] / figures["chance"]
    return {"row": row, "seed": seed, "choice": choice, **figures}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=Path, help="file for the figures; the runs in it are kept")
    parser.add_argument("--seeds", type=int, default=3)
    args, settings = parser.parse_known_args()

    with one_line():
        content: dict[str, Any] = {"settings": settings, "runs": []}
        if args.json.exists():
            content = json.loads(args.json.read_text())
        if content["settings"] != settings:
            raise ConfigError(
                f"{args.json} was measured with {content['settings']}, not {settings}: "
                "name another file"
            )

        # All rows with one seed before the next seed, so that the rows can be compared early.
        done = {(run["row"], run["seed"]) for run in content["runs"]}
        for seed in range(args.seeds):
            for row in ROWS:
                if (row, seed) in done:
                    continue

                content["runs"].append(measure_row(row, seed, settings))
                content |= {"figures": summary(content["runs"]), "environment": environment()}
                args.json.write_text(json.dumps(content, indent=1) + "\n")
                show(content["figures"])


if __name__ == "__main__":
    main()
