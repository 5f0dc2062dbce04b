"""`train.compile` compiles the whole model at once, and one static graph per batch size."""

from functools import partial

import torch

from mldec.config import build
from mldec.config.compose import compose
from mldec.data.loader import Batch
from mldec.data.types import Classes
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.training.step import Learner

EPOCHS = (4, 4, 3, 4, 4, 3)  # images of each batch of two epochs


def test_a_ragged_last_batch_leaves_the_others_their_static_graph(monkeypatch):
    words = ["backbone=tiny", "head=ml_decoder_small", "loss=asl", "data.image_size=32"]
    config = compose(["+experiment=digits", *words, "train.compile=true"])
    parts = build.check(config, build.MODEL_PARTS)
    model = build.model(parts, Classes(tuple("abcdefgh")), pretrained=False)

    images = []
    compile_with = torch.compile

    def record(graph, inputs):
        images.extend(value.shape for value in inputs if value.dtype == torch.uint8)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(compile_with, backend=record))
    learner = Learner(config, model, AsymmetricLoss(), device=torch.device("cpu"), steps=12)
    learner.train()
    for size in EPOCHS:
        shown = torch.randint(256, (size, 3, 32, 32), dtype=torch.uint8)
        targets = torch.randint(2, (size, 8), dtype=torch.int8)
        learner.learn([Batch(shown, targets, torch.arange(size))], size)

    # The graph of a symbolic batch would serve all batches from the second epoch on, slowly.
    assert [shape[0] for shape in images] == [4, 3]
    assert all(isinstance(shape[0], int) for shape in images)
