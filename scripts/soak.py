"""Kill, stop and damage small training runs, and see whether they come out as if nothing had happened.

    python scripts/soak.py [--kills 200] [--signals 100] [--flips 1000] [--worlds 1 2 3 5 8] [--json FILE]

kills    `kill -9` at a random moment of a run that saves at every step, then resume=auto: is the end bit-equal?
signals  SIGTERM, SIGUSR1 or SIGINT at a random moment: how long until it has saved, with which status, and the same
flips    one changed byte of a checkpoint: is it noticed?
worlds   mAP and all other numbers of one checkpoint, evaluated under torchrun by different numbers of processes
saving   how long a save holds up training at the size of TResNet-L

A count of 0 leaves a part out, and FILE keeps what it had of it. Each run is a process of its own, forked from this one
so that it need not import torch again. Not part of the tests: the whole takes about half an hour on two cores.
"""

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import mldec.train
from mldec import build, checkpoint, storage
from mldec.benchmark import environment
from mldec.config import compose
from mldec.data.base import Classes
from mldec.errors import CheckpointError
from mldec.learner import Learner

RUN = [
    "+experiment=digits",
    "device=cpu",
    "data.image_size=32",
    "data.train_images=64",
    "data.val_images=40",
    "train.batch_size=16",
    "train.eval_batch_size=8",
    "train.epochs=3",
    "train.workers=0",
    "train.log_every=3",
    "train.save_every_steps=1",
]
CLOCK = ("time", "train/images_per_second", "train/data_wait")


def start(folder: Path, *words: str) -> int:
    """Start a run in a folder, as `python -m mldec.train` does, and return its process number."""
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        return child
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["mldec-train", *RUN, *words]
    status = 0
    try:
        mldec.train.main()
    except SystemExit as stop:
        status = int(stop.code or 0)
    os._exit(status)


def finish(child: int) -> int:
    """Wait for a process and return its status; minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def same(one: Any, other: Any) -> bool:
    """Compare plain containers and tensors to the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def result(folder: Path) -> dict[str, Any]:
    """Return everything a finished run left, but for what the clock says."""
    run = folder / "outputs" / "digits"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    files = {name: checkpoint.load(run / "checkpoints" / name) for name in ("last.pt", "best.pt")}
    for state in files.values():
        del state["git"]  # of the checkout, which may be worked on meanwhile
    return {"lines": [{k: v for k, v in line.items() if k not in CLOCK} for line in lines], **files}


def kills(count: int, work: Path, whole: dict[str, Any], seconds: float) -> dict[str, int]:
    """Kill runs at random moments and resume each to its end."""
    found: Counter[str] = Counter(kills=0, lost=0, equal=0, killed_while_writing=0)
    for number in tqdm(range(count), desc="kills"):
        folder = work / f"kill-{number}"
        while True:
            child = start(folder)
            time.sleep(random.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            if finish(child) == -signal.SIGKILL:
                break
            shutil.rmtree(folder)  # it was at its end already
        found["kills"] += 1
        found["killed_while_writing"] += any(folder.rglob("*.tmp"))
        if finish(start(folder, "resume=auto", f"train.workers={number % 2}")) != 0:
            found["lost"] += 1
            print(f"\nlost: {(folder / 'output.txt').read_text()[-500:]}")
            continue
        ended = result(folder)
        for name in ("last.pt", "best.pt"):
            ended[name]["config"]["train"]["workers"] = 0
        found["equal"] += same(ended, whole)
        shutil.rmtree(folder)
    return dict(found)


def signals(count: int, work: Path, whole: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Ask runs to stop at random moments of their training, until so many did in order; resume each to its end."""
    found: Counter[str] = Counter(
        sent=0, in_order=0, before_training=0, after_the_end=0, wrong_status=0, lost=0, equal=0
    )
    slowest = 0.0
    with tqdm(total=count, desc="signals") as bar:
        while found["in_order"] < count:
            folder = work / f"signal-{found['sent']}"
            number = random.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
            child = start(folder)
            while not any(folder.rglob("train.log")):  # written when training begins
                time.sleep(0.01)
            time.sleep(random.uniform(0, seconds / 2))
            asked = time.monotonic()
            os.kill(child, number)
            status = finish(child)
            in_order = status == (130 if number == signal.SIGINT else 143) and any(folder.rglob("last.pt"))
            outcome = "in_order" if in_order else "after_the_end" if status == 0 else "before_training"
            found["sent"] += 1
            found[outcome] += 1
            found["wrong_status"] += outcome == "before_training" and status not in (-number, 130)
            slowest = max(slowest, time.monotonic() - asked if in_order else 0.0)
            bar.update(in_order)
            if finish(start(folder, "resume=auto")) != 0:
                found["lost"] += 1
            else:
                found["equal"] += same(result(folder), whole)
                shutil.rmtree(folder)
    return {**found, "slowest_save_seconds": round(slowest, 2)}


def flips(count: int, work: Path, source: Path) -> dict[str, int]:
    """Change one byte of a checkpoint at a time."""
    path = work / "flipped.pt"
    storage.duplicate(source, path)
    content = path.read_bytes()
    path.unlink()
    noticed = 0
    for _ in tqdm(range(count), desc="flips"):
        place = random.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ random.randrange(1, 256)]) + content[place + 1 :])
        try:
            storage.read_torch(path)
        except CheckpointError:
            noticed += 1
    return {"flips": count, "noticed": noticed, "bytes": len(content)}


def worlds(sizes: list[int], work: Path, source: Path) -> dict[str, Any]:
    """Evaluate a checkpoint with different numbers of processes; 40 images in batches of 16 leave some with none."""
    found = {}
    for size in tqdm(sizes, desc="worlds"):
        target = work / f"world-{size}.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        settings = ["data.val_images=41", "train.eval_batch_size=16", "--json", str(target)]
        command = [sys.executable, *launcher, "-m", "mldec.evaluate", str(source), *settings]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found[size] = target.read_text()
    return {"processes": sizes, "equal": len(set(found.values())) == 1}


def saving(work: Path) -> dict[str, float]:
    """Time a save of TResNet-L with its moving average and Adam's state: what training waits for, and the rest."""
    config = compose(["+experiment=coco_tresnet_l", "device=cpu"])
    model = build.model(config, Classes(tuple(map(str, range(80)))), pretrained=False)
    learner = Learner(config, model, build.loss(config), device=torch.device("cpu"), steps=10)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    learner.optimizer.step()
    waits = []
    for _ in range(5):
        begin = time.perf_counter()
        state = storage.snapshot(learner.state_dict())
        waits.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    storage.save(work / "large.pt", state)
    wait = sorted(waits)[len(waits) // 2]
    return {
        "gib": round((work / "large.pt").stat().st_size / 2**30, 2),
        "training_waits_seconds": round(wait, 3),
        "share_when_saving_each_minute": round(wait / 60, 5),
        "background_seconds": round(time.perf_counter() - begin, 2),
    }


def main() -> None:
    """Run all and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2, 3, 5, 8])
    parser.add_argument("--no-saving", dest="saving", action="store_false", help="leave out TResNet-L")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    random.seed(words.seed)
    torch.set_num_threads(1)  # a pool of threads would not survive the forks
    tqdm.set_lock(threading.RLock())  # its own is shared by all children: one that is killed would keep it
    tqdm.monitor_interval = 0  # no thread of ours while forking
    importlib.import_module("torch.utils.tensorboard")  # here once, not in every child

    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for _ in range(2):  # the second one's time counts: the first meets cold caches
            shutil.rmtree(work / "whole", ignore_errors=True)
            begin = time.monotonic()
            if finish(start(work / "whole")) != 0:
                sys.exit((work / "whole" / "output.txt").read_text())
            seconds = time.monotonic() - begin
        whole = result(work / "whole")
        best = work / "whole" / "outputs" / "digits" / "checkpoints" / "best.pt"
        jobs: dict[str, Callable[[], Any]] = {
            "kills": lambda: kills(words.kills, work, whole, seconds),
            "signals": lambda: signals(words.signals, work, whole, seconds),
            "flips": lambda: flips(words.flips, work, best),
            "worlds": lambda: worlds(words.worlds, work, best),
            "saving": lambda: saving(work),
        }
        figures = {name: job() for name, job in jobs.items() if getattr(words, name)}
    print(json.dumps(figures, indent=1))
    if words.json:
        if words.json.exists():  # what was not run now stays as it was
            figures = {**json.loads(words.json.read_text())["figures"], **figures}
        content = {"benchmark": "soak", "figures": figures, "environment": environment()}
        words.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
