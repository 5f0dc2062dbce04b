"""Export a checkpoint as one file that answers by itself, and prove that it answers alike.

`python -m mldec.export best.pt model.onnx` writes an ONNX file, `model.pt2` a program of
torch.export, for programs of your own: no command opens it, because loading one can run code that
it holds. Input: images uint8 [B, 3, S, S], RGB, as many as one likes. Outputs, in this order:
probabilities float32 [B, K] and decisions bool [B, K]. Normalisation, calibration and thresholds
are inside. With --any-size the resize is too, and all images of a batch have one size H x W.

The file is compared with the checkpoint before it is written: on generated images, and on those of
--verify FOLDER, whose labels are used if it holds a folder per class or a data.csv. An fp32 file
that differs by more than 1e-4 (with --any-size 0.02), or an fp16 file whose mAP differs by more
than 0.1, is not written, and the status is 1.

A zero-shot checkpoint takes word vectors [K, D] as a second input, or scores the classes of
--classes, whose vectors are those of --vectors or by the text encoder of the training.
"""

import argparse

from mldec.cli import add_class_options, add_model_options, command, fraction, run_command

PRECISIONS = ("fp32", "fp16", "int8")


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec.export`."""
    arguments = command("export", str(__doc__))
    add_model_options(arguments)

    arguments.add_argument("out", metavar="OUT.onnx|OUT.pt2", help="the file to write")
    arguments.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="fp32",
        help="of the weights; int8 (.onnx only) is calibrated on images; default: fp32",
    )
    arguments.add_argument(
        "--any-size", action="store_true", help="put the resize of the images into the file"
    )
    arguments.add_argument(
        "--verify", metavar="FOLDER", help="real images to compare file and checkpoint on"
    )
    arguments.add_argument(
        "--threshold",
        type=fraction,
        help="of the decisions, 0 to 1; default: the thresholds that mldec.calibrate stored, else "
        "data.threshold of the run",
    )

    add_class_options(arguments)
    return arguments


def export(args: argparse.Namespace) -> None:
    """Export what the command line names."""
    # Imported late: --help and a wrong argument need not wait for torch.
    from mldec.export.exporting import run

    run(args)


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, export)


if __name__ == "__main__":
    main()
