"""`train.compile` compiles the whole model at once, and one static graph per batch size."""

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from mldec import build
from mldec.config.compose import compose
from mldec.data.loader import Batch
from mldec.data.types import Classes
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.model import Classifier
from mldec.training.step import Learner

EPOCHS = (4, 4, 3, 4, 4, 3)  # images of each batch of two epochs

CLOSED = {
    "gap": ["head=gap"],
    "ml_decoder": ["head=ml_decoder"],
    "ml_decoder_200": ["head=ml_decoder_200"],
    "query2label": ["head=query2label", "head.input_proj=true"],  # its width is not the network's
    "transformer_decoder": ["head=transformer_decoder"],
}
WORDS = ["gap_words", "ml_decoder_zsl", "ml_decoder_zsl_groups"]

# Settings and image size of each network; Swin is the smallest, whose code is that of the others.
NETWORKS = {
    "resnet50": (["backbone=resnet50"], 64),
    "tresnet_l": (["backbone=tresnet_l"], 64),
    "vit_b16": (["backbone=timm", "backbone.name=vit_base_patch16_224"], 224),
    "swin": (["backbone=timm", "backbone.name=swin_tiny_patch4_window7_224"], 224),
}


def check(words: list[str], size: int, *, queries: torch.Tensor | None) -> None:
    """Compile a model, and run it for two epochs, whose last batch is smaller."""
    parts = build.check(compose(["+experiment=coco_tresnet_m", *words]), build.MODEL_PARTS)
    model: Classifier = build.model(parts, Classes(tuple("abcdefgh")), pretrained=False)
    model.train()

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    for batch_size in EPOCHS:
        images = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8)
        assert compiled(images, queries).shape[0] == batch_size

    # With `fullgraph` a break would have been an error.
    assert counter.frame_count == 2


def test_a_ragged_last_batch_leaves_the_others_their_static_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["backbone=tiny", "head=ml_decoder_small", "loss=asl", "data.image_size=32"]
    config = compose(["+experiment=digits", *words, "train.compile=true"])
    parts = build.check(config, build.MODEL_PARTS)
    model = build.model(parts, Classes(tuple("abcdefgh")), pretrained=False)

    images = []
    compile_with = torch.compile

    def record(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
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


@pytest.mark.parametrize("head", ["gap", "ml_decoder_small"])
def test_a_small_model_is_compiled_whole_and_once_per_batch_size(head: str) -> None:
    check(["backbone=tiny", f"head={head}"], 32, queries=None)


@pytest.mark.slow
@pytest.mark.parametrize("head", CLOSED)
@pytest.mark.parametrize("network", NETWORKS)
def test_each_network_is_compiled_whole_with_each_head(network: str, head: str) -> None:
    words, size = NETWORKS[network]
    check([*words, *CLOSED[head]], size, queries=None)


@pytest.mark.slow
@pytest.mark.parametrize("head", WORDS)
@pytest.mark.parametrize("network", NETWORKS)
def test_each_network_is_compiled_whole_with_each_head_of_words(network: str, head: str) -> None:
    words, size = NETWORKS[network]
    check([*words, f"head={head}"], size, queries=torch.randn(8, 300))
