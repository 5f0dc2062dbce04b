"""Print the scores of two taggers on two devices, also from a thread.

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
    """Store the scores of an image."""
    [scores[name]] = tagger(batch)["scores"]


with truths():
    first = Tagger(sys.argv[1], device="cuda:0", content="scores")
    second = Tagger(sys.argv[1], device="cuda:1", content="scores")
    tag("first", first)
    tag("second", second)
    tag("first after second", first)

    # The current device of a new thread is 0.
    thread = threading.Thread(target=tag, args=("second in a thread", second))
    thread.start()
    thread.join()
print(json.dumps(scores))
