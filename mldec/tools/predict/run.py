"""Answer what images show: the work of the command `mldec predict`."""

import argparse
import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mldec.cli import require
from mldec.errors import ConfigError, DataError, RunInUseError, print_error, say
from mldec.files.atomic import (
    STANDARD_OUTPUT,
    check_folder,
    check_targets,
    is_stream,
    named,
    to_json,
)
from mldec.files.cache import cache_folder
from mldec.files.run_folder import locked
from mldec.files.torch_files import sha256_of
from mldec.runtime.console import keep_output_clean, on_terminal
from mldec.runtime.signals import StopRequest, listening
from mldec.tools.predict import results, storage
from mldec.tools.predict.answers import (
    Pictures,
    Predictor,
    Row,
    Rule,
    chosen_rule,
    counted,
)
from mldec.tools.predict.decode import Item
from mldec.tools.predict.engine import Engine, EngineOptions, TorchEngine, open_engine
from mldec.tools.predict.heat_maps import fonts
from mldec.tools.predict.inputs import STANDARD_INPUT, Inputs, Shard, chosen_shard
from mldec.tools.predict.results import Journal, Outputs, Record
from mldec.tools.predict.xmp import write_sidecar

log = logging.getLogger("mldec")

# The options that name result files: rows of text, which can be written to a pipe, and others.
FORMATS = (*results.TEXTS, "parquet", "features")
PARTS = ("jsonl", "parquet")  # they can be the parts of shards
EVERY = 60.0  # seconds between two lines about the progress in a log


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

    def outputs(self) -> Outputs:
        """Return the result files of this process."""
        return Outputs([*self.targets.values()], self.work, overwrite=self.args.overwrite)

    def rows(self, items: Iterator[Item], stop: StopRequest, *, then: str = "") -> Iterator[Row]:
        """Yield the row of each item, after its sidecar, and a message if there is no answer."""
        for row in self.predictor.rows(items, stop, then=then):
            if self.args.xmp:
                try:
                    write_sidecar(row)
                except DataError as error:
                    row = Row(row.image, error=str(error), may_pass=True)
            if row.error is not None:
                print_error(row.error)
            yield row


def run(args: argparse.Namespace) -> int:
    """Do the work of `mldec predict`; return the exit status, 1 if an image has no answer."""
    # Everything that can be refused at once comes before the first image.
    shard = chosen_shard(args.shard)
    targets = {option: path for option in FORMATS if (path := getattr(args, option)) is not None}
    is_streamed = not targets or any(map(is_stream, targets.values()))
    check_options(args, shard, targets, is_streamed=is_streamed)
    if STANDARD_OUTPUT in targets.values():
        keep_output_clean()
    if args.shard is not None and not is_streamed:
        targets = part_of(targets, shard)

    letters = fonts(args.font)
    inputs = Inputs(args.images, args.list, column=args.column, root=args.root)
    engine = open_engine(EngineOptions.of(vars(args)))
    rule = chosen_rule(engine, content=args.content, top=args.top, threshold=args.threshold)
    is_ranked = args.threshold is None and rule.stored is None and rule.content == "top"
    if args.xmp and (rule.content == "scores" or is_ranked):
        raise ConfigError(
            "--xmp writes the classes that are present: pass --threshold or --content decisions"
        )

    pictures = None
    if args.pictures is not None:
        assert isinstance(engine, TorchEngine)
        pictures = Pictures(engine, Path(args.pictures), letters)
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
    if is_streamed:
        status = to_stream(job)
    elif args.merge is not None:
        status = merge(job)
    else:
        status = to_files(job)

    # Said once, where several processes have written.
    if shard.number == 0 and is_ranked and not engine.classes.exclusive:
        print_error(
            f"{args.checkpoint} has no thresholds: classes are listed by score alone; pass "
            f"--threshold, or calibrate it with mldec calibrate"
        )
    if shard.number == 0 and inputs.unsupported:
        print_error(str(inputs.unsupported))
    return status


def check_options(
    args: argparse.Namespace, shard: Shard, targets: dict[str, str], *, is_streamed: bool
) -> None:
    """Raise an error for options that do not fit each other, or files that cannot be written."""
    if args.pictures is not None:
        check_folder("--pictures", args.pictures)
    if args.parquet is not None:
        require("--parquet", "parquet", "pyarrow")

    is_sharded, is_one = args.shard is not None, shard.of == 1
    is_part = is_sharded and not is_streamed
    several = len(targets) > 1
    for is_refused, fault in (
        (
            is_streamed and (several or not {*targets} <= {*results.TEXTS}),
            f"a pipe or standard output takes one of --{', --'.join(results.TEXTS)} alone",
        ),
        (
            is_part and (several or not {*targets} <= {*PARTS}),
            f"a shard writes --{' or --'.join(PARTS)}: join them to others with --merge",
        ),
        (args.features and args.views, "--features are of a single view: leave --views out"),
        (args.merge and is_streamed, "--merge has no effect without a result file"),
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
    if not is_part:
        # The record of the result belongs to the files that are written.
        names = [*targets.values()]
        if names and not is_streamed:
            names.append(results.beside(names[0], results.RECORD))
        check_targets(*(path for path in names if not storage.is_address(path)))


def facts(
    args: argparse.Namespace, shard: Shard, targets: dict[str, str], engine: Engine, rule: Rule
) -> dict[str, Any]:
    """Return all that decides what a result holds, by the names that users know, as in JSON."""
    word_vectors = engine.classes.word_vectors
    vectors = b"" if word_vectors is None else word_vectors.numpy().tobytes()
    known = {
        "the version of the rows": results.VERSION,
        "the checkpoint": sha256_of(engine.path),
        "--precision": engine.precision,
        "--image-size": engine.image_size,
        "the classes": sha256(to_json(engine.classes.names).encode()).hexdigest(),
        "the word vectors": sha256(vectors).hexdigest(),
        "--content": rule.content,
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
    if rule.content == "scores" and row.scores is not None:
        predictions = rule.chosen(row.scores)

    names = [prediction.name for prediction in predictions]
    if rule.content != "decisions":
        names = [f"{prediction.name} {prediction.score:.3f}" for prediction in predictions]
    return f"{row.image}: {', '.join(names) or 'nothing'}"


def to_files(job: Job) -> int:
    """Answer the images of this process and write result files; return the exit status.

    Several processes with one result leave their rows to the one that ends last: none waits for
    another one, so that any of them may end and begin again at any time.
    """
    share = job.shard if job.args.shard is None else Shard(0, 1)
    folders = [job.work / str(number) for number in range(share.of)]
    outputs = job.outputs()
    status = finished_status(job, outputs)
    if status is not None:
        # Rows of a process that was killed after it had written the result.
        clean(job, folders)
        return status

    made_with = {**job.made_with, "the number of processes": share.of}
    journal = Journal(folders[share.number], job.name, made_with)
    with locked(journal.folder):
        answer(job, journal, outputs)

    try:
        with locked(job.work):
            records = [Record.read(str(folder / results.HOW)) for folder in folders]
            # A status of 1 would make torchrun end the other processes.
            if not all(record and record.images is not None for record in records):
                return 0
            rows = [str(folder / results.ROWS) for folder in folders]
            record = publish(job, rows, outputs)
            if not record.retry:
                clean(job, folders)
    except RunInUseError:
        if share.of == 1:
            raise
        return 0  # another process has ended too, and writes the result
    return 1 if record.errors else 0


def clean(job: Job, folders: list[Path]) -> None:
    """Remove the journals of a complete result."""
    for folder in folders:
        results.remove_journal(folder)
    (job.work / results.NOTES).unlink(missing_ok=True)
    with suppress(OSError):
        job.work.rmdir()


def publish(job: Job, rows: list[str], outputs: Outputs) -> Record:
    """Write result files of rows, print what they hold, and return their record."""
    lines = partial(results.joined, rows, job.inputs)
    record = results.publish(outputs, job.targets, job.rule, lines, job.made_with, job.inputs)
    again = f"; run the same command to retry {record.retry:,}" if record.retry else ""
    say(f"{job.name}: {contents(record)}{again}")
    return record


def contents(record: Record) -> str:
    """Return the number of images of a result, and of those without an answer."""
    errors = f", {record.errors:,} without an answer" if record.errors else ""
    return f"{counted(record.images or 0)}{errors}"


def finished_status(job: Job, outputs: Outputs) -> int | None:
    """Return the exit status if the result files are complete, and print it; None otherwise.

    Raises a ConfigError for files with other settings, or files that the command did not write.
    """
    record = outputs.record
    if record is not None:
        record.compare(job.name, job.made_with)
    # Images that failed are tried again.
    if not outputs.are_whole() or record is None or record.retry:
        return None

    items = job.inputs if job.args.shard is None else job.inputs.of(*job.shard)
    images, names = results.summed(named(item.name)["image"] for item in items)
    if names != record.names:
        raise results.changed(job.name, f"{record.images:,} images then, {images:,} now")
    say(f"{job.name} is complete: {contents(record)}; nothing to do")
    return 1 if record.errors else 0


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
    files = []
    for number, part in enumerate(parts):
        record = results.check_part(part, f"{number}/{len(parts)}")
        Record(made_with={**record.made_with, **own}).compare(part, {**job.made_with, **own})
        files.append(record.files)

    digest = sha256(to_json(files).encode()).hexdigest()
    job = replace(job, made_with={**job.made_with, "the parts": digest})
    with locked(job.work):
        outputs = job.outputs()
        status = finished_status(job, outputs)
        if status is not None:
            return status
        return 1 if publish(job, parts, outputs).errors else 0


def answer(job: Job, journal: Journal, outputs: Outputs) -> None:
    """Answer the images of this process, what is left of them, or those that failed."""
    lines = partial(results.lines_in, str(journal.rows))
    is_parquet = journal.target.endswith(".parquet") and results.is_part(journal.target)
    # In a log, a line a minute; on a terminal, a bar.
    every = {} if on_terminal() else dict.fromkeys(("delay", "mininterval", "maxinterval"), EVERY)
    with listening() as stop:
        items = job.inputs.of(*job.shard)
        items = journal.begin(items, job.predictor.batch_size, overwrite=job.args.overwrite)
        if journal.failed:
            log.info(f"{journal.target}: retrying {counted(len(journal.failed))}")
            items = iter(journal.failed)
        elif journal.images:
            log.info(f"{journal.target}: {counted(journal.images)} are done, going on")
        rows = job.rows(items, stop, then="; the same command goes on")
        rows = iter(tqdm(rows, journal.target, unit=" images", leave=False, **every))
        if journal.failed:
            journal.retry(results.line_of(job.rule, row) for row in rows)
            return

        try:
            for row in rows:
                journal.add(results.line_of(job.rule, row))
                if is_parquet and journal.images % results.CHUNK == 0:
                    journal.flush()
                    number = journal.images // results.CHUNK - 1
                    results.write_chunk(outputs, journal.target, job.rule, lines, number)
        finally:
            journal.flush()
    journal.finish()
