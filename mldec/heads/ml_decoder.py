"""ML-Decoder: fixed queries, no self-attention, and group decoding (paper section 2)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.heads.layers import (
    OFFICIAL_LAYERS,
    Decoder,
    QueryStep,
    as_tokens,
    at_least_one,
    check_word_vectors,
    reject_word_vectors,
    renamed,
    without_autocast,
)

# Official names of tensors -> ours. "embed_standart" is the spelling of the official files.
OFFICIAL_NAMES = [
    ("decoder.embed_standart.", "embed."),
    ("decoder.query_embed.weight", "queries"),
    ("decoder.duplicate_pooling_bias", "pool_bias"),
    ("decoder.duplicate_pooling", "pool_weight"),
    ("decoder.layers.", "layers."),
    ("wordvec_proj.", "word_proj."),
]
OFFICIAL_NAMES += OFFICIAL_LAYERS


class MLDecoder(nn.Module):
    """Decode K class logits with G group queries that cross-attend to the tokens.

    Each group has g = ceil(K / G) classes. Class c is slot c % g of group c // g. G = K is the full
    decoding of the paper. Defaults follow the official code, and `load_state_dict` also accepts the
    state dict of an official head.

    Source: paper section 2.3 and figure 2; reference src_files/ml_decoder/ml_decoder.py.

    Args:
        in_features: Width C of the tokens.
        num_classes: Number of classes K, 1 or more; required. Ignored with `word_dim`, where it
            may be 0.
        num_groups: Number of group queries G, clipped to K. None for one query per class.
        embed_dim: Decoder width D.
        num_heads: Number of attention heads. Must divide D.
        mlp_dim: Hidden width of the feed-forward block.
        num_layers: Number of decoder layers.
        dropout: Dropout probability in all parts of the decoder.
        init_queries: Initialization of the queries. "random": drawn from N(0, 1) and frozen.
            "learned": drawn from N(0, 1) and trained. "orthogonal": frozen orthogonal rows of
            norm sqrt(D), the expected norm of a random query.
        doubled_query: Keep the residual connection of the removed self-attention: x + dropout(x)
            of the queries x. This adds noise in training. In evaluation, the next norm cancels the
            factor of 2.
        self_attention: Add self-attention between the queries, as in the transformer-decoder
            baseline of the paper.
        word_dim: Width D_w of word vectors. If set, the head is zero-shot (paper section 2.4). The
            queries are then the word vectors, no parameter belongs to a class, and `num_groups` and
            `init_queries` are ignored.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int | None = None,
        *,
        num_groups: int | None = 100,
        embed_dim: int = 768,
        num_heads: int = 8,
        mlp_dim: int = 2048,
        num_layers: int = 1,
        dropout: float = 0.1,
        init_queries: Literal["random", "learned", "orthogonal"] = "random",
        doubled_query: bool = True,
        self_attention: bool = False,
        word_dim: int | None = None,
    ) -> None:
        if num_classes is None:
            # The first argument of the official class is the number of classes.
            raise TypeError(
                "MLDecoder(in_features, num_classes): num_classes is missing; the official "
                f"MLDecoder({in_features}) is MLDecoder(2048, {in_features})"
            )
        super().__init__()
        at_least_one(embed_dim=embed_dim, mlp_dim=mlp_dim, num_layers=num_layers)
        at_least_one(num_groups=num_groups, word_dim=word_dim)

        self.num_classes = num_classes
        self.word_dim = word_dim
        self.embed = nn.Linear(in_features, embed_dim)

        query_step: QueryStep = "double" if doubled_query else "norm"
        if self_attention:
            query_step = "self_attention"
        sizes = (embed_dim, num_heads, mlp_dim, dropout)
        self.layers = Decoder(num_layers, *sizes, query_step=query_step)

        # Tensors with rows of a class or of a group of classes.
        self.class_tensors: tuple[str, ...] = ()
        pool_shape: tuple[int, ...]
        if word_dim is None:
            at_least_one(num_classes=num_classes)
            groups = min(num_groups or num_classes, num_classes)
            self._add_queries(init_queries, groups, embed_dim)
            group_size = -(-num_classes // groups)  # rounded up
            pool_shape = (groups, embed_dim, group_size)
            num_biases = num_classes
            self.class_tensors = ("queries", "pool_weight", "pool_bias")
        else:
            self.word_proj: nn.Module = nn.Identity()
            if word_dim != embed_dim:
                self.word_proj = nn.Linear(word_dim, embed_dim)
            pool_shape = (embed_dim, 1)
            num_biases = 1  # shared by all classes

        # For a tensor [G, D, g], the standard deviation of Xavier initialization is
        # sqrt(2 / ((D + G) g)), as in the official code.
        self.pool_weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(pool_shape)))
        self.pool_bias = nn.Parameter(torch.zeros(num_biases))

    def set_bias_from_prior(self, logits: Tensor) -> None:
        """Initialize the biases from prior logits [K]; a shared bias gets their mean."""
        if self.word_dim is not None:
            logits = logits.mean()
        self.pool_bias.data.copy_(logits)

    def _add_queries(self, kind: str, groups: int, embed_dim: int) -> None:
        """Register the group queries [G, D] as a parameter or a buffer."""
        if kind == "orthogonal":
            # If G > D, only the columns can be orthogonal.
            directions = nn.init.orthogonal_(torch.empty(groups, embed_dim))
            initial = F.normalize(directions, dim=1) * embed_dim**0.5
        else:
            initial = torch.randn(groups, embed_dim)

        if kind == "learned":
            self.queries = nn.Parameter(initial)
        else:
            self.register_buffer("queries", initial)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Rename the tensors of an official head before loading."""
        for key in list(state_dict):
            if key.startswith(prefix):
                name = renamed(key.removeprefix(prefix), OFFICIAL_NAMES)
                state_dict[prefix + name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def take_classes(
        self, tensors: Mapping[str, Tensor], sources: Sequence[int | None], known: int
    ) -> list[int]:
        """Copy queries and pooling rows of classes from another ML-Decoder; see `mldec.heads`.

        A pooling row is only meaningful with its query, and all classes of a group share one query.
        Each group therefore takes the most frequent old query of its classes, and only the rows
        that belong to this query.
        """
        size = self.pool_weight.shape[2]
        old_size = tensors["pool_weight"].shape[2]
        taken = []
        for group in range(len(self.queries)):
            # Index of each class of the group -> its index in the other head.
            pairs: dict[int, int] = {}
            first = group * size
            for number, source in enumerate(sources[first : first + size], first):
                if source is not None:
                    pairs[number] = source
            if not pairs:
                continue

            old_groups = Counter(source // old_size for source in pairs.values())
            old_group = old_groups.most_common(1)[0][0]
            self.queries[group] = tensors["queries"][old_group]
            for number, source in pairs.items():
                if source // old_size == old_group:
                    row = tensors["pool_weight"][old_group, :, source % old_size]
                    self.pool_weight[group, :, number % size] = row
                    self.pool_bias[number] = tensors["pool_bias"][source]
                    taken.append(number)
        return taken

    def forward(
        self, tokens: Tensor, word_vectors: Tensor | None = None, *, attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute logits [B, K]. With `attention`, also return attention weights [B, G, N]."""
        tokens = as_tokens(tokens, self.embed.in_features)
        if self.word_dim is None:
            reject_word_vectors(word_vectors, self)
            queries: Tensor = self.queries  # [G, D]
        else:
            word_vectors = check_word_vectors(word_vectors, self.word_dim)
            queries = F.relu(self.word_proj(word_vectors.to(self.pool_bias.dtype)))
        memory = F.relu(self.embed(tokens))
        x, weights = self.layers(queries, memory, attention=attention)
        logits = self.pool(x)
        if weights is None:
            return logits
        return logits, weights

    def pool(self, x: Tensor) -> Tensor:
        """Apply group fully-connected pooling (paper section 2.3): [B, G, D] -> [B, K]."""
        with without_autocast(x.device):
            x = x.to(self.pool_weight.dtype)
            # The classes of a zero-shot head share one weight.
            if self.pool_weight.dim() == 2:
                return (x @ self.pool_weight).squeeze(-1) + self.pool_bias

            # Drop the empty slots of the last group.
            groups = x.transpose(0, 1) @ self.pool_weight  # [G, B, g], one batched product
            return groups.transpose(0, 1).flatten(1)[:, : self.num_classes] + self.pool_bias
