"""The work of the command `mldec predict`."""

import filecmp
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from mldec.cli import require
from mldec.errors import ConfigError, DataError, log, print_error, say, writing
from mldec.evaluation.options import option_of
from mldec.files.atomic import (
    STANDARD_OUTPUT,
    check_folder,
    check_targets,
    is_stream,
    replacing,
    to_json,
    write_texts,
)
from mldec.files.run_folder import locked
from mldec.files.torch_files import sha256_of
from mldec.names import format_list
from mldec.runtime.console import keep_output_clean, progress_bar
from mldec.runtime.signals import StopRequest, listening
from mldec.tools.heat_maps import Font, fonts, missing_glyphs
from mldec.tools.predict import formats, results, xmp
from mldec.tools.predict.answers import Pictures, Predictor, Row, Rule, chosen_rule, counted
from mldec.tools.predict.decode import Item
from mldec.tools.predict.engine import Engine, TorchEngine, open_engine
from mldec.tools.predict.inputs import Inputs
from mldec.tools.predict.options import PredictOptions

# Options of result files. Texts can be streamed.
TEXTS = list(formats.TEXTS)
FORMATS = TEXTS + ["parquet", "features"]
# Options that change the rows, and that `settings` does not resolve.
SETTINGS = ["weights", "views", "threshold", "draft", "list", "column", "root", "shard", "pictures"]
SETTINGS += ["suggest", "xmp", "xmp_parent", "image_prefix", "sort", "copy"]


def targets_of(options: PredictOptions) -> dict[str, str]:
    """Return the result files by the names of their options."""
    values = {name: getattr(options, name) for name in FORMATS}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Job:
    """The images and the model of a command."""

    options: PredictOptions
    inputs: Inputs
    predictor: Predictor
    rule: Rule

    def rows(self, items: Iterator[Item], stop: StopRequest, *, hint: str = "") -> Iterator[Row]:
        """Yield the row of each item, after its sidecar is written and its error printed."""
        options = self.options
        sidecars: Counter[str] = Counter()
        for row in self.predictor.rows(items, stop, hint=hint):
            try:
                if options.suggest:
                    row = xmp.suggestions(row)
                if options.xmp:
                    sidecars.update(xmp.write_sidecar(row, options.xmp_parent))
                if options.sort is not None:
                    sort_photo(row, Path(options.sort), copy=options.copy)
            except DataError as error:
                row = Row(row.image, error=str(error), retry=True)
            if row.error is not None:
                print_error(row.error)
            yield row
        if options.xmp:
            log.info(f"--xmp: {xmp.sidecar_counts(sidecars)}")


def run(options: PredictOptions) -> int:
    """Run `mldec predict`; return the exit status, which is 1 if an image has an error."""
    if options.xmp_undo:
        # The first argument may be a photo instead of a checkpoint. A checkpoint does no harm here,
        # because it has no sidecars, unless it is a name such as zoo:NAME and not a path.
        paths = list(options.images)
        if Path(options.checkpoint).exists() or not paths:
            paths.insert(0, options.checkpoint)
        return xmp.undo(paths)

    # Check all options before the first image.
    targets = targets_of(options)
    is_streamed = not targets or any(is_stream(target) for target in targets.values())
    check_options(options, is_streamed=is_streamed)
    if STANDARD_OUTPUT in targets.values():
        keep_output_clean()
    picture_fonts = fonts(options.font)
    inputs = Inputs(
        options.images,
        options.list,
        column=options.column,
        root=options.root,
        shard=options.shard,
    )

    engine = open_engine(options)
    rule = chosen_rule(
        engine, content=options.content, top=options.top, threshold=options.threshold
    )
    is_ranked = rule.content == "top" and not rule.has_thresholds
    for name in ("suggest", "xmp", "sort") + formats.PRELABELS:
        if getattr(options, name) and (rule.content == "scores" or is_ranked):
            remedy = "pass --threshold or --content decisions"
            raise ConfigError(f"{option_of(name)}: no predicted classes; {remedy}")
    rule = replace(rule, image_prefix=options.image_prefix)

    pictures = None
    if options.pictures is not None:
        pictures = open_pictures(engine, options.pictures, picture_fonts)
    predictor = Predictor(
        engine,
        rule,
        batch_size=options.batch_size,
        workers=options.workers,
        draft=options.draft,
        features=options.features is not None,
        pictures=pictures,
    )
    job = Job(options, inputs, predictor, rule)
    if is_streamed:
        status = stream(job)
    else:
        status = write_files(job, settings(options, engine, rule))

    if is_ranked and not engine.classes.exclusive:
        print_error(
            f"{options.checkpoint} has no thresholds: classes are ranked by score only; "
            f"pass --threshold, or calibrate it with mldec calibrate"
        )
    if inputs.skipped:
        print_error(str(inputs.skipped))
    return status


def open_pictures(engine: Engine, folder: str, fonts: Sequence[Font]) -> Pictures:
    """Return the pictures in a folder, and report class names that the font cannot show."""
    assert isinstance(engine, TorchEngine)
    missing = missing_glyphs("".join(engine.classes.names), fonts[0])
    if missing:
        fault = f"the font has no glyphs for {format_list(missing)} of the class names"
        print_error(f"--pictures: {fault}; pass --font FILE with another font")
    return Pictures(engine, Path(folder), fonts)


def check_options(options: PredictOptions, *, is_streamed: bool) -> None:
    """Raise ConfigError for options in conflict, or result files that cannot be written."""
    if options.pictures is not None:
        check_folder("--pictures", options.pictures)
    if options.parquet is not None:
        require("--parquet", "parquet", "pyarrow")
    if options.sort is not None:
        check_folder("--sort", options.sort)
        target = Path(options.sort).resolve()
        if any(target.is_relative_to(Path(path).resolve()) for path in options.images):
            # The next command would predict the links as well.
            raise ConfigError(f"--sort {options.sort}: it is inside the photos; choose another one")

    targets = targets_of(options)
    error = None
    if is_streamed and (len(targets) > 1 or not set(targets) <= set(TEXTS)):
        error = f"standard output or a pipe needs {' or '.join(map(option_of, TEXTS))}, and no file"
    elif options.xmp_parent and not options.xmp:
        error = "--xmp-parent needs --xmp"
    elif options.copy and options.sort is None:
        error = "--copy needs --sort"
    elif options.features and options.views:
        error = "--features cannot be combined with --views; leave one out"
    if error is not None:
        raise ConfigError(error)

    paths = list(targets.values())
    if not is_streamed:
        paths.append(paths[0] + results.RECORD)
    check_targets(*paths)


def settings(options: PredictOptions, engine: Engine, rule: Rule) -> dict[str, Any]:
    """Return `made_with` of the record: all settings that change the result, as JSON types."""
    word_vectors = engine.classes.word_vectors
    vectors = b"" if word_vectors is None else word_vectors.numpy().tobytes()
    files = [f"{option_of(name)} {path}" for name, path in targets_of(options).items()]
    values = {
        "the version of the rows": results.VERSION,
        "the checkpoint": sha256_of(engine.path),
        "--precision": engine.precision,
        "--engine": engine.program,
        "--image-size": engine.image_size,
        "--thresholds": sha256(to_json(rule.stored).encode()).hexdigest(),
        "the classes": sha256(to_json(engine.classes.names).encode()).hexdigest(),
        "the word vectors": sha256(vectors).hexdigest(),
        "--content": rule.content,
        "--top": rule.top,
        "the images": options.images,
        "the result files": files,
    }
    for name in SETTINGS:
        values[option_of(name)] = getattr(options, name)
    return dict(json.loads(to_json(values)))


def stream(job: Job) -> int:
    """Write each row immediately to the console, standard output, a pipe or a device."""
    targets = targets_of(job.options)
    is_console = STANDARD_OUTPUT not in targets.values()
    errors = 0

    def lines(stop: StopRequest) -> Iterator[formats.Line]:
        nonlocal errors
        for row in job.rows(iter(job.inputs), stop):
            errors += row.error is not None
            if is_console and row.error is None:
                say(console_line(row, job.rule))
            yield formats.line_of(job.rule, row)

    with listening() as stop:
        if targets:
            [(kind, target)] = targets.items()
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


def sort_photo(row: Row, folder: Path, *, copy: bool) -> None:
    """Add a link to the photo of a row, or a copy, to the folder of each predicted class.

    Different photos of the same name get a hash of their path. Existing files are never replaced.
    """
    if row.error is not None:
        return
    photo = xmp.photo_of(row, "--sort").absolute()
    digest = sha256(os.fsencode(photo)).hexdigest()[:8]
    for prediction in row.predictions:
        # The name of a class may contain slashes or be "..".
        parent = folder / (re.sub(r"[^\w .-]", "_", prediction.name).strip(". ") or "_")
        target = parent / photo.name
        with writing(target):
            parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(target) and not (target.exists() and filecmp.cmp(photo, target)):
                target = parent / f"{photo.stem}-{digest}{photo.suffix}"
            if os.path.lexists(target):
                continue
            if not copy:
                target.symlink_to(photo)
                continue
            with replacing(target) as file:
                file.write(photo.read_bytes())
            shutil.copystat(photo, target)


def write_files(job: Job, made_with: dict[str, Any]) -> int:
    """Predict the remaining images, or those to retry, and write the result files."""
    targets = targets_of(job.options)
    name = next(iter(targets.values()))
    with locked(Path(name + results.PROGRESS)):
        files = results.Results(targets, made_with, overwrite=job.options.overwrite)
        end = "; nothing to do"
        if files.is_complete(job.inputs):
            name += " is complete"
        else:
            with listening() as stop:
                items = files.begin(iter(job.inputs), job.predictor.batch_size)
                if files.retries:
                    log.info(f"{name}: retrying {counted(files.retries)}")
                elif files.images:
                    log.info(f"{name}: resuming after {counted(files.images)}")
                rows = job.rows(items, stop, hint="; run the same command to resume")
                bar = progress_bar(rows, desc=name, unit=" images")
                files.write(formats.line_of(job.rule, row) for row in bar)
            files.publish(job.rule)
            retry = files.record.retry
            end = f"; run the same command to retry {retry:,} of them" if retry else ""

    record = files.record
    errors = f", {record.errors:,} with an error" if record.errors else ""
    say(f"{name}: {counted(record.images or 0)}{errors}{end}")
    return int(record.errors > 0)
