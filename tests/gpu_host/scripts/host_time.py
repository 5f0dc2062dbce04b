"""Print launches, waits and host milliseconds per training step with random images.

Arguments: experiment, number of classes, and settings. Under torchrun, rank 0 prints.
"""

import argparse
import json
import os
import sys
import time

import torch
from benchmark import build_trial, compose_experiment
from null_gpu import UninitializedWeights, counted

from mldec.runtime import distributed

STEPS = 10

experiment, classes, *settings = sys.argv[1:]
args = argparse.Namespace(experiment=experiment, settings=["device=cuda", *settings])
config = compose_experiment(args)
with distributed.processes(torch.device("cuda", distributed.rank_and_world_size()[0])):
    with UninitializedWeights():
        trial = build_trial(config, int(classes))
    batches = trial.random_batches()
    images = config.train.batch_size
    learner = trial.learner()
    learner.train()
    for _ in range(3):
        learner.learn(batches, images)

    times = []
    with counted() as counts:
        for _ in range(STEPS):
            start = time.process_time()
            learner.learn(batches, images)
            times.append(1000 * (time.process_time() - start))
    result = {name: count / STEPS for name, count in counts.items()}
    if distributed.is_main():
        print(json.dumps({**result, "milliseconds": min(times)}))

# A regular exit can abort, see `finish`.
sys.stdout.flush()
os._exit(0)
