"""Print the counts per batch of predict for some checkpoints.

Arguments: names of checkpoints.
"""

import json
import sys

import numpy as np
from null_gpu import counted, truths
from PIL import Image

from mldec.evaluation.options import ModelOptions
from mldec.runtime.signals import StopRequest
from mldec.tools.predict.answers import Predictor, chosen_rule
from mldec.tools.predict.decode import Item
from mldec.tools.predict.engine import open_engine

BATCH = 4
BATCHES = 6
IMAGE = Image.fromarray(np.zeros((40, 40, 3), np.uint8))
ITEMS = [Item(str(number), str(number), content=IMAGE) for number in range(BATCH * BATCHES)]

results = []
with truths():
    for checkpoint in sys.argv[1:]:
        engine = open_engine(ModelOptions(checkpoint=checkpoint, device="cuda"))
        rule = chosen_rule(engine, content="top")
        predictor = Predictor(engine, rule, batch_size=BATCH, workers=0)
        # The first batch moves constants to the device.
        list(predictor.rows(iter(ITEMS[:BATCH]), StopRequest()))
        with counted() as counts:
            list(predictor.rows(iter(ITEMS), StopRequest()))
        results.append({name: count / BATCHES for name, count in counts.items()})
print(json.dumps(results))
