"""Heads: map the tokens of a backbone to one logit per class.

The constructor of a head is `Head(in_features, num_classes, *, ...)`. It raises ConfigError if an
argument is out of range. `forward(tokens, word_vectors=None)` returns logits [B, K].

- `tokens` are tokens [B, N, C] or a feature map [B, C, H, W].
- `word_vectors` [K, D_w] are required by zero-shot heads. Other heads raise ConfigError for them.
- Decoder heads have the keyword `attention`. If it is set, they also return the cross-attention
  weights of the last layer [B, G, N], averaged over attention heads.

Symbols of shapes: B batch size, N tokens, C backbone width, D decoder width, D_w width of word
vectors, G groups, K classes.

Two methods are optional. `set_bias_from_prior(logits)` initializes the biases from prior logits
[K], see `train.start_at_frequency`. `take_classes(tensors, sources, known)` copies the rows of
classes from another head of the same kind, the source:

- `tensors` maps the names in `class_tensors` to tensors of the source.
- `sources` has one entry per class of this head: its index in the source, or None.
- `known` is the number of classes of the source.

It returns the indices of the copied classes in this head.

A head with the method `fit(features, labels, groups=None, *, exclusive)` is trained in closed form
on the outputs of a frozen backbone, see `RidgeHead`. The method sets the attributes `left_out`,
logits [N, K] of models without the image, and `summary` for the log. Two further attributes are
optional: `features = "blocks"` requests the blocks of a backbone, which are then an argument
`blocks` of the constructor, and `allocate(tensors)` prepares buffers whose shapes depend on the
training data for a state dict.
"""

from mldec import lazily
from mldec.heads.ml_decoder import MLDecoder

# Heads are imported on first use, because a run has only one.
_MODULES = {
    "CSRA": "csra",
    "GAP": "gap",
    "RAM": "ram",
    "Query2Label": "query2label",
    "RidgeHead": "ridge",
    "attach": "attached",
    "Cosine": "words",
    "WordGAP": "words",
    "WordGroupDecoder": "words",
}
__getattr__ = lazily(__name__, _MODULES)
__all__ = ["MLDecoder", *_MODULES]
