"""Print the shapes of the batches that the backbone gets in predict and in an evaluation.

Argument: a checkpoint. The working folder has a folder "photos".
"""

import sys

from null_gpu import finish, truths

from mldec.backbones import TimmBackbone
from mldec.evaluate import evaluate, parser
from mldec.runtime.signals import StopRequest
from mldec.tools.predict import opened
from mldec.tools.predict.answers import Predictor
from mldec.tools.predict.inputs import Inputs

BATCH = 8
shapes = []
forward = TimmBackbone.forward


def record(self, images):
    """Append the shape of a batch."""
    if len(images) > 1:  # not the image of `fold_batchnorms`
        shapes.append(list(images.shape))
    return forward(self, images)


TimmBackbone.forward = record
with truths():
    engine, rule = opened(sys.argv[1], {"device": "cuda"})
    predictor = Predictor(engine, rule, batch_size=BATCH, workers=0)
    list(predictor.rows(iter(Inputs(["photos"])), StopRequest()))
result = {"predict": list(shapes)}

shapes.clear()
words = [sys.argv[1], "device=cuda", f"train.eval_batch_size={BATCH}"]
evaluate(parser().parse_intermixed_args(words))
result["evaluate"] = shapes
finish(result)
