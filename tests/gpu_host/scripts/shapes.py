"""Print the shapes of the batches that the backbone gets in predict and in an evaluation.

Argument: a checkpoint. The working folder has a folder "photos".
"""

import sys

from null_gpu import finish, truths

from mldec.backbones import TimmBackbone
from mldec.evaluate import EvaluateOptions, evaluate
from mldec.evaluation.options import ModelOptions
from mldec.runtime.signals import StopRequest
from mldec.tools.predict.answers import Predictor, chosen_rule
from mldec.tools.predict.engine import open_engine
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
    engine = open_engine(ModelOptions(checkpoint=sys.argv[1], device="cuda"))
    predictor = Predictor(engine, chosen_rule(engine, content="top"), batch_size=BATCH, workers=0)
    list(predictor.rows(iter(Inputs(["photos"])), StopRequest()))
result = {"predict": list(shapes)}

shapes.clear()
settings = ["device=cuda", f"train.eval_batch_size={BATCH}"]
evaluate(EvaluateOptions(checkpoint=sys.argv[1], settings=settings))
result["evaluate"] = shapes
finish(result)
