"""Kill, stop and damage small training runs, and test whether they end as if nothing had happened.

    python scripts/soak.py [--kills 200] [--signals 100] [--flips 1000] [--worlds 1 2 3 5 8]
                           [--json FILE]

kills    `kill -9` at a random moment of a run that saves at every step, then resume=auto: is the
         end bit-equal?
signals  SIGTERM, SIGUSR1 or SIGINT at a random moment: how long until it has saved, what is its
         status, and is the end bit-equal after resume=auto?
flips    one changed byte of a checkpoint: is it noticed?
worlds   mAP and all other numbers of one checkpoint, evaluated under torchrun by different numbers
         of processes: are they equal?
saving   how long does a save hold up training, at the size of TResNet-L?

A count of 0 leaves a part out, and FILE keeps its earlier figures. Each run is a process of its
own, forked from this one so that it need not import torch again. This is not part of the tests: all
of it takes about a quarter of an hour on two cores.
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
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import mldec.train
from mldec import build
from mldec.benchmark import environment
from mldec.config.compose import compose
from mldec.data.types import Classes
from mldec.errors import CheckpointError
from mldec.files import torch_files
from mldec.training.step import Learner

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
CLOCK = ("time", "train/images_per_second", "train/data_wait")  # differ between equal runs


def start(folder: Path, *settings: str) -> int:
    """Start a run in a folder, as `python -m mldec.train` does, and return its process id."""
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        return child

    # This is the child: it never returns from here.
    os.chdir(folder)
    descriptor = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)

    sys.argv = ["mldec-train", *RUN, *settings]
    status = 1
    try:
        mldec.train.main()
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    except BaseException:
        # A bug. It must not climb on, into a second copy of this script.
        traceback.print_exc()
    os._exit(status)


def finish(child: int) -> int:
    """Wait for a process and return its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def same(one: Any, other: Any) -> bool:
    """Tell whether two plain containers of tensors are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def result(folder: Path) -> dict[str, Any]:
    """Return everything that a finished run has written, but for times."""
    run = folder / "outputs" / "digits"
    lines = []
    for text in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(text)
        lines.append({name: value for name, value in metrics.items() if name not in CLOCK})

    files = {
        name: torch_files.read_torch(run / "checkpoints" / name) for name in ("last.pt", "best.pt")
    }
    for state in files.values():
        # The commit may change while this script runs.
        del state["git"]
    return {"lines": lines, **files}


def go_on(folder: Path, whole: dict[str, Any], counts: Counter[str], workers: int = 0) -> None:
    """Resume a run to its end, and count it as "lost" or as "equal" to an uninterrupted one."""
    if finish(start(folder, "resume=auto", f"train.workers={workers}")) != 0:
        counts["lost"] += 1
        print(f"\nlost: {(folder / 'output.txt').read_text()[-500:]}")
        return

    # The number of loader processes may differ; nothing else may.
    ended = result(folder)
    for name in ("last.pt", "best.pt"):
        ended[name]["config"]["train"]["workers"] = 0
    if not same(ended, whole):
        print(f"\nnot equal: {folder}")
        return

    counts["equal"] += 1
    shutil.rmtree(folder)


def kills(count: int, work: Path, whole: dict[str, Any], seconds: float) -> dict[str, int]:
    """Kill runs at random moments and resume each to its end."""
    counts: Counter[str] = Counter(kills=0, lost=0, equal=0, killed_while_writing=0)
    for number in tqdm(range(count), desc="kills"):
        folder = work / f"kill-{number}"

        # Start again if the run had ended before it was killed.
        while True:
            child = start(folder)
            time.sleep(random.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            if finish(child) == -signal.SIGKILL:
                break
            shutil.rmtree(folder)

        # A temporary file shows that the kill came in the middle of a save.
        counts["kills"] += 1
        counts["killed_while_writing"] += any(folder.rglob("*.tmp"))
        go_on(folder, whole, counts, workers=number % 2)
    return dict(counts)


def signals(count: int, work: Path, whole: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Ask runs to stop at random moments, until `count` have stopped in order; resume each."""
    counts: Counter[str] = Counter(
        sent=0, in_order=0, before_training=0, after_the_end=0, wrong_status=0, lost=0, equal=0
    )
    slowest = 0.0
    with tqdm(total=count, desc="signals") as bar:
        while counts["in_order"] < count:
            folder = work / f"signal-{counts['sent']}"
            number = random.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])

            # The log is written when training begins.
            child = start(folder)
            while not any(folder.rglob("train.log")):
                time.sleep(0.01)
            time.sleep(random.uniform(0, seconds / 2))
            asked = time.monotonic()
            os.kill(child, number)
            status = finish(child)
            waited = time.monotonic() - asked

            counts["sent"] += 1
            expected_status = 130 if number == signal.SIGINT else 143
            if status == expected_status and any(folder.rglob("last.pt")):
                counts["in_order"] += 1
                slowest = max(slowest, waited)
                bar.update()
            elif status == 0:
                counts["after_the_end"] += 1
            else:
                # Python's own status: the handlers were not installed yet.
                counts["before_training"] += 1
                counts["wrong_status"] += status not in (-number, 130)

            go_on(folder, whole, counts)
    return {**counts, "slowest_save_seconds": round(slowest, 2)}


def flips(count: int, work: Path, source: Path) -> dict[str, int]:
    """Change one random byte of a checkpoint at a time, and count how often it is noticed."""
    path = work / "flipped.pt"
    torch_files.duplicate(source, path)
    content = path.read_bytes()
    path.unlink()

    noticed = 0
    for _ in tqdm(range(count), desc="flips"):
        changed = bytearray(content)
        changed[random.randrange(len(content))] ^= random.randrange(1, 256)
        path.write_bytes(changed)
        try:
            torch_files.read_torch(path)
        except CheckpointError:
            noticed += 1
    return {"flips": count, "noticed": noticed, "bytes": len(content)}


def worlds(sizes: list[int], work: Path, source: Path) -> dict[str, Any]:
    """Evaluate a checkpoint with different numbers of processes.

    With 41 images in batches of 16, some of the processes have none.
    """
    reports = {}
    for size in tqdm(sizes, desc="worlds"):
        target = work / f"world-{size}.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        settings = ["data.val_images=41", "train.eval_batch_size=16", "--json", str(target)]
        command = [sys.executable, *launcher, "-m", "mldec.evaluate", str(source), *settings]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, capture_output=True, env=one_thread)
        reports[size] = target.read_text()
    return {"processes": sizes, "equal": len(set(reports.values())) == 1}


def saving(work: Path) -> dict[str, float]:
    """Time a save of TResNet-L with its moving average and Adam's state.

    Training waits for the snapshot of the state; the file is written in the background.
    """
    config = compose(["+experiment=coco_tresnet_l", "device=cpu"])
    parts = build.check(config, ["backbone", "head", "loss"])
    model = build.model(parts, Classes(tuple(map(str, range(80)))), pretrained=False)
    learner = Learner(config, model, build.loss(parts), device=torch.device("cpu"), steps=10)

    # One step, so that Adam has its state.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    learner.optimizer.step()

    waits = []
    for _ in range(5):
        begin = time.perf_counter()
        state = torch_files.snapshot(learner.state())
        waits.append(time.perf_counter() - begin)
    wait = sorted(waits)[len(waits) // 2]

    begin = time.perf_counter()
    torch_files.save(work / "large.pt", state)
    background = time.perf_counter() - begin

    return {
        "gib": round((work / "large.pt").stat().st_size / 2**30, 2),
        "training_waits_seconds": round(wait, 3),
        "share_when_saving_each_minute": round(wait / 60, 5),
        "background_seconds": round(background, 2),
    }


def main() -> None:
    """Run all parts and write their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2, 3, 5, 8])
    parser.add_argument(
        "--no-saving", dest="saving", action="store_false", help="leave out TResNet-L"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    random.seed(args.seed)

    # Threads do not survive a fork, and a lock that the children share would stay locked when one
    # of them is killed. What a child would import is imported once, here.
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0
    importlib.import_module("torch.utils.tensorboard")

    with tempfile.TemporaryDirectory() as name:
        work = Path(name)

        # The uninterrupted run, twice: the first one fills caches, the second one is timed.
        for _ in range(2):
            shutil.rmtree(work / "whole", ignore_errors=True)
            begin = time.monotonic()
            if finish(start(work / "whole")) != 0:
                sys.exit((work / "whole" / "output.txt").read_text())
            seconds = time.monotonic() - begin

        whole = result(work / "whole")
        best = work / "whole" / "outputs" / "digits" / "checkpoints" / "best.pt"
        jobs: dict[str, Callable[[], Any]] = {
            "kills": lambda: kills(args.kills, work, whole, seconds),
            "signals": lambda: signals(args.signals, work, whole, seconds),
            "flips": lambda: flips(args.flips, work, best),
            "worlds": lambda: worlds(args.worlds, work, best),
            "saving": lambda: saving(work),
        }
        figures = {name: job() for name, job in jobs.items() if getattr(args, name)}

    print(json.dumps(figures, indent=1))
    if args.json:
        # The figures of parts that were left out now stay as they were.
        if args.json.exists():
            figures = {**json.loads(args.json.read_text())["figures"], **figures}
        content = {"benchmark": "soak", "figures": figures, "environment": environment()}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
