"""Entry point of the commands, such as `mldec train +experiment=digits`."""

import sys
from importlib import import_module

from mldec.cli import VERSION
from mldec.errors import print_error, suggest

COMMANDS = {
    "train": "train a model: +experiment=digits, or your own data, backbone, head and loss",
    "evaluate": "compute the metrics of a checkpoint on the validation images",
    "calibrate": "fit a threshold per class, and store it in a copy of a checkpoint",
    "report": "write an HTML page of metrics with intervals, curves and images",
    "predict": "predict the classes of images",
    "next": "choose the images to label next",
    "export": "write a checkpoint as a self-contained ONNX file",
    "publish": "upload a checkpoint to the Hugging Face Hub, with a model card",
    "demo": "serve a web page and an HTTP API on this machine",
    "summary": "print a table of the runs in a folder, or of means over seeds",
    "check-data": "check the images and labels of a dataset, or find wrong labels",
    "cache": "print the size of the cached features, or remove them",
}

# Commands in the package `mldec`. The other commands are in `mldec.tools`.
CORE = ("train", "evaluate")


def module_of(command: str) -> str:
    """Return the name of the module of a command. Its function `main` reads `sys.argv`."""
    name = command.replace("-", "_")
    if name in CORE:
        return f"mldec.{name}"
    return f"mldec.tools.{name}"


def overview() -> str:
    """Return the text with all commands."""
    width = max(map(len, COMMANDS))
    lines = [VERSION, "", "Commands (each has --help):", ""]
    for name, purpose in COMMANDS.items():
        lines.append(f"  mldec {name:<{width}}  {purpose}")
    return "\n".join(lines)


def main() -> None:
    """Run a command, or print the commands or the version."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return
    if arguments[0] == "--version":
        print(VERSION)
        return

    # The module of a command parses the arguments after the name of the command.
    command = arguments[0].replace("_", "-")
    if command in COMMANDS:
        sys.argv[1:] = arguments[1:]
        import_module(module_of(command)).main()
        return

    # Import it here, because it imports omegaconf, which --help does not need.
    from mldec.config.schema import RETIRED

    if f"mldec {command}" in RETIRED:
        print_error(f"mldec {command} was removed; {RETIRED[f'mldec {command}']}")
        sys.exit(2)
    print_error(f"{arguments[0]}: unknown command{suggest(command, list(COMMANDS))}")
    sys.exit(2)


if __name__ == "__main__":
    main()
