#!/usr/bin/env python
"""Compare the numbers of two checkouts on this machine, probe by probe.

    python scripts/maintainers/same_numbers.py BEFORE AFTER [--only NAME ...] [--quick] [--jobs 2]
    python scripts/maintainers/same_numbers.py CHECKOUT --record FILE
    python scripts/maintainers/same_numbers.py FILE AFTER

BEFORE and AFTER are folders of checkouts, such as worktrees of two commits. A probe is a function
that returns numbers, such as losses of a run, rows of predict or the image order of a reader. Each
probe runs for both checkouts, on one thread and offline. Results are compared bit by bit (see
`EXCEPTIONS` for the exceptions). The exit status is 1 if a probe differs or fails.

--record writes the results of one checkout to FILE (.json.gz), which then replaces BEFORE. The last
bits depend on the processor and on torch. FILE contains both, and the script warns if they differ.

A server per checkout imports the libraries once. It forks a process per probe, which forks a
process per command. --jobs 2 runs both servers in parallel. --only takes names and patterns, such
as "reader_*". --list prints the names. The probes are described in same_numbers.yaml.

Probes use the commands and files of mldec. Only `splits` and `model_of` import from it. The sample
data is in `MLDEC_SAMPLE_DATA` or ../shared/data.
"""

import argparse
import csv
import fnmatch
import gzip
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import pickle
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

TOP = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("MLDEC_SAMPLE_DATA") or TOP.parent / "shared" / "data").resolve()
COCO = DATA / "coco2014_mini"
TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
FORK = multiprocessing.get_context("fork")
LIBRARIES = ("torchvision", "timm", "hydra", "scipy.optimize", "sklearn.datasets", "plotly", "onnx")

# Accepted differences: a pattern of PROBE/PATH, the relative tolerance, and why.
EXCEPTIONS = [
    ("calibrate_*/temperature", 1e-4, "iterative search of a library"),
    ("calibrate_*/slopes/*", 1e-4, "iterative search of a library"),
    ("calibrate_*/threshold*", math.inf, "decisions are compared instead"),
]
# Results that exist on one side only, because they were added, renamed or removed.
CHANGED = (
    "*/val/loss",
    "*/val_raw/loss",
    "*/head/queries",
    "*/head/init_queries",
    "*/train/fit_memory",
    "*/train/pieces",
    "*/log/images",
    "*/log/classes",
    "*/log/trackio",
    "*/tensorboard/val_AP/*",
    "*/tensorboard/val_accuracy/*",
    "*/tensorboard/val_images",
    "*/tensorboard/val_pr*",
)
# Hashes of checkpoints, which contain these settings.
HASHES = ("*/stored/source", "*/made_with/the checkpoint")
# Keys that depend on the time, the machine and the commit.
VOLATILE = {"time", "train/images_per_second", "train/data_wait", "date", "git", "commit"}
VOLATILE |= {"versions", "command"}


# Commands of mldec, and two functions that import from it.


def command(name: str, *words: Any, **environment: str) -> str:
    """Run a command of mldec or a script in a forked process, and return its standard output.

    Raises:
        RuntimeError: If its status is not 0. The message contains the last line of its errors.
    """
    process = FORK.Process(target=_command, args=(name, [str(word) for word in words], environment))
    process.start()
    process.join()
    if process.exitcode:
        lines = Path("errors.txt").read_text().strip().splitlines()
        raise RuntimeError(f"{name} ended with status {process.exitcode}: {''.join(lines[-1:])}")
    return Path("output.txt").read_text()


def _command(name: str, words: list[str], environment: dict[str, str]) -> None:
    """Do the work of a forked process."""
    redirect("output.txt", "errors.txt")
    os.environ.update(environment)
    sys.path[0] = str(Path.cwd())
    sys.argv = [name] + words

    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        main = imported("main", f"mldec.{name}", f"mldec.tools.{name}")
        main()


def redirect(output: str, errors: str) -> None:
    """Write standard output and standard error of this process to files."""
    for number, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)


def imported(name: str, *modules: str) -> Any:
    """Import an object from the first module that defines it. Modules differ between commits."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {', '.join(modules)}")


def splits(settings: list[str]) -> dict[str, Any]:
    """Return order, labels, classes, fingerprint and first pixels of a reader's images."""
    try:
        build_data = imported("data_from_settings", "mldec.build")
    except ImportError:
        build_data = imported("chosen_data", "mldec.config.build", "mldec.build")
    labels_of = imported("labels_of", "mldec.data.split_labels", "mldec.data.loader")
    fingerprint = imported("fingerprint", "mldec.data.fingerprint")
    fixed_sample = imported("fixed_sample", "mldec.data.base", "mldec.data.types")

    data = build_data(settings)[1]
    result = {}
    for name, split in (("train", data.train), ("val", data.val)):
        dataset = split.dataset
        classes = split.classes
        names = [plain(str(dataset.name(index))) for index in range(len(dataset))]
        result[name] = {
            "images": len(names),
            "first names": names[:3],
            "names": digest("\n".join(names)),
            "labels": digest(labels_of(split).dense()),
            "first classes": classes.names[:3],
            "classes": digest("\n".join(classes.names)),
            "exclusive": classes.exclusive,
            "queries": classes.word_vectors,
            "fingerprint": vars(fingerprint(split)),
            "pixels": [fixed_sample(dataset, index) for index in range(min(3, len(names)))],
        }
    return result


def model_of(path: Path, **options: Any) -> tuple[Any, list[str]]:
    """Return the model and the class names of a checkpoint."""
    loaded = imported("load_model", "mldec.checkpoint")(path, **options)
    return loaded.model, loaded.classes.names


# Results as plain values.


def digest(value: Any) -> str:
    """Return a hash of a text, or of an array with its type and shape."""
    if isinstance(value, str):
        return hashlib.sha256(value.encode()).hexdigest()[:16]
    array = np.ascontiguousarray(value)
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def plain(value: Any) -> Any:
    """Return a result as JSON values, without volatile keys. Tensors become digests.

    The temporary folder becomes SIDE, and `_target_: a.b.Name` becomes Name.
    """
    if isinstance(value, dict):
        if isinstance(value.get("_target_"), str):
            value = {**value, "_target_": value["_target_"].rpartition(".")[2]}
        return {str(key): plain(value[key]) for key in value if key not in VOLATILE}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return value.replace(os.environ["SIDE"], "SIDE")
    if hasattr(value, "numpy"):
        return digest(value)
    return digest(value) if isinstance(value, np.ndarray) else value


def read(file: Path | str) -> Any:
    """Return the content of a result file as plain values."""
    path = Path(file)
    readers: dict[str, Callable[[], Any]] = {
        ".json": lambda: json.loads(path.read_text()),
        ".jsonl": lambda: [json.loads(line) for line in path.read_text().splitlines()],
        ".yaml": lambda: yaml.safe_load(path.read_text()),
        ".csv": lambda: list(csv.DictReader(path.read_text().splitlines())),
        ".npy": lambda: np.load(path),
        ".jpg": lambda: np.asarray(importlib.import_module("PIL.Image").open(path)),
        ".pt": lambda: importlib.import_module("torch").load(path, weights_only=True),
        ".parquet": lambda: importlib.import_module("pyarrow.parquet").read_table(path).to_pylist(),
    }
    return plain(readers[path.suffix]())


def results_of(run: Path) -> dict[str, Any]:
    """Return log, settings, checkpoints and TensorBoard tags of a run."""
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    steps = {}
    for kind in ("scalars", "images", "tensors", "histograms"):
        for tag in events.Tags()[kind]:
            # The group "main" has some keys of metrics.jsonl, such as main/val_mAP.
            key = tag
            if tag.startswith("main/"):
                key = tag.removeprefix("main/").replace("_", "/", 1)
            steps[key] = [event.step for event in getattr(events, kind.title())(tag)]

    files = ["metrics.jsonl", "config.yaml", "run.json", "checkpoints/last.pt"]
    files += ["checkpoints/best.pt"]
    return {name: read(run / name) for name in files} | {"tensorboard": steps}


# Probes. Each runs in an empty folder.


def words_of(kind: str, name: str) -> list[str]:
    """Return the arguments of an entry in the tables."""
    folders = {"data": DATA, "coco": COCO, "trees": os.environ["TREES"]}
    settings = {key: text.format(**folders) for key, text in TABLES["settings"].items()}
    words: list[str] = TABLES[kind][name].format(**folders, **settings).split()
    return words


def train(words: list[str], **environment: str) -> Path:
    """Train in the current folder with all steps in the log, and return the folder of the run."""
    fixed = ["name=run", "device=cpu", "train.log_every=1"]
    if not any(word.startswith("train.workers=") for word in words):
        fixed.append("train.workers=0")
    command("train", *words, *fixed, **environment)
    return Path("outputs/run").resolve()


def trained(name: str) -> Path:
    """Return the folder of a run, which is trained at the first call."""
    folder = Path(os.environ["SIDE"], "runs", name)
    here = Path.cwd()
    if not folder.exists():
        unfinished = Path(os.environ["SIDE"], "unfinished", name)
        unfinished.mkdir(parents=True)
        os.chdir(unfinished)
        train(words_of("run", name))
        os.chdir(here)
        folder.parent.mkdir(exist_ok=True)
        unfinished.rename(folder)
    return folder / "outputs" / "run"


def own_parts() -> list[str]:
    """Write custom parts to the current folder, and return the settings that load them."""
    Path("parts.py").write_text(TABLES["parts"])
    for option, part in (("backbone", "Means"), ("loss", "Noted"), ("loss", "Faulty")):
        Path("configs", option).mkdir(parents=True, exist_ok=True)
        Path("configs", option, f"{part}.yaml").write_text(f"_target_: parts.{part}\n")
    return ["plugins=[parts]", "--config-dir=configs"]


def run(name: str) -> dict[str, Any]:
    """Losses, metrics, checkpoints, and TensorBoard tags and steps of a run."""
    return results_of(trained(name))


def configs(*choices: str) -> dict[str, Any]:
    """The composed config of each choice; by default of each experiment and option."""
    folder = Path(os.environ["CHECKOUT"], "configs")
    every = [f"+experiment={path.stem}" for path in folder.glob("experiment/*.yaml")]
    for part in ("data", "backbone", "head", "loss"):
        options = [path.stem for path in folder.glob(f"{part}/*.yaml")]
        every += [f"+experiment=digits {part}={option}" for option in options]

    result: dict[str, Any] = {}
    for choice in choices or every:
        try:
            result[choice] = yaml.safe_load(command("train", *choice.split(), "--cfg", "job"))
        except RuntimeError:
            result[choice] = "refused"
    return result


def reader(name: str) -> dict[str, Any]:
    """Order, labels, classes, fingerprint and first pixels of a reader's images."""
    words = words_of("reader", name)
    if name == "shards":
        script = Path(os.environ["CHECKOUT"], "scripts", "pack_shards.py")
        command(str(script), "packed", "data=coco", f"data.root={COCO}")
    if "digits" not in name:
        words.append("data.image_size=32")
    return splits(words)


def batches(name: str) -> list[str]:
    """Digests of images and targets of each batch of a run."""
    words = words_of("batches", name) + own_parts() + ["backbone=Means", "loss=Noted"]
    if not any(word.startswith("head=") for word in words):
        words.append("head=gap")
    train(words + ["optim.name=sgd", "optim.lr=1e-3"])
    return Path("batches.txt").read_text().splitlines()


def two_processes() -> dict[str, Any]:
    """A run and its evaluation by two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    settings = ["name=run", "device=cpu", "train.log_every=1", "train.average_batchnorm=true"]
    training = ["mldec.train"] + words_of("settings", "small") + settings
    evaluation = ["mldec.evaluate", "outputs/run", "train.eval_batch_size=7", "--json", "a.json"]
    for words in (training, evaluation):
        subprocess.run(launcher + ["-m"] + words, check=True, capture_output=True)
    return {**results_of(Path("outputs/run")), "evaluate": read("a.json")}


def resume() -> dict[str, Any]:
    """A run that is killed and resumed twice, and an uninterrupted run."""
    words = words_of("settings", "small") + ["loss=Faulty", "train.nonfinite=skip"]
    words += ["resume=auto", "train.save_every_steps=1", "train.epochs=6", "train.patience=2"]
    results = {}
    for name, kills in (("whole", []), ("killed", ["6", "9"])):
        Path(name).mkdir()
        os.chdir(name)
        words += own_parts()
        for kill in kills:
            try:
                train(words, KILL_AT=kill)
            except RuntimeError as error:
                if "status -9" not in str(error):
                    raise
        results[name] = results_of(train(words))
        os.chdir("..")

    # TensorBoard may contain an evaluation twice.
    whole = results["whole"]
    killed = {**results["killed"], "tensorboard": []}
    killed["run.json"]["start_epoch"] = whole["run.json"]["start_epoch"]
    return {**whole, "unlike": list(differences({**whole, "tensorboard": []}, killed))}


def evaluate(name: str) -> dict[str, Any]:
    """Keys and values of `mldec evaluate`."""
    checkpoint, *words = words_of("evaluate", name)
    command("evaluate", trained(checkpoint), *words, "--json", "a.json", "--csv", "a.csv")
    return {"json": read("a.json"), "csv": read("a.csv")}


def calibrate(name: str) -> dict[str, Any]:
    """Keys and values of `mldec calibrate`, and the decisions by its thresholds."""
    checkpoint, *words = words_of("calibrate", name)
    command("calibrate", trained(checkpoint), *words, "--json", "a.json", "--out", "a.pt")
    command("evaluate", "a.pt", "--json", "b.json")
    result = {"json": read("a.json"), "stored": read("a.pt")["calibration"], "used": read("b.json")}
    if name != "zero_shot":
        words = ["--content", "decisions", "--jsonl", "a.jsonl", "--workers", "0"]
        command("predict", "a.pt", COCO / "val2014", *words)
        result["decisions"] = read("a.jsonl")
    return result


def predict(name: str) -> dict[str, Any]:
    """Rows of `mldec predict` in each format, and the pixels of its heat maps."""
    checkpoint, *words = words_of("predict", name)
    photos = sorted((COCO / "val2014").iterdir())[:12]
    command("predict", trained(checkpoint), *photos, "--workers", 0, *words, "--jsonl", "a.jsonl")
    files = list(Path().glob("a.*")) + list(Path().glob("pictures/*.jpg"))
    return {str(path): read(path) for path in sorted(files) if path.suffix != ".lock"}


def report() -> dict[str, Any]:
    """Numbers of `mldec report`."""
    result = {}
    for name in ("digits", "digits_single", "coco_smoke", "zlpr"):
        words = ["--compare", trained("bce")] if name == "zlpr" else []
        command("report", trained(name), *words, "--out", "a.html", "--json", "a.json")
        result[name] = read("a.json")
    return result


def check_data() -> dict[str, Any]:
    """Counts of `mldec check-data`, and suspected label errors."""
    result = {}
    for name in ("digits", "coco", "coco_zsl", "voc", "openimages_miil", "csv_labels"):
        command("check_data", *words_of("reader", name), "--json", "a.json")
        result[name] = read("a.json")
    for name in ("coco_smoke", "digits"):
        command("check_data", "--checkpoint", trained(name), "--errors", "a.csv")
        result[f"errors_{name}"] = read("a.csv")
    return result


def summary() -> list[dict[str, str]]:
    """The table of `mldec summary`."""
    for name in ("digits", "digits_single", "coco_smoke"):
        shutil.copytree(trained(name), Path("runs", name))
    command("summary", "runs", "--csv", "a.csv")
    rows: list[dict[str, str]] = read("a.csv")
    return rows


def export(name: str) -> dict[str, Any]:
    """Outputs of an ONNX file."""
    checkpoint, *words = words_of("export", name)
    command("export", trained(checkpoint), "model.onnx", *words)
    session = importlib.import_module("onnxruntime").InferenceSession("model.onnx")
    [images] = session.get_inputs()
    pixels = np.random.RandomState(0).randint(0, 256, (4, *images.shape[1:])).astype(np.uint8)
    names = [output.name for output in session.get_outputs()]
    outputs = session.run(None, {images.name: pixels})
    return {name: values.tolist() for name, values in zip(names, outputs, strict=True)}


def released(name: str) -> dict[str, Any]:
    """Logits of a file in the authors' layout, with invented weights."""
    torch = importlib.import_module("torch")
    sys.path.insert(0, str(next(TOP.glob("tests/**/fill.py")).parent))
    fill = importlib.import_module("fill")

    def shapes_of(keys: str) -> dict[str, list[int]]:
        return dict(json.loads(next(TOP.glob(f"tests/**/{keys}.keys.json")).read_text()))

    file, keys, size = words_of("released", name)
    shapes = shapes_of(keys)
    word_vectors = []
    body = {key: shape for key, shape in shapes.items() if not key.startswith("head.")}
    if name == "asl":
        shapes = {**body, "head.fc.weight": [80, 2048], "head.fc.bias": [80]}
    if name == "zero_shot":
        head = {**shapes_of("head_zero_shot"), "decoder.embed_standart.weight": [768, 2048]}
        shapes = {**body, **{f"head.{key}": shape for key, shape in head.items()}}
        word_vectors = [torch.from_numpy(fill.word_vectors(23))]
    tensors = {key: torch.from_numpy(fill.tensor(key, tuple(shapes[key]))) for key in shapes}
    torch.save({"model": tensors}, file)

    model, names = model_of(Path(file), image_size=int(size))
    with torch.no_grad():
        logits = model(torch.from_numpy(fill.images(int(size))), *word_vectors)
    return {"logits": logits, "first": logits[0, :5].tolist(), "names": names}


def parity() -> str:
    """Whether the checkout passes its tests with numbers of the official code."""
    tests = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "tests/parity"]
    done = subprocess.run(tests, cwd=os.environ["CHECKOUT"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-500:]
    return "passed"


FEW = ("+experiment=digits", "+experiment=coco_tresnet_l", "+experiment=digits loss=partial")
PROBES: dict[str, Callable[[], Any]] = {}
WITH_ENTRIES: list[Callable[[str], Any]] = [run, batches, reader, evaluate, calibrate, predict]
WITH_ENTRIES += [export, released]
for probe_of in WITH_ENTRIES:
    kind = probe_of.__name__
    PROBES |= {f"{kind}_{name}": partial(probe_of, name) for name in TABLES[kind]}
SINGLE: list[Callable[[], Any]] = [resume, two_processes, configs, report, check_data, summary]
SINGLE += [parity]
PROBES |= {probe.__name__: probe for probe in SINGLE}
PROBES["configs_few"] = partial(configs, *FEW)
QUICK = ["run_digits", "resume", "predict_top", "configs_few", "reader_coco", "batches_mix_batch"]


def write_trees(top: Path) -> None:
    """Write the data sets in {trees}."""
    for path, text in TABLES["trees"].items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(text)

    photos = sorted((COCO / "train2014").iterdir())[:6]
    folders = ["csv", "openimages/train", "openimages/test", "nuswide/images", "texts/Flickr/x"]
    folders += ["vg500/VG_100K", "cars/cars_train"]
    for folder in folders:
        (top / folder).mkdir(parents=True, exist_ok=True)
        for number, photo in enumerate(photos):
            name = f"{number + 1:05}" if folder == "cars/cars_train" else "abcdef"[number]
            (top / folder / f"{name}.jpg").symlink_to(photo)
    (top / "cars" / "devkit").symlink_to(DATA / "stanford_cars_devkit" / "devkit")

    # A word vector per class, in the files of the authors [width, classes].
    torch = importlib.import_module("torch")
    for folder, classes in (("nuswide", 4), ("texts", 4)):
        vectors = torch.arange(5.0 * classes).reshape(5, classes)
        torch.save(vectors, top / folder / "wordvec_array.pth")

    batches = top / "cifar100" / "cifar-100-python"
    batches.mkdir(parents=True)
    for split, labels in (("train", [2, 0, 1, 1]), ("test", [1, 2])):
        rows = np.random.RandomState(0).randint(0, 256, (len(labels), 3072)).astype(np.uint8)
        content = {"data": rows, "fine_labels": labels, "coarse_labels": labels}
        (batches / split).write_bytes(pickle.dumps(content, 3))
    (batches / "meta").write_bytes(pickle.dumps({"fine_label_names": ["apple", "baby", "bear"]}, 3))


# The two sides, and their comparison.


def start(checkout: Path, folder: Path) -> subprocess.Popen[str]:
    """Start a process that runs probes with a checkout in a separate folder."""
    environment = {"PYTHONPATH": checkout, "CHECKOUT": checkout, "SIDE": folder}
    environment |= {"TREES": folder.parent / "trees", "XDG_CACHE_HOME": folder / "cache"}
    words = {name: str(path) for name, path in environment.items()}
    words |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MLDEC_SAMPLE_DATA": str(DATA), **words},
    )


def ask(sides: list[Any], probe: str) -> list[dict[str, Any]]:
    """Run a probe on all sides in parallel. Returns {"result": ...} or {"error": ...} for each."""
    for side in sides:
        print(probe, file=side.stdin, flush=True)
    return [json.loads(side.stdout.readline()) for side in sides]


def serve() -> None:
    """Run probes by the names on standard input, each in a new process and folder."""
    for library in LIBRARIES:
        importlib.import_module(library)
    home = str(importlib.import_module("mldec").__file__)
    assert home.startswith(os.environ["CHECKOUT"]), home

    for line in sys.stdin:
        folder = Path(os.environ["SIDE"], "probes", line.strip())
        folder.mkdir(parents=True)
        process = FORK.Process(target=_probe, args=(line.strip(), folder))
        process.start()
        process.join()
        print((folder / "answer").read_text(), flush=True)


def _probe(name: str, folder: Path) -> None:
    """Do the work of a forked process, and write its result or error."""
    os.chdir(folder)
    redirect("probe_output.txt", "probe_errors.txt")
    try:
        answer = {"result": plain(PROBES[name]())}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    (folder / "answer").write_text(json.dumps(answer))


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path of each difference and both values. A missing value is "absent"."""
    if isinstance(before, list) and isinstance(after, list):
        before = dict(enumerate(before))
        after = dict(enumerate(after))
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            values = (before.get(key, "absent"), after.get(key, "absent"))
            yield from differences(*values, f"{path}/{key}")
    # NaN equals NaN as text.
    elif json.dumps(before) != json.dumps(after):
        yield path, before, after


def accepted(path: str, before: Any, after: Any) -> bool:
    """Return True if a difference is listed above."""
    if any(fnmatch.fnmatch(path, pattern) for pattern in HASHES):
        return True
    if "absent" in (before, after):
        return any(fnmatch.fnmatch(path, pattern) for pattern in CHANGED)
    if not all(isinstance(value, int | float) for value in (before, after)):
        return False
    tolerances = [limit for pattern, limit, _ in EXCEPTIONS if fnmatch.fnmatch(path, pattern)]
    return any(math.isclose(before, after, rel_tol=limit) for limit in tolerances)


def machine() -> str:
    """Return processor and version of torch, on which the last bits depend."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        processor = models[0].partition(": ")[2] if models else processor
    return f"{processor}, torch {importlib.import_module('torch').__version__}"


def record(checkout: Path, names: list[str], file: Path) -> None:
    """Run probes with one checkout, and write their results to a file."""
    git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    probes = {}
    with tempfile.TemporaryDirectory() as temporary:
        write_trees(Path(temporary, "trees"))
        side = start(checkout.resolve(), Path(temporary, "before"))
        for name in names:
            started = time.monotonic()
            [probes[name]] = ask([side], name)
            error = probes[name].get("error", "")
            print(f"{name:24} {time.monotonic() - started:4.0f} s  {error}", flush=True)
        side.communicate()

    content = {"commit": commit, "machine": machine(), "probes": probes}
    with gzip.open(file, "wt") as stream:
        json.dump(content, stream)


@contextmanager
def work_folder(recorded: dict[str, Any]) -> Iterator[Path]:
    """Create a temporary folder, with the path of the recording: results contain paths."""
    path = re.search(r"/tmp/tmp\w+", json.dumps(recorded))
    if path is None:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
        return

    folder = Path(path[0])
    shutil.rmtree(folder, ignore_errors=True)  # of a killed run
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def verdict(probe: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return `same`, `differs: where` or `failed: why`."""
    for side, answer in (("before", before), ("after", after)):
        if "error" in answer:
            return f"failed {side}: {answer['error']}"

    unequal = list(differences(before["result"], after["result"], probe))
    wrong = [difference for difference in unequal if not accepted(*difference)]
    if wrong:
        path, old, new = wrong[0]
        change = f"{json.dumps(old)[:80]} -> {json.dumps(new)[:80]}"
        return f"differs: {path}: {change}, and {len(wrong) - 1} more"
    return f"same, with {len(unequal)} exceptions" if unequal else "same"


def main() -> None:
    """Compare the two checkouts of the command line."""
    parser = argparse.ArgumentParser(description="Compare the numbers of two checkouts.")
    parser.add_argument("sides", nargs="*", type=Path, metavar="CHECKOUT or FILE")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the results of CHECKOUT")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="a few probes, in three minutes")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1)
    parser.add_argument("--list", action="store_true", help="print the names of the probes")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.serve:
        serve()
        return
    patterns = QUICK if args.quick else args.only
    names = [name for name in PROBES if any(fnmatch.fnmatch(name, each) for each in patterns)]
    if args.list:
        print("\n".join(names))
        return
    if len(args.sides) != (1 if args.record else 2) or not names:
        parser.error("pass two checkouts, and names that --list prints")
    if args.record:
        record(args.sides[0], names, args.record)
        return

    recorded: dict[str, Any] = {}
    if args.sides[0].is_file():
        with gzip.open(args.sides.pop(0), "rt") as stream:
            content = json.load(stream)
        recorded = content["probes"]
        names = [name for name in names if name in recorded]
        print(f"recorded from commit {content['commit']} on {content['machine']}")
        if content["machine"] != machine():
            print(f"this machine is {machine()}: the last bits may differ")

    verdicts = []
    with work_folder(recorded) as temporary:
        write_trees(temporary / "trees")
        sides: list[Any] = []
        folders = ("before",) if recorded else ("after", "before")
        for name, checkout in zip(folders, reversed(args.sides), strict=False):
            sides.insert(0, start(checkout.resolve(), temporary / name))

        for name in names:
            started = time.monotonic()
            together = [sides] if args.jobs == 2 else [[side] for side in sides]
            answers = [recorded[name]] if recorded else []
            for some in together:
                answers += ask(some, name)
            verdicts.append(verdict(name, *answers))
            print(f"{name:24} {time.monotonic() - started:4.0f} s  {verdicts[-1]}", flush=True)
        for side in sides:
            side.communicate()

    same = sum(line.startswith("same") for line in verdicts)
    print(f"{same} of {len(names)} probes are the same")
    sys.exit(same < len(names))


if __name__ == "__main__":
    main()
