#!/usr/bin/env python
"""Predict a table of photos with Ray Data.

    python examples/ray_predict.py outputs/mine photos.parquet answers.parquet

The table has a column `path`, `bytes` or `image`. Both tables may be files, folders or addresses
such as s3://bucket/photos. The results have the other columns, and error, classes and scores.
Ray reports usage statistics unless RAY_USAGE_STATS_ENABLED=0 is set.
"""

import argparse

import ray

from mldec.tools.predict import Tagger


def main() -> None:
    """Predict all rows of a table."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("checkpoint", help="run folder or checkpoint")
    parser.add_argument("photos", help="Parquet file or folder")
    parser.add_argument("answers", help="new Parquet folder")
    parser.add_argument("--top", type=int, help="maximum number of classes per photo")
    parser.add_argument("--actors", type=int, default=2, help="processes with a model")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per actor; 0.5: two share one")
    args = parser.parse_args()

    table = ray.data.read_parquet(args.photos)
    # Only these arguments are pickled. Each actor loads the checkpoint once.
    table = table.map_batches(
        Tagger,
        fn_constructor_args=[args.checkpoint],
        fn_constructor_kwargs={"top": args.top},
        batch_size=64,
        concurrency=args.actors,
        num_cpus=0.5,  # leaves half a core per actor for reading the table
        num_gpus=args.gpus,
    )
    table.write_parquet(args.answers)


if __name__ == "__main__":
    main()
