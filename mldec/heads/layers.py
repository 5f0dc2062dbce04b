"""The transformer layers of the decoder heads: batch first, post-norm, as officially."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.errors import ConfigError

QueryStep = Literal["self_attention", "double", "norm", "none"]

# The names that the authors' heads give to the tensors of a layer -> ours, replaced in this order.
# Our own names contain none of the official ones, so they stay what they are.
OFFICIAL_LAYERS = [
    ("multihead_attn.", "cross_attn."),
    ("linear1.", "mlp.0."),
    ("linear2.", "mlp.3."),
]


def renamed(key: str, names: list[tuple[str, str]]) -> str:
    """Return our name of a head's tensor, from its official name or from our own."""
    for official, ours in names:
        key = key.replace(official, ours)
    return key


class Attention(nn.Module):
    """Multi-head attention, batch first, with parameters as `nn.MultiheadAttention` begins them.

    With `key_dim` E, keys and values are E wide, and the projections are three linear layers.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float, key_dim: int | None = None
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ConfigError(
                f"head.embed_dim {embed_dim} is not a multiple of head.num_heads {num_heads}"
            )
        self.num_heads = num_heads
        self.dropout = dropout

        self.projections: nn.ModuleList | None = None
        if key_dim is not None:
            widths = (embed_dim, key_dim, key_dim)
            self.projections = nn.ModuleList(nn.Linear(width, embed_dim) for width in widths)
        else:
            # The three projections share one tensor, because xavier's bound depends on its shape.
            self.in_proj_weight = nn.Parameter(
                nn.init.xavier_uniform_(torch.empty(3 * embed_dim, embed_dim))
            )
            self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))

        self.out_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query [B or 1, G, D] to key and value [B, N, D] or [B, N, E].

        Return the attended values [B, G, D], and the attention weights [B, G, N], averaged over
        heads, or None. A query of batch size 1 is projected once for the whole batch.
        """
        q, k, v = self._project(query, 0), self._project(key, 1), self._project(value, 2)

        # A query of batch size 1 serves every image. Not `len(k)`: in an exported model that would
        # be the fixed number of images that it was traced with.
        q = q.expand(k.shape[0], -1, -1, -1)

        attended = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0
        )
        attended = self.out_proj(attended.transpose(1, 2).flatten(2))
        if not need_weights:
            return attended, None
        return attended, _weights(q, k).mean(1)

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the attention weights of each head, which fused kernels do not give.

        They are float32 [B, heads, G, N].
        """
        return _weights(self._project(query, 0), self._project(key, 1))

    def weight_gradients(self, value: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of a scalar with respect to the weights [B, heads, G, N].

        It follows from that with respect to the attended values [B, G, D], which are linear in the
        weights; the value is [B, N, D].
        """
        per_head = self._split_heads(gradient @ self.out_proj.weight)
        return per_head @ self._project(value, 2).transpose(-2, -1)

    def _project(self, x: Tensor, part: int) -> Tensor:
        """Map [B, N, D] to queries (part 0), keys (1) or values (2), [B, heads, N, D / heads]."""
        if self.projections is not None:
            return self._split_heads(self.projections[part](x))
        weight, bias = self.in_proj_weight.chunk(3)[part], self.in_proj_bias.chunk(3)[part]
        return self._split_heads(F.linear(x, weight, bias))

    def _split_heads(self, projected: Tensor) -> Tensor:
        """Map [B, N, D] to [B, heads, N, D / heads]."""
        return projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _weights(q: Tensor, k: Tensor) -> Tensor:
    """Return the attention weights of queries [.., G, d] to keys [.., N, d], in float32."""
    return (q.float() @ k.float().transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)


class FeedForward(nn.Sequential):
    """Two linear layers with ReLU, or GELU, and dropout between them: [.., D] -> [.., D]."""

    def __init__(
        self, embed_dim: int, mlp_dim: int, dropout: float, activation: type[nn.Module] = nn.ReLU
    ) -> None:
        super().__init__(
            nn.Linear(embed_dim, mlp_dim),
            activation(),
            nn.Dropout(dropout),
            nn.Linear(mlp_dim, embed_dim),
        )


class EncoderLayer(nn.Module):
    """Self-attention over the tokens, then feed-forward (Query2Label)."""

    def __init__(self, embed_dim: int, num_heads: int, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(embed_dim, num_heads, dropout)
        self.mlp = FeedForward(embed_dim, mlp_dim, dropout)
        self.norm1, self.norm2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Map tokens [B, N, D] to tokens; positions [N, D] are for queries and keys, as in DETR."""
        located = tokens + positions
        attended, _ = self.self_attn(located, located, tokens)
        tokens = self.norm1(tokens + self.dropout(attended))
        return self.norm2(tokens + self.dropout(self.mlp(tokens)))


class DecoderLayer(nn.Module):
    """One decoder layer: a step among the queries, then cross-attention, then feed-forward.

    The step is "self_attention" in the full transformer decoder; "double" in ML-Decoder, where the
    residual of the removed self-attention stays, so that a query is added to its own dropout;
    "norm", the same without that addition; or "none", not even the norm (Query2Label, RAM).
    RAM has another width E of the tokens, activation and epsilon of the norms.
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
        self.mlp = FeedForward(embed_dim, mlp_dim, dropout, activation)
        self.norm2, self.norm3 = nn.LayerNorm(embed_dim, eps), nn.LayerNorm(embed_dim, eps)
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
        """Let the queries x [B or 1, G, D] attend to the tokens [B, N, D] or [B, N, E].

        Return the decoded queries [B, G, D], and the cross-attention weights [B, G, N] or None.
        Positions are added to queries and keys, never to values.
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


def at_least_one(**sizes: int | None) -> None:
    """Raise a `ConfigError` naming the first size below 1; None is not set."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ConfigError(f"head.{name} is {size}: it must be at least 1")


def as_tokens(features: Tensor, width: int) -> Tensor:
    """Return features [B, N, C], or a map [B, C, H, W] row by row, as tokens [B, N, C]."""
    tokens = features.flatten(2).transpose(1, 2) if features.ndim == 4 else features
    if tokens.ndim != 3 or tokens.shape[2] != width:
        raise ValueError(
            f"tokens have the shape {list(features.shape)}: "
            f"give [B, N, {width}] or [B, {width}, H, W]"
        )
    return tokens


@torch.no_grad()
def take_rows(
    head: Any, tensors: Mapping[str, Tensor], sources: Sequence[int | None], known: int
) -> list[int]:
    """Copy the rows of classes from the tensors of a head of the same kind with other classes.

    Each of the `class_tensors` of a head has as many rows for every class, one class after the
    other. For each class, `sources` has its number among the `known` ones of the other head, or
    None. Return the classes whose rows were taken.
    """
    taken = [number for number, source in enumerate(sources) if source is not None]
    rows = [source for source in sources if source is not None]
    for name in head.class_tensors:
        own, given = head.get_parameter(name), tensors[name].to(head.get_parameter(name))
        # It refuses another number of rows per class.
        own.unflatten(0, (len(sources), -1)).index_copy_(
            0, torch.tensor(taken), given.unflatten(0, (known, -1))[rows]
        )
    return taken


def refuse_words(words: Tensor | None, head: nn.Module) -> None:
    """Raise a `ConfigError` if a head that knows only its own classes is given word vectors."""
    if words is not None:
        raise ConfigError(
            f"head {type(head).__name__} takes no word queries: use head=ml_decoder with "
            f"head.word_dim=<width>"
        )


def check_words(words: Tensor | None, width: int) -> Tensor:
    """Return word vectors [K, D_w] after checking that there are some, of this width."""
    if words is None or words.ndim != 2 or words.shape[1] != width:
        given = "none" if words is None else f"the shape {list(words.shape)}"
        raise ConfigError(
            f"a head with head.word_dim={width} needs word queries of that width, "
            f"[K, {width}] floating point, got {given}"
        )
    return words
