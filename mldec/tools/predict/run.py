"""The work of the command `mldec predict`."""

import argparse
import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from mldec.cli import require
from mldec.errors import ConfigError, DataError, RunInUseError, print_error, say
from mldec.files.atomic import (
    STANDARD_OUTPUT,
    check_folder,
    check_targets,
    is_stream,
    named,
    to_json,
    write_texts,
)
from mldec.files.cache import cache_folder
from mldec.files.run_folder import locked
from mldec.files.torch_files import sha256_of
from mldec.runtime.console import keep_output_clean, progress_bar
from mldec.runtime.signals import StopRequest, listening
from mldec.tools.predict import formats, results, storage, xmp
from mldec.tools.predict.answers import Pictures, Predictor, Row, Rule, chosen_rule, counted
from mldec.tools.predict.decode import Item
from mldec.tools.predict.engine import Engine, EngineOptions, TorchEngine, open_engine
from mldec.tools.predict.heat_maps import fonts
from mldec.tools.predict.inputs import STANDARD_INPUT, Inputs, Shard, chosen_shard
from mldec.tools.predict.results import Journal, Outputs, Record

log = logging.getLogger("mldec")

# Options of result files. Texts can be streamed, and parts are files of shards.
TEXTS = list(formats.TEXTS)
FORMATS = TEXTS + ["parquet", "features"]
PARTS = ("jsonl", "parquet")
# Options that change the rows.
SETTINGS = ["weights", "views", "threshold", "draft", "list", "column", "root", "pictures"]
SETTINGS += ["suggest", "xmp", "xmp_parent", "image_prefix"]


@dataclass(frozen=True)
class Job:
    """The inputs, the model and the outputs of a command."""

    args: argparse.Namespace
    shard: Shard
    targets: dict[str, str]  # the result files of this process, by their options
    inputs: Inputs
    predictor: Predictor
    rule: Rule
    made_with: dict[str, Any]  # see `Record`

    @property
    def name(self) -> str:
        """The first result file."""
        return next(iter(self.targets.values()))

    @property
    def work(self) -> Path:
        """The local folder of the journals."""
        folder = self.args.progress
        if folder is None and not storage.is_address(self.name):
            return Path(results.companion(self.name, results.JOURNAL))
        name = f"{self.name.rpartition('/')[2]}-{sha256(self.name.encode()).hexdigest()[:12]}"
        return Path(folder or cache_folder(None) / "predict", name + results.JOURNAL)

    def outputs(self) -> Outputs:
        """Return the result files of this process."""
        return Outputs(self.targets, self.made_with, self.work, self.args.overwrite)

    def rows(self, items: Iterator[Item], stop: StopRequest, *, hint: str = "") -> Iterator[Row]:
        """Yield the row of each item, after its sidecar is written and its error printed."""
        sidecars: Counter[str] = Counter()
        for row in self.predictor.rows(items, stop, hint=hint):
            try:
                if self.args.suggest:
                    row = xmp.suggestions(row)
                if self.args.xmp:
                    sidecars.update(xmp.write_sidecar(row, self.args.xmp_parent))
            except DataError as error:
                row = Row(row.image, error=str(error), retry=True)
            if row.error is not None:
                print_error(row.error)
            yield row
        if self.args.xmp:
            log.info(f"--xmp: {xmp.sidecar_counts(sidecars)}")


def run(args: argparse.Namespace) -> int:
    """Run `mldec predict`; return the exit status, which is 1 if an image has an error."""
    if args.xmp_undo:
        # The first path is a checkpoint in a repeated command, or else photos.
        first = [args.checkpoint] if Path(args.checkpoint).exists() or not args.images else []
        return xmp.undo(first + args.images)

    # Check all options before the first image.
    shard = chosen_shard(args.shard)
    targets = {}
    for name in FORMATS:
        if getattr(args, name) is not None:
            targets[name] = getattr(args, name)
    is_streamed = not targets or any(is_stream(target) for target in targets.values())
    check_options(args, shard, targets, is_streamed=is_streamed)
    if STANDARD_OUTPUT in targets.values():
        keep_output_clean()
    if args.shard is not None and not is_streamed:
        [(kind, folder)] = targets.items()
        count = len(results.parts_in(folder))
        if count not in (0, shard.total):
            raise ConfigError(f"{folder} has parts of {count} shards; use another folder")
        targets = {kind: results.part_of(folder, kind, shard)}

    picture_fonts = fonts(args.font)
    inputs = Inputs(args.images, args.list, column=args.column, root=args.root)
    engine = open_engine(EngineOptions.of(vars(args)))
    rule = chosen_rule(engine, content=args.content, top=args.top, threshold=args.threshold)
    is_ranked = rule.content == "top" and not rule.has_thresholds
    for name in ("suggest", "xmp") + formats.PRELABELS:
        if getattr(args, name) and (rule.content == "scores" or is_ranked):
            remedy = "pass --threshold or --content decisions"
            raise ConfigError(f"{option_of(name)}: no predicted classes; {remedy}")
    rule = replace(rule, image_prefix=args.image_prefix)

    pictures = None
    if args.pictures is not None:
        assert isinstance(engine, TorchEngine)
        pictures = Pictures(engine, Path(args.pictures), picture_fonts)
    predictor = Predictor(
        engine,
        rule,
        batch_size=args.batch_size,
        workers=args.workers,
        draft=args.draft,
        features=args.features is not None,
        pictures=pictures,
    )
    made_with = settings(args, shard, targets, engine, rule)
    job = Job(args, shard, targets, inputs, predictor, rule, made_with)
    if is_streamed:
        status = to_stream(job)
    elif args.merge is not None:
        status = merge(job)
    else:
        status = to_files(job)

    # One of several processes prints this.
    if shard.number == 0 and is_ranked and not engine.classes.exclusive:
        print_error(
            f"{args.checkpoint} has no thresholds: classes are ranked by score only; "
            f"pass --threshold, or calibrate it with mldec calibrate"
        )
    if shard.number == 0 and inputs.unsupported:
        print_error(str(inputs.unsupported))
    # torchrun would end the other processes after status 1.
    return 0 if args.shard == "auto" else status


def option_of(name: str) -> str:
    """Return the option with a name of `FORMATS`."""
    return f"--{name.replace('_', '-')}"


def check_options(
    args: argparse.Namespace, shard: Shard, targets: dict[str, str], *, is_streamed: bool
) -> None:
    """Raise ConfigError for options in conflict, or result files that cannot be written."""
    if args.pictures is not None:
        check_folder("--pictures", args.pictures)
    if args.parquet is not None:
        require("--parquet", "parquet", "pyarrow")

    error = None
    is_part = args.shard is not None and not is_streamed
    if is_streamed and (len(targets) > 1 or not set(targets) <= set(TEXTS)):
        error = f"standard output or a pipe needs {' or '.join(map(option_of, TEXTS))}, and no file"
    elif is_part and (len(targets) > 1 or not set(targets) <= set(PARTS)):
        error = f"--shard: pass --{' or --'.join(PARTS)}; use --merge for other formats"
    elif args.xmp_parent and not args.xmp:
        error = "--xmp-parent needs --xmp"
    elif args.features and args.views:
        error = "--features cannot be combined with --views; leave one out"
    elif args.merge and is_streamed:
        error = "--merge needs a result file, such as --jsonl FILE"
    elif args.overwrite and (args.shard is not None or shard.total > 1):
        error = "--overwrite is for one process; remove the result files instead"
    elif args.list == STANDARD_INPUT and (args.merge or shard.total > 1):
        error = "--list -: standard input can be read once, by one process; pass a file"
    if error is not None:
        raise ConfigError(error)

    if targets and not is_part:
        paths = list(targets.values())
        if not is_streamed:
            paths.append(results.companion(paths[0], results.RECORD))
        check_targets(*[path for path in paths if not storage.is_address(path)])


def settings(
    args: argparse.Namespace, shard: Shard, targets: dict[str, str], engine: Engine, rule: Rule
) -> dict[str, Any]:
    """Return `made_with` of the records: all settings that change the result, as JSON types."""
    word_vectors = engine.classes.word_vectors
    vectors = b"" if word_vectors is None else word_vectors.numpy().tobytes()
    values = {
        "the version of the rows": results.VERSION,
        "the checkpoint": sha256_of(engine.path),
        "--precision": engine.precision,
        "--image-size": engine.image_size,
        "--thresholds": sha256(to_json(rule.stored).encode()).hexdigest(),
        "the classes": sha256(to_json(engine.classes.names).encode()).hexdigest(),
        "the word vectors": sha256(vectors).hexdigest(),
        "--content": rule.content,
        "--top": rule.top,
        "the images": args.images,
        "--shard of": None if args.shard is None else shard.total,
        "the result files": [f"{option_of(name)} {path}" for name, path in targets.items()],
    }
    for name in SETTINGS:
        values[option_of(name)] = getattr(args, name)
    return dict(json.loads(to_json(values)))


def to_stream(job: Job) -> int:
    """Write each row immediately to the console, standard output, a pipe or a device."""
    is_console = STANDARD_OUTPUT not in job.targets.values()
    errors = 0

    def lines(stop: StopRequest) -> Iterator[bytes]:
        nonlocal errors
        for row in job.rows(job.inputs.of(*job.shard), stop):
            errors += row.error is not None
            if is_console and row.error is None:
                say(console_line(row, job.rule))
            yield formats.line_of(job.rule, row)

    with listening() as stop:
        if job.targets:
            [(kind, target)] = job.targets.items()
            write_texts(target, formats.TEXTS[kind](job.rule, lines(stop)))
        else:
            for _ in lines(stop):
                pass
    return int(errors > 0)


def console_line(row: Row, rule: Rule) -> str:
    """Return the text of a row without an error for the console."""
    predictions = row.predictions
    if rule.content == "scores" and row.scores is not None:
        predictions = rule.chosen(row.scores)

    names = []
    for prediction in predictions:
        name = prediction.name
        if rule.content != "decisions":
            name += f" {prediction.score:.3f}"
        names.append(name)
    return f"{row.image}: {', '.join(names) or 'nothing'}"


def to_files(job: Job) -> int:
    """Write the rows of this process to its journal, and the result files from all journals.

    Processes of one torchrun do not wait for each other. The last process writes the result files.
    Each process can be killed and restarted at any time.
    """
    # Processes with --shard write one part each.
    share = Shard(0, 1)
    if job.args.shard is None:
        share = job.shard
    folders = [job.work / str(number) for number in range(share.total)]
    outputs = job.outputs()
    status = finished_status(job, outputs)
    if status is not None:
        # A process may have been killed between the result and the removal of its journal.
        results.remove_journals(job.work, folders)
        return status

    made_with = {**job.made_with, "the number of processes": share.total}
    journal = Journal(folders[share.number], job.name, made_with)
    with locked(journal.folder):
        write_journal(job, journal)

    try:
        with locked(job.work):
            done = []
            for folder in folders:
                record = Record.read(str(folder / results.HOW))
                if record and record.images is not None and not record.retry:
                    done.append(record)
            # torchrun would end the other processes after status 1.
            if len(done) < len(folders):
                return 0
            parts = [[str(folder / results.ROWS)] for folder in folders]
            result = publish(job, parts, outputs)
            if not result.retry:
                results.remove_journals(job.work, folders)
                return int(result.errors > 0)

            # The next command writes the result after each process has retried its images.
            for folder, record in zip(folders, done, strict=True):
                replace(record, retry=result.retry).write(str(folder / results.HOW), folder)
            return 1
    except RunInUseError:
        if share.total == 1:
            raise
        return 0  # another process writes the result


def write_journal(job: Job, journal: Journal) -> None:
    """Predict the remaining images of this process, or the images to retry."""
    with listening() as stop:
        items = job.inputs.of(*job.shard)
        items = journal.begin(items, job.predictor.batch_size, job.args.overwrite)
        if journal.failed:
            log.info(f"{job.name}: retrying {counted(len(journal.failed))}")
        elif journal.images:
            log.info(f"{job.name}: resuming after {counted(journal.images)}")
        rows = job.rows(items, stop, hint="; run the same command to resume")
        progress = progress_bar(rows, desc=job.name, unit=" images")
        lines = (formats.line_of(job.rule, row) for row in progress)
        if journal.failed:
            journal.retry(lines)
        else:
            try:
                for line in lines:
                    journal.add(line)
            finally:
                journal.flush()
    journal.finish()


def publish(job: Job, parts: list[list[str]], outputs: Outputs) -> Record:
    """Write the result files from the files of each part, and return their record."""
    lines = partial(results.joined, parts, job.inputs, job.name)
    record = outputs.publish(job.rule, lines, job.inputs)
    hint = f"; run the same command to retry {record.retry:,} of them" if record.retry else ""
    say(f"{job.name}: {summary(record)}{hint}")
    return record


def summary(record: Record) -> str:
    """Return the numbers of images and errors of a result as text."""
    errors = f", {record.errors:,} with an error" if record.errors else ""
    return f"{counted(record.images or 0)}{errors}"


def finished_status(job: Job, outputs: Outputs) -> int | None:
    """Print and return the exit status of a complete result; None if there are images left."""
    record = outputs.record
    if record is not None:
        record.compare(job.name, job.made_with)
    if not outputs.is_complete() or record is None or record.retry:
        return None

    items = job.inputs if job.args.shard is None else job.inputs.of(*job.shard)
    images, names = results.count_and_hash(named(item.name)["image"] for item in items)
    if names != record.names:
        raise results.changed(job.name, f"{record.images:,} images then, {images:,} now")
    say(f"{job.name} is complete: {summary(record)}; nothing to do")
    return int(record.errors > 0)


def merge(job: Job) -> int:
    """Write result files from the parts of shards; return the exit status."""
    folder = job.args.merge
    parts = results.parts_in(folder)
    if not parts:
        raise DataError(f"--merge {folder} has no parts; pass the folder of --shard")
    kind = parts[0].rpartition(".")[2]
    if kind == "parquet" and list(job.targets) != ["parquet"]:
        raise ConfigError(f"--merge {folder}: Parquet parts can only be merged to --parquet")

    # The settings of the parts differ only in the names of their files.
    own = dict.fromkeys(("the result files", "--shard of"))
    files = []
    fingerprints = []
    for number, part in enumerate(parts):
        outputs = Outputs({kind: part}, {}, job.work, False)
        record = outputs.record
        if record is None or not outputs.is_complete():
            shard = f"{number}/{len(parts)}"
            raise DataError(f"{part} is missing or incomplete; run --shard {shard} again")
        Record(made_with={**record.made_with, **own}).compare(part, {**job.made_with, **own})
        files.append([f"{part.rpartition('/')[0]}/{name}" for name in sorted(record.files)])
        fingerprints.append(record.files)

    digest = sha256(to_json(fingerprints).encode()).hexdigest()
    job = replace(job, made_with={**job.made_with, "the parts": digest})
    with locked(job.work):
        outputs = job.outputs()
        status = finished_status(job, outputs)
        if status is None:
            status = int(publish(job, files, outputs).errors > 0)
        return status
