"""RAM and RAM++: the queries are embeddings of tag names or of tag descriptions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.heads.layers import (
    Decoder,
    as_tokens,
    at_least_one,
    reject_word_vectors,
    take_rows,
    without_autocast,
)

# Official names of tensors -> ours, replaced in this order.
OFFICIAL_NAMES = [
    ("vision_multi.", "tagging_head."),  # its older name
    ("tagging_head.encoder.layer.", "layers."),
    ("crossattention.self.query.", "cross_attn.projections.0."),
    ("crossattention.self.key.", "cross_attn.projections.1."),
    ("crossattention.self.value.", "cross_attn.projections.2."),
    ("crossattention.output.dense.", "cross_attn.out_proj."),
    ("crossattention.output.LayerNorm.", "norm2."),
    ("intermediate.dense.", "mlp.0."),
    ("output.dense.", "mlp.3."),
    ("output.LayerNorm.", "norm3."),
    ("image_proj.", "embed."),
    ("wordvec_proj.", "word_proj."),
]
REWEIGHT_SCALE = math.log(1 / 0.07)  # initial value in RAM++; its training did not change it


class RAM(nn.Module):
    """Decode K tags from their text embeddings with cross-attention layers.

    RAM has one row per tag, and the query of a tag is a projection of its row. RAM++ has M rows per
    tag, which embed M descriptions of the tag. The query is a projection of their weighted mean.
    The weights are computed for each image by a softmax over exp(s) c . row. Here c is the mean of
    the projected tokens, normalized to length 1, and s is a learned scalar.

    The queries attend to the tokens and to the mean token. There is no self-attention between tags,
    and one linear layer computes the logits of all tags.

    The official rows come from CLIP's text encoder and are frozen. Here they are initialized at
    random and trained.

    Source: arXiv 2306.03514 (RAM), arXiv 2310.15200 section 3.2 (RAM++); reference
    xinyu1205/recognize-anything ram/models (ram.py, ram_plus.py, bert.py).

    Args:
        in_features: Width C of the tokens.
        num_classes: Number of tags K.
        descriptions: Number of rows M per tag. 51 in the released RAM++.
        word_dim: Width E of the rows and of the projected tokens.
        embed_dim: Decoder width D.
        num_heads: Number of attention heads. Must divide D.
        mlp_dim: Hidden width of the feed-forward block.
        num_layers: Number of decoder layers.
        dropout: Dropout probability in all parts of the decoder.
    """

    class_tensors = ("label_embed",)
    take_classes = take_rows

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        descriptions: int = 1,
        word_dim: int = 512,
        embed_dim: int = 768,
        num_heads: int = 4,
        mlp_dim: int = 3072,
        num_layers: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        at_least_one(num_classes=num_classes, descriptions=descriptions, word_dim=word_dim)
        at_least_one(embed_dim=embed_dim, mlp_dim=mlp_dim, num_layers=num_layers)

        self.descriptions = descriptions
        self.embed = nn.Linear(in_features, word_dim)

        # The rows of a tag are consecutive. Their norm is about 1, as in CLIP.
        rows = torch.empty(num_classes * descriptions, word_dim)
        self.label_embed = nn.Parameter(nn.init.normal_(rows, std=word_dim**-0.5))
        self.reweight_scale: nn.Parameter | None = None
        if descriptions > 1:
            self.reweight_scale = nn.Parameter(torch.tensor(REWEIGHT_SCALE))

        self.word_proj = nn.Linear(word_dim, embed_dim)
        self.layers = Decoder(
            num_layers,
            embed_dim,
            num_heads,
            mlp_dim,
            dropout,
            query_step="none",
            key_dim=word_dim,
            activation=nn.GELU,
            eps=1e-12,
        )
        self.fc = nn.Linear(embed_dim, 1)

    def forward(
        self, tokens: Tensor, word_vectors: Tensor | None = None, *, attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute logits [B, K]. With `attention`, also return attention weights [B, K, N].

        The attention weight of the mean token is omitted.
        """
        tokens = as_tokens(tokens, self.embed.in_features)
        reject_word_vectors(word_vectors, self)
        memory = self.embed(torch.cat([tokens.mean(1, keepdim=True), tokens], 1))
        x = F.relu(self.word_proj(self._label_embeddings(memory[:, 0])))
        x, weights = self.layers(x, memory, attention=attention)

        with without_autocast(x.device):
            logits = self.fc(x.to(self.fc.weight.dtype)).squeeze(-1)
        if weights is None:
            return logits
        return logits, weights[:, :, 1:]

    def _label_embeddings(self, mean_token: Tensor) -> Tensor:
        """Return tag embeddings [B, K, E] or [1, K, E], given the mean tokens [B, E]."""
        if self.reweight_scale is None:
            return self.label_embed[None]

        # Without autocast: the cast of all rows takes longer than it saves.
        with without_autocast(mean_token.device):
            image = F.normalize(mean_token.to(self.label_embed.dtype), dim=1)
            similarities = self.reweight_scale.exp() * (image @ self.label_embed.T)
            weights = similarities.unflatten(1, (-1, self.descriptions)).softmax(2)  # [B, K, M]
            rows = self.label_embed.unflatten(0, (-1, self.descriptions))  # [K, M, E]
            return (weights.transpose(0, 1) @ rows).transpose(0, 1)
