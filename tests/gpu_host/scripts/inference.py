"""Print the counts of a batch of inference with and without folded batch norms.

Arguments: a JSON object from names of experiments to numbers of images, and optionally "compile".
"""

import argparse
import json
import sys

import torch
from benchmark import build_trial, compose_experiment
from null_gpu import UninitializedWeights, counted, finish, truths

from mldec.evaluation.inference import for_inference
from mldec.runtime.devices import Precision, autocast, to_device

CLASSES = 80


@torch.no_grad()
def batch(experiment, images, fold, compiled):
    """Score two batches, and return the counts of the second one."""
    words = ["device=cuda"]
    args = argparse.Namespace(experiment=experiment, settings=words)
    with UninitializedWeights():
        trial = build_trial(compose_experiment(args), CLASSES)
    size = trial.config.data["image_size"]
    pixels = torch.zeros(images, 3, size, size, dtype=torch.uint8).pin_memory()
    # The host reads from the device whether the folded network is equal.
    with truths():
        model = for_inference(trial.model.eval(), size, torch.float16, fold=fold, compiled=compiled)
    model.to(memory_format=torch.channels_last)

    def score():
        inputs = to_device(pixels, trial.device, memory_format=torch.channels_last)
        with autocast(trial.device, Precision.fp16):
            model(inputs).float().sigmoid()

    score()
    with counted() as counts:
        score()
    return counts


results = {}
is_compiled = "compile" in sys.argv[2:]
for name, number in json.loads(sys.argv[1]).items():
    results[name] = [batch(name, number, fold, is_compiled) for fold in (False, True)]
finish(results)
