#!/usr/bin/env python
"""Predict a Hugging Face dataset, or write it as files for training.

    python examples/hf_dataset.py predict outputs/mine photos.parquet answers.parquet
    python examples/hf_dataset.py export owner/name /data/mine --train train --val validation
    mldec train +experiment=finetune_frozen data.root=/data/mine

A dataset is a Parquet file, a folder, or a name on the Hub. Predictions read the column `image`,
`bytes` or `path`. The export reads the columns `image` and `labels` (or `label`) of class names or
`ClassLabel` numbers.
"""

import argparse
import csv
import json
from pathlib import Path

import datasets
from datasets import Dataset

from mldec.tools.predict import Tagger


def load(name: str, split: str) -> Dataset:
    """Return a split of a dataset. A Parquet file has the split "train" only."""
    if name.endswith(".parquet"):
        return datasets.load_dataset("parquet", data_files=name, split=split)
    return datasets.load_dataset(name, split=split)


def predict(args: argparse.Namespace) -> None:
    """Write the other columns of a dataset, and error, classes and scores."""
    table = load(args.dataset, args.split)
    images = [name for name in ("image", "bytes") if name in table.column_names]
    tagger = Tagger(args.checkpoint, top=args.top)
    table = table.map(tagger, batched=True, batch_size=64, remove_columns=images)
    table.to_parquet(args.answers)


def class_names(table: Dataset, column: str) -> list[str] | None:
    """Return the names of a column of `ClassLabel` numbers, or None for a column of names."""
    feature = table.features[column]
    feature = getattr(feature, "feature", feature)  # of a list
    return getattr(feature, "names", None)


def export(args: argparse.Namespace) -> None:
    """Write the image files, and data.csv with the columns path, labels and split."""
    args.folder.mkdir(parents=True)
    with (args.folder / "data.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "labels", "split"])
        for split, source in (("train", args.train), ("val", args.val)):
            (args.folder / split).mkdir()
            table = load(args.dataset, source)
            column = "labels" if "labels" in table.column_names else "label"
            names = class_names(table, column)

            # Keep the bytes of the files instead of decoding and encoding the images.
            table = table.cast_column("image", datasets.Image(decode=False))
            for number, row in enumerate(table):
                suffix = Path(row["image"]["path"] or "image.jpg").suffix
                path = f"{split}/{number:08}{suffix}"
                content = row["image"]["bytes"] or Path(row["image"]["path"]).read_bytes()
                (args.folder / path).write_bytes(content)

                labels = row[column] if isinstance(row[column], list) else [row[column]]
                if names is not None:
                    labels = [names[label] for label in labels]
                writer.writerow([path, json.dumps(labels, ensure_ascii=False), split])


def main() -> None:
    """Parse the command line, and predict or export."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("predict")
    command.set_defaults(function=predict)
    command.add_argument("checkpoint", help="run folder or checkpoint")
    command.add_argument("dataset")
    command.add_argument("answers", help="Parquet file")
    command.add_argument("--split", default="train")
    command.add_argument("--top", type=int, help="maximum number of classes per image")

    command = commands.add_parser("export")
    command.set_defaults(function=export)
    command.add_argument("dataset")
    command.add_argument("folder", type=Path, help="new folder")
    command.add_argument("--train", default="train", help="training split (default: train)")
    command.add_argument("--val", default="validation", help="default: validation")

    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
