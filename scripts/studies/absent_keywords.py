"""Compare the meanings of absent keywords.

Command: `python scripts/studies/absent_keywords.py FOLDER --pretrained FILE`

FOLDER has a table with all labels (`data=csv`) and a split. Keywords are simulated by 75 % or 50 %
of the positives of the training photos, at least one per photo, as in a library whose photos are
tagged incompletely. Absent labels are negatives, or not annotated (-1) with losses for them. The
recipe is finetune_frozen head=csra. Each loss has three or four learning rates and three seeds,
which also select the labels; the best mean over the seeds counts. The metric is that of the
validation photos with all of their labels after the last epoch. The result is
benchmarks/absent_keywords.json.
"""

import argparse
import json
import statistics
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import mldec
from mldec.runtime.environment import environment

OUT = Path(__file__).resolve().parents[2] / "benchmarks" / "absent_keywords.json"
SEEDS = range(3)
RATES = ["1e-3", "3e-3", "1e-2"]
LOWER_RATES = {"negative, bce": ["3e-4"]}  # its best rate would be at an end otherwise
ALL = "negative, bce, all labels"
LOSSES = {
    ALL: ["loss=bce"],
    "negative, bce": ["loss=bce"],
    "negative, focal": ["loss=focal"],
    "negative, hill": ["loss=hill"],
    "unknown, bce": ["loss=bce"],
    "unknown, partial_ignore": ["loss=partial_ignore"],
    "unknown, partial_selective": ["loss=partial_selective"],
}


def train(folder: Path, pretrained: str, settings: list[str]) -> float:
    """Return the validation metric of a run after its last epoch."""
    common = ["data=csv", f"data.root={folder}", f"backbone.pretrained={pretrained}"]
    common += ["train.eval_every=100", "train.workers=0", "head=csra"]
    common += ["backbone=efficientnet_lite0", "data.image_size=224"]
    with tempfile.TemporaryDirectory() as outputs, chdir(outputs):
        mldec.fit(overrides=common + settings)
        lines = Path("outputs/finetune_frozen/metrics.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    return float(values[-1]["val/mAP_skip_empty"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=lambda text: Path(text).absolute())
    parser.add_argument("--pretrained", required=True, help="weights of the backbone")
    args = parser.parse_args()

    results: list[dict[str, Any]] = []
    for share in (0.75, 0.5):
        for name, loss in LOSSES.items():
            hidden = [f"data.observed={share}", f"data.unobserved={name.split(',')[0]}"]
            best: list[float] = []
            for rate in RATES + LOWER_RATES.get(name, []):
                scores = []
                for seed in SEEDS:
                    settings = [*loss, f"optim.lr={rate}", f"seed={seed}"]
                    if name != ALL:
                        settings += [*hidden, f"data.observed_seed={seed}"]
                    scores.append(
                        train(args.folder, str(Path(args.pretrained).absolute()), settings)
                    )
                print(share, name, rate, [f"{score:.2f}" for score in scores], flush=True)
                results.append({"observed": share, "labels": name, "lr": rate, "mAP": scores})
                if not best or statistics.mean(scores) > statistics.mean(best):
                    best = scores
            print(f"{share} {name}: {statistics.mean(best):.1f} ± {statistics.stdev(best):.1f}")

    content = {"benchmark": "absent keywords", "figures": results, "environment": environment()}
    OUT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
