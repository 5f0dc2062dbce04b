"""Kill, stop and damage small training runs, and see whether they come out as if nothing had happened.

    python scripts/soak.py [--kills 200] [--signals 100] [--flips 1000] [--worlds 1 2 3 5 8]
                           [--pairs 50] [--disks 50] [--workers 20] [--shm 5] [--json FILE]

kills    `kill -9` at a random moment of a run that saves at every step, then resume=auto: is the end bit-equal?
signals  SIGTERM, SIGUSR1 or SIGINT at a random moment: how long until it has saved, with which status, and the same
flips    one changed byte of a checkpoint: is it noticed?
worlds   mAP and all other numbers of one checkpoint, evaluated under torchrun by different numbers of processes
saving   how long a save holds up training at the size of TResNet-L
pairs    two runs at once in one folder: is one of them refused, and the other one's folder its own?
disks    a disk that is full at a random byte: one line? Then there is space, and resume=auto: is the end bit-equal?
workers  `kill -9` of a loader process at a random moment: one line? Then resume=auto, and the same
shm      /dev/shm is filled at a random moment, in the middle of a run with loader processes: the same

`disks` and `shm` mount file systems, which only root may, in a namespace that nothing else sees.
A count of 0 leaves a part out, and FILE keeps what it had of it. Each run is a process of its own, forked from this one
so that it need not import torch again. Not part of the tests: the whole takes about half an hour on two cores.
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
from mldec.data.base import Classes
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
CLOCK = ("time", "train/images_per_second", "train/data_wait")


def start(folder: Path, *words: str, output: str = "output.txt") -> int:
    """Start a run in a folder, as `python -m mldec.train` does, and return its process number."""
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        return child
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["mldec-train", *RUN, *words]
    status = 1
    try:
        mldec.train.main()
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    except BaseException:  # a bug: what Python would print, and no second copy of this script
        traceback.print_exc()
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
    files = {
        name: torch_files.read_torch(run / "checkpoints" / name) for name in ("last.pt", "best.pt")
    }
    for state in files.values():
        del state["git"]  # of the checkout, which may be worked on meanwhile
    return {"lines": [{k: v for k, v in line.items() if k not in CLOCK} for line in lines], **files}


def go_on(folder: Path, whole: dict[str, Any], found: Counter[str], workers: int = 0) -> None:
    """Resume a run to its end, and count it as lost, or as equal to the whole one; remove an equal one."""
    if finish(start(folder, "resume=auto", f"train.workers={workers}")) != 0:
        found["lost"] += 1
        print(f"\nlost: {(folder / 'output.txt').read_text()[-500:]}")
        return
    ended = result(folder)
    for name in ("last.pt", "best.pt"):
        ended[name]["config"]["train"]["workers"] = 0
    if not same(ended, whole):
        print(f"\nnot equal: {folder}")
        return
    found["equal"] += 1
    shutil.rmtree(folder, ignore_errors=True)  # but for what is mounted there


def one_line(folder: Path, said: str = "") -> bool:
    """Tell whether a run that failed said so in one line with some words in it."""
    output = (folder / "output.txt").read_text()
    good = output.count("mldec: ") == 1 and "Traceback" not in output and said in output
    if not good:
        print(f"\nnot one line: {output[-500:]}")
    return good


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
        go_on(folder, whole, found, workers=number % 2)
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
            in_order = status == (130 if number == signal.SIGINT else 143) and any(
                folder.rglob("last.pt")
            )
            outcome = (
                "in_order" if in_order else "after_the_end" if status == 0 else "before_training"
            )
            found["sent"] += 1
            found[outcome] += 1
            found["wrong_status"] += outcome == "before_training" and status not in (-number, 130)
            slowest = max(slowest, time.monotonic() - asked if in_order else 0.0)
            bar.update(in_order)
            go_on(folder, whole, found)
    return {**found, "slowest_save_seconds": round(slowest, 2)}


def pairs(count: int, work: Path, whole: dict[str, Any], seconds: float) -> dict[str, int]:
    """Start a second run beside one that has the same folder, with and without resume=auto."""
    found: Counter[str] = Counter(pairs=0, one_ended=0, refused_as_another_run=0, equal=0)
    for number in tqdm(range(count), desc="pairs"):
        folder = work / f"pair-{number}"
        first = start(folder, output="first.txt")
        time.sleep(random.uniform(0, seconds / 2))
        second = start(folder, *(["resume=auto"] if number % 2 else []), output="second.txt")
        statuses = [finish(first), finish(second)]
        outputs = [(folder / name).read_text() for name in ("first.txt", "second.txt")]
        found["pairs"] += 1
        found["one_ended"] += sorted(statuses) == [0, 1]
        found["refused_as_another_run"] += any(
            status == 1 and "another run" in output and "Traceback" not in output
            for status, output in zip(statuses, outputs, strict=True)
        )
        if 0 not in statuses or not same(result(folder), whole):
            print(
                f"\nnot equal: {folder}, statuses {statuses}: {outputs[0][-300:]}\n{outputs[1][-300:]}"
            )
            continue
        found["equal"] += 1
        shutil.rmtree(folder)
    return dict(found)


def workers(count: int, work: Path, whole: dict[str, Any], seconds: float) -> dict[str, int]:
    """Kill loader processes at random moments, until so many runs ended by it; resume each to its end."""
    found: Counter[str] = Counter(killed=0, ended_by_it=0, one_line=0, lost=0, equal=0)
    with tqdm(total=count, desc="workers") as bar:
        while found["ended_by_it"] < count:
            folder = work / f"worker-{found['killed']}"
            child = start(folder, "train.workers=2")
            time.sleep(random.uniform(0, seconds))
            while (loaders := children(child)) == []:
                time.sleep(0.01)
            if loaders is None:  # it was at its end already
                finish(child)
                shutil.rmtree(folder)
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(loaders), signal.SIGKILL)
            found["killed"] += 1
            if finish(child) == 0:  # it needed no batch any more
                shutil.rmtree(folder)
                continue
            found["ended_by_it"] += 1
            found["one_line"] += one_line(folder, "a loader process died")
            bar.update()
            go_on(folder, whole, found)
    return dict(found)


def children(process: int) -> list[int] | None:
    """Return the children of a process; None if it has ended."""
    try:
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return None
        listed = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return None
    return [int(child) for child in listed.split()]


def own_mounts() -> bool:
    """Move to a namespace of mounts of our own, which ends with this process; tell whether we may."""
    new_mounts = 0x20000  # CLONE_NEWNS
    if ctypes.CDLL(None).unshare(new_mounts) != 0:
        return False
    return subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True).returncode == 0


@contextlib.contextmanager
def mounted(folder: Path, size: int) -> Iterator[None]:
    """Mount an empty file system of so many bytes on a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def disks(count: int, work: Path, whole: dict[str, Any]) -> dict[str, int]:
    """Run on disks of random sizes, until so many were too small; resume each with space to its end."""
    found: Counter[str] = Counter(runs=0, full=0, one_line=0, lost=0, equal=0)
    files = [path for path in (work / "whole" / "outputs").rglob("*") if path.is_file()]
    needed = sum(path.stat().st_size for path in files)
    with tqdm(total=count, desc="disks") as bar:
        while found["full"] < count:
            folder = work / f"disk-{found['runs']}"
            found["runs"] += 1
            with mounted(folder / "outputs", random.randrange(4096, 2 * needed)):
                if finish(start(folder)) == 0:
                    continue
                found["full"] += 1
                found["one_line"] += one_line(folder)
                bar.update()
                subprocess.run(
                    ["mount", "-o", f"remount,size={8 * needed}", folder / "outputs"], check=True
                )
                go_on(folder, whole, found)
    return dict(found)


def shm(count: int, work: Path, whole: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Fill /dev/shm at random moments of runs, until so many ended by it; resume each to its end."""
    found: Counter[str] = Counter(filled=0, ended_by_it=0, one_line=0, lost=0, equal=0)
    slowest = 0.0
    with tqdm(total=count, desc="shm") as bar:
        while found["ended_by_it"] < count:
            folder = work / f"shm-{found['filled']}"
            found["filled"] += 1
            with mounted(Path("/dev/shm"), 2**20):
                child = start(folder, "train.workers=2")
                time.sleep(random.uniform(0, seconds))
                filled = time.monotonic()
                with (
                    contextlib.suppress(OSError),
                    Path("/dev/shm/full").open("wb", buffering=0) as file,
                ):
                    while True:
                        file.write(bytes(4096))
                status = finish(child)
            if status == 0:
                shutil.rmtree(folder)
                continue
            found["ended_by_it"] += 1
            slowest = max(slowest, time.monotonic() - filled)
            found["one_line"] += one_line(folder, "enlarge /dev/shm")
            bar.update()
            go_on(folder, whole, found)
    return {**found, "slowest_end_seconds": round(slowest, 2)}


def flips(count: int, work: Path, source: Path) -> dict[str, int]:
    """Change one byte of a checkpoint at a time."""
    path = work / "flipped.pt"
    torch_files.duplicate(source, path)
    content = path.read_bytes()
    path.unlink()
    noticed = 0
    for _ in tqdm(range(count), desc="flips"):
        place = random.randrange(len(content))
        path.write_bytes(
            content[:place]
            + bytes([content[place] ^ random.randrange(1, 256)])
            + content[place + 1 :]
        )
        try:
            torch_files.read_torch(path)
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
        subprocess.run(
            command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        found[size] = target.read_text()
    return {"processes": sizes, "equal": len(set(found.values())) == 1}


def saving(work: Path) -> dict[str, float]:
    """Time a save of TResNet-L with its moving average and Adam's state: what training waits for, and the rest."""
    config = compose(["+experiment=coco_tresnet_l", "device=cpu"])
    parts = build.check(config, ["backbone", "head", "loss"])
    model = build.model(parts, Classes(tuple(map(str, range(80)))), pretrained=False)
    learner = Learner(config, model, build.loss(parts), device=torch.device("cpu"), steps=10)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    learner.optimizer.step()
    waits = []
    for _ in range(5):
        begin = time.perf_counter()
        state = torch_files.snapshot(learner.state())
        waits.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    torch_files.save(work / "large.pt", state)
    wait = sorted(waits)[len(waits) // 2]
    return {
        "gib": round((work / "large.pt").stat().st_size / 2**30, 2),
        "training_waits_seconds": round(wait, 3),
        "share_when_saving_each_minute": round(wait / 60, 5),
        "background_seconds": round(time.perf_counter() - begin, 2),
    }


def main() -> None:
    """Run all and write the table."""
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
    words = parser.parse_args()
    random.seed(words.seed)
    if (words.disks or words.shm) and not own_mounts():
        sys.exit("only root may mount the file systems of disks and shm: pass --disks 0 --shm 0")
    torch.set_num_threads(1)  # a pool of threads would not survive the forks
    tqdm.set_lock(
        threading.RLock()
    )  # its own is shared by all children: one that is killed would keep it
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
            "pairs": lambda: pairs(words.pairs, work, whole, seconds),
            "disks": lambda: disks(words.disks, work, whole),
            "workers": lambda: workers(words.workers, work, whole, seconds),
            "shm": lambda: shm(words.shm, work, whole, seconds),
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
