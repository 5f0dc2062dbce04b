"""The options of the jobs of `mldec.benchmark`; nothing slow is imported for them."""

from argparse import ArgumentParser

from mldec.cli import positive


def device(parser: ArgumentParser) -> None:
    """Add the device."""
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")


def head(parser: ArgumentParser) -> None:
    """Add the options of the job that measures the head."""
    device(parser)
    parser.add_argument(
        "--batch-size", type=positive, default=16, help="images per batch (default 16)"
    )


def data(parser: ArgumentParser) -> None:
    """Add the options of the job that takes the training transform apart."""
    parser.add_argument(
        "folder", nargs="?", metavar="FOLDER", help="of photos, beside a made picture"
    )


def queries(parser: ArgumentParser) -> None:
    """Add the options of the job that varies the number of word queries."""
    device(parser)
    parser.add_argument("--batch-size", type=int, default=8, help="images per batch (default 8)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of timing per number of queries"
    )


def predict(parser: ArgumentParser) -> None:
    """Add the options of the job that answers photos."""
    parser.add_argument("checkpoint", help="as for mldec.predict")
    parser.add_argument("images", metavar="FOLDER", help="of images")
    parser.add_argument(
        "--count", type=positive, default=512, help="images per round (default 512)"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="timed (default 5)")
    device(parser)


def experiment(parser: ArgumentParser) -> None:
    """Add the options of the jobs that train an experiment; settings may follow them."""
    parser.add_argument(
        "--experiment", default="coco_tresnet_l", help="its backbone, head, loss and sizes"
    )
    parser.add_argument(
        "--classes", type=positive, default=80, help="if the data is not read (default 80)"
    )
    parser.add_argument("--repeats", type=positive, default=20, help="timed steps (default 20)")
    parser.usage = "%(prog)s [options] [key=value ...], such as train.precision=bf16"


def profile(parser: ArgumentParser) -> None:
    """Add the options of the job that takes a step apart."""
    experiment(parser)
    parser.add_argument(
        "--trace", metavar="FILE", help="write a trace of three steps for chrome://tracing"
    )
