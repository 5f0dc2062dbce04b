#!/usr/bin/env python
"""Predict millions of photos with Ray Data, on one machine or a cluster.

    python examples/ray_predict.py outputs/mine photos/ answers --actors 2
    python examples/ray_predict.py outputs/mine photos.parquet answers --actors 16 --gpus 0.5
    python examples/ray_predict.py outputs/mine s3://bucket/photos s3://bucket/answers

The photos are a folder, or a Parquet file with a column `path` and, unless the paths are local
files of every machine, a column `bytes`. The answers are a folder of Parquet files with the other
columns of the photos, and `error`, `classes` and `scores`. A photo that cannot be decoded has an
error and no classes. The same command skips the photos that have an answer.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileSystem

# Ray reads this variable when it is imported. Its usage statistics are sent to its authors.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

from mldec.data.images import READ
from mldec.tools.predict import Tagger

# Types of the columns, also for a batch without an error or without a class.
TYPES = {
    "error": pa.string(),
    "classes": pa.list_(pa.string()),
    "scores": pa.list_(pa.float32()),
}


class NewTagger(Tagger):
    """A `Tagger` for tables that skips the photos with these paths."""

    def __init__(self, done: Any, checkpoint: str, **options: Any) -> None:
        super().__init__(checkpoint, **options)
        self._done = set(ray.get(done))

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the rows of the other photos, without `bytes` and with the predictions."""
        new = [path not in self._done for path in batch["path"].to_pylist()]
        columns = super().__call__(batch.filter(pa.array(new, pa.bool_())).to_pydict())
        arrays = {}
        for name, values in columns.items():
            kind = TYPES[name] if name in TYPES else batch.schema.field(name).type
            arrays[name] = pa.array(values, kind)
        return pa.table(arrays)


def absolute(path: str) -> str:
    """Return an address such as s3://bucket/photos as it is, and a local path as absolute."""
    return path if "://" in path else str(Path(path).absolute())


def predicted(answers: str) -> list[str]:
    """Return the paths in the answers of earlier runs.

    Ray writes files in place. A file that a killed run has not finished is removed.
    """
    files, folder = FileSystem.from_uri(answers)
    paths: list[str] = []
    for file in files.get_file_info(FileSelector(folder, allow_not_found=True)):
        try:
            table = pq.read_table(file.path, columns=["path"], filesystem=files)
            paths += table["path"].to_pylist()
        except pa.ArrowInvalid:
            files.delete_file(file.path)
    return paths


def main() -> None:
    """Predict all photos without an answer."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("checkpoint", help="run folder or checkpoint")
    parser.add_argument("photos", help="folder of images, or Parquet file")
    parser.add_argument("answers", help="folder of the results")
    parser.add_argument("--content", choices=("top", "scores", "decisions"), default="top")
    parser.add_argument("--top", type=int, help="maximum number of classes per photo")
    parser.add_argument("--threshold", type=float, help="minimum score, 0 to 1")
    parser.add_argument("--batch-size", type=int, default=64, help="photos per forward pass")
    parser.add_argument("--actors", type=int, default=2, help="processes with a model")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per actor; 0.5: two share one")
    args = parser.parse_args()

    photos = absolute(args.photos)
    answers = absolute(args.answers)
    if photos.endswith(".parquet"):
        table = ray.data.read_parquet(photos)
    else:
        suffixes = sorted(suffix.removeprefix(".") for suffix in READ)
        table = ray.data.read_binary_files(photos, include_paths=True, file_extensions=suffixes)

    # Only these arguments are pickled. Each actor loads the checkpoint once.
    options = {name: getattr(args, name) for name in ("content", "top", "threshold", "batch_size")}
    table = table.map_batches(
        NewTagger,
        fn_constructor_args=[ray.put(predicted(answers)), args.checkpoint],
        fn_constructor_kwargs=options,
        batch_size=args.batch_size,
        batch_format="pyarrow",
        concurrency=args.actors,
        num_cpus=0.5,  # leaves half a core per actor for reading the photos
        num_gpus=args.gpus,
    )
    table.write_parquet(answers)


if __name__ == "__main__":
    main()
