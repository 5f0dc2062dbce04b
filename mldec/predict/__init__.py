"""Name what images show: `python -m mldec.predict best.pt photo.jpg folder/ [--jsonl FILE]`.

After Ctrl-C, a crash or a full disk the same command goes on. Over a complete result it retries the
images that could not be read, or does nothing. With --shard each of many machines answers its
share. docs/predicting.md says what a row holds, docs/scale.md how a hundred million images are
answered.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mldec import lazily
from mldec.errors import ConfigError, suggest
from mldec.runtime import cli

__getattr__ = lazily(__name__, {"Tagger": "tagger"})

# The options of `load`; the others of the command are about files.
OF_LOAD = (
    *("weights", "image_size", "class_names", "plugin", "device", "precision", "views"),
    *("classes", "vectors", "top", "threshold", "thresholds"),
)


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec.predict`."""
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
    cli.add_precision_option(work, "auto")
    work.add_argument("--batch-size", type=cli.positive, help="default 16, on a GPU 64")
    work.add_argument(
        "--workers",
        type=cli.whole,
        metavar="N",
        help="processes that decode images; 0 decodes in this one (default: one per processor)",
    )
    return arguments


def load(path: str | Path, **options: Any) -> Callable[[Any], list[Any]]:
    """Return a function that names what photos show: `mldec.load("best.pt")("photo.jpg")`.

    A photo is a path or a PIL image; it gives classes and scores, as the command prints them, and a
    list gives a list. The options are those of the command that are in `OF_LOAD`, such as top=3.
    """
    from mldec.data.images import load_image, upright

    engine, rule = opened(path, options)

    def predicted(photo: Any) -> list[Any]:
        if isinstance(photo, list | tuple):
            return [predicted(one) for one in photo]
        if isinstance(photo, str | Path):
            image = load_image(photo, engine.transform, decoder=engine.decoder)
        else:
            image = engine.transform(upright(photo))
        [scores] = engine.answer([image]).scores.cpu()
        return [(one.name, one.score) for one in rule.chosen(scores)]

    return predicted


def opened(path: str | Path, options: Mapping[str, Any], content: Any = "top") -> tuple[Any, Any]:
    """Return the engine of a checkpoint, with options of `load`, and the rule of its answers."""
    from mldec.predict.answers import chosen_rule
    from mldec.predict.engine import open_engine

    args = parser().parse_args([str(path)])
    for name, value in options.items():
        if name not in OF_LOAD:
            raise ConfigError(f"{name}: there is no such option{suggest(name, list(OF_LOAD))}")
        setattr(args, name, value)
    engine = open_engine(args)
    return engine, chosen_rule(engine, content=content, top=args.top, threshold=args.threshold)


def main() -> None:
    """Run the command."""

    def work(args: argparse.Namespace) -> int:
        # Imported late: --help and a wrong argument need not wait for torch.
        from mldec.predict.run import run

        return run(args)

    # Intermixed, so that images may also follow options: their number is free.
    cli.run_command(parser().parse_intermixed_args, work)
