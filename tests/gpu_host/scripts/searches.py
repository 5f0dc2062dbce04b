"""Print whether cuDNN searches for kernels in each batch of predict, and in evaluations.

Argument: a checkpoint.
"""

import sys

import torch
from null_gpu import finish, truths

from mldec.checkpoint import load_model
from mldec.evaluation.open import open_for_evaluation
from mldec.evaluation.options import EvalOptions, ModelOptions
from mldec.tools.predict.engine import open_engine

BATCH = 4
BATCHES = 25


def searches():
    """Return the flag of cuDNN."""
    return torch.backends.cudnn.benchmark


result = {"predict": [], "single": [], "evaluate": {}}
with truths():
    engine = open_engine(ModelOptions(checkpoint=sys.argv[1], device="cuda"))
    images = torch.zeros(BATCH, 3, 32, 32, dtype=torch.uint8)
    for name, size in (("single", 0), ("predict", BATCH)):
        for _ in range(BATCHES):
            engine.answer(images, size=size)
            result[name].append(searches())

loaded = load_model(sys.argv[1])
for name, count in (("few", 10), ("many", 40)):
    settings = ["device=cuda", "train.eval_batch_size=2", f"data.val_images={count}"]
    open_for_evaluation(loaded, EvalOptions(checkpoint=sys.argv[1], settings=settings))
    result["evaluate"][name] = searches()
finish(result)
