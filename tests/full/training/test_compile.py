"""Networks and heads compile to a single graph per batch size."""

import pytest
import torch
from squares import fit, settings, trainer
from torch._dynamo.testing import CompileCounter

from mldec import build
from mldec.config.compose import compose
from mldec.data.types import Classes

CLOSED = {
    "gap": ["head=gap"],
    "ml_decoder": ["head=ml_decoder"],
    "ml_decoder_200": ["head=ml_decoder_200"],
    "query2label": ["head=query2label", "head.input_proj=true"],  # the widths differ
    "transformer_decoder": ["head=transformer_decoder"],
}
OF_WORDS = {name: [f"head={name}"] for name in ("gap_words", "ml_decoder_zsl")}
OF_WORDS["ml_decoder_zsl_groups"] = ["head=ml_decoder_zsl_groups"]

# Settings and image size of each network, with few blocks: all blocks of a kind compile alike.
LAYERS = ["backbone.model_args={layers:[1,1,1,1]}"]
VIT = ["backbone=timm", "backbone.name=vit_base_patch16_224", "backbone.model_args={depth:2}"]
SWIN = ["backbone=timm", "backbone.name=swin_tiny_patch4_window7_224"]
SWIN += ["backbone.model_args={depths:[2,1,1,1]}"]
NETWORKS = {
    "tiny": (["backbone=tiny"], 32),
    "resnet50": (["backbone=resnet50", *LAYERS], 64),
    "tresnet_l": (["backbone=tresnet_l", *LAYERS], 64),
    "vit_b16": (VIT, 224),
    "swin": (SWIN, 224),
}


# Each head on the smallest network, and each network with one head.
PAIRS = [("tiny", head) for head in {**CLOSED, **OF_WORDS}]
PAIRS += [(network, "ml_decoder") for network in NETWORKS if network != "tiny"]


@pytest.mark.parametrize(("network", "head"), PAIRS)
def test_network_and_head_compile_to_one_graph(network, head):
    words, size = NETWORKS[network]
    words = ["+experiment=coco_tresnet_m", *words, *{**CLOSED, **OF_WORDS}[head]]
    parts = build.check(compose(words), build.MODEL_PARTS)
    model = build.model(parts, Classes(tuple("abcdefgh")), pretrained=False).train()
    word_vectors = torch.randn(8, 300) if head in OF_WORDS else None

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    for batch_size in (4, 4, 3, 4, 4, 3):
        images = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8)
        assert compiled(images, word_vectors).shape[0] == batch_size

    # A graph break would raise an error with `fullgraph`.
    assert counter.frame_count == 2


def test_compiled_training_gives_same_weights(tmp_path):
    results = []
    for word in ("train.compile=false", "train.compile=true"):
        # adam would amplify rounding errors.
        config = settings(word, "train.epochs=1", "optim.name=sgd")
        job = trainer(config, tmp_path / word, dropout=0.0)
        fit(job, tmp_path / word)
        results.append(job.learner.model.state_dict())
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)
