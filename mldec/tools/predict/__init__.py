"""Predict the classes of images: `mldec predict best.pt photo.jpg folder/ [--jsonl FILE]`.

Running the same command again resumes it after a stop or kill, and retries images that could not
be read. See docs/predicting.md, and docs/scale.md for Ray Data.
"""

import argparse

from mldec import cli, lazily
from mldec.tools.predict.options import PredictOptions

__getattr__ = lazily(__name__, {"Tagger": "tagger"})

# The options of the results, in the order of --help.
RESULTS = ["jsonl", "json", "csv", "label_studio", "image_prefix", "cvat", "parquet", "features"]
RESULTS += ["overwrite", "pictures", "font", "suggest", "xmp", "xmp_parent", "xmp_undo"]
RESULTS += ["sort", "copy"]


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec predict`."""
    arguments = cli.command("predict", "Predict the classes of images.")
    cli.add_model_options(arguments, exported=True)
    cli.add_options(arguments, PredictOptions, "views")
    cli.add_options(add_images(arguments), PredictOptions, "shard")
    group = arguments.add_argument_group("predictions")
    names = ("content", "top", "threshold", "classes", "vectors")
    cli.add_options(group, PredictOptions, *names)
    cli.add_options(arguments.add_argument_group("results"), PredictOptions, *RESULTS)
    add_processing(arguments)
    return arguments


def add_images(arguments: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the arguments of the input images, and return their group."""
    group = arguments.add_argument_group("images")
    group.add_argument("images", nargs="*", help="images, .tar files or folders")
    cli.add_options(group, PredictOptions, "list", "column", "root", "draft")
    return group


def add_processing(arguments: argparse.ArgumentParser) -> None:
    """Add the options of the device and of the loader."""
    group = arguments.add_argument_group("processing")
    names = ("device", "precision", "compile", "engine", "batch_size", "workers")
    cli.add_options(group, PredictOptions, *names)


def main() -> None:
    """Run the command."""

    def work(options: PredictOptions) -> int:
        # Import torch only after the options are checked.
        from mldec.tools.predict.run import run

        return run(options)

    # Images may also follow options.
    cli.run_command(parser().parse_intermixed_args, work, PredictOptions)
