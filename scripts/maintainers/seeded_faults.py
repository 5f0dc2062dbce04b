#!/usr/bin/env python
"""Insert one fault at a time into a copy of a checkout, and find the first test that fails.

    python scripts/maintainers/seeded_faults.py CHECKOUT [--only N ...] [--all-tests] [--json FILE]

A fault is a plausible mistake in one line that makes numbers wrong without an error. Its old text
must occur exactly once in mldec/, in any module. The tests of its subject run up to the first
failure; --all-tests runs the whole default suite. The tests must pass without a fault.

FILE keeps the results of other faults from earlier runs. If no test fails, the fault is printed as
`not caught` and the exit status is 1. The 80 faults take about 33 minutes of processor time.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
DATA = os.environ.get("MLDEC_SAMPLE_DATA") or str(TOP.parent / "shared" / "data")
TIMEOUT = 900  # seconds per run of the tests, because a fault may cause an endless loop

# The tests of each subject, fastest first.
TESTS = {
    "resume": "unit/training/*.py unit/losses/*.py",
    "loader": "unit/data/*.py",
    "metrics": "unit/evaluators/*.py",
    "losses": "unit/losses/*.py parity/*losses*.py unit/training/*.py",
    "heads": "unit/heads/*.py parity/*heads*.py",
    "thresholds": "tools/calibration/test_fitting.py tools/calibration/test_command.py",
    "checkpoints": "unit/files/*.py unit/checkpoint/*.py unit/training/*.py parity/*heads*.py",
    "readers": "unit/data/*.py unit/data/*/*.py",
    "report": "tools/report/*.py extras/report/*.py",
    "predict": "tools/predict/*.py",
    "shards": "tools/predict/test_results.py tools/predict/test_command.py",
    "thresholds file": "unit/checkpoint/test_ram_files.py tools/calibration/test_command.py",
    "export": "extras/export/test_program.py extras/export/test_command.py",
    "xmp": "tools/predict/test_xmp.py",
    "summary": "tools/test_summary.py",
}

# Each fault has three lines: subject and description, old text, new text.
FAULTS = r"""
resume: the step starts again from 0
- self.step = saved.step
+ self.step = 0
resume: the schedule is one step behind
- fast_forward(self.schedule, self.step)
+ fast_forward(self.schedule, self.step - 1)
resume: the moving average continues from the raw weights
- load_strict(self.ema.module, saved.ema or {}, path)
+ load_strict(self.ema.module, saved.model, path)
resume: the state of the optimizer is lost
- load_state(self.optimizer, saved.optimizer)
+ self.optimizer.state.clear()
resume: the estimated class priors of the loss are lost
- self.loss.load_state_dict(saved.loss)
+ self.loss.train()
resume: the epoch starts again with its first image
- self.batches.start = self.position
+ self.batches.start = 0
resume: the mean loss excludes the steps before the interruption
- self.meter = Meter(loss=saved.log.loss, steps=saved.log.steps)
+ self.meter = Meter()
resume: patience and best.pt are reset
- self.best = saved.best
+ self.best = Best()
loader: a resumed epoch begins with its first images
- start = step * self.batch_size
+ start = (step - self.start) * self.batch_size
loader: the ranks train on the same images
- first_part = self.rank * self.accumulate
+ first_part = 0
loader: a last batch that is too small for batch norm is kept
- self.steps = self.num_images // self.batch_size + (tail >= 2 * self.parts)
+ self.steps = self.num_images // self.batch_size + (tail > 0)
loader: the augmentation of an image is the same in each epoch
- rng = SampleRandom(sample_seed(self.seed, *key))
+ rng = SampleRandom(sample_seed(self.seed, *key[1:]))
loader: the evaluation drops the last, smaller batch
- for start in indices[::batch_size][rank::world_size]:
+ for start in indices[: -(len(indices) % batch_size) or None : batch_size][rank::world_size]:
loader: repetitions of an image have the same random numbers
- repetition += int(appearances[shuffled]) * self.repeats
+ repetition += 0
loader: the repeat factor lacks its square root
- per_class = np.sqrt(threshold / fractions).clip(min=1)
+ per_class = (threshold / fractions).clip(min=1)
metrics: labels of -1 count as negatives in AP
- annotated = np.sort(scores[targets >= 0])
+ annotated = np.sort(scores)
metrics: the recall of 11-point AP is rounded down
- needed = -(-np.arange(11) * total // 10)
+ needed = np.arange(11) * total // 10
metrics: decisions on labels of -1 count as wrong
- decided = decided & (targets >= 0)
+ decided = decided & (targets >= -1)
metrics: the top k has one class too few if logits are equal
- return above | (level & (level.cumsum(1, dtype=torch.int32) <= remaining))
+ return above | (level & (level.cumsum(1, dtype=torch.int32) < remaining))
metrics: mAP_weighted divides by the positives of all classes
- weighted = (per_class_ap * positives)[valid].sum() / positives[valid].sum()
+ weighted = (per_class_ap * positives)[valid].sum() / positives.sum()
metrics: a confidence on the edge of a bin belongs to the next bin
- bins = ((confidence * BINS - 1) // FIXED_POINT).clamp(0, BINS - 1)
+ bins = ((confidence * BINS) // FIXED_POINT).clamp(0, BINS - 1)
losses: the focal weight of ASL has a gradient
- right = right.detach()
+ right = right.clone()
losses: the focal weight of ASL with a softmax has no gradient
- weight = wrong ** (self.gamma_pos * targets + self.gamma_neg * (1 - targets))
+ weight = wrong.detach() ** (self.gamma_pos * targets + self.gamma_neg * (1 - targets))
losses: normalized partial ASL lacks the constant weight of 1
- weights = weights * (1 + 1 / (1 + (~unannotated).sum(1, keepdim=True)))
+ weights = weights * (1 / (1 + (~unannotated).sum(1, keepdim=True)))
losses: selective partial ASL also drops annotated labels
- kept = weights.flatten()[chosen] * (likely[chosen] < 0)
+ kept = weights.flatten()[chosen] * 0
losses: cross-entropy is averaged over the classes
- return F.cross_entropy(logits, targets, label_smoothing=self.smoothing)
+ return F.cross_entropy(logits, targets, label_smoothing=self.smoothing) / logits.shape[-1]
losses: positives have the weight of negatives
- return (negatives / positives).clamp(max=cap).float()
+ return (positives / negatives).clamp(max=cap).float()
losses: a mean loss counts each micro-batch as a whole batch
- share = len(images) / images_in_step
+ share = 1.0
heads: the wrong end of the padded group outputs is cut off
- return groups.transpose(0, 1).flatten(1)[:, : self.num_classes] + self.pool_bias
+ return groups.transpose(0, 1).flatten(1)[:, -self.num_classes :] + self.pool_bias
heads: ML-Decoder lacks the residual of the removed self-attention
- x = self.norm1(x + self.dropout(x))
+ x = self.norm1(self.dropout(x))
heads: the queries of cross-attention have no positions
- x + query_positions, tokens + token_positions, tokens, need_weights=need_weights
+ x, tokens + token_positions, tokens, need_weights=need_weights
heads: the sine positions of x and y are swapped
- return torch.cat((y, x), dim=2).flatten(0, 1)
+ return torch.cat((x, y), dim=2).flatten(0, 1)
heads: shuffled word groups are restored with the wrong permutation
- logits = logits[:, order.argsort()]
+ logits = logits[:, order]
heads: projected word vectors have no ReLU
- return F.relu(self.word_proj(word_vectors.to(self.pool_bias.dtype)))
+ return self.word_proj(word_vectors.to(self.pool_bias.dtype))
thresholds: the highest threshold that reaches the precision is chosen
- return int(np.flatnonzero(precision >= wanted)[-1]), reached
+ return int(np.flatnonzero(precision >= wanted)[0]), reached
thresholds: negatives with the score of a positive are not counted
- below = np.searchsorted(cuts, logits[~present], side="right")
+ below = np.searchsorted(cuts, logits[~present], side="left")
thresholds: a score at the threshold is absent
- predicted = calibrated >= lowest[index]
+ predicted = calibrated > lowest[index]
thresholds: Platt scaling is fitted to hard targets
- targets = np.where(present, (positives + 1) / (positives + 2), 1 / (negatives + 2))
+ targets = np.where(present, 1.0, 0.0)
thresholds: cross-fitting evaluates in-sample images
- tally.add(fit(logits, labels, folds != fold, choice), logits, labels, folds == fold)
+ tally.add(fit(logits, labels, folds == folds, choice), logits, labels, folds == fold)
checkpoints: the moving average is loaded even if the raw weights are better
- chosen = self.best.weights if name is None else name
+ chosen = "ema" if name is None else name
checkpoints: a file that differs from its checksum is read
- if digest not in hashes:
+ if not hashes:
checkpoints: tensors change while they are written
- return value.detach().to("cpu", copy=True)
+ return value.detach().to("cpu")
checkpoints: in-place ABN is converted without its epsilon
- value = value.abs() + 1e-5
+ value = value.abs()
checkpoints: logits stay in the order of the checkpoint's classes
- columns = [column_of[name] for name in current.names]
+ columns = list(column_of.values())
checkpoints: older versions of a damaged checkpoint are not tried
- paths = [version for version in versions(path, MOST_VERSIONS) if version.exists()]
+ paths = [path]
readers: the images of COCO are in the order of the file
- rows = {image: row for row, image in enumerate(sorted(index.imgs))}
+ rows = {image: row for row, image in enumerate(index.imgs)}
readers: the last object of a class in a VOC image determines the label
- labels[name] = labels.get(name, DIFFICULT) if is_difficult else 1
+ labels[name] = DIFFICULT if is_difficult else 1
readers: the classes of Stanford-Cars are off by one
- column = int(annotation["class"]) - 1
+ column = int(annotation["class"]) % len(names)
readers: an empty cell of a CSV file is a negative
- _CELLS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1, "": -1}
+ _CELLS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1, "": 0}
readers: zero-shot evaluation on all images only uses images with an unseen class
- used = images if self.val_images == "all" else with_unseen
+ used = with_unseen
metrics: the envelope of the precision runs over lower recalls
- envelope = np.maximum.accumulate(precision)
+ envelope = np.maximum.accumulate(precision[::-1])[::-1]
report: the intervals have a level of 90 % instead of 95 %
- bounds: np.ndarray = np.percentile(values, (2.5, 97.5), axis=0)
+ bounds: np.ndarray = np.percentile(values, (5, 95), axis=0)
report: two models are compared by unpaired resamples
- gaps[name] = own.resampled[name] - other.resampled[name]
+ gaps[name] = own.resampled[name] - other.resampled[name][::-1]
report: missed images with the highest scores come first
- "missed": (~decided & (labels == 1), scores),
+ "missed": (~decided & (labels == 1), -scores),
report: a score on the edge of a bin belongs to the lower bin
- bins = np.searchsorted(edges[1:-1], scores, "right")
+ bins = np.searchsorted(edges[1:-1], scores, "left")
predict: the stored thresholds are sorted and assigned to the wrong classes
- return torch.tensor([*self.stored], dtype=torch.float64)
+ return torch.tensor(sorted(self.stored), dtype=torch.float64)
predict: a score at the threshold is not predicted
- reached = scores >= min_scores
+ reached = scores > min_scores
predict: scores of single-label models are sigmoids
- return logits.softmax(-1) if loaded.classes.exclusive else logits.sigmoid()
+ return logits.sigmoid()
predict: pooled features are the maximum over the tokens
- pooled = None if tokens is None else tokens[:count].float().mean(1)
+ pooled = None if tokens is None else tokens[:count].float().amax(1)
predict: a result is resumed although the input images have changed
- if item is None or named(item.name)["image"] != name:
+ if item is None:
shards: the last row of each group of a Parquet file is lost
- rows = [cells_of(row_of(line)) for line in group_lines]
+ rows = [cells_of(row_of(line)) for line in group_lines[:-1]]
shards: the rows of an incomplete batch are kept after a kill
- file.truncate(end)
+ file.truncate(position)
shards: a modified part is merged
- if known is None or storage.fingerprint(path) not in known:
+ if known is None:
shards: a row of another image is merged
- if row_of(line).get("image") != named(item.name)["image"]:
+ if "image" not in row_of(line):
thresholds file: the thresholds stay in the order of the rows
- thresholds = tuple(values[name] for name in classes.names)
+ thresholds = tuple(values.values())
thresholds file: the calibrated thresholds override the file
- values = dict(zip(classes.names, known, strict=False)) | dict(zip(given, above, strict=True))
+ values = dict(zip(given, above, strict=True)) | dict(zip(classes.names, known, strict=False))
thresholds: the temperature is stored in place of the slope
- slopes=[1 / fitted],
+ slopes=[fitted],
thresholds: calibrated values stay in the order of the classes of the data
- thresholds=in_order(outcome.thresholds, names, own),
+ thresholds=tuple(outcome.thresholds),
export: resized pixels are truncated instead of rounded
- return torch.floor(pixels + 0.5).clamp(0, 255).to(torch.uint8)
+ return pixels.clamp(0, 255).to(torch.uint8)
export: the center crop starts one pixel too early
- return number // 2 + (number % 2) * (number // 2 % 2)
+ return number // 2
report: the p-value is one-sided
- return float(min(1, 2 * (1 + rarer) / (1 + len(gaps))))
+ return float(min(1, (1 + rarer) / (1 + len(gaps))))
report: the interval of a class difference is the interval of the first model
- low, high = interval_bounds(own.resampled_ap - other.resampled_ap)
+ low, high = interval_bounds(own.resampled_ap)
report: images without a label count as wrong in resampled top-1
- shares = [right @ block[rows] / block[rows].sum(0) for block in weights]
+ shares = [right @ block[rows] / block.sum(0) for block in weights]
xmp: keywords of an earlier run are treated as keywords of the user
- items = set(texts[ITEMS])
+ items = set()
xmp: photos that differ in their suffix share a sidecar
- path = photo.with_name(f"{photo.name}.xmp")
+ path = photo.with_suffix(".xmp")
summary: the interval of a paired difference has a level of 90 %
- test.confidence_interval(0.95)
+ test.confidence_interval(0.90)
summary: runs with different cache folders are in different groups
- IGNORED = {"seed", "name", "resume", "data.cache_dir"}
+ IGNORED = {"seed", "name", "resume"}
summary: the deviation is the population deviation
- statistics.stdev(values) if len(values) > 1 else None
+ statistics.pstdev(values) if len(values) > 1 else None
summary: the difference of two groups pairs results of different seeds
- others = [base[seed].metrics[main_metric] for seed in seeds]
+ others = [base[seed].metrics[main_metric] for seed in reversed(seeds)]
summary: each metric comes from its own best evaluation
- metrics = {key: value for key, value in logged.metrics.items() if value is not None}
+ metrics = {key: max(x.metrics[key] or 0 for x in progress.evaluations) for key in logged.metrics}
"""


@dataclass
class Fault:
    """A changed line, and the first test that fails because of it."""

    number: int
    subject: str
    breaks: str
    old: str
    new: str
    caught_by: str | None = None


def read_faults() -> list[Fault]:
    """Return the faults of the table, numbered from 1."""
    faults = []
    lines = FAULTS.strip().splitlines()
    for number, (head, old, new) in enumerate(zip(*[iter(lines)] * 3, strict=True), 1):
        subject, _, breaks = head.partition(": ")
        faults.append(
            Fault(number, subject, breaks, old.removeprefix("- "), new.removeprefix("+ "))
        )
    return faults


def copy_of(checkout: Path, folder: Path) -> str:
    """Copy the commit of a checkout to a folder, and return its hash."""
    git = ["git", "-C", str(checkout)]
    archive = folder / "checkout.tar"
    subprocess.run(git + ["archive", "-o", str(archive), "HEAD"], check=True)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    commit = subprocess.run(git + ["rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return commit.stdout.strip()


def place_of(old: str, folder: Path) -> Path:
    """Return the file in mldec/ that contains a text, which must occur exactly once."""
    files = [path for path in folder.glob("mldec/**/*.py") if old in path.read_text()]
    if len(files) != 1 or files[0].read_text().count(old) != 1:
        sys.exit(f"seeded_faults: {old!r} must occur once in mldec/; update FAULTS")
    return files[0]


def failing_test(folder: Path, patterns: str) -> str | None:
    """Run tests, and return the name of the first failing test, or None."""
    tests: list[Path] = []
    for pattern in patterns.split():
        tests += sorted(folder.glob(f"tests/{pattern}"))
    words = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not gpu"]
    command = [sys.executable, "-m", "pytest"] + words + [str(test) for test in tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "MLDEC_SAMPLE_DATA": DATA}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return f"timeout after {TIMEOUT} s"

    if done.returncode == 0:
        return None
    # Drop the parameters of the test, which may contain any text.
    found = re.search(r"^(?:FAILED|ERROR) ([^\s[]+)", done.stdout, re.MULTILINE)
    return found[1] if found else f"pytest ended with status {done.returncode}"


def main() -> None:
    """Run the faults of the command line."""
    parser = argparse.ArgumentParser(description="See which test catches each seeded fault.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", nargs="+", type=int, metavar="N")
    parser.add_argument("--all-tests", action="store_true", help="run the whole default suite")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    faults = [fault for fault in read_faults() if not args.only or fault.number in args.only]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        commit = copy_of(args.checkout, folder)
        files = {fault.number: place_of(fault.old, folder) for fault in faults}
        tests = {name: "**/test_*.py" if args.all_tests else TESTS[name] for name in TESTS}
        for patterns in {tests[fault.subject] for fault in faults}:
            failed = failing_test(folder, patterns)
            if failed:
                sys.exit(f"seeded_faults: {failed} fails without a fault")

        for fault in faults:
            started = time.monotonic()
            file = files[fault.number]
            good = file.read_text()
            file.write_text(good.replace(fault.old, fault.new))
            fault.caught_by = failing_test(folder, tests[fault.subject])
            file.write_text(good)
            verdict = fault.caught_by or "not caught"
            name = f"{fault.subject}: {fault.breaks}"
            print(
                f"{fault.number:2} {time.monotonic() - started:4.0f} s  {name}: {verdict}",
                flush=True,
            )

    if args.json:
        write(args.json, faults, commit)
    sys.exit(any(fault.caught_by is None for fault in faults))


def write(path: Path, faults: list[Fault], commit: str) -> None:
    """Write the faults, and keep other faults that are already in the file."""
    earlier = json.loads(path.read_text())["faults"] if path.exists() else []
    entries = {entry["number"]: entry for entry in earlier}
    entries |= {fault.number: asdict(fault) for fault in faults}
    table = [entries[number] for number in sorted(entries)]
    caught = sum(entry["caught_by"] is not None for entry in table)
    date = datetime.now(UTC).date().isoformat()
    content = {"commit": commit, "date": date, "caught": caught, "of": len(table), "faults": table}
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
