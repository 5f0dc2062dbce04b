"""Official names of tensors become ours, and ours stay."""

import pytest
import torch

from mldec.heads.layers import renamed
from mldec.heads.ml_decoder import OFFICIAL_NAMES as ML_DECODER
from mldec.heads.ml_decoder import MLDecoder
from mldec.heads.query2label import OFFICIAL_NAMES as QUERY2LABEL
from mldec.heads.query2label import Query2Label

SIZES = {"embed_dim": 16, "num_heads": 2, "mlp_dim": 16}


@pytest.mark.parametrize(
    ("official", "ours"),
    [
        ("decoder.embed_standart.bias", "embed.bias"),
        ("decoder.query_embed.weight", "queries"),
        ("decoder.duplicate_pooling", "pool_weight"),
        ("decoder.duplicate_pooling_bias", "pool_bias"),
        ("decoder.layers.0.linear2.weight", "layers.0.mlp.3.weight"),
        ("wordvec_proj.weight", "word_proj.weight"),
    ],
)
def test_official_names_of_ml_decoder(official: str, ours: str) -> None:
    assert renamed(official, ML_DECODER) == ours


def test_our_names_stay() -> None:
    with torch.device("meta"):
        decoder = MLDecoder(8, 3, self_attention=True, **SIZES)
        zero_shot = MLDecoder(8, 3, word_dim=5, num_groups=None, **SIZES)
        query2label = Query2Label(8, 3, input_proj=True, self_attention=True, **SIZES)
    for head, names in [
        (decoder, ML_DECODER),
        (zero_shot, ML_DECODER),
        (query2label, QUERY2LABEL),
    ]:
        assert [renamed(key, names) for key in head.state_dict()] == list(head.state_dict())
