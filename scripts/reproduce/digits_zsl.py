#!/usr/bin/env python
"""Measure `+experiment=digits_zsl`: the GAP baseline, the four rows of the paper's table 3, other decoders.

    python scripts/reproduce/digits_zsl.py benchmarks/cpu_digits_zsl.json [--seeds 3] [key=value ...]

Each seed has its own unseen classes, writings, scenes and start. A run is added to the file as soon as it is done,
and is not done again when the script is started again; settings after the file hold for all runs.
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
from mldec.errors import ConfigError, one_line
from mldec.train import run

NOISE = ["train.query_noise=0.3"]
RANDOM = ["train.random_queries=1"]
ROWS = {  # the order makes a table that is broken off most useful
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
    """Do a run, and return its last metrics and its time; that of the processor is without loader workers."""
    with tempfile.TemporaryDirectory() as folder:
        start, busy = time.perf_counter(), time.process_time()
        run(config, Path(folder))
        lines = [
            json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
        ]
        last = [line for line in lines if "val/zsl_mAP" in line][-1]
        times = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
        return {name: last[f"val/{name}"] for name in METRICS} | times


def references(config: Config) -> dict[str, float]:
    """Return the zsl_mAP in percent of models that know nothing, every colour, or every digit of a scene.

    The first is chance: the mean share of the evaluated images that show an unseen class.
    """
    data = build.data(build.check(config, ["data"]))
    targets = torch.stack([data.val.dataset[index][1] for index in range(len(data.val.dataset))])
    shown = targets.unflatten(1, (-1, 10))  # [N, colours, digits]
    answers = {
        "chance": torch.zeros_like(shown),
        "colours_only": shown.amax(2, keepdim=True).expand_as(shown),
        "digits_only": shown.amax(1, keepdim=True).expand_as(shown),
    }
    found = {}
    for name, answer in answers.items():
        evaluator = data.evaluator()
        evaluator.update(answer.flatten(1).float(), targets)
        found[name] = evaluator.compute()["zsl_mAP"]
    return found


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean and standard deviation over the seeds of each row."""
    table = {}
    for row in ROWS:
        found = [one for one in runs if one["row"] == row]
        if found:
            table[row] = {"seeds": [one["seed"] for one in found]}
            for name in (*METRICS, *REFERENCES, "times_chance"):
                values = [one[name] for one in found]
                spread = statistics.stdev(values) if len(values) > 1 else None
                table[row][name] = {"mean": statistics.mean(values), "std": spread}
    return table


def show(table: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'row':<22}{'seeds':>6}{'zsl mAP':>16}{'x chance':>10}{'gzsl mAP':>16}")
    for row, found in table.items():
        cells = [
            f"{found[name]['mean']:.1f} +- {found[name]['std'] or 0:.1f}"
            for name in ("zsl_mAP", "gzsl_mAP")
        ]
        times = f"{found['times_chance']['mean']:.1f}"
        print(
            f"{row:<22}{len(found['seeds']):>6}{cells[0]:>16}{times:>10}{cells[1]:>16}", flush=True
        )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "json", type=Path, help="where the figures go; figures there already are kept"
    )
    parser.add_argument("--seeds", type=int, default=3)
    words, settings = parser.parse_known_args()
    with one_line():
        content = (
            json.loads(words.json.read_text())
            if words.json.exists()
            else {"settings": settings, "runs": []}
        )
        if content["settings"] != settings:
            raise ConfigError(
                f"{words.json} was measured with {content['settings']}, not {settings}: name another file"
            )
        for seed in range(words.seeds):
            for row, choice in ROWS.items():
                if any((one["row"], one["seed"]) == (row, seed) for one in content["runs"]):
                    continue
                seeded = [
                    f"name=digits_zsl_{seed}",
                    f"seed={seed}",
                    f"data.seed={seed}",
                    "train.eval_every=1000",
                ]
                config = compose(["+experiment=digits_zsl", *seeded, *choice, *settings])
                figures = measure(config) | references(config)
                figures["times_chance"] = figures["zsl_mAP"] / figures["chance"]
                content["runs"].append({"row": row, "seed": seed, "choice": choice, **figures})
                content |= {"figures": summary(content["runs"]), "environment": environment()}
                words.json.write_text(json.dumps(content, indent=1) + "\n")
                show(content["figures"])


if __name__ == "__main__":
    main()
