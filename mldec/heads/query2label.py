"""Query2Label: a transformer with one learned query per class (arXiv 2107.10834)."""

import math

import torch
from torch import Tensor, nn

from mldec.errors import ConfigError
from mldec.heads.layers import (
    OFFICIAL_LAYERS,
    Decoder,
    EncoderLayer,
    QueryStep,
    as_tokens,
    at_least_one,
    reject_word_vectors,
    take_rows,
)

# Official names of tensors -> ours.
OFFICIAL_NAMES = [
    ("transformer.encoder.layers.", "encoder."),
    ("transformer.decoder.layers.", "decoder."),
    ("transformer.decoder.norm.", "norm."),
    ("query_embed.weight", "queries"),
    ("fc.W", "fc_weight"),
    ("fc.b", "fc_bias"),
]
OFFICIAL_NAMES += OFFICIAL_LAYERS


class Query2Label(nn.Module):
    """DETR-style transformer over the tokens with one learned query per class.

    Each class has its own linear map from its decoded query to its logit. Defaults follow the
    official code.

    Source: SlongLiu/query2labels lib/models (query2label.py, transformer.py).

    Args:
        in_features: Width C of the tokens.
        num_classes: Number of classes K.
        embed_dim: Transformer width D, a multiple of 4.
        num_heads: Number of attention heads. Must divide D.
        mlp_dim: Hidden width of the feed-forward blocks.
        encoder_layers: Number of encoder layers, 0 or more.
        decoder_layers: Number of decoder layers, 1 or more.
        dropout: Dropout probability in all parts.
        input_proj: Project the tokens from C to D. Required if C and D differ.
        self_attention: Add self-attention between the label queries. Off in the official code.
    """

    class_tensors = ("queries", "fc_weight", "fc_bias")
    take_classes = take_rows

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        embed_dim: int = 2048,
        num_heads: int = 4,
        mlp_dim: int = 8192,
        encoder_layers: int = 1,
        decoder_layers: int = 2,
        dropout: float = 0.1,
        input_proj: bool = False,
        self_attention: bool = False,
    ) -> None:
        super().__init__()
        at_least_one(num_classes=num_classes, embed_dim=embed_dim)
        at_least_one(mlp_dim=mlp_dim, decoder_layers=decoder_layers)

        if in_features != embed_dim and not input_proj:
            raise ConfigError(
                f"head.embed_dim: {embed_dim} differs from the backbone's width {in_features}; "
                f"set head.input_proj=true or head.embed_dim={in_features}"
            )

        self.in_features = in_features
        self.input_proj: nn.Module = nn.Identity()
        if input_proj:
            self.input_proj = nn.Linear(in_features, embed_dim)

        sizes = (embed_dim, num_heads, mlp_dim, dropout)
        query_step: QueryStep = "self_attention" if self_attention else "none"
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(encoder_layers))
        self.decoder = Decoder(decoder_layers, *sizes, query_step=query_step)

        # The official code reinitializes every matrix of the transformer. Do not reorder this: the
        # initial weights of a seed depend on the order of the random draws.
        for layers in (self.encoder, self.decoder):
            for parameter in layers.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)

        self.norm = nn.LayerNorm(embed_dim)
        self.queries = nn.Parameter(torch.randn(num_classes, embed_dim))

        # Same bound as in nn.Linear: the weights of a class are one row of width D.
        bound = embed_dim**-0.5
        self.fc_weight = nn.Parameter(torch.empty(num_classes, embed_dim).uniform_(-bound, bound))
        self.fc_bias = nn.Parameter(torch.empty(num_classes).uniform_(-bound, bound))

    def set_bias_from_prior(self, logits: Tensor) -> None:
        """Initialize the biases from prior logits [K]."""
        self.fc_bias.data.copy_(logits)

    def forward(
        self, tokens: Tensor, word_vectors: Tensor | None = None, *, attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute logits [B, K]. With `attention`, also return attention weights [B, K, N].

        The tokens must come from a square map, otherwise ConfigError is raised.
        """
        tokens = as_tokens(tokens, self.in_features)
        reject_word_vectors(word_vectors, self)

        memory = self.input_proj(tokens)
        _, num_tokens, dim = memory.shape
        positions = _sine_positions(num_tokens, dim, memory.device).to(memory.dtype)

        for layer in self.encoder:
            memory = layer(memory, positions)

        # The decoder starts from zeros and the learned queries are positions, as in DETR.
        x, weights = self.decoder(
            torch.zeros_like(self.queries),
            memory,
            attention=attention,
            query_positions=self.queries,
            token_positions=positions,
        )

        logits = (self.norm(x) * self.fc_weight).sum(-1) + self.fc_bias
        if weights is None:
            return logits
        return logits, weights


def _sine_positions(num_tokens: int, dim: int, device: torch.device) -> Tensor:
    """Return the normalized sine positions of DETR for a square map, float32 [N, dim]."""
    side = math.isqrt(num_tokens)
    if side * side != num_tokens:
        raise ConfigError(f"head: Query2Label needs a square map, not {num_tokens} tokens; resize")

    # One axis: coordinates in (0, 2 pi], dim / 4 frequencies, alternating sines and cosines. The
    # ratio of the longest to the shortest wavelength is 10,000.
    half = dim // 2
    coordinate = torch.arange(1, side + 1, device=device) / (side + 1e-6) * 2 * math.pi
    exponent = 2 * (torch.arange(half, device=device) // 2) / half
    angle = coordinate[:, None] / 10_000.0**exponent
    axis = torch.stack((angle[:, 0::2].sin(), angle[:, 1::2].cos()), dim=2).flatten(1)

    # The first half encodes y, the second half x.
    y = axis[:, None].expand(-1, side, -1)
    x = axis[None].expand(side, -1, -1)
    return torch.cat((y, x), dim=2).flatten(0, 1)
