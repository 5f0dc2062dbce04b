"""Kill, stop and damage small training runs, and test whether they end as if nothing had happened.

    python scripts/soak.py [--kills 200] [--signals 100] [--flips 1000] [--worlds 1 2 3 5 8]
                           [--pairs 50] [--disks 50] [--workers 20] [--shm 5] [--json FILE]

kills    `kill -9` at a random moment of a run that saves at every step, then resume=auto: is the
         end bit-equal?
signals  SIGTERM, SIGUSR1 or SIGINT at a random moment: how long until it has saved, what is its
         status, and is the end bit-equal after resume=auto?
flips    one changed byte of a checkpoint: is it noticed?
worlds   mAP and all other numbers of one checkpoint, evaluated under torchrun by different numbers
         of processes: are they equal?
saving   how long does a save hold up training, at the size of TResNet-L?
pairs    two runs at once in one folder: is one of them refused, and the folder that of the other?
disks    a disk that is full at a random byte: is there one line on it? Then there is space, and
         resume=auto: is the end bit-equal?
workers  `kill -9` of a loader process at a random moment: one line? Then resume=auto: bit-equal?
shm      /dev/shm is filled at a random moment of a run with loader processes: the same questions

`disks` and `shm` mount file systems, which only root may, in a namespace that no other process
sees. A count of 0 leaves a part out, and FILE keeps its earlier figures. Each run is a process of
its own, forked from this one so that it need not import torch again. This is not part of the tests:
all of it takes about half an hour on two cores.
"""

import argparse
import contextlib
import ctypes
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
from collections.abc import Callable, Iterator
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


def start(folder: Path, *settings: str, output: str = "output.txt") -> int:
    """Start a run in a folder, as `python -m mldec.train` does, and return its process id."""
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        return child

    # This is the child: it never returns from here.
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
    """Resume a run to its end and compare it with an uninterrupted one.

    Args:
        folder: of the run; it is removed if the ends are equal.
        whole: the result of the uninterrupted run.
        counts: counts the run as "lost" if it fails, and as "equal".
        workers: loader processes of the resumed run.
    """
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

    # A mounted file system cannot be removed.
    counts["equal"] += 1
    shutil.rmtree(folder, ignore_errors=True)


def one_line(folder: Path, expected: str = "") -> bool:
    """Tell whether a run failed with one line, which has some expected text in it."""
    output = (folder / "output.txt").read_text()
    is_one_line = output.count("mldec: ") == 1 and "Traceback" not in output
    if not (is_one_line and expected in output):
        print(f"\nnot one line: {output[-500:]}")
        return False
    return True


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
    """Ask runs to stop at random moments of training, and resume each to its end.

    Args:
        count: how many runs must stop in order.
        work: a folder.
        whole: the result of the uninterrupted run.
        seconds: duration of a run.
    """
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


def pairs(count: int, work: Path, whole: dict[str, Any], seconds: float) -> dict[str, int]:
    """Start a second run while one has the same folder, with and without resume=auto."""
    counts: Counter[str] = Counter(pairs=0, one_ended=0, refused_as_another_run=0, equal=0)
    for number in tqdm(range(count), desc="pairs"):
        folder = work / f"pair-{number}"
        first = start(folder, output="first.txt")
        time.sleep(random.uniform(0, seconds / 2))
        resume = ["resume=auto"] if number % 2 else []
        second = start(folder, *resume, output="second.txt")
        statuses = [finish(first), finish(second)]
        outputs = [(folder / name).read_text() for name in ("first.txt", "second.txt")]

        # The other one must have gone to its end, as if it had been alone.
        counts["pairs"] += 1
        counts["one_ended"] += sorted(statuses) == [0, 1]
        counts["refused_as_another_run"] += any(
            status == 1 and "another run" in output and "Traceback" not in output
            for status, output in zip(statuses, outputs, strict=True)
        )

        if 0 not in statuses or not same(result(folder), whole):
            tails = "\n".join(output[-300:] for output in outputs)
            print(f"\nnot equal: {folder}, statuses {statuses}: {tails}")
            continue

        counts["equal"] += 1
        shutil.rmtree(folder)
    return dict(counts)


def workers(count: int, work: Path, whole: dict[str, Any], seconds: float) -> dict[str, int]:
    """Kill loader processes at random moments, and resume each run that ended by it."""
    counts: Counter[str] = Counter(killed=0, ended_by_it=0, one_line=0, lost=0, equal=0)
    with tqdm(total=count, desc="workers") as bar:
        while counts["ended_by_it"] < count:
            folder = work / f"worker-{counts['killed']}"
            child = start(folder, "train.workers=2")
            time.sleep(random.uniform(0, seconds))

            # Between epochs there are no loader processes; None means that the run has ended.
            loaders = children(child)
            while loaders == []:
                time.sleep(0.01)
                loaders = children(child)
            if loaders is None:
                finish(child)
                shutil.rmtree(folder)
                continue

            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(loaders), signal.SIGKILL)
            counts["killed"] += 1

            # A run that needed no further batch ends as if nothing had happened.
            if finish(child) == 0:
                shutil.rmtree(folder)
                continue

            counts["ended_by_it"] += 1
            counts["one_line"] += one_line(folder, "a loader process ")
            bar.update()
            go_on(folder, whole, counts)
    return dict(counts)


def children(process: int) -> list[int] | None:
    """Return the ids of a process's children; None if it has ended."""
    try:
        # Z: it has ended, and nobody has waited for it yet.
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return None
        listed = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return None
    return [int(child) for child in listed.split()]


def own_mounts() -> bool:
    """Move this process to a mount namespace of its own, and tell whether that is allowed."""
    new_mounts = 0x20000  # CLONE_NEWNS
    if ctypes.CDLL(None).unshare(new_mounts) != 0:
        return False
    return subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True).returncode == 0


@contextlib.contextmanager
def mounted(folder: Path, size: int) -> Iterator[None]:
    """Mount an empty file system of `size` bytes on a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def disks(count: int, work: Path, whole: dict[str, Any]) -> dict[str, int]:
    """Run on disks of random sizes, and resume each run whose disk was too small with space."""
    counts: Counter[str] = Counter(runs=0, full=0, one_line=0, lost=0, equal=0)
    files = [path for path in (work / "whole" / "outputs").rglob("*") if path.is_file()]
    needed = sum(path.stat().st_size for path in files)

    with tqdm(total=count, desc="disks") as bar:
        while counts["full"] < count:
            folder = work / f"disk-{counts['runs']}"
            counts["runs"] += 1
            with mounted(folder / "outputs", random.randrange(4096, 2 * needed)):
                if finish(start(folder)) == 0:
                    continue
                counts["full"] += 1
                counts["one_line"] += one_line(folder)
                bar.update()

                # With space on the same disk, the run goes on.
                enlarge = ["mount", "-o", f"remount,size={8 * needed}", folder / "outputs"]
                subprocess.run(enlarge, check=True)
                go_on(folder, whole, counts)
    return dict(counts)


def shm(count: int, work: Path, whole: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Fill /dev/shm at random moments, and resume each run that ended by it."""
    counts: Counter[str] = Counter(filled=0, ended_by_it=0, one_line=0, lost=0, equal=0)
    slowest = 0.0
    with tqdm(total=count, desc="shm") as bar:
        while counts["ended_by_it"] < count:
            folder = work / f"shm-{counts['filled']}"
            counts["filled"] += 1
            with mounted(Path("/dev/shm"), 2**20):
                child = start(folder, "train.workers=2")
                time.sleep(random.uniform(0, seconds))
                filled = time.monotonic()
                fill(Path("/dev/shm/full"))
                status = finish(child)

            if status == 0:
                shutil.rmtree(folder)
                continue

            counts["ended_by_it"] += 1
            slowest = max(slowest, time.monotonic() - filled)
            counts["one_line"] += one_line(folder, "enlarge /dev/shm")
            bar.update()
            go_on(folder, whole, counts)
    return {**counts, "slowest_end_seconds": round(slowest, 2)}


def fill(path: Path) -> None:
    """Write a file until its disk is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


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
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--disks", type=int, default=50)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--shm", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    random.seed(args.seed)
    if (args.disks or args.shm) and not own_mounts():
        sys.exit("only root may mount the file systems of disks and shm: pass --disks 0 --shm 0")

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
            "pairs": lambda: pairs(args.pairs, work, whole, seconds),
            "disks": lambda: disks(args.disks, work, whole),
            "workers": lambda: workers(args.workers, work, whole, seconds),
            "shm": lambda: shm(args.shm, work, whole, seconds),
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
