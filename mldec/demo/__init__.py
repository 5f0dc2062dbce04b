"""Show what a model answers on a web page: `python -m mldec.demo best.pt`, or `model.onnx`.

Drop photos on the page: their classes with bars, the thresholds of the checkpoint or one of a
slider, and heat maps of where the model looked (a checkpoint only). A zero-shot model also scores
the classes that are typed into the page; if it was trained on a file of word vectors, pass this
file with --vectors. The same answers come as JSON over HTTP: docs/demo.md.

The page is for this machine alone unless --host says otherwise. Photos stay in memory; nothing is
written, and the page asks no other host for anything. Ctrl-C ends it.
"""

import argparse

from mldec.cli import add_model_options, add_precision_option, command, run_command

HOST, PORT = "127.0.0.1", 7860
LAST_PORT = 65535


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec.demo`."""
    arguments = command("demo", str(__doc__))
    add_model_options(arguments, exported=True)

    arguments.add_argument(
        "--vectors",
        metavar="FILE|clip:MODEL",
        help="word vectors of the classes that are typed into the page, for a zero-shot model, or "
        "a text encoder; default: the text encoder of the training; see DATASETS.md, Word vectors",
    )
    arguments.add_argument(
        "--port",
        type=port,
        default=PORT,
        help=f"of the page; 0 takes a free one; default: {PORT}",
    )
    arguments.add_argument(
        "--host",
        default=HOST,
        help=f"address to listen on; default: {HOST}, which only this machine reaches; "
        f"0.0.0.0 is every network of this machine",
    )
    arguments.add_argument(
        "--device", default="auto", help="of a checkpoint: auto, cpu, cuda or cuda:<number>"
    )
    add_precision_option(arguments, "auto")
    return arguments


def port(text: str) -> int:
    """Read the number of a port."""
    if not text.isdecimal() or int(text) > LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text} is not a port, 0 to {LAST_PORT}")
    return int(text)


def demo(args: argparse.Namespace) -> None:
    """Serve the page of the command line until a signal comes."""
    # Imported late: --help and a wrong argument need not wait for torch.
    from mldec.demo.serving import run

    run(args)


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, demo)


if __name__ == "__main__":
    main()
