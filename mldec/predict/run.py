"""Answer what images show: the work of the command `mldec.predict`."""

import argparse
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from mldec.checkpoint import Loaded, load_model
from mldec.checkpoint.classes import can_make
from mldec.checkpoint.open_vocabulary import queries_for
from mldec.data.cache import cache_folder
from mldec.data.types import Classes
from mldec.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RunInUseError,
    complain,
    say,
)
from mldec.predict import results, storage
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
from mldec.predict.engine import (
    Engine,
    ExportedEngine,
    OnnxFile,
    TorchEngine,
    check_exported_options,
    is_exported,
)
from mldec.predict.heat_maps import Typeface
from mldec.predict.inputs import STANDARD_INPUT, Inputs, Item
from mldec.predict.results import Journal, Record
from mldec.predict.xmp import write_sidecar
from mldec.runtime import distributed
from mldec.runtime.cli import chosen_model, keep_output_clean, on_terminal, require
from mldec.runtime.devices import Precision
from mldec.runtime.results import STANDARD_OUTPUT, check_folder, check_targets, is_special, to_json
from mldec.runtime.signals import StopRequest, listening
from mldec.runtime.torch_files import sha256_of


def check_class_options(args: argparse.Namespace) -> None:
    """Raise a `ConfigError` if the options that choose or name classes do not fit each other."""
    if args.classes is not None:
        class_names(args.classes)
        if args.class_names is not None:
            raise ConfigError(
                "--classes and --class-names exclude each other: other classes, or other names for "
                "those of the checkpoint"
            )
    elif args.vectors is not None:
        raise ConfigError(
            f"--vectors {args.vectors} has no effect without --classes: name the classes too"
        )


def class_names(text: str) -> tuple[str, ...]:
    """Return the names of classes in a text with commas between them."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError(f"--classes {text!r} names no class: pass names with commas between them")

    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"--classes names {name!r} twice: name each class once")
    return names


def read_classes(
    text: str, vectors: str | None, trained: Classes | None, *, keep: bool = True
) -> Classes:
    """Return classes that a zero-shot model is to score, by their names with commas between them.

    Their word vectors are from a file or a text encoder, see `queries_for`, or made as those of the
    training were. `trained` are the classes of the training, None if these are not known.
    """
    names = class_names(text)
    if trained is not None and trained.exclusive and len(names) < 2:
        raise ConfigError(
            f"--classes names {names[0]!r} alone, and the scores of this model are shares of the "
            f"classes: name at least two"
        )
    return queries_for(names, vectors, trained, option="--classes", keep=keep)


def with_classes(loaded: Loaded, names: str, vectors: str | None) -> Loaded:
    """Return a zero-shot model that scores other classes; see `read_classes`."""
    if loaded.classes.queries is None:
        raise CheckpointError(
            "--classes: the checkpoint knows its own classes only, "
            "it was not trained by word vectors"
        )
    return replace(loaded, classes=read_classes(names, vectors, loaded.classes))


log = logging.getLogger("mldec")

# The options that name result files: rows of text, which can be written to a pipe, and others.
FORMATS = (*results.TEXTS, "parquet", "features")
PARTS = ("jsonl", "parquet")  # they can be the parts of shards
NUMBERS = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")  # variables with the number of a shard
EVERY = 60.0  # seconds between two lines of the log


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
    inputs: Inputs
    predictor: Predictor
    rule: Rule
    made_with: dict[str, Any]  # see `Record`

    def journal(self, target: str) -> Path:
        """Return the folder where the rows of a result file wait until it is whole."""
        folder = self.args.progress
        if folder is None and not storage.is_address(target):
            return Path(results.beside(target, results.JOURNAL))
        name = f"{target.rpartition('/')[2]}-{sha256(target.encode()).hexdigest()[:12]}"
        return Path(folder or cache_folder(None) / "predict", name + results.JOURNAL)


def run(args: argparse.Namespace) -> int:
    """Do the work of `mldec.predict`; return the exit status, 1 if an image has no answer."""
    # Everything that can be refused at once comes before the first image.
    shard = chosen_shard(args.shard)
    check_options(args, shard)
    if STANDARD_OUTPUT in wanted(args).values():
        keep_output_clean()
    inputs = Inputs(args.images, args.list, column=args.column, root=args.root)
    device = distributed.pick_device(args.device)
    engine = open_engine(args, device)
    limits = {"content": args.content, "top": args.top, "threshold": args.threshold}
    rule = chosen_rule(engine.classes, engine.thresholds, **limits)
    is_ranked = args.threshold is None and rule.stored is None and rule.content is Content.TOP
    if args.xmp and (rule.content is Content.SCORES or is_ranked):
        raise ConfigError(
            "--xmp writes the classes that are present: pass --threshold or --content decisions"
        )

    pictures = None
    if args.pictures is not None:
        assert isinstance(engine, TorchEngine)
        pictures = Pictures(engine.loaded, Path(args.pictures), Typeface(args.font))
    amounts = {"batch_size": args.batch_size, "workers": args.workers}
    predictor = Predictor(
        engine,
        rule,
        device,
        draft=args.draft,
        features=args.features is not None,
        pictures=pictures,
        **amounts,
    )

    job = Job(args, shard, inputs, predictor, rule, facts(args, shard, engine, rule))
    if is_streamed(args):
        status = to_streams(job)
    elif args.merge is not None:
        status = merge(job)
    elif args.shard is not None:
        status = to_files(job, part_of(job), Shard(0, 1))
    else:
        status = to_files(job, wanted(args), shard)

    # Said once, where several processes have written.
    if shard.number == 0 and is_ranked and not engine.classes.exclusive:
        complain(
            f"{args.checkpoint} has no thresholds: classes are listed by score alone; pass "
            f"--threshold, or calibrate it with python -m mldec.calibrate"
        )
    return status


def wanted(args: argparse.Namespace) -> dict[str, str]:
    """Return the result files by their options, in the order of `FORMATS`."""
    targets = {option: getattr(args, option) for option in FORMATS}
    return {option: target for option, target in targets.items() if target is not None}


def is_streamed(args: argparse.Namespace) -> bool:
    """Tell whether rows are written as they come: to the console, a pipe or a device."""
    targets = wanted(args).values()
    return not targets or any(map(_is_stream, targets))


def _is_stream(target: str) -> bool:
    return target == STANDARD_OUTPUT or (is_special(Path(target)) and not Path(target).is_dir())


def check_options(args: argparse.Namespace, shard: Shard) -> None:
    """Raise an error for options that do not fit each other, or files that cannot be written."""
    check_class_options(args)
    if args.pictures is not None:
        check_folder("--pictures", args.pictures)
        Typeface(args.font)
    if is_exported(args.checkpoint):
        check_exported_options(args, "features", "pictures", "views")

    if args.parquet is not None:
        require("--parquet", "parquet", "pyarrow")

    is_stream, is_sharded = is_streamed(args), args.shard is not None
    targets = wanted(args)
    for option, target in targets.items():
        fault = None
        if is_stream and not _is_stream(target):
            fault = "a file is written at the end and a pipe row by row: choose one of them"
        elif is_stream and option not in results.TEXTS:
            fault = "it must be a file, because it is not written row by row"
        elif is_sharded and not is_stream and (option not in PARTS or len(targets) > 1):
            fault = f"a shard writes --{' or --'.join(PARTS)}: join them to others with --merge"
        elif target.startswith("http"):
            fault = "no file can be written there: name a path or an object of a store"
        if fault is not None:
            raise ConfigError(f"--{option} {target}: {fault}")
        if is_sharded and not is_stream and not storage.is_address(target):
            check_folder(f"--{option}", target)
    if is_stream or not is_sharded:
        check_targets(*(name for name in targets.values() if not storage.is_address(name)))

    # Options that exclude each other; several processes are those of torchrun.
    is_one, is_input = shard.of == 1, args.list == STANDARD_INPUT
    for is_refused, fault in (
        (args.font and not args.pictures, "--font has no effect without --pictures: leave it out"),
        (
            args.features and not args.features.endswith(results.NPY),
            f"--features {args.features}: the name of an array file ends in {results.NPY}",
        ),
        (
            args.features and args.views,
            "--features are of a single view of an image: leave --views out",
        ),
        (args.overwrite and is_stream, "--overwrite has no effect without a result file"),
        (args.merge and is_stream, "--merge has no effect without a result file"),
        (args.merge and not is_one, "--merge is for one process, and no shard"),
        (
            is_stream and not is_sharded and not is_one,
            "several processes write to a file only, such as --jsonl FILE",
        ),
        (
            args.overwrite and (is_sharded or not is_one),
            "--overwrite is for a single process: remove the result, and it is begun anew",
        ),
        (
            is_input and (args.merge or not is_one),
            "--list -: standard input can be read once, by one process: name a file",
        ),
    ):
        if is_refused:
            raise ConfigError(fault)


def open_engine(args: argparse.Namespace, device: torch.device) -> Engine:
    """Load the network of the command line, with its classes."""
    if is_exported(args.checkpoint):
        classes: Classes | None = None
        if args.classes is not None:
            classes = read_classes(args.classes, args.vectors, None)
        return ExportedEngine(OnnxFile(Path(args.checkpoint)), classes)

    loaded = load_model(**chosen_model(args), device=device)
    train = loaded.config.train
    distributed.prepare_device(device, tf32=train.tf32, deterministic=train.deterministic)
    if args.classes is not None:
        loaded = with_classes(loaded, args.classes, args.vectors)
    if not loaded.classes.names:
        fault = "names no classes and holds no word vectors: pass --classes and --vectors"
        if can_make(loaded.classes):
            fault = "has no classes of its own: pass --classes"
        raise CheckpointError(f"{args.checkpoint} {fault}")
    return TorchEngine(loaded, Precision(args.precision or "auto"))


def facts(args: argparse.Namespace, shard: Shard, engine: Engine, rule: Rule) -> dict[str, Any]:
    """Return all that decides what a result holds, by the names that users know, as in JSON."""
    queries = engine.classes.queries
    known = {
        "the checkpoint": sha256_of(engine.path),
        "--precision": engine.precision,
        "--image-size": engine.image_size,
        "the classes": sha256(to_json(engine.classes.names).encode()).hexdigest(),
        "the word vectors": queries and sha256(queries.numpy().tobytes()).hexdigest(),
        "--content": rule.content.value,
        "--top": rule.top,
        "the images": args.images,
        "--shard of": None if args.shard is None else shard.of,
        "the result files": [f"--{option} {target}" for option, target in wanted(args).items()],
    }
    options = "weights views threshold draft list column root pictures xmp"
    known |= {f"--{name}": getattr(args, name) for name in options.split()}
    if args.thresholds is not None:
        known["--thresholds"] = sha256(to_json(rule.stored).encode()).hexdigest()
    # As they are read from a record, so that they compare equal to it.
    return dict(json.loads(to_json(known)))


def noted(rows: Iterator[Row], args: argparse.Namespace) -> Iterator[Row]:
    """Write the sidecar of each photo, if it is wanted, before its row."""
    for row in rows:
        if args.xmp:
            write_sidecar(row)
        yield row


def to_streams(job: Job) -> int:
    """Write the rows as they come: to the console, standard output or a device."""
    # Standard output is for a person or for a program, not for both.
    targets, errors = wanted(job.args), 0
    to_person = STANDARD_OUTPUT not in targets.values()

    def lines(stop: StopRequest) -> Iterator[bytes]:
        nonlocal errors
        for row in noted(job.predictor.rows(job.inputs.of(*job.shard), stop), job.args):
            if row.error is not None:
                errors += 1
                complain(row.error)
            elif to_person:
                say(line(row, job.rule))
            yield results.line_of(job.rule, row)

    with listening() as stop:
        results.stream(targets, job.rule, lines(stop))
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


def to_files(job: Job, targets: dict[str, str], share: Shard) -> int:
    """Answer the images of this process and write result files; return the exit status.

    Several processes with one result leave their rows to the one that ends last: none waits for
    another one, so that any of them may end and begin again at any time.
    """
    first = next(iter(targets.values()))
    work = job.journal(first)
    if (finished := existing(job, targets, work)) is not None:
        items = job.inputs if job.args.shard is None else job.inputs.of(*job.shard)
        return check_finished(first, finished, items)
    others = {path.name.partition("-of-")[2] for path in work.glob("*-of-*")} - {str(share.of)}
    if others:
        raise ConfigError(
            f"{first} was begun by {max(others)} processes, not {share.of}: start as many again, "
            f"or remove {work}"
        )

    folders = [work / f"{number}-of-{share.of}" for number in range(share.of)]
    made_with = {**job.made_with, "the number of processes": share.of}
    journal = Journal(folders[share.number], first, made_with)
    with results.locked(journal.folder):
        written = answer(job, journal)

    try:
        with results.locked(work):
            records = [Record.read(str(folder / results.HOW)) for folder in folders]
            # A status of 1 would make torchrun end the other processes.
            if not all(record and record.images is not None for record in records):
                return 0
            rows = [str(folder / results.ROWS) for folder in folders]
            status = publish(job, targets, rows, work, written)
            for folder in folders:
                shutil.rmtree(folder)
    except RunInUseError:
        if share.of == 1:
            raise
        return 0  # another process has ended too, and writes the result
    return status


def publish(
    job: Job, targets: dict[str, str], rows: list[str], work: Path, written: Sequence[int] = ()
) -> int:
    """Write result files of rows, say what they hold, and return the exit status."""
    lines = partial(results.joined, rows, job.inputs)
    record = results.publish(targets, job.rule, lines, job.made_with, work, written=written)
    errors = f", {record.errors:,} without an answer" if record.errors else ""
    say(f"{next(iter(targets.values()))}: {counted(record.images or 0)}{errors}")
    return 1 if record.errors else 0


def existing(job: Job, targets: dict[str, str], work: Path) -> Record | None:
    """Return the record of a complete result; None if something is to be done.

    What was made otherwise is refused, and so is what has no record.
    """
    if job.args.overwrite:
        return None
    first = next(iter(targets.values()))
    record = Record.read(results.beside(first, results.RECORD))
    if record is not None:
        record.compare(first, job.made_with)
        return record if all(map(storage.exists, targets.values())) else None

    for target in targets.values():
        if not work.exists() and not results.is_part(target) and storage.exists(target):
            raise ConfigError(
                f"{target} exists, and nothing says how it was made: name another file, or pass "
                f"--overwrite"
            )
    return None


def part_of(job: Job) -> dict[str, str]:
    """Return the file of a shard in the folder that the option names."""
    [(option, folder)] = wanted(job.args).items()
    shards = len(results.parts_in(folder))
    if shards not in (0, job.shard.of):
        raise ConfigError(
            f"{folder} holds parts of {shards} shards, not {job.shard.of}: name another folder"
        )
    return {option: results.part_of(folder, option, *job.shard)}


def merge(job: Job) -> int:
    """Join the parts of shards to result files, and return the exit status."""
    folder, targets = job.args.merge, wanted(job.args)
    first = next(iter(targets.values()))
    parts = results.parts_in(folder)
    if not parts:
        raise DataError(f"--merge {folder}: there are no parts; name the folder of --shard")
    if parts[0].endswith(".parquet") and [*targets] != ["parquet"]:
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

    work = job.journal(first)
    if (finished := existing(job, targets, work)) is not None:
        return check_finished(first, finished, job.inputs)
    with results.locked(work):
        return publish(job, targets, parts, work)


def answer(job: Job, journal: Journal) -> list[int]:
    """Answer the images of this process, or what is left of them.

    Returns the numbers of the files of rows of a Parquet part that were written on the way.
    """
    written: list[int] = []
    lines = partial(results.lines_in, str(journal.rows))
    is_parquet = journal.target.endswith(".parquet") and results.is_part(journal.target)
    with ExitStack() as stack:
        stop = stack.enter_context(listening())
        items = journal.begin(
            job.inputs.of(*job.shard), job.predictor.batch_size, overwrite=job.args.overwrite
        )
        if journal.images:
            log.info(f"{journal.target}: {counted(journal.images)} are done, going on")
        show = stack.enter_context(progress(journal.target))
        stack.callback(journal.flush)
        rows = job.predictor.rows(items, stop, then="; the same command goes on")
        for row in noted(rows, job.args):
            if row.error is not None:
                complain(row.error)
            journal.add(results.line_of(job.rule, row))
            show()
            if is_parquet and journal.images % results.CHUNK == 0:
                journal.flush()
                written.append(journal.images // results.CHUNK - 1)
                results.write_chunk(journal.target, job.rule, lines, written[-1], journal.folder)
    journal.finish()
    return written


@contextmanager
def progress(title: str) -> Iterator[Callable[[], None]]:
    """Yield a function that shows one more image, in a bar or by a line of the log a minute."""
    started = last = time.monotonic()
    images = 0
    with tqdm(desc=title, unit=" images", leave=False, disable=not on_terminal()) as bar:

        def show() -> None:
            nonlocal images, last
            images += 1
            bar.update()
            now = time.monotonic()
            if bar.disable and now - last >= EVERY:
                last = now
                log.info(f"{title}: {images:,} images, {images / (now - started):.1f} images/s")

        yield show


def check_finished(target: str, record: Record, items: Iterable[Item]) -> int:
    """Check that a complete result is of the images of the input, and return the exit status."""
    images, names = results.summed(named(item.name)["image"] for item in items)
    if names != record.names:
        raise results.changed(target, f"{record.images:,} images then, {images:,} now")
    say(f"{target} is complete: {counted(images)}; nothing to do")
    return 0
