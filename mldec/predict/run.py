"""Answer what images show: the work of the command `mldec.predict`."""

import argparse
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from mldec.data.cache import cache_folder
from mldec.errors import ConfigError, DataError, RunInUseError, complain, say
from mldec.predict import results
from mldec.predict.answers import (
    Content,
    Pictures,
    Predictor,
    Row,
    Rule,
    chosen_rule,
    counted,
    named,
)
from mldec.predict.engine import Engine, TorchEngine, open_engine
from mldec.predict.heat_maps import fonts
from mldec.predict.inputs import STANDARD_INPUT, Inputs, Item
from mldec.predict.results import Journal, Record
from mldec.predict.xmp import write_sidecar
from mldec.runtime import storage
from mldec.runtime.cli import keep_output_clean, on_terminal, require
from mldec.runtime.results import STANDARD_OUTPUT, check_folder, check_targets, is_special, to_json
from mldec.runtime.signals import StopRequest, listening
from mldec.runtime.torch_files import sha256_of

log = logging.getLogger("mldec")

# The options that name result files: rows of text, which can be written to a pipe, and others.
FORMATS = (*results.TEXTS, "parquet", "features")
PARTS = ("jsonl", "parquet")  # they can be the parts of shards
NUMBERS = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")  # variables with the number of a shard
EVERY = 60.0  # seconds between two lines about the progress in a log


class Shard(NamedTuple):
    """A share of the images: that of one process."""

    number: int  # from 0
    of: int


def chosen_shard(option: str | None) -> Shard:
    """Return the share of this process, by --shard, or by the variables of torchrun without it.

    I/N says it; auto/N takes I from a SLURM array or an indexed Job of Kubernetes, and auto takes
    both from torchrun.
    """
    number, of = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if option is None:
        return Shard(int(number or 0), int(of or 1))

    first, _, last = option.partition("/")
    is_set = [name for name in (*NUMBERS, "RANK") if os.environ.get(name)]
    if first == "auto":
        sources = NUMBERS if last else ("RANK",)
        if len(is_set) != 1 or is_set[0] not in sources:
            raise ConfigError(
                f"--shard {option} takes its number from {' or '.join(sources)} alone, and "
                f"{' and '.join(is_set) or 'nothing'} is set; pass --shard I/N instead"
            )
        number, of = os.environ[is_set[0]], last or of
    elif int(of or 1) > 1:
        raise ConfigError(f"--shard {option} is that of all processes of torchrun: pass auto")
    else:
        number, of = first, last

    if not (number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise ConfigError(
            f"--shard {option}: there is no shard {number or '?'} of {of or '?'}; "
            f"shards count from 0 to N - 1, with N from 1 on"
        )
    return Shard(int(number), int(of))


@dataclass(frozen=True)
class Job:
    """What is answered, by what, and where the answers go."""

    args: argparse.Namespace
    shard: Shard
    targets: dict[str, str]  # the result files of this process, by their options
    inputs: Inputs
    predictor: Predictor
    rule: Rule
    made_with: dict[str, Any]  # see `Record`

    @property
    def name(self) -> str:
        """Return the first result file, which the result is called by."""
        return next(iter(self.targets.values()))

    @property
    def work(self) -> Path:
        """Return the folder where rows wait until the result files are whole."""
        folder = self.args.progress
        if folder is None and not storage.is_address(self.name):
            return Path(results.beside(self.name, results.JOURNAL))
        name = f"{self.name.rpartition('/')[2]}-{sha256(self.name.encode()).hexdigest()[:12]}"
        return Path(folder or cache_folder(None) / "predict", name + results.JOURNAL)

    def rows(self, items: Iterator[Item], stop: StopRequest, *, then: str = "") -> Iterator[Row]:
        """Yield the row of each item, after a message if there is no answer, and its sidecar."""
        for row in self.predictor.rows(items, stop, then=then):
            if row.error is not None:
                complain(row.error)
            if self.args.xmp:
                write_sidecar(row)
            yield row


def run(args: argparse.Namespace) -> int:
    """Do the work of `mldec.predict`; return the exit status, 1 if an image has no answer."""
    # Everything that can be refused at once comes before the first image.
    shard = chosen_shard(args.shard)
    targets = {option: path for option in FORMATS if (path := getattr(args, option)) is not None}
    is_stream = not targets or any(map(_is_stream, targets.values()))
    check_options(args, shard, targets, is_stream=is_stream)
    if STANDARD_OUTPUT in targets.values():
        keep_output_clean()
    if args.shard is not None and not is_stream:
        targets = part_of(targets, shard)

    letters = fonts(args.font)
    inputs = Inputs(args.images, args.list, column=args.column, root=args.root)
    engine = open_engine(args)
    rule = chosen_rule(engine, content=args.content, top=args.top, threshold=args.threshold)
    is_ranked = args.threshold is None and rule.stored is None and rule.content is Content.TOP
    if args.xmp and (rule.content is Content.SCORES or is_ranked):
        raise ConfigError(
            "--xmp writes the classes that are present: pass --threshold or --content decisions"
        )

    pictures = None
    if args.pictures is not None:
        assert isinstance(engine, TorchEngine)
        pictures = Pictures(engine.loaded, Path(args.pictures), letters)
    predictor = Predictor(
        engine,
        rule,
        batch_size=args.batch_size,
        workers=args.workers,
        draft=args.draft,
        features=args.features is not None,
        pictures=pictures,
    )
    made_with = facts(args, shard, targets, engine, rule)
    job = Job(args, shard, targets, inputs, predictor, rule, made_with)
    if is_stream:
        status = to_stream(job)
    elif args.merge is not None:
        status = merge(job)
    else:
        status = to_files(job)

    # Said once, where several processes have written.
    if shard.number == 0 and is_ranked and not engine.classes.exclusive:
        complain(
            f"{args.checkpoint} has no thresholds: classes are listed by score alone; pass "
            f"--threshold, or calibrate it with python -m mldec.calibrate"
        )
    return status


def _is_stream(target: str) -> bool:
    """Tell whether rows are written to a target as they come: standard output, a pipe, a device."""
    return target == STANDARD_OUTPUT or (is_special(Path(target)) and not Path(target).is_dir())


def check_options(
    args: argparse.Namespace, shard: Shard, targets: dict[str, str], *, is_stream: bool
) -> None:
    """Raise an error for options that do not fit each other, or files that cannot be written."""
    if args.pictures is not None:
        check_folder("--pictures", args.pictures)
    if args.parquet is not None:
        require("--parquet", "parquet", "pyarrow")

    # Several processes without --shard are those of torchrun.
    is_sharded, is_one = args.shard is not None, shard.of == 1
    is_part = is_sharded and not is_stream
    local = [path for path in targets.values() if not storage.is_address(path)]
    for is_refused, fault in (
        (
            is_stream and (len(targets) > 1 or not {*targets} <= {*results.TEXTS}),
            f"a pipe or standard output takes one of --{', --'.join(results.TEXTS)} alone",
        ),
        (
            is_part and (len(targets) > 1 or not {*targets} <= {*PARTS}),
            f"a shard writes --{' or --'.join(PARTS)}: join them to others with --merge",
        ),
        (
            any(path.startswith("http") for path in targets.values()),
            "no result can be written to the web: name a path or an object of a store",
        ),
        (
            args.features and args.views,
            "--features are of a single view of an image: leave --views out",
        ),
        (args.merge and is_stream, "--merge has no effect without a result file"),
        (
            is_stream and not is_sharded and not is_one,
            "several processes write to a file only, such as --jsonl FILE",
        ),
        (
            args.overwrite and (is_sharded or not is_one),
            "--overwrite is for a single process: remove the result, and it is begun anew",
        ),
        (
            args.list == STANDARD_INPUT and (args.merge or not is_one),
            "--list -: standard input can be read once, by one process: name a file",
        ),
    ):
        if is_refused:
            raise ConfigError(fault)
    if is_part:
        for path in local:
            check_folder("--shard", path)
    else:
        check_targets(*local)


def facts(
    args: argparse.Namespace, shard: Shard, targets: dict[str, str], engine: Engine, rule: Rule
) -> dict[str, Any]:
    """Return all that decides what a result holds, by the names that users know, as in JSON."""
    queries = engine.classes.queries
    known = {
        "the version of the rows": results.VERSION,
        "the checkpoint": sha256_of(engine.path),
        "--precision": engine.precision,
        "--image-size": engine.image_size,
        "the classes": sha256(to_json(engine.classes.names).encode()).hexdigest(),
        "the word vectors": queries and sha256(queries.numpy().tobytes()).hexdigest(),
        "--content": rule.content.value,
        "--top": rule.top,
        "the images": args.images,
        "--shard of": None if args.shard is None else shard.of,
        "the result files": [f"--{option} {target}" for option, target in targets.items()],
    }
    options = "weights views threshold draft list column root pictures xmp"
    known |= {f"--{name}": getattr(args, name) for name in options.split()}
    if args.thresholds is not None:
        known["--thresholds"] = sha256(to_json(rule.stored).encode()).hexdigest()
    # As they are read from a record, so that they compare equal to it.
    return dict(json.loads(to_json(known)))


def to_stream(job: Job) -> int:
    """Write the rows as they come: to the console, standard output or a device."""
    # Standard output is for a person or for a program, not for both.
    to_person, errors = STANDARD_OUTPUT not in job.targets.values(), 0

    def lines(stop: StopRequest) -> Iterator[bytes]:
        nonlocal errors
        for row in job.rows(job.inputs.of(*job.shard), stop):
            errors += row.error is not None
            if to_person and row.error is None:
                say(line(row, job.rule))
            yield results.line_of(job.rule, row)

    with listening() as stop:
        if job.targets:
            [(kind, target)] = job.targets.items()
            results.stream(kind, target, job.rule, lines(stop))
        else:
            for _ in lines(stop):
                pass
    return 1 if errors else 0


def line(row: Row, rule: Rule) -> str:
    """Return the line of the console for an image that was answered."""
    predictions = row.predictions
    if rule.content is Content.SCORES and row.scores is not None:
        predictions = rule.chosen(row.scores)

    names = [prediction.name for prediction in predictions]
    if rule.content is not Content.DECISIONS:
        names = [f"{prediction.name} {prediction.score:.3f}" for prediction in predictions]
    return f"{row.image}: {', '.join(names) or 'nothing'}"


def to_files(job: Job) -> int:
    """Answer the images of this process and write result files; return the exit status.

    Several processes with one result leave their rows to the one that ends last: none waits for
    another one, so that any of them may end and begin again at any time.
    """
    if (finished := existing(job)) is not None:
        items = job.inputs if job.args.shard is None else job.inputs.of(*job.shard)
        return check_finished(job, finished, items)

    share = job.shard if job.args.shard is None else Shard(0, 1)
    folders = [job.work / str(number) for number in range(share.of)]
    made_with = {**job.made_with, "the number of processes": share.of}
    journal = Journal(folders[share.number], job.name, made_with)
    with results.locked(journal.folder):
        written = answer(job, journal)

    try:
        with results.locked(job.work):
            records = [Record.read(str(folder / results.HOW)) for folder in folders]
            # A status of 1 would make torchrun end the other processes.
            if not all(record and record.images is not None for record in records):
                return 0
            status = publish(job, [str(folder / results.ROWS) for folder in folders], written)
            for folder in folders:
                shutil.rmtree(folder)
    except RunInUseError:
        if share.of == 1:
            raise
        return 0  # another process has ended too, and writes the result
    return status


def publish(job: Job, rows: list[str], written: Sequence[int] = ()) -> int:
    """Write result files of rows, say what they hold, and return the exit status."""
    lines = partial(results.joined, rows, job.inputs)
    record = results.publish(job.targets, job.rule, lines, job.made_with, job.work, written=written)
    errors = f", {record.errors:,} without an answer" if record.errors else ""
    say(f"{job.name}: {counted(record.images or 0)}{errors}")
    return 1 if record.errors else 0


def existing(job: Job) -> Record | None:
    """Return the record of a complete result; None if something is to be done.

    What was made otherwise is refused, and so is what has no record.
    """
    if job.args.overwrite:
        return None
    record = Record.read(results.beside(job.name, results.RECORD))
    if record is not None:
        record.compare(job.name, job.made_with)
        return record if all(map(storage.exists, job.targets.values())) else None

    for target in job.targets.values():
        if not job.work.exists() and not results.is_part(target) and storage.exists(target):
            raise ConfigError(
                f"{target} exists, and nothing says how it was made: name another file, or pass "
                f"--overwrite"
            )
    return None


def check_finished(job: Job, record: Record, items: Inputs | Iterator[Item]) -> int:
    """Check that a complete result is of the images of the input, and return the exit status."""
    images, names = results.summed(named(item.name)["image"] for item in items)
    if names != record.names:
        raise results.changed(job.name, f"{record.images:,} images then, {images:,} now")
    say(f"{job.name} is complete: {counted(images)}; nothing to do")
    return 0


def part_of(targets: dict[str, str], shard: Shard) -> dict[str, str]:
    """Return the file of a shard in the folder that the option names."""
    [(option, folder)] = targets.items()
    shards = len(results.parts_in(folder))
    if shards not in (0, shard.of):
        raise ConfigError(
            f"{folder} holds parts of {shards} shards, not {shard.of}: name another folder"
        )
    return {option: results.part_of(folder, option, *shard)}


def merge(job: Job) -> int:
    """Join the parts of shards to result files, and return the exit status."""
    folder = job.args.merge
    parts = results.parts_in(folder)
    if not parts:
        raise DataError(f"--merge {folder}: there are no parts; name the folder of --shard")
    if parts[0].endswith(".parquet") and [*job.targets] != ["parquet"]:
        raise ConfigError(f"--merge {folder}: parts of Parquet are joined to --parquet alone")

    # The parts are made alike, but for the names of files.
    own = dict.fromkeys(("the result files", "--shard of"))
    for number, part in enumerate(parts):
        record = Record.read(results.beside(part, results.RECORD))
        if record is None:
            raise DataError(
                f"--merge {folder}: {part} is not complete; run --shard {number}/{len(parts)} first"
            )
        Record(made_with={**record.made_with, **own}).compare(part, {**job.made_with, **own})

    if (finished := existing(job)) is not None:
        return check_finished(job, finished, job.inputs)
    with results.locked(job.work):
        return publish(job, parts)


def answer(job: Job, journal: Journal) -> list[int]:
    """Answer the images of this process, or what is left of them.

    Returns the numbers of the files of rows of a Parquet part that were written on the way.
    """
    written: list[int] = []
    lines = partial(results.lines_in, str(journal.rows))
    is_parquet = journal.target.endswith(".parquet") and results.is_part(journal.target)
    # In a log, a line a minute; on a terminal, a bar.
    every = {} if on_terminal() else dict.fromkeys(("delay", "mininterval", "maxinterval"), EVERY)
    with listening() as stop:
        items = job.inputs.of(*job.shard)
        items = journal.begin(items, job.predictor.batch_size, overwrite=job.args.overwrite)
        if journal.images:
            log.info(f"{journal.target}: {counted(journal.images)} are done, going on")
        rows = job.rows(items, stop, then="; the same command goes on")
        try:
            for row in tqdm(rows, journal.target, unit=" images", leave=False, **every):
                journal.add(results.line_of(job.rule, row))
                if is_parquet and journal.images % results.CHUNK == 0:
                    journal.flush()
                    number = journal.images // results.CHUNK - 1
                    results.write_chunk(journal.target, job.rule, lines, number, journal.folder)
                    written.append(number)
        finally:
            journal.flush()
    journal.finish()
    return written
