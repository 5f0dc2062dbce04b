"""ML-Decoder: fixed queries, no self-attention, and group decoding (paper section 2)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.heads.layers import (
    OFFICIAL_LAYERS,
    DecoderLayer,
    QueryStep,
    as_tokens,
    at_least_one,
    check_words,
    refuse_words,
    renamed,
)

# Official names of tensors -> ours, see `OFFICIAL_LAYERS`. The files do spell "embed_standart".
OFFICIAL_NAMES = [
    ("decoder.embed_standart.", "embed."),
    ("decoder.query_embed.weight", "queries"),
    ("decoder.duplicate_pooling_bias", "pool_bias"),
    ("decoder.duplicate_pooling", "pool_weight"),
    ("decoder.layers.", "layers."),
    ("wordvec_proj.", "word_proj."),
    *OFFICIAL_LAYERS,
]


class MLDecoder(nn.Module):
    """Decode K classes from G group queries that attend to the tokens.

    Class c belongs to group c // g, slot c % g, with g = ceil(K / G) classes per group; G = K is
    the paper's full decoding. Defaults are those of the official code, and `load_state_dict` takes
    the state dict of an official head as it is. Source: paper section 2.3 and figure 2; reference
    src_files/ml_decoder/ml_decoder.py.

    Args:
        in_features: width C of the tokens.
        num_classes: number of classes K; has no effect with `word_dim`, and may be 0 then.
        num_groups: number of group queries G, clipped to K; None for one query per class.
        embed_dim: decoder width D.
        num_heads: number of attention heads; divides D.
        mlp_dim: hidden width of the feed-forward part.
        num_layers: number of decoder layers.
        dropout: dropout probability in all parts of the decoder.
        queries: "random": drawn from N(0, 1) and frozen; "learned": drawn likewise, but trained;
            "orthogonal": frozen orthogonal rows of norm sqrt(D), the length a random query has.
        doubled_query: keep the residual of the removed self-attention, which adds a query to its
            own dropout. In evaluation it changes almost nothing, in training it is noise on the
            queries; released weights need it.
        self_attention: let the queries attend to each other: the transformer-decoder baseline of
            the paper.
        word_dim: width D_w of word vectors; makes the head zero-shot: `forward` then needs queries,
            and no parameter belongs to a class (paper section 2.4). `num_groups` and `queries` have
            no effect then.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        num_groups: int | None = 100,
        embed_dim: int = 768,
        num_heads: int = 8,
        mlp_dim: int = 2048,
        num_layers: int = 1,
        dropout: float = 0.1,
        queries: Literal["random", "learned", "orthogonal"] = "random",
        doubled_query: bool = True,
        self_attention: bool = False,
        word_dim: int | None = None,
    ) -> None:
        super().__init__()
        at_least_one(embed_dim=embed_dim, mlp_dim=mlp_dim, num_layers=num_layers)
        at_least_one(num_groups=num_groups, word_dim=word_dim)

        self.num_classes = num_classes
        self.word_dim = word_dim
        self.embed = nn.Linear(in_features, embed_dim)

        query_step: QueryStep = "double" if doubled_query else "norm"
        if self_attention:
            query_step = "self_attention"

        self.layers = nn.ModuleList(
            DecoderLayer(embed_dim, num_heads, mlp_dim, dropout, query_step=query_step)
            for _ in range(num_layers)
        )

        # What belongs to a class, or to the classes of a group.
        self.class_tensors: tuple[str, ...] = ()
        pool_shape: tuple[int, ...]
        if word_dim is None:
            at_least_one(num_classes=num_classes)
            groups = min(num_groups or num_classes, num_classes)
            self._add_queries(queries, groups, embed_dim)
            group_size = -(-num_classes // groups)  # rounded up
            pool_shape = (groups, embed_dim, group_size)
            num_biases = num_classes
            self.class_tensors = ("queries", "pool_weight", "pool_bias")
        else:
            self.word_proj = (
                nn.Linear(word_dim, embed_dim) if word_dim != embed_dim else nn.Identity()
            )
            pool_shape = (embed_dim, 1)
            num_biases = 1  # shared by all classes

        # In three dimensions xavier's standard deviation is sqrt(2 / ((D + G) g)), as in the
        # official code.
        self.pool_weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(pool_shape)))
        self.pool_bias = nn.Parameter(torch.zeros(num_biases))

    def start_at(self, logits: Tensor) -> None:
        """Set the biases to these logits [K]; one that all classes share, to their mean."""
        self.pool_bias.data.copy_(logits if self.word_dim is None else logits.mean())

    def _add_queries(self, kind: str, groups: int, embed_dim: int) -> None:
        """Add the group queries [G, D] as a parameter or a buffer."""
        if kind == "orthogonal":
            # If G > D, only the columns can be orthogonal. The rows get the length sqrt(D) either
            # way, which is that of a random query.
            directions = nn.init.orthogonal_(torch.empty(groups, embed_dim))
            initial = F.normalize(directions, dim=1) * embed_dim**0.5
        else:
            initial = torch.randn(groups, embed_dim)

        if kind == "learned":
            self.queries = nn.Parameter(initial)
        else:
            self.register_buffer("queries", initial)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the tensors of an official head too; `load_state_dict` calls this."""
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name = renamed(key.removeprefix(prefix), OFFICIAL_NAMES)
            state_dict[prefix + name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def take_classes(
        self, tensors: Mapping[str, Tensor], sources: Sequence[int | None], known: int
    ) -> list[int]:
        """Copy the queries and pooling rows of classes from the tensors of another ML-Decoder.

        A row has a meaning with its query only, and the classes of a group share one: a group takes
        the query that most of its classes had, and the rows of these. The arguments are those of
        `take_rows`; return the classes whose rows were taken.
        """
        size, old_size = self.pool_weight.shape[2], tensors["pool_weight"].shape[2]
        taken = []
        for group in range(len(self.queries)):
            members = range(group * size, min((group + 1) * size, self.num_classes))
            found = [(number, sources[number]) for number in members]
            pairs = [(number, source) for number, source in found if source is not None]
            if not pairs:
                continue

            old_groups = Counter(source // old_size for _, source in pairs)
            old_group = old_groups.most_common(1)[0][0]
            self.queries[group] = tensors["queries"][old_group]
            for number, source in pairs:
                if source // old_size == old_group:
                    row = tensors["pool_weight"][old_group, :, source % old_size]
                    self.pool_weight[group, :, number % size] = row
                    self.pool_bias[number] = tensors["pool_bias"][source]
                    taken.append(number)
        return taken

    def forward(
        self, tokens: Tensor, queries: Tensor | None = None, *, attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map tokens [B, N, C], or a map [B, C, H, W], to logits [B, K].

        A zero-shot head, and no other, needs queries: word vectors [K, D_w] of any classes. With
        `attention`, that of the last layer is returned too, averaged over heads: [B, G, N].
        """
        tokens = as_tokens(tokens, self.embed.in_features)
        memory = F.relu(self.embed(tokens))
        x = self._initial_queries(queries)

        # The queries do not depend on the image: one copy serves the whole batch, except in
        # training, where dropout must differ from image to image.
        x = x.expand(tokens.shape[0] if self.training else 1, -1, -1)

        weights = None
        for layer in self.layers:
            x, weights = layer(x, memory, need_weights=attention and layer is self.layers[-1])

        logits = self.pool(x)
        return logits if weights is None else (logits, weights)

    def _initial_queries(self, words: Tensor | None) -> Tensor:
        """Return the queries [G, D] before the first layer."""
        if self.word_dim is None:
            refuse_words(words, self)
            return self.queries

        return F.relu(self.word_proj(check_words(words, self.word_dim).to(self.pool_bias.dtype)))

    def pool(self, x: Tensor) -> Tensor:
        """Group fully-connected pooling: [B, G, D] -> [B, K] (paper, equation of section 2.3)."""
        # Half precision would round different logits to the same value, and ties change the mAP:
        # autocast is off here.
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.pool_weight.dtype)
            if self.pool_weight.dim() == 2:  # one weight for all classes of a zero-shot head
                return (x @ self.pool_weight).squeeze(-1) + self.pool_bias

            # The last group may have more slots than classes: the surplus is cut off.
            groups = x.transpose(0, 1) @ self.pool_weight  # [G, B, g]: one batched product
            return groups.transpose(0, 1).flatten(1)[:, : self.num_classes] + self.pool_bias
