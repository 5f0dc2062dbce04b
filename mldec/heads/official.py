"""The names that the authors' heads give to their tensors, and ours."""

# Official names -> ours, replaced in this order. The files do spell "embed_standart" like this.
# Our own names contain none of the official ones, so they stay what they are.
_LAYERS = [("multihead_attn.", "cross_attn."), ("linear1.", "mlp.0."), ("linear2.", "mlp.3.")]
ML_DECODER = [
    ("decoder.embed_standart.", "embed."),
    ("decoder.query_embed.weight", "queries"),
    ("decoder.duplicate_pooling_bias", "pool_bias"),
    ("decoder.duplicate_pooling", "pool_weight"),
    ("decoder.layers.", "layers."),
    ("wordvec_proj.", "word_proj."),
    *_LAYERS,
]
QUERY2LABEL = [
    ("transformer.encoder.layers.", "encoder."),
    ("transformer.decoder.layers.", "decoder."),
    ("transformer.decoder.norm.", "norm."),
    ("query_embed.weight", "queries"),
    ("fc.W", "fc_weight"),
    ("fc.b", "fc_bias"),
    *_LAYERS,
]


def renamed(key: str, names: list[tuple[str, str]]) -> str:
    """Return our name of a head's tensor, from its official name or from our own."""
    for official, ours in names:
        key = key.replace(official, ours)
    return key
