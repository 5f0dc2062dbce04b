"""Answer with two taggers on two devices, and from a thread; print the scores of each.

Arguments: a checkpoint.
"""

import json
import sys
import threading

import numpy as np
from null_gpu import truths

from mldec.tools.predict import Tagger

batch = {"image": [np.zeros((40, 40, 3), np.uint8)]}
scores = {}


def tag(name, tagger):
    """Store the scores that a tagger gives the classes of an image."""
    [scores[name]] = tagger(batch)["scores"]


with truths():
    first, second = (Tagger(sys.argv[1], device=f"cuda:{n}", content="scores") for n in range(2))
    tag("first", first)
    tag("second", second)
    tag("first after second", first)

    # A new thread begins with device 0.
    thread = threading.Thread(target=tag, args=("second in a thread", second))
    thread.start()
    thread.join()
print(json.dumps(scores))
