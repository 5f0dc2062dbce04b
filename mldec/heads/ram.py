"""RAM and RAM++: the queries are embeddings of tag names or of descriptions of the tags."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.heads.layers import DecoderLayer, as_tokens, at_least_one, refuse_words, take_rows

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
REWEIGHT_SCALE = math.log(1 / 0.07)  # where the training of RAM++ starts, and where it stayed


class RAM(nn.Module):
    """Decode K tags from their text embeddings by two layers of cross-attention.

    With one row per tag, the query of a tag is a projection of this row (RAM). With M rows, which
    embed M descriptions of the tag, it is a projection of their mean, weighted for each image by a
    softmax over exp(s) c . row, where c is the mean of the projected tokens, scaled to length 1,
    and s a learned number (RAM++). The mean of the tokens is attended to beside the tokens. Tags do
    not see each other, and one linear layer serves all of them.

    Source: arXiv 2306.03514 (RAM), arXiv 2310.15200 section 3.2 (RAM++); reference
    xinyu1205/recognize-anything ram/models (ram.py, ram_plus.py, bert.py). Officially the rows come
    from CLIP's text encoder and are frozen; here they begin at random, and are trained.

    Args:
        in_features: width C of the tokens.
        num_classes: number of tags K.
        descriptions: number of rows M per tag; 51 in the released RAM++.
        word_dim: width E of the rows, and of the tokens that are attended to.
        embed_dim: decoder width D.
        num_heads: number of attention heads; divides D.
        mlp_dim: hidden width of the feed-forward part.
        num_layers: number of decoder layers.
        dropout: dropout probability in all parts of the decoder.
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

        # The rows of a tag follow each other. Like those of CLIP they have a length of about 1.
        rows = torch.empty(num_classes * descriptions, word_dim)
        self.label_embed = nn.Parameter(nn.init.normal_(rows, std=word_dim**-0.5))
        self.reweight_scale: nn.Parameter | None = None
        if descriptions > 1:
            self.reweight_scale = nn.Parameter(torch.tensor(REWEIGHT_SCALE))

        self.word_proj = nn.Linear(word_dim, embed_dim)
        self.layers = nn.ModuleList(
            DecoderLayer(
                embed_dim,
                num_heads,
                mlp_dim,
                dropout,
                query_step="none",
                key_dim=word_dim,
                activation=nn.GELU,
                eps=1e-12,
            )
            for _ in range(num_layers)
        )
        self.fc = nn.Linear(embed_dim, 1)

    def forward(
        self, tokens: Tensor, queries: Tensor | None = None, *, attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map tokens [B, N, C], or a map [B, C, H, W], to logits [B, K].

        The queries are the head's own: others are refused. With `attention`, that of the last layer
        is returned too, averaged over heads: [B, K, N], without that to the mean of the tokens.
        """
        tokens = as_tokens(tokens, self.embed.in_features)
        refuse_words(queries, self)
        memory = self.embed(torch.cat([tokens.mean(1, keepdim=True), tokens], 1))
        x = F.relu(self.word_proj(self._label_embeddings(memory[:, 0])))

        # One copy of the queries serves the whole batch, except in training, where dropout must
        # differ from image to image, or where the image has re-weighted them.
        if self.training:
            x = x.expand(tokens.shape[0], -1, -1)

        weights = None
        for layer in self.layers:
            x, weights = layer(x, memory, need_weights=attention and layer is self.layers[-1])

        # Half precision would round different logits to the same value, and ties change the mAP:
        # autocast is off here.
        with torch.autocast(x.device.type, enabled=False):
            logits = self.fc(x.to(self.fc.weight.dtype)).squeeze(-1)
        return logits if weights is None else (logits, weights[:, :, 1:])

    def _label_embeddings(self, mean_token: Tensor) -> Tensor:
        """Return an embedding per tag, [B, K, E] or [1, K, E], for the mean tokens [B, E]."""
        if self.reweight_scale is None:
            return self.label_embed[None]

        # In float32: a cast of all rows would take longer than it saves.
        with torch.autocast(mean_token.device.type, enabled=False):
            image = F.normalize(mean_token.to(self.label_embed.dtype), dim=1)
            similarities = self.reweight_scale.exp() * (image @ self.label_embed.T)
            weights = similarities.unflatten(1, (-1, self.descriptions)).softmax(2)  # [B, K, M]
            rows = self.label_embed.unflatten(0, (-1, self.descriptions))  # [K, M, E]
            return (weights.transpose(0, 1) @ rows).transpose(0, 1)
