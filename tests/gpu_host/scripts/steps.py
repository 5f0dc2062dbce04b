"""Print the counts or the error of a training step with random images for some experiments.

Arguments: a JSON object from names of experiments to numbers of classes.
"""

import argparse
import gc
import json
import sys
import traceback

import torch
from benchmark import build_trial, compose_experiment
from null_gpu import UninitializedWeights, counted, finish

IMAGES = 4


def step(experiment, classes):
    """Train two steps, and return the counts of the second one."""
    words = [f"train.batch_size={IMAGES}", "train.accumulate=1", "device=cuda"]
    if experiment == "finetune_frozen":
        words.append("head=csra")  # the default is fitted without steps
    args = argparse.Namespace(experiment=experiment, settings=words)
    with UninitializedWeights():
        trial = build_trial(compose_experiment(args), classes)
    batches = trial.random_batches()
    learner = trial.learner()
    learner.train()

    learner.learn(batches, IMAGES)
    with counted() as counts:
        learner.learn(batches, IMAGES)
    [_, numbers] = learner.read()
    return {"counts": counts, "fault": numbers.fault, "step": numbers.step}


results = {}
for experiment, classes in json.loads(sys.argv[1]).items():
    try:
        results[experiment] = step(experiment, classes)
    except Exception:
        results[experiment] = {"error": traceback.format_exc()}

    # Free the memory for the next experiment.
    gc.collect()
    torch.cuda.empty_cache()
finish(results)
