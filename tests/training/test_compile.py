"""`train.compile` compiles the whole model at once, and not again for each batch size."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from mldec import build
from mldec.config.compose import compose
from mldec.data.base import Classes
from mldec.model import Classifier

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
    """Compile a model, and run it with batches of several sizes, the last of them smaller."""
    parts = build.check(compose(["+experiment=coco_tresnet_m", *words]), build.MODEL_PARTS)
    model: Classifier = build.model(parts, Classes(tuple("abcdefgh")), pretrained=False)
    model.train()

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for batch_size in (4, 4, 3, 2, 5):
        images = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8)
        assert compiled(images, queries).shape[0] == batch_size

    # With `fullgraph` a break would have been an error. The second size is compiled for any size.
    assert counter.frame_count == 2


@pytest.mark.parametrize("head", ["gap", "ml_decoder_small"])
def test_a_small_model_is_compiled_whole_and_once_for_all_batch_sizes(head: str) -> None:
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
