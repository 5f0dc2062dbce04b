"""Training steps of experiments, with random images; print the counts of one, or the error.

Arguments: a JSON object from names of experiments to numbers of classes.
"""

import argparse
import gc
import json
import sys
import time
import traceback

import torch
from null_gpu import counted, finish

from mldec.tools.benchmark.throughput import build_trial, compose_experiment

IMAGES = 4


def step(experiment, classes):
    """Train two steps; return the counts of the second one."""
    words = [f"train.batch_size={IMAGES}", "train.accumulate=1", "device=cuda"]
    args = argparse.Namespace(experiment=experiment, settings=words)
    tried = build_trial(compose_experiment(args), classes)
    batches = tried.random_batches()
    learner = tried.learner()
    learner.train()

    learner.learn(batches, IMAGES)
    with counted() as counts:
        learner.learn(batches, IMAGES)
    [_, numbers] = learner.read()
    return {"counts": counts, "fault": numbers.fault, "step": numbers.step}


results = {}
for experiment, classes in json.loads(sys.argv[1]).items():
    start = time.perf_counter()
    try:
        results[experiment] = step(experiment, classes)
    except Exception:
        results[experiment] = {"error": traceback.format_exc()}
    print(experiment, round(time.perf_counter() - start, 1), "s", file=sys.stderr)

    # The weights of the next experiment take their place.
    gc.collect()
    torch.cuda.empty_cache()
finish(results)
