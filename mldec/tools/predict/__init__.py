"""Predict the classes of images: `mldec predict best.pt photo.jpg folder/ [--jsonl FILE]`.

Running the same command again resumes it after a stop or kill, and retries images that could not
be read. See docs/predicting.md, and docs/scale.md for Ray Data.
"""

import argparse

from mldec import cli, lazily
from mldec.tools.predict.options import PredictOptions

__getattr__ = lazily(__name__, {"Tagger": "tagger"})


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec predict`."""
    arguments = cli.command("predict", "Predict the classes of images.")
    cli.add_model_options(arguments, exported=True)
    cli.add_views_option(arguments)

    image_options(arguments).add_argument(
        "--shard",
        type=shard,
        default=(0, 1),
        metavar="I/N",
        help="predict only every N-th image, beginning with number I, from 0",
    )

    predictions = arguments.add_argument_group("predictions")
    add = predictions.add_argument
    add(
        "--content",
        choices=("top", "scores", "decisions"),
        default="top",
        help="the predicted classes with their scores (default), all scores, or only the names of "
        "the predicted classes",
    )
    add("--top", type=cli.positive, help="maximum number of classes; without thresholds: 10")
    add(
        "--threshold",
        type=cli.fraction,
        help="minimum score, 0 to 1; default: the thresholds of the checkpoint, if any. Scores "
        "of models trained with ASL are not probabilities unless they are calibrated",
    )
    cli.add_class_options(predictions)

    add = arguments.add_argument_group("results").add_argument
    add("--jsonl", metavar="FILE", help="JSON Lines; - for standard output")
    add("--json", metavar="FILE", help="JSON list of the same rows, or -")
    add("--csv", metavar="FILE", help="CSV table, or -")
    add("--label-studio", metavar="FILE", help="tasks with predictions, to import; or -")
    add(
        "--image-prefix",
        metavar="TEXT",
        default="",
        help="text before the paths in --label-studio, such as /data/local-files/?d=",
    )
    add("--cvat", metavar="FILE", help="tags as CVAT for images 1.1, to upload; or -")
    add("--parquet", metavar="FILE", help="Parquet table; needs pyarrow")
    add("--features", metavar="FILE", help="mean of the backbone's tokens: .npy, float32 [N, C]")
    add("--overwrite", action="store_true", help="replace existing result files and start again")
    add("--pictures", metavar="FOLDER", help="write a JPEG file with heat maps per image")
    add("--font", metavar="FILE", help="font of --pictures, a .ttf or .otf file")
    add("--suggest", action="store_true", help="leave out classes that are keywords of the photo")
    add(
        "--xmp",
        action="store_true",
        help="add classes that are not keywords of the photo to its sidecar, photo.jpg.xmp",
    )
    add("--xmp-parent", metavar="NAME", help="parent of the keywords of --xmp, such as Suggested")
    add(
        "--xmp-undo",
        action="store_true",
        help="remove all keywords that --xmp has added; needs no checkpoint",
    )

    add("--sort", metavar="FOLDER", help="add links to the photos to a folder per predicted class")
    add("--copy", action="store_true", help="copies instead of links in the folders of --sort")

    processing_options(arguments)
    return arguments


def shard(text: str) -> tuple[int, int]:
    """Parse I/N with 0 <= I < N."""
    number, _, total = text.partition("/")
    if number == "auto":
        raise argparse.ArgumentTypeError(f"{text} was removed; run one process for each I/{total}")
    if not (number.isdecimal() and total.isdecimal() and int(number) < int(total)):
        raise argparse.ArgumentTypeError(f"{text} is not I/N with 0 <= I < N, such as 0/4")
    return int(number), int(total)


def image_options(arguments: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the arguments of the input images, and return their group."""
    group = arguments.add_argument_group("images")
    add = group.add_argument
    add("images", nargs="*", help="images, .tar files or folders")
    add(
        "--list",
        metavar="FILE",
        help="text file with one path per line (- for standard input), or a .csv or .parquet file "
        "with a column of them; .parquet also with image files as bytes",
    )
    add("--column", metavar="NAME", help="column of --list (default: image, path or bytes)")
    add("--root", metavar="FOLDER", help="folder of relative paths in --list (default: current)")
    add("--draft", action="store_true", help="decode large JPEG files smaller: faster, less exact")
    return group


def processing_options(arguments: argparse.ArgumentParser) -> None:
    """Add the options of the device and of the loader."""
    processing = arguments.add_argument_group("processing")
    add = processing.add_argument
    add("--device", default="auto", help="auto, cpu, mps, cuda or cuda:<number>")
    cli.add_precision_option(
        processing, "on a GPU that of the training if fp16 or bf16, else auto; on a CPU fp32"
    )
    cli.add_compile_option(processing)
    cli.add_engine_option(processing)
    add("--batch-size", type=cli.positive, help="default 16, on a GPU 64")
    add("--workers", type=cli.whole, metavar="N", help="decoding processes (default: one per CPU)")


def main() -> None:
    """Run the command."""

    def work(options: PredictOptions) -> int:
        # Import torch only after the options are checked.
        from mldec.tools.predict.run import run

        return run(options)

    # Images may also follow options.
    cli.run_command(parser().parse_intermixed_args, work, PredictOptions)
