"""Answer what images show: the work of the command `mldec.predict`."""

import argparse
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mldec.checkpoint import Loaded, load_model
from mldec.checkpoint.classes import can_make
from mldec.checkpoint.open_vocabulary import queries_for
from mldec.data.types import Classes
from mldec.errors import CheckpointError, ConfigError, complain, say
from mldec.predict import results
from mldec.predict.answers import Content, Pictures, Predictor, Row, Rule, chosen_rule, counted
from mldec.predict.engine import (
    Engine,
    ExportedEngine,
    OnnxFile,
    TorchEngine,
    check_exported_options,
    is_exported,
)
from mldec.predict.heat_maps import Typeface
from mldec.predict.inputs import Inputs
from mldec.predict.results import Format, Parts, Record, Text
from mldec.predict.xmp import write_sidecar
from mldec.runtime import distributed
from mldec.runtime.cli import chosen_model, keep_output_clean
from mldec.runtime.devices import Precision
from mldec.runtime.results import STANDARD_OUTPUT, check_folder, check_targets, is_special, to_json
from mldec.runtime.signals import listening
from mldec.runtime.torch_files import sha256_of


def check_class_options(args: argparse.Namespace) -> None:
    """Raise a `ConfigError` if the options that choose or name classes do not fit each other."""
    if args.vectors is not None and args.classes is None:
        raise ConfigError(
            f"--vectors {args.vectors} has no effect without --classes: name the classes too"
        )
    if args.classes is not None:
        class_names(args.classes)
    if args.classes is not None and args.class_names is not None:
        raise ConfigError(
            "--classes and --class-names exclude each other: other classes, or other names for "
            "those of the checkpoint"
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

# The options that name result files, and their formats.
FORMATS: dict[str, Callable[[Rule], Format]] = {
    "jsonl": results.json_lines,
    "json": results.json_list,
    "csv": results.comma_separated,
    "parquet": results.Parquet,
    "features": lambda rule: results.Features(),
}
STREAMED = ("jsonl", "json", "csv")  # they can be written to a pipe


def run(args: argparse.Namespace) -> int:
    """Do the work of `mldec.predict`; return the exit status, 1 if an image has no answer."""
    # Everything that can be refused at once comes before the first image.
    check_options(args)
    if STANDARD_OUTPUT in wanted(args).values():
        keep_output_clean()
    inputs = Inputs(args.images, args.list, column=args.column, root=args.root)
    device = distributed.pick_device(args.device)
    engine = open_engine(args, device)
    rule = chosen_rule(
        engine.classes,
        engine.thresholds,
        content=args.content,
        top=args.top,
        threshold=args.threshold,
    )
    formats = {option: FORMATS[option](rule) for option in wanted(args)}
    has_thresholds = args.threshold is not None or rule.stored is not None
    is_decided = rule.content is Content.DECISIONS or has_thresholds
    if args.xmp and (rule.content is Content.SCORES or not is_decided):
        raise ConfigError(
            "--xmp writes the classes that are present: pass --threshold or --content decisions"
        )

    pictures = None
    if args.pictures is not None:
        assert isinstance(engine, TorchEngine)
        pictures = Pictures(engine.loaded, Path(args.pictures), Typeface(args.font))
    predictor = Predictor(
        engine,
        rule,
        device,
        batch_size=args.batch_size,
        workers=args.workers,
        draft=args.draft,
        features=args.features is not None,
        pictures=pictures,
    )

    if is_streamed(args):
        status = to_streams(args, inputs, predictor, rule, formats)
    else:
        files = {Path(target): formats[option] for option, target in wanted(args).items()}
        made_with = facts(args, engine, rule)
        with distributed.processes(device):
            status = to_files(args, inputs, predictor, files, made_with)

    # Said once, where several processes have written.
    is_main = os.environ.get("RANK", "0") == "0"
    has_no_threshold = args.threshold is None and rule.stored is None
    is_ranked_only = has_no_threshold and not engine.classes.exclusive
    if is_main and is_ranked_only and rule.content is Content.TOP:
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
    """Tell whether rows are written as soon as they are known: to the console, a pipe or a device.

    Regular files are written in parts.
    """
    targets = wanted(args).values()
    return not targets or any(map(_is_stream, targets))


def _is_stream(target: str) -> bool:
    return target == STANDARD_OUTPUT or is_special(Path(target))


def check_options(args: argparse.Namespace) -> None:
    """Raise an error for options that do not fit each other, or files that cannot be written."""
    check_class_options(args)
    if args.font is not None and args.pictures is None:
        raise ConfigError("--font has no effect without --pictures: leave it out")
    check_targets(*wanted(args).values())
    if args.pictures is not None:
        check_folder("--pictures", args.pictures)
        Typeface(args.font)

    if args.features is not None and not args.features.endswith(results.NPY):
        raise ConfigError(
            f"--features {args.features}: the name of an array file ends in {results.NPY}"
        )
    if args.features is not None and args.views is not None:
        raise ConfigError("--features are of a single view of an image: leave --views out")
    if is_streamed(args):
        _check_streams(args)
    if is_exported(args.checkpoint):
        check_exported_options(args, "features", "pictures", "views")


def _check_streams(args: argparse.Namespace) -> None:
    """Raise a `ConfigError` for what cannot be written row by row, or not by several processes."""
    for option, target in wanted(args).items():
        if not _is_stream(target):
            raise ConfigError(
                f"--{option} {target}: a file is written in parts and a pipe row by row: choose "
                f"one of them"
            )
        if option not in STREAMED:
            raise ConfigError(f"--{option} {target} must be a file: it is not written row by row")

    if args.overwrite:
        raise ConfigError("--overwrite has no effect without a result file: leave it out")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("several processes write to a file only: pass --jsonl FILE, for example")


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


def facts(args: argparse.Namespace, engine: Engine, rule: Rule) -> dict[str, Any]:
    """Return all that decides what a result holds, by the names that users know, as in JSON."""
    queries = engine.classes.queries
    vectors = None if queries is None else results.digest([queries.numpy().tobytes().hex()])
    known = {
        "the checkpoint": sha256_of(engine.path),
        "--weights": args.weights,
        "--precision": engine.precision,
        "--image-size": engine.image_size,
        "--views": args.views,
        "the classes": results.digest(engine.classes.names),
        "the word vectors": vectors,
        "--content": rule.content.value,
        "--top": rule.top,
        "--threshold": args.threshold,
        "--draft": args.draft,
        "the images": args.images,
        "--list": args.list,
        "--column": args.column,
        "--root": args.root,
        "--pictures": args.pictures,
        "the result files": [f"--{option} {target}" for option, target in wanted(args).items()],
    }
    if args.xmp:
        known["--xmp"] = True
    if args.thresholds is not None:
        known["--thresholds"] = results.digest(map(str, rule.stored or []))
    # As they are read from a record, so that they compare equal to it.
    return dict(json.loads(to_json(known)))


def noted(rows: Iterator[Row], args: argparse.Namespace) -> Iterator[Row]:
    """Write the sidecar of each photo, if it is wanted, before its row."""
    for row in rows:
        if args.xmp:
            write_sidecar(row)
        yield row


def to_streams(
    args: argparse.Namespace,
    inputs: Inputs,
    predictor: Predictor,
    rule: Rule,
    formats: dict[str, Format],
) -> int:
    """Write the rows as they come: to the console, standard output or a device."""
    # Standard output is for a person or for a program, not for both.
    to_person = STANDARD_OUTPUT not in wanted(args).values()

    status = 0
    with ExitStack() as stack:
        stop = stack.enter_context(listening())
        streams = []
        for option, target in wanted(args).items():
            text = formats[option]
            assert isinstance(text, Text)
            streams.append(stack.enter_context(results.streaming(target, text)))

        for row in noted(predictor.rows(iter(inputs), stop), args):
            if row.error is not None:
                status = 1
                complain(row.error)
            elif to_person:
                say(line(row, rule))
            for add in streams:
                add(row)
    return status


def to_files(
    args: argparse.Namespace,
    inputs: Inputs,
    predictor: Predictor,
    files: dict[Path, Format],
    made_with: dict[str, Any],
) -> int:
    """Write the rows to files, in parts that outlive this process."""
    if not inputs.repeatable and distributed.world_size() > 1:
        raise ConfigError("--list -: several processes cannot share standard input; name a file")

    parts = Parts(files)
    with ExitStack() as stack:
        stop = stack.enter_context(listening())
        record, done = distributed.on_main(
            lambda: _begun(parts, made_with, stack, overwrite=args.overwrite)
        )
        if record.finished is not None:
            return distributed.on_main(lambda: _check_finished(record, inputs, parts))

        division = results.Division(
            inputs,
            parts,
            done,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        then = "; the same command goes on"
        to_count = inputs if inputs.repeatable and distributed.is_main() else None
        with results.Progress(str(parts.first), to_count) as progress:
            for row in noted(predictor.rows(division.to_do(), stop, then=then), args):
                if row.error is not None:
                    complain(row.error)
                division.add(row)
                progress.update(division.images)

        # Every process has written its blocks before one of them joins them.
        distributed.gather(None)
        return distributed.on_main(lambda: _finish(record, parts, division.blocks))


def line(row: Row, rule: Rule) -> str:
    """Return the line of the console for an image that was answered."""
    predictions = row.predictions
    if rule.content is Content.SCORES and row.scores is not None:
        predictions = rule.chosen(row.scores)

    names = [prediction.name for prediction in predictions]
    if rule.content is not Content.DECISIONS:
        names = [f"{prediction.name} {prediction.score:.3f}" for prediction in predictions]
    return f"{row.image}: {', '.join(names) or 'nothing'}"


def _begun(
    parts: Parts, made_with: dict[str, Any], stack: ExitStack, *, overwrite: bool
) -> tuple[Record, set[int]]:
    """Begin a result, or go on with it, and return the numbers of the finished blocks.

    Other processes are kept away until the end: the stack takes the locks.
    """
    record = None if overwrite else parts.existing(made_with)
    if record is None or record.finished is None:
        parts.lock(stack)
        # Another command may have made the result before the locks were ours.
        record = None if overwrite else parts.existing(made_with)

    if record is None:
        record = parts.start(made_with)
    if record.finished is not None:
        return record, set()

    done = parts.done()
    if done:
        finished = sum(parts.read(number).images for number in done)
        log.info(f"{parts.first}: {counted(finished)} are done, going on")
    return record, done


def _finish(record: Record, parts: Parts, blocks: int) -> int:
    """Join the parts, print a summary, and return the exit status."""
    summary = parts.finish(record, blocks)
    errors = f", {summary.errors:,} without an answer" if summary.errors else ""
    say(f"{parts.first}: {counted(summary.images)}{errors}")
    return 1 if summary.errors else 0


def _check_finished(record: Record, inputs: Inputs, parts: Parts) -> int:
    """Check that a complete result is of the images of the input, and return the exit status."""
    assert record.finished is not None
    if inputs.repeatable:
        names = (item.name for item in inputs)
        parts.check_all_names(record.finished, names)

    say(f"{parts.first} is complete: {counted(record.finished.images)}; nothing to do")
    return 0
