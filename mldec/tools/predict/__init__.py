"""Predict the classes of images: `mldec predict best.pt photo.jpg folder/ [--jsonl FILE]`.

A command that was stopped or killed is resumed by running it again. See docs/predicting.md, and
docs/scale.md for many machines.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mldec import cli, lazily
from mldec.errors import ConfigError, suggest

__getattr__ = lazily(__name__, {"Tagger": "tagger"})

# Options of the command that `load` and `Tagger` accept.
OF_LOAD = ["weights", "image_size", "class_names", "plugin", "device", "precision", "views"]
OF_LOAD += ["classes", "vectors", "top", "threshold", "thresholds"]


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec predict`."""
    arguments = cli.command("predict", "Predict the classes of images.")
    cli.add_model_options(arguments, exported=True)
    cli.add_views_option(arguments)

    images = arguments.add_argument_group("images")
    images.add_argument(
        "images",
        nargs="*",
        help="image files, .tar files or folders: paths, or addresses such as s3://bucket/photos",
    )
    images.add_argument(
        "--list",
        metavar="FILE",
        help="text file with one path or address per line (- for standard input), or a .csv or "
        ".parquet file with a column of them; .parquet also with image files as bytes",
    )
    images.add_argument(
        "--column",
        metavar="NAME",
        help="column of --list (default: image, path, url or bytes)",
    )
    images.add_argument(
        "--root", metavar="FOLDER", help="folder of relative paths in --list (default: current)"
    )
    images.add_argument(
        "--draft",
        action="store_true",
        help="decode large JPEG files at a smaller size: faster, and pixels change slightly",
    )

    answers = arguments.add_argument_group("predictions")
    answers.add_argument(
        "--content",
        choices=("top", "scores", "decisions"),
        default="top",
        help="the classes with the highest scores, all scores, or the names of the classes above "
        "their thresholds (default top)",
    )
    answers.add_argument("--top", type=cli.positive, help="maximum number of classes (default 10)")
    answers.add_argument(
        "--threshold",
        type=cli.fraction,
        help="minimum score, 0 to 1; default: the thresholds of the checkpoint, else 0. Scores "
        "after ASL are not probabilities unless they are calibrated",
    )
    cli.add_class_options(answers)

    results = arguments.add_argument_group("results")
    results.add_argument("--jsonl", metavar="FILE", help="JSON Lines; - for standard output")
    results.add_argument("--json", metavar="FILE", help="JSON list of the same rows, or -")
    results.add_argument("--csv", metavar="FILE", help="CSV table, or -")
    results.add_argument("--parquet", metavar="FILE", help="Parquet table; needs pyarrow")
    results.add_argument(
        "--features",
        metavar="FILE",
        help="mean of the backbone's tokens per image: a .npy file, float32 [N, C]",
    )
    results.add_argument(
        "--overwrite", action="store_true", help="replace existing result files and start again"
    )
    results.add_argument(
        "--shard",
        metavar="I/N",
        help="predict shard I of N, from 0, and write it to a file in the folder of --jsonl or "
        "--parquet; auto/N: number from SLURM or Kubernetes, auto: from torchrun",
    )
    results.add_argument("--merge", metavar="FOLDER", help="join the shards in a folder")
    results.add_argument(
        "--progress",
        metavar="FOLDER",
        help="folder of unfinished rows (default: next to the result, or a cache for addresses)",
    )
    results.add_argument(
        "--pictures",
        metavar="FOLDER",
        help="write each image with a heat map per class to a JPEG file in this folder",
    )
    results.add_argument("--font", metavar="FILE", help="TrueType font of --pictures")
    results.add_argument(
        "--xmp",
        action="store_true",
        help="write the predicted classes as keywords to the sidecar of each photo, photo.jpg.xmp",
    )

    work = arguments.add_argument_group("processing")
    work.add_argument("--device", default="auto", help="auto, cpu, mps, cuda or cuda:<number>")
    cli.add_precision_option(work, "that of the training if it is fp16 or bf16, else auto")
    work.add_argument("--batch-size", type=cli.positive, help="default 16, on a GPU 64")
    work.add_argument(
        "--workers",
        type=cli.whole,
        metavar="N",
        help="decoding processes; 0 decodes in the main process (default: one per processor)",
    )
    return arguments


def load(
    path: str | Path, *, batch_size: int | None = None, workers: int = 0, **options: Any
) -> Callable[[Any], Any]:
    """Return a function that predicts the classes of photos: `mldec.load("best.pt")("photo.jpg")`.

    A photo is a path, the bytes of an image file, a PIL image, or uint8 values: a numpy array
    [H, W, 3] or a torch tensor [3, H, W]. Gray images and an alpha channel, which is dropped, are
    accepted too. Other dtypes raise an error, because their range is ambiguous.

    One photo gives a `Row`; iterate over it for pairs of a class name and a score. A folder, a tar
    file, a batch of arrays or any iterable of photos gives a list of rows. An unreadable photo
    raises a `DataError`, or gives a row with `error` in a list.

    Args:
        path: A checkpoint, as for the command.
        batch_size: Images per forward pass; None for 16, or 64 on a GPU.
        workers: Processes that decode lists of more than 64 photos; 0 decodes in this process. A
            script that sets it needs `if __name__ == "__main__":`.
        options: Options of the command in `OF_LOAD`, such as top=3 or threshold=0.5.

    Raises:
        UserError: If an option is invalid, or the checkpoint cannot be used.
    """
    from mldec.errors import DataError
    from mldec.runtime.signals import StopRequest
    from mldec.tools.predict.answers import Predictor
    from mldec.tools.predict.photos import is_photo, items

    amounts = parsed(path, {"batch_size": batch_size, "workers": workers})
    engine, rule = opened(path, options)
    predictor = Predictor(engine, rule, batch_size=amounts.batch_size, workers=amounts.workers)

    def predict(photos: Any) -> Any:
        rows = list(predictor.rows(items(photos), StopRequest()))
        if not is_photo(photos):
            return rows
        [row] = rows
        if row.error is not None:
            raise DataError(row.error)
        return row

    return predict


def parsed(path: str | Path, options: Mapping[str, Any]) -> argparse.Namespace:
    """Parse options from Python like the command line does. None is the default of an option."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list | tuple) else [value]
        if name == "classes" and isinstance(value, list | tuple):
            values = [",".join(value)]
        words += [f"--{name.replace('_', '-')}={one}" for one in values if one is not None]

    arguments = parser()
    arguments.exit_on_error = False
    try:
        return arguments.parse_args(words + ["--", str(path)])
    except argparse.ArgumentError as error:
        name = str(error.argument_name).removeprefix("--").replace("-", "_")
        raise ConfigError(f"{name}: {error.message}") from error


def opened(path: str | Path, options: Mapping[str, Any], content: Any = "top") -> tuple[Any, Any]:
    """Return the engine of a checkpoint, and the rule of its predictions."""
    from mldec.tools.predict.answers import chosen_rule
    from mldec.tools.predict.engine import EngineOptions, open_engine

    for name in options:
        if name not in OF_LOAD:
            raise ConfigError(f"{name} is not an option{suggest(name, OF_LOAD)}")
    args = parsed(path, options)
    engine = open_engine(EngineOptions.of(vars(args)))
    return engine, chosen_rule(engine, content=content, top=args.top, threshold=args.threshold)


def main() -> None:
    """Run the command."""

    def work(args: argparse.Namespace) -> int:
        # Import torch only after the arguments are parsed.
        from mldec.tools.predict.run import run

        return run(args)

    # Images may also follow options.
    cli.run_command(parser().parse_intermixed_args, work)
