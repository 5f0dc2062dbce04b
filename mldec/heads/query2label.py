"""Query2Label: one encoder and two decoder layers with a learned query a label (arXiv 2107.10834)."""

import math

import torch
from torch import Tensor, nn

from mldec.errors import ConfigError
from mldec.heads.layers import DecoderLayer, EncoderLayer, QueryStep, at_least_one, check_tokens


class Query2Label(nn.Module):
    """A DETR-style transformer over the tokens, one learned query a class, and a linear layer of each class's own.

    Defaults are those of the official code. Source: SlongLiu/query2labels lib/models (query2label.py, transformer.py).

    Args:
        in_features: width C of the tokens.
        num_classes: number of classes K.
        embed_dim: transformer width D.
        num_heads: attention heads.
        mlp_dim: hidden width of the feed-forward parts.
        encoder_layers: encoder layers.
        decoder_layers: decoder layers.
        dropout: probability, everywhere.
        input_proj: project the tokens from C to D; needed when C and D differ.
        self_attention: self-attention among the label queries, removed by default as officially.

    Raises:
        ConfigError: if C differs from D without a projection, or a size is out of range.
    """

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
        at_least_one(
            num_classes=num_classes,
            embed_dim=embed_dim,
            mlp_dim=mlp_dim,
            decoder_layers=decoder_layers,
        )
        if encoder_layers < 0:
            raise ConfigError(f"head.encoder_layers is {encoder_layers}: it must be 0 or more")
        if in_features != embed_dim and not input_proj:
            raise ConfigError(
                f"head.embed_dim {embed_dim} differs from the backbone's width {in_features}: "
                f"set head.input_proj=true or head.embed_dim={in_features}"
            )
        if embed_dim % 4:
            raise ConfigError(
                f"head.embed_dim {embed_dim} is not a multiple of 4, which sine positions need"
            )
        self.in_features = in_features
        self.input_proj = nn.Linear(in_features, embed_dim) if input_proj else nn.Identity()
        sizes = (embed_dim, num_heads, mlp_dim, dropout)
        query_step: QueryStep = "self_attention" if self_attention else "none"
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(encoder_layers))
        self.decoder = nn.ModuleList(
            DecoderLayer(*sizes, query_step=query_step) for _ in range(decoder_layers)
        )
        for weight in [
            p for layers in (self.encoder, self.decoder) for p in layers.parameters() if p.dim() > 1
        ]:
            nn.init.xavier_uniform_(weight)
        self.norm = nn.LayerNorm(embed_dim)
        self.queries = nn.Parameter(torch.randn(num_classes, embed_dim))
        bound = embed_dim**-0.5
        self.fc_weight = nn.Parameter(torch.empty(num_classes, embed_dim).uniform_(-bound, bound))
        self.fc_bias = nn.Parameter(torch.empty(num_classes).uniform_(-bound, bound))

    def forward(
        self, tokens: Tensor, queries: Tensor | None = None, *, attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map tokens [B, N, C] of a square map to logits [B, K].

        Args:
            tokens: of the backbone, row by row, N a square number.
            queries: refused: the label queries are the head's own.
            attention: also return the attention of the last decoder layer, averaged over heads.

        Returns:
            logits [B, K], and the attention of each query over the tokens [B, K, N] if asked for.

        Raises:
            ConfigError: if word queries are given, or the tokens are not those of a square map.
            ValueError: if the tokens have another form.
        """
        check_tokens(tokens, self.in_features)
        if queries is not None:
            raise ConfigError(
                "head Query2Label takes no word queries: use head=ml_decoder with head.word_dim=<width>"
            )
        memory = self.input_proj(tokens)
        positions = sine_positions(tokens.shape[1], memory.shape[-1]).to(memory)
        for layer in self.encoder:
            memory = layer(memory, positions)
        x, weights = torch.zeros_like(self.queries)[None], None
        if self.training:
            x = x.expand(len(tokens), -1, -1)
        for layer in self.decoder:
            x, weights = layer(
                x,
                memory,
                query_positions=self.queries,
                token_positions=positions,
                need_weights=attention and layer is self.decoder[-1],
            )
        logits = (self.norm(x) * self.fc_weight).sum(-1) + self.fc_bias
        return logits if weights is None else (logits, weights)


def sine_positions(num_tokens: int, dim: int, *, temperature: float = 10_000.0) -> Tensor:
    """Return the normalised sine positions of DETR for a square map of N tokens: float32 [N, dim], y before x.

    Raises:
        ConfigError: if N is not a square number: the shape of the map could not be told.
    """
    side = math.isqrt(num_tokens)
    if side * side != num_tokens:
        raise ConfigError(
            f"head Query2Label needs the tokens of a square map, got {num_tokens}: use square images"
        )
    place = torch.arange(1, side + 1) / (side + 1e-6) * 2 * math.pi
    half = dim // 2
    angle = place[:, None] / temperature ** (2 * (torch.arange(half) // 2) / half)
    line = torch.stack((angle[:, 0::2].sin(), angle[:, 1::2].cos()), dim=2).flatten(
        1
    )  # [side, half]
    return torch.cat(
        (line[:, None].expand(-1, side, -1), line[None].expand(side, -1, -1)), dim=2
    ).flatten(0, 1)
