"""Transformer layers of the decoder heads, batch first and post-norm as in the official code."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.errors import ConfigError

QueryStep = Literal["self_attention", "double", "norm", "none"]

# Official names of the tensors of a layer -> our names, replaced in this order. Our names do not
# contain official names, so `renamed` does not change them.
OFFICIAL_LAYERS = [
    ("multihead_attn.", "cross_attn."),
    ("linear1.", "mlp.0."),
    ("linear2.", "mlp.3."),
]


def renamed(key: str, names: list[tuple[str, str]]) -> str:
    """Convert an official tensor name to our name. Our names are returned unchanged."""
    for official, ours in names:
        key = key.replace(official, ours)
    return key


class Attention(nn.Module):
    """Multi-head attention, batch first, initialized like `nn.MultiheadAttention`.

    Args:
        embed_dim: Width D of queries and output.
        num_heads: Number of attention heads. Must divide D.
        dropout: Dropout probability of the attention weights.
        key_dim: Width E of keys and values. None for D with one fused projection; otherwise the
            projections are three linear layers.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float, key_dim: int | None = None
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ConfigError(f"head.num_heads: {num_heads} must divide head.embed_dim={embed_dim}")
        self.num_heads = num_heads
        self.dropout = dropout

        self.projections: nn.ModuleList | None = None
        if key_dim is not None:
            widths = (embed_dim, key_dim, key_dim)
            self.projections = nn.ModuleList(nn.Linear(width, embed_dim) for width in widths)
        else:
            # The projections share one tensor, because the Xavier bound depends on its shape.
            self.in_proj_weight = nn.Parameter(
                nn.init.xavier_uniform_(torch.empty(3 * embed_dim, embed_dim))
            )
            self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))

        self.out_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Compute multi-head attention. A query of batch size 1 is projected once for the batch.

        Args:
            query: Queries [B, G, D] or [1, G, D].
            key: Keys [B, N, D], or [B, N, E] with `key_dim`.
            value: Values of the same shape as the keys.
            need_weights: Whether to return the attention weights.

        Returns:
            Attended values [B, G, D], and attention weights [B, G, N] averaged over heads, or None.
        """
        q = self._project(query, 0)
        k = self._project(key, 1)
        v = self._project(value, 2)

        # `k.shape[0]` stays dynamic in an exported model; `len(k)` would become a constant.
        q = q.expand(k.shape[0], -1, -1, -1)

        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        attended = self.out_proj(attended.transpose(1, 2).flatten(2))
        if not need_weights:
            return attended, None
        return attended, _attention_weights(q, k).mean(1)

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the attention weights of each head, float32 [B, heads, G, N]; see `forward`."""
        return _attention_weights(self._project(query, 0), self._project(key, 1))

    def weight_gradients(self, value: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of a scalar by the attention weights, [B, heads, G, N].

        `gradient` [B, G, D] is the gradient of the same scalar by the output of `forward`. The
        output is linear in the weights, so no backward pass is needed.
        """
        per_head = self._split_heads(gradient @ self.out_proj.weight)
        return per_head @ self._project(value, 2).transpose(-2, -1)

    def _project(self, x: Tensor, part: int) -> Tensor:
        """Map [B, N, D] to queries (part 0), keys (1) or values (2), [B, heads, N, D / heads]."""
        if self.projections is not None:
            return self._split_heads(self.projections[part](x))
        weight = self.in_proj_weight.chunk(3)[part]
        bias = self.in_proj_bias.chunk(3)[part]
        return self._split_heads(F.linear(x, weight, bias))

    def _split_heads(self, projected: Tensor) -> Tensor:
        """Map [B, N, D] to [B, heads, N, D / heads]."""
        return projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """Return the attention weights of queries [.., G, d] to keys [.., N, d], in float32."""
    return (q.float() @ k.float().transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)


def _feed_forward(
    embed_dim: int, mlp_dim: int, dropout: float, activation: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Return a feed-forward block with dropout after the activation, [.., D] -> [.., D]."""
    return nn.Sequential(
        nn.Linear(embed_dim, mlp_dim),
        activation(),
        nn.Dropout(dropout),
        nn.Linear(mlp_dim, embed_dim),
    )


class EncoderLayer(nn.Module):
    """Encoder layer of Query2Label: self-attention over the tokens, then a feed-forward block."""

    def __init__(self, embed_dim: int, num_heads: int, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(embed_dim, num_heads, dropout)
        self.mlp = _feed_forward(embed_dim, mlp_dim, dropout)
        self.norm1 = nn.LayerNorm(embed_dim)
        self.norm2 = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Encode tokens [B, N, D]; positions [N, D] are added to queries and keys, as in DETR."""
        located = tokens + positions
        attended, _ = self.self_attn(located, located, tokens)
        tokens = self.norm1(tokens + self.dropout(attended))
        return self.norm2(tokens + self.dropout(self.mlp(tokens)))


class DecoderLayer(nn.Module):
    """Decoder layer: a query step, cross-attention to the tokens, and a feed-forward block.

    Args:
        embed_dim: Width D of the queries.
        num_heads: Number of attention heads. Must divide D.
        mlp_dim: Hidden width of the feed-forward block.
        dropout: Dropout probability in all parts.
        query_step: Step before the cross-attention. "self_attention": self-attention between the
            queries, as in a transformer decoder. "double": norm(x + dropout(x)), the remainder of
            the removed self-attention (ML-Decoder). "norm": norm(x). "none": no step (Query2Label,
            RAM).
        key_dim: Width E of the tokens, if it differs from D (RAM).
        activation: Activation of the feed-forward block.
        eps: Epsilon of the norms after the cross-attention and the feed-forward block.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mlp_dim: int,
        dropout: float,
        *,
        query_step: QueryStep,
        key_dim: int | None = None,
        activation: type[nn.Module] = nn.ReLU,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.query_step = query_step
        if query_step == "self_attention":
            self.self_attn = Attention(embed_dim, num_heads, dropout)
        if query_step != "none":
            self.norm1 = nn.LayerNorm(embed_dim)

        self.cross_attn = Attention(embed_dim, num_heads, dropout, key_dim)
        self.mlp = _feed_forward(embed_dim, mlp_dim, dropout, activation)
        self.norm2 = nn.LayerNorm(embed_dim, eps)
        self.norm3 = nn.LayerNorm(embed_dim, eps)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        tokens: Tensor,
        *,
        query_positions: Tensor | float = 0.0,
        token_positions: Tensor | float = 0.0,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Decode the queries. Positions are added to queries and keys, not to values.

        Args:
            x: Queries [B, G, D] or [1, G, D].
            tokens: Tokens [B, N, D], or [B, N, E] with `key_dim`.
            query_positions: Positions of the queries, broadcast to x.
            token_positions: Positions of the tokens, broadcast to the tokens.
            need_weights: Whether to return the cross-attention weights.

        Returns:
            Decoded queries [B, G, D], and attention weights [B, G, N] averaged over heads, or None.
        """
        if self.query_step == "self_attention":
            located = x + query_positions
            attended, _ = self.self_attn(located, located, x)
            x = self.norm1(x + self.dropout(attended))
        # The official code removes self-attention but keeps its residual connection and norm.
        elif self.query_step == "double":
            x = self.norm1(x + self.dropout(x))
        elif self.query_step == "norm":
            x = self.norm1(x)

        attended, weights = self.cross_attn(
            x + query_positions, tokens + token_positions, tokens, need_weights=need_weights
        )

        x = self.norm2(x + self.dropout(attended))
        return self.norm3(x + self.dropout(self.mlp(x))), weights


class Decoder(nn.ModuleList):
    """Stack of decoder layers. The arguments are those of `DecoderLayer`."""

    def __init__(self, num_layers: int, *sizes: Any, **options: Any) -> None:
        super().__init__(DecoderLayer(*sizes, **options) for _ in range(num_layers))

    def forward(
        self, x: Tensor, tokens: Tensor, *, attention: bool = False, **positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Decode the queries with all layers; see `DecoderLayer.forward`.

        The queries x may also be [G, D]. With `attention`, the weights are those of the last layer.
        """
        # Queries [1, G, D] are the same for all images. In training they are expanded to the
        # batch, because dropout must differ between images.
        if x.ndim == 2:
            x = x[None]
        if self.training:
            x = x.expand(tokens.shape[0], -1, -1)

        weights = None
        for layer in self:
            need_weights = attention and layer is self[-1]
            x, weights = layer(x, tokens, need_weights=need_weights, **positions)
        return x, weights


def at_least_one(**sizes: int | None) -> None:
    """Raise ConfigError for the first size below 1. None is skipped."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ConfigError(f"head.{name} is {size}: it must be at least 1")


def as_tokens(features: Tensor, width: int) -> Tensor:
    """Return tokens [B, N, C] of this width C. A map [B, C, H, W] is flattened row by row."""
    tokens = features
    if features.ndim == 4:
        tokens = features.flatten(2).transpose(1, 2)
    if tokens.ndim != 3 or tokens.shape[2] != width:
        raise ValueError(
            f"tokens have the shape {list(features.shape)}: "
            f"it must be [B, N, {width}] or [B, {width}, H, W]"
        )
    return tokens


@torch.no_grad()
def take_rows(
    head: Any, tensors: Mapping[str, Tensor], sources: Sequence[int | None], known: int
) -> list[int]:
    """Copy the rows of classes from another head; see `take_classes` in `mldec.heads`.

    Each tensor in `class_tensors` has the same number of consecutive rows for every class.
    """
    taken = []
    rows = []
    for number, source in enumerate(sources):
        if source is not None:
            taken.append(number)
            rows.append(source)
    for name in head.class_tensors:
        own = head.get_parameter(name)
        given = tensors[name].to(own)
        own_rows = own.unflatten(0, (len(sources), -1))
        given_rows = given.unflatten(0, (known, -1))
        # `index_copy_` raises an error if the number of rows per class differs.
        own_rows.index_copy_(0, torch.tensor(taken), given_rows[rows])
    return taken


def reject_word_vectors(word_vectors: Tensor | None, head: nn.Module) -> None:
    """Raise ConfigError if word vectors are passed to a head with fixed classes."""
    if word_vectors is not None:
        raise ConfigError(
            f"head: {type(head).__name__} has no word_dim and takes no word vectors; "
            f"pass head=ml_decoder head.word_dim={word_vectors.shape[-1]}"
        )


def check_word_vectors(word_vectors: Tensor | None, width: int) -> Tensor:
    """Return the word vectors [K, width], or raise ConfigError if they have another shape."""
    if word_vectors is None or word_vectors.ndim != 2 or word_vectors.shape[1] != width:
        shape = None if word_vectors is None else list(word_vectors.shape)
        raise ConfigError(
            f"head.word_dim={width}: word vectors of shape {shape}; give [K, {width}]"
        )
    return word_vectors


def without_autocast(device: torch.device) -> torch.autocast:
    """Return a context manager that disables autocast for the computation of logits.

    Half precision rounds different logits to the same value, and such ties change the mAP.
    """
    return torch.autocast(device.type, enabled=False)
