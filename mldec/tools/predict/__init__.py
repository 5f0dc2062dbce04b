"""Name what images show: `mldec predict best.pt photo.jpg folder/ [--jsonl FILE]`.

After Ctrl-C, a crash or a full disk the same command goes on. Over a complete result it retries the
images that could not be read, or does nothing. With --shard each of many machines answers its
share. docs/predicting.md says what a row holds, docs/scale.md how a hundred million images are
answered.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mldec import cli, lazily
from mldec.errors import ConfigError, suggest

__getattr__ = lazily(__name__, {"Tagger": "tagger"})

# The options of `load`; the others of the command are about files.
OF_LOAD = (
    *("weights", "image_size", "class_names", "plugin", "device", "precision", "views"),
    *("classes", "vectors", "top", "threshold", "thresholds"),
)


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec predict`."""
    arguments = cli.command("predict", "Name what images show.")
    cli.add_model_options(arguments, exported=True)
    cli.add_views_option(arguments)

    images = arguments.add_argument_group("images")
    images.add_argument(
        "images",
        nargs="*",
        help="image files, .tar files or folders of them: paths, or addresses (s3://bucket/photos)",
    )
    images.add_argument(
        "--list",
        metavar="FILE",
        help="a file with one path or address per line, or a .csv or .parquet file with a column "
        "of them (.parquet: or of bytes); - reads lines from standard input",
    )
    images.add_argument(
        "--column",
        metavar="NAME",
        help="of a .csv or .parquet file of --list (default: image, path, url or bytes)",
    )
    images.add_argument(
        "--root", metavar="FOLDER", help="the paths of --list are relative to it (default: to here)"
    )
    images.add_argument(
        "--draft",
        action="store_true",
        help="let the decoder shrink large JPEG files, which is faster and changes pixels a little",
    )

    answers = arguments.add_argument_group("answers")
    answers.add_argument(
        "--content",
        choices=("top", "scores", "decisions"),
        default="top",
        help="the classes with the highest scores, all scores, or the names of the classes that "
        "reach their thresholds (default top)",
    )
    answers.add_argument("--top", type=cli.positive, help="classes per image at most (default 10)")
    answers.add_argument(
        "--threshold",
        type=cli.fraction,
        help="lowest score, 0 to 1, of top and decisions; default: the thresholds of the file, "
        "else 0; without calibration, scores after ASL are not probabilities",
    )
    cli.add_class_options(answers)

    results = arguments.add_argument_group("results")
    results.add_argument("--jsonl", metavar="FILE", help="a line per image; - is standard output")
    results.add_argument("--json", metavar="FILE", help="a JSON list of the same rows; or -")
    results.add_argument("--csv", metavar="FILE", help="a table; or -")
    results.add_argument("--parquet", metavar="FILE", help="a table, which needs pyarrow")
    results.add_argument(
        "--features",
        metavar="FILE",
        help="mean over the tokens of the backbone per image, a .npy file, float32 [N, C]",
    )
    results.add_argument("--overwrite", action="store_true", help="replace them, and begin anew")
    results.add_argument(
        "--shard",
        metavar="I/N",
        help="answer share I of N, from 0, and write it as a file of the folder that --jsonl or "
        "--parquet names; auto/N: the number of a task of SLURM or Kubernetes, auto: of torchrun",
    )
    results.add_argument("--merge", metavar="FOLDER", help="join the parts in such a folder")
    results.add_argument(
        "--progress",
        metavar="FOLDER",
        help="where rows wait until a file is whole (default: beside it; in the cache for a store)",
    )
    results.add_argument(
        "--pictures",
        metavar="FOLDER",
        help="draw each image and a heat map per class, in a JPEG file of this folder",
    )
    results.add_argument(
        "--font",
        metavar="FILE",
        help="TrueType font of --pictures, for names of classes in other letters than English",
    )
    results.add_argument(
        "--xmp",
        action="store_true",
        help="write the classes of each photo as keywords to its sidecar, photo.jpg.xmp",
    )

    work = arguments.add_argument_group("work")
    work.add_argument("--device", default="auto", help="auto, cpu, mps, cuda or cuda:<number>")
    cli.add_precision_option(work, "that of the training if it is fp16 or bf16, else auto")
    work.add_argument("--batch-size", type=cli.positive, help="default 16, on a GPU 64")
    work.add_argument(
        "--workers",
        type=cli.whole,
        metavar="N",
        help="processes that decode images; 0 decodes in this one (default: one per processor)",
    )
    return arguments


def load(
    path: str | Path, *, batch_size: int | None = None, workers: int = 0, **options: Any
) -> Callable[[Any], Any]:
    """Return a function that predicts the classes of photos: `mldec.load("best.pt")("photo.jpg")`.

    A photo is a path, the bytes of an image file, a PIL image, or uint8 values: a numpy array
    [H, W, 3] or a torch tensor [3, H, W]. Gray images and an alpha channel, which is dropped, are
    accepted too. Other dtypes raise an error, because their range is ambiguous.

    The answer to one photo is a `Row`; iterate over it for pairs of a class name and a score. A
    folder, a tar file, a batch of arrays or any iterable of photos gives a list of rows. A photo
    that cannot be read gives a row with `error` in such a list, and raises a `DataError` alone.

    Args:
        path: a checkpoint, as for the command.
        batch_size: images per forward pass; None for 16, or 64 on a GPU.
        workers: processes that decode more than 64 photos; 0 decodes in this process. A script
            that sets it needs `if __name__ == "__main__":`.
        options: those of the command that are in `OF_LOAD`, such as top=3 or threshold=0.5.

    Raises:
        UserError: if an option has an invalid value, or the checkpoint cannot be used.
    """
    from mldec.errors import DataError
    from mldec.runtime.signals import StopRequest
    from mldec.tools.predict.answers import Predictor
    from mldec.tools.predict.photos import is_photo, items

    amounts = parsed(path, {"batch_size": batch_size, "workers": workers})
    engine, rule = opened(path, options)
    predictor = Predictor(engine, rule, batch_size=amounts.batch_size, workers=amounts.workers)

    def predict(photos: Any) -> Any:
        is_single = is_photo(photos)
        rows = list(predictor.rows(items(photos), StopRequest()))
        if not is_single:
            return rows
        [row] = rows
        if row.error is not None:
            raise DataError(row.error)
        return row

    return predict


def parsed(path: str | Path, options: Mapping[str, Any]) -> argparse.Namespace:
    """Parse options that are given from Python with the checks of the command line."""
    words = []
    for name, value in options.items():
        if isinstance(value, list | tuple):
            values = [",".join(map(str, value))] if name == "classes" else value
        else:
            values = [] if value is None else [value]
        words += [f"--{name.replace('_', '-')}={one}" for one in values]

    arguments = parser()
    arguments.exit_on_error = False
    try:
        return arguments.parse_args([*words, "--", str(path)])
    except argparse.ArgumentError as error:
        name = str(error.argument_name).removeprefix("--").replace("-", "_")
        raise ConfigError(f"{name}: {error.message}") from error


def opened(path: str | Path, options: Mapping[str, Any], content: Any = "top") -> tuple[Any, Any]:
    """Return the engine of a checkpoint, with options of `load`, and the rule of its answers."""
    from mldec.tools.predict.answers import chosen_rule
    from mldec.tools.predict.engine import EngineOptions, open_engine

    for name in options:
        if name not in OF_LOAD:
            raise ConfigError(f"{name}: there is no such option{suggest(name, list(OF_LOAD))}")
    args = parsed(path, options)
    engine = open_engine(EngineOptions.of(vars(args)))
    return engine, chosen_rule(engine, content=content, top=args.top, threshold=args.threshold)


def main() -> None:
    """Run the command."""

    def work(args: argparse.Namespace) -> int:
        # Imported late: --help and a wrong argument need not wait for torch.
        from mldec.tools.predict.run import run

        return run(args)

    # Intermixed, so that images may also follow options: their number is free.
    cli.run_command(parser().parse_intermixed_args, work)
