"""Random settings and files: no traceback, no hang, no excessive memory (see `guarded`)."""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints
from xml.sax.saxutils import escape

import mutations
import numpy as np
import pytest
import torch
from guarded import Ended, guarded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from PIL import Image
from support import QUICK, write_coco

from mldec import build, checkpoint, train
from mldec.config.compose import compose, parse, to_dict
from mldec.config.schema import PARTS, Config
from mldec.data.base import Classes, DataModule, Split, fixed_sample
from mldec.data.loader import TrainBatches, train_loader
from mldec.data.workers import unwrap
from mldec.evaluation import evaluate
from mldec.runtime import facts, signals

# Cases of each kind in the default run: 500 together. The slow run has 20 times as many: 10,000.
CASES = {
    "train settings": 60,
    "evaluate settings": 20,
    "check_data settings": 20,
    "predict flags": 20,
    "checkpoint values": 110,
    "checkpoint bytes": 60,
    "csv": 70,
    "json": 60,
    "lists": 30,
    "cache": 50,
}
SLOW = 20

SMALL = ["data.train_images=32", "data.val_images=8", "train.log_every=1"]
DEVICE = torch.device("cpu")

both = pytest.mark.parametrize(
    "times", [1, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["default", "slow"]
)


def test_the_numbers_of_cases() -> None:
    assert sum(CASES.values()) == 500
    assert SLOW * sum(CASES.values()) == 10_000


def explore(
    kind: str, times: int, strategy: SearchStrategy[Any], try_case: Callable[[Any], object]
) -> None:
    """Try the number of cases in the table: fixed ones by default, new ones in the slow run."""
    tried = 0

    @settings(
        max_examples=times * CASES[kind],
        deadline=None,
        database=None,
        derandomize=times == 1,
        print_blob=times > 1,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def test(case: Any) -> None:
        nonlocal tried
        tried += 1
        try_case(case)

    test()
    assert tried >= times * CASES[kind], f"only {tried} cases of {kind} were tried"


# --- What the cases start from --------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def quiet_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No user's cache, no TensorBoard threads, and training stops after its first step."""

    @contextlib.contextmanager
    def stopping() -> Iterator[signals.StopRequest]:
        request = signals.StopRequest()
        request.signal = signals.signal.SIGTERM
        yield request

    import mldec.inference.tagging  # noqa: F401 - binds the real `listening`, if nothing has yet

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for tracker in ("wandb", "trackio"):  # as if not installed: they would use the network
            patch.setitem(sys.modules, tracker, None)
        patch.setattr(signals, "listening", stopping)
        patch.setattr(facts, "git_commit", lambda: None)  # starts two processes
        yield


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the cases; each has a new one in it."""
    return tmp_path_factory.mktemp("cases")


@contextlib.contextmanager
def new_folder(work: Path) -> Iterator[Path]:
    folder = work / "a" / "b" / "c" / "case"  # so deep, because a random name may climb
    folder.mkdir(parents=True)
    here = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(here)
        shutil.rmtree(work / "a")


def command(name: str, *words: str | Path) -> Ended:
    """Run a command of the package in this process, under guard."""

    def call() -> None:
        sys.argv = [f"mldec-{name}", *map(str, words)]
        importlib.import_module(f"mldec.{name}").main()

    return guarded(call)


@pytest.fixture(scope="module")
def last(work: Path, quiet_surroundings: None) -> Path:
    """A checkpoint of the first of two steps."""
    with new_folder(work) as folder:
        ended = command("train", *QUICK, *SMALL)
        assert ended.status == 143, ended
        made = folder / "outputs" / "digits" / "checkpoints" / "last.pt"
        return made.rename(work / "good.pt")


@pytest.fixture(scope="module")
def state(last: Path) -> dict[str, Any]:
    return torch.load(last, weights_only=True)


@pytest.fixture(scope="module")
def config(state: dict[str, Any]) -> Config:
    """The config of the run, read once: Hydra takes longer than all the rest."""
    return dataclasses.replace(parse(state["config"]), plugins=["patches"])


@pytest.fixture(scope="module")
def image(work: Path) -> Path:
    path = work / "image.png"
    Image.new("RGB", (20, 10), "red").save(path)
    return path


# --- Settings -------------------------------------------------------------------------------------


def known_keys() -> list[str]:
    """Return every setting, fixed or of the parts that a quick run has."""
    quick = to_dict(compose(["+experiment=digits"]))
    keys = []
    for field in dataclasses.fields(Config):
        kind = get_type_hints(Config)[field.name]
        if dataclasses.is_dataclass(kind):
            keys += [f"{field.name}.{inner.name}" for inner in dataclasses.fields(kind)]
        else:
            keys.append(field.name)
        if field.name in PARTS:
            keys += [f"{field.name}.{name}" for name in quick[field.name]]
    keys += [
        "data.root",
        "data.cutout",
        "data.threshold",
        "data.seed",
        "data.bad_images",
        "data.cache_dir",
    ]
    keys += ["head.dropout", "head.num_groups", "head.num_heads", "loss.gamma_neg", "loss.clip"]
    return keys


@both
@pytest.mark.parametrize("name", ["train", "evaluate", "check_data"])
def test_settings(name: str, times: int, work: Path, last: Path) -> None:
    first = {
        "train": [*QUICK, *SMALL],
        "evaluate": [last, "--plugin=patches", "--json=out.json"],
        "check_data": [
            "data=digits",
            "data.train_images=16",
            "data.val_images=8",
            "train.workers=0",
        ],
    }[name]

    def try_case(words: list[str]) -> None:
        with new_folder(work):
            command(name, *first, *words)

    explore(f"{name} settings", times, mutations.settings_words(known_keys()), try_case)


@both
def test_flags(times: int, work: Path, last: Path, image: Path) -> None:
    numbers = st.sampled_from(["--threshold", "--top", "--batch-size"])
    sizes = st.sampled_from(
        [number for number in mutations.NUMBERS if not 0 < number < 8]
    )  # that of a patch
    texts = st.sampled_from(["--device", "--device", "--weights", "--classes"])
    flags = st.one_of(
        st.builds("{}={}".format, numbers, st.sampled_from(mutations.NUMBERS)),
        sizes.map("--image-size={}".format),
        st.builds("{}={}".format, texts, mutations.values()),
    )

    def try_case(words: list[str]) -> None:
        with new_folder(work):
            command("predict", last, image, "--plugin=patches", *words)

    explore("predict flags", times, mutations.few(flags), try_case)


# --- Checkpoints ----------------------------------------------------------------------------------

# The names of settings that a checkpoint may hold beside those that this one has.
EXTRA = (
    "num_layers",
    "num_groups",
    "num_heads",
    "dropout",
    "crop",
    "image_size",
    "size",
    "width",
    "extra",
)


def open_door(door: str, path: Path, image: Path, config: Config) -> Ended:
    """Give a file to a command that reads checkpoints; `config` is that of the resumed run."""
    if door == "predict":
        ended = command("predict", path, image, "--plugin=patches", "--device=cpu")
        assert ended.status != 0 or "nothing" not in ended.out, "no class has a score"
        return ended
    if door == "evaluate":
        ended = command(
            "evaluate", path, "--plugin=patches", "--json=out.json", "device=cpu", "train.workers=0"
        )
        if ended.status == 0:
            read_json(Path("out.json"))
        return ended
    config = dataclasses.replace(config, **{door: str(path)})
    return guarded(lambda: train.run(config, Path("outputs")))


def read_json(path: Path) -> Any:
    """Read a file as strictly as other languages do, which know no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{path} holds {word}, which is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


DOORS = st.sampled_from(["resume", "resume", "predict", "evaluate", "init"])


@both
def test_values_of_a_checkpoint(
    times: int, work: Path, state: dict[str, Any], config: Config, image: Path
) -> None:
    changes = mutations.changes(state, mutations.checkpoint_values(), EXTRA)

    def try_case(case: tuple[str, list[mutations.Change]]) -> None:
        door, list_of_changes = case
        with new_folder(work) as folder:
            with warnings.catch_warnings(
                action="ignore"
            ):  # torch's remarks on tensors of odd kinds
                torch.save(mutations.changed(state, list_of_changes), folder / "odd.pt")
            open_door(door, folder / "odd.pt", image, config)

    explore("checkpoint values", times, st.tuples(DOORS, changes), try_case)


@both
def test_bytes_of_a_checkpoint(
    times: int, work: Path, last: Path, config: Config, image: Path
) -> None:
    content = last.read_bytes()
    whole = mutations.edits(len(content)).map(lambda edits: ("file", edits))
    inner = mutations.edits(12_000).map(lambda edits: ("data.pkl", edits))

    def try_case(case: tuple[str, tuple[str, list[mutations.Edit]]]) -> None:
        door, (place, edits) = case
        if place == "file":
            changed = mutations.edited(content, edits)
        else:
            changed = mutations.edited_member(content, place, edits)
        with new_folder(work) as folder:
            (folder / "odd.pt").write_bytes(changed)
            open_door(door, folder / "odd.pt", image, config)

    explore("checkpoint bytes", times, st.tuples(DOORS, whole | inner), try_case)


# --- Annotations ----------------------------------------------------------------------------------


class Reader:
    """Read data as a run does, take its first items, and keep its classes in a checkpoint."""

    def __init__(self, folder: Path, state: dict[str, Any], config: Config) -> None:
        self.folder, self.state, self.config = folder, state, config

    def open(self, **arguments: Any) -> tuple[Config, build.Parts, DataModule]:
        """Return the config, the parts and the data of these arguments of `data`."""
        small = {
            "image_size": 16,
            "augment": "none",
            "cutout": 0.0,
            "cache_dir": str(self.folder / "cache"),
        }
        exclusive = bool(arguments.get("exclusive")) or "folders" in arguments["_target_"]
        loss = {"_target_": "mldec.losses.BinaryCrossEntropy"}
        if not exclusive:
            loss = {"_target_": "mldec.losses.PartialAsymmetricLoss", "mode": "ignore"}
        config = dataclasses.replace(self.config, data={**small, **arguments}, loss=loss)
        parts = build.check(config)
        return config, parts, build.data(parts)

    def __call__(self, **arguments: Any) -> Ended:
        """Do it all, under guard."""

        def call() -> None:
            config, parts, data = self.open(**arguments)
            build.check_together(config, data, build.loss(parts))
            batches = TrainBatches(
                len(data.train.dataset), batch_size=min(2, len(data.train.dataset))
            )
            next(unwrap(train_loader(data, batches, workers=0, pin=False)))
            evaluate(build.model(parts, data.val.classes), data, config, device=DEVICE)

            found.append(data.val.classes)

        found: list[Classes] = []
        ended = guarded(call)
        if ended.status == 0:
            self.keep(*found)
        return ended

    def keep(self, classes: Classes) -> None:
        """Read the classes back: a checkpoint that refuses what a reader took loses a training."""
        part = {
            "names": list(classes.names),
            "exclusive": classes.exclusive,
            "queries": classes.queries,
        }
        torch.save({**self.state, "classes": part}, self.folder / "kept.pt")
        checkpoint.load(self.folder / "kept.pt")


TABLE = [
    ["path", "labels", "negatives", "split"],
    ["0.png", "cat", "dog", "train"],
    ["1.png", "dog", "", "train"],
    ["2.png", "cat;dog", "", "train"],
    ["3.png", "", "cat", "val"],
    ["4.png", "dog", "cat", "val"],
    ["5.png", "cat", "", "val"],
]


def write_images(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        Image.new("RGB", (9, 6), (40 * number, 0, 0)).save(folder / name)


@both
def test_csv(times: int, work: Path, state: dict[str, Any], config: Config) -> None:
    forms = st.fixed_dictionaries(
        {},
        optional={
            "exclusive": st.booleans(),
            "separator": st.sampled_from([";", ",", " ; ", "\t"]),
            "classes": st.lists(mutations.names(), max_size=3)
            | st.sampled_from(["names.txt", "data.csv", "nope"]),
            "val_fraction": st.sampled_from([0.5, 1e-9]),
            "bad_images": st.sampled_from(["stop", "skip"]),
        },
    )
    # Most cases have one kind of change: more of them would end at the first one.
    plain = {
        "columns": st.sampled_from([4, 4, 2]),
        "cells": st.just([]),
        "edits": st.just([]),
        "end": st.just("\n"),
        "encoding": st.just("utf-8"),
        "names": st.just([]),
        "form": st.just({}),
    }
    cells = mutations.cells(len(TABLE), 4)
    written = {
        "end": st.sampled_from(mutations.ENDS),
        "encoding": st.sampled_from(mutations.ENCODINGS),
    }
    cases = st.one_of(
        st.fixed_dictionaries({**plain, "cells": cells}),
        st.fixed_dictionaries({**plain, "cells": cells, "form": forms}),
        st.fixed_dictionaries({**plain, "edits": mutations.edits(150, text=True)}),
        st.fixed_dictionaries(
            {**plain, "form": forms, "names": st.lists(mutations.names(), max_size=3), **written}
        ),
    )

    def try_case(case: dict[str, Any]) -> None:
        rows = [row[: case["columns"]] for row in TABLE]
        table = mutations.changed_table(rows, case["cells"])
        content = mutations.as_csv(table, end=case["end"], encoding=case["encoding"])
        with new_folder(work) as folder:
            write_images(folder, [f"{number}.png" for number in range(6)])
            (folder / "data.csv").write_bytes(mutations.edited(content, case["edits"]))
            names = ["cat", "dog", *case["names"]]
            (folder / "names.txt").write_text(case["end"].join(names), encoding="utf-8")
            target = "mldec.data.csv_table.csv_table"
            Reader(folder, state, config)(_target_=target, root=str(folder), **case["form"])

    explore("csv", times, cases, try_case)


@pytest.fixture(scope="module")
def coco(work: Path) -> Path:
    """A whole small COCO tree."""
    write_coco(work / "coco", classes=3, images=6)
    return work / "coco"


@both
def test_json(times: int, work: Path, coco: Path, state: dict[str, Any], config: Config) -> None:
    good = json.loads((coco / "annotations" / "instances_val2014.json").read_text())
    good["annotations"][0] |= {"area": 12.5, "iscrowd": 0, "bbox": [1, 2, 3, 4]}
    cases = st.fixed_dictionaries(
        {
            "changes": mutations.changes(
                good, mutations.json_values(), ("area", "id", "name", "file_name")
            ),
            "edits": mutations.weighted(
                (3, st.just([])), (1, mutations.edits(len(json.dumps(good)), text=True))
            ),
            "both": st.booleans(),
            "form": st.fixed_dictionaries({}, optional={"annotated_only": st.booleans()}),
        }
    )

    def try_case(case: dict[str, Any]) -> None:
        content = json.dumps(mutations.changed(good, case["changes"])).encode()
        content = mutations.edited(content, case["edits"])
        with new_folder(work) as folder:
            shutil.copytree(coco, folder / "coco")
            for split in ("train2014", "val2014") if case["both"] else ("val2014",):
                changed = content.replace(b"val2014", split.encode())
                (folder / "coco" / "annotations" / f"instances_{split}.json").write_bytes(changed)
            target = "mldec.data.coco.coco"
            Reader(folder, state, config)(
                _target_=target, root=str(folder / "coco"), **case["form"]
            )

    explore("json", times, cases, try_case)


def annotation(name: str, difficult: str) -> bytes:
    return (
        f"<annotation><object><name>{escape(name)}</name><difficult>{escape(difficult)}</difficult></object>"
        "</annotation>"
    ).encode(errors="replace")


@both
def test_lists_and_folders(times: int, work: Path, state: dict[str, Any], config: Config) -> None:
    voc = st.fixed_dictionaries(
        {
            "ids": mutations.weighted(
                (2, st.just([])), (1, st.lists(mutations.names(), max_size=3))
            ),
            "name": mutations.names() | st.just("dog"),
            "difficult": st.sampled_from(["0", "1", "", "2", "\x00", "\u0661"]),
            "list edits": mutations.weighted((2, st.just([])), (1, mutations.edits(8, text=True))),
            "xml edits": mutations.weighted((1, st.just([])), (1, mutations.edits(90, text=True))),
        }
    )
    folders = st.fixed_dictionaries(
        {
            "folders": st.lists(mutations.names(), min_size=1, max_size=3),
            "classes": st.none() | st.lists(mutations.names(), max_size=4) | st.just("names.txt"),
            "file": mutations.edits(8, text=True),
        }
    )

    def try_voc(case: dict[str, Any], folder: Path) -> None:
        for inner in ("ImageSets/Main", "Annotations"):
            (folder / inner).mkdir(parents=True)
        write_images(folder / "JPEGImages", ["a.jpg", "b.jpg", "c.jpg"])
        for image in "abc":
            (folder / "Annotations" / f"{image}.xml").write_bytes(annotation("cat", "0"))
        changed = mutations.edited(annotation(case["name"], case["difficult"]), case["xml edits"])
        (folder / "Annotations" / "b.xml").write_bytes(changed)
        for split, ids in (("trainval", ["a", "c"]), ("test", ["b", *case["ids"]])):
            lines = "".join(f"{line}\n" for line in ids).encode(errors="replace")
            edits = case["list edits"] if split == "test" else []
            (folder / "ImageSets" / "Main" / f"{split}.txt").write_bytes(
                mutations.edited(lines, edits)
            )
        Reader(folder, state, config)(_target_="mldec.data.voc.voc", root=str(folder))

    def try_folders(case: dict[str, Any], folder: Path) -> None:
        for split in ("train", "val"):
            for name in ["cat", "dog", *case["folders"]]:
                with contextlib.suppress(OSError, ValueError):  # no name of a folder
                    write_images(folder / "root" / split / name, ["0.png", "1.png"])
        names = mutations.edited(b"cat\ndog\n", case["file"])
        (folder / "root" / "names.txt").write_bytes(names)
        arguments = {"root": str(folder / "root"), "classes": case["classes"]}
        Reader(folder, state, config)(_target_="mldec.data.folders.folders", **arguments)

    def try_case(case: dict[str, Any]) -> None:
        with new_folder(work) as folder:
            (try_voc if "ids" in case else try_folders)(case, folder)

    explore("lists", times, voc | folders, try_case)


# --- The cache ------------------------------------------------------------------------------------


def contents(split: Split) -> tuple[Any, ...]:
    """Return everything that was read of a split, in comparable form."""
    names = [split.dataset.name(index) for index in range(len(split.dataset))]
    targets = [
        fixed_sample(split.dataset, index)[1].tolist() for index in range(len(split.dataset))
    ]
    return split.classes.names, split.classes.exclusive, names, targets


@both
def test_cache(times: int, work: Path, coco: Path, state: dict[str, Any], config: Config) -> None:
    """A changed cache is never believed: it gives what a fresh reading gives, or one line."""
    root = work / "cached"
    write_images(root, [f"{number}.png" for number in range(6)])
    (root / "data.csv").write_bytes(mutations.as_csv(TABLE, end="\n", encoding="utf-8"))
    sources = {
        "csv": {"_target_": "mldec.data.csv_table.csv_table", "root": str(root)},
        "coco": {"_target_": "mldec.data.coco.coco", "root": str(coco)},
    }
    reader = Reader(root, state, config)
    wanted, files = {}, {}
    for name, arguments in sources.items():
        wanted[name] = contents(reader.open(**arguments)[2].val)
        (path,) = (root / "cache").glob(f"{name}*.npz")
        files[name] = path, path.read_bytes()
    with np.load(io.BytesIO(files["csv"][1]), allow_pickle=False) as stored:
        known = list(stored.files)
    arrays = mutations.array_changes(known).map(lambda changes: ("arrays", changes))
    edits = mutations.edits(len(files["csv"][1])).map(lambda edits: ("bytes", edits))

    def try_case(case: tuple[str, tuple[str, list[Any]]]) -> None:
        name, (what, changes) = case
        path, good = files[name]
        change = mutations.changed_arrays if what == "arrays" else mutations.edited
        path.write_bytes(change(good, changes))
        found = []
        ended = guarded(lambda: found.append(contents(reader.open(**sources[name])[2].val)))
        assert ended.status == 1 or found == [wanted[name]], "a changed cache was believed"

    explore("cache", times, st.tuples(st.sampled_from(list(sources)), arrays | edits), try_case)


def test_the_base_of_each_kind_is_good(
    work: Path, last: Path, coco: Path, state: dict[str, Any], config: Config, image: Path
) -> None:
    """Otherwise the cases would all end in the same line."""
    for door, status in (("predict", 0), ("evaluate", 0), ("resume", 143), ("init", 143)):
        with new_folder(work):
            ended = open_door(door, last, image, config)
            assert ended.status == status, (door, ended)
    with new_folder(work) as folder:
        write_images(folder, [f"{number}.png" for number in range(6)])
        (folder / "data.csv").write_bytes(mutations.as_csv(TABLE, end="\n", encoding="utf-8"))
        reader = Reader(folder, state, config)
        assert reader(_target_="mldec.data.csv_table.csv_table", root=str(folder)).status == 0
        assert reader(_target_="mldec.data.coco.coco", root=str(coco)).status == 0
