"""Zero-shot heads other than ML-Decoder: classes are defined by their word vectors."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.errors import ConfigError
from mldec.heads.layers import (
    Decoder,
    as_tokens,
    at_least_one,
    check_word_vectors,
    without_autocast,
)


class WordGroupDecoder(nn.Module):
    """Decode K class logits with G = ceil(K / g) group queries made from word vectors.

    Let n_i be the word vector of class i. The query of a group concatenates A n_i over its g
    classes, where A is a matrix [D / g, D_w]. The logit of class i is (B n_i) . x + b. Here x is
    the decoded query of its group, B is a matrix [D, D_w] and b is a scalar. No parameter belongs
    to a class: the group size is fixed, and the number of groups follows from K.

    This is our implementation of paper section 2.4, which is not in the public code. We chose the
    following details:

    - Word vectors are normalized to length 1, and empty slots are filled with zeros.
    - The logits have a bias b.
    - Classes are grouped in order in evaluation and at random in training.

    Unlike with full decoding, the logit of a class depends slightly on the other classes of its
    group.

    Args:
        in_features: Width C of the tokens.
        num_classes: Ignored.
        word_dim: Width D_w of word vectors.
        group_size: Number of classes g per group. Must divide D.
        embed_dim: Decoder width D.
        num_heads: Number of attention heads. Must divide D.
        mlp_dim: Hidden width of the feed-forward block.
        num_layers: Number of decoder layers.
        dropout: Dropout probability in all parts of the decoder.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        word_dim: int = 300,
        group_size: int = 4,
        embed_dim: int = 768,
        num_heads: int = 8,
        mlp_dim: int = 2048,
        num_layers: int = 1,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        at_least_one(word_dim=word_dim, group_size=group_size, embed_dim=embed_dim)
        at_least_one(mlp_dim=mlp_dim, num_layers=num_layers)
        if embed_dim % group_size:
            raise ConfigError(
                f"head.group_size is {group_size}: it must divide head.embed_dim={embed_dim}"
            )

        self.word_dim = word_dim
        self.group_size = group_size
        self.embed = nn.Linear(in_features, embed_dim)
        sizes = (embed_dim, num_heads, mlp_dim, dropout)
        self.layers = Decoder(num_layers, *sizes, query_step="double")
        self.query_proj = nn.Linear(word_dim, embed_dim // group_size, bias=False)  # A

        # B. Decoded queries have norm sqrt(D) and word vectors have norm 1. The initial logits
        # therefore have a standard deviation of about 1.
        self.pool_proj = nn.Parameter(torch.randn(embed_dim, word_dim) * embed_dim**-0.5)
        self.pool_bias = nn.Parameter(torch.zeros(1))

    def forward(
        self, tokens: Tensor, word_vectors: Tensor | None = None, *, attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute logits [B, K]. With `attention`, also return attention weights [B, G, N]."""
        tokens = as_tokens(tokens, self.embed.in_features)
        word_vectors = check_word_vectors(word_vectors, self.word_dim).to(self.pool_bias.dtype)
        word_vectors = F.normalize(word_vectors, dim=1)

        # Groups are random in training, because the groups at test time are different.
        order = None
        if self.training:
            order = torch.randperm(len(word_vectors), device=word_vectors.device)
            word_vectors = word_vectors[order]

        # Pad the last group with zeros: [K, D_w] -> [G, g, D_w]. Indexing by slot number, with
        # sizes from `shape`, keeps K dynamic in an exported model.
        num_classes = word_vectors.shape[0]
        num_groups = (num_classes + self.group_size - 1) // self.group_size
        first = torch.arange(num_groups, device=word_vectors.device) * self.group_size
        in_group = torch.arange(self.group_size, device=word_vectors.device)
        padded = F.pad(word_vectors, (0, 0, 0, self.group_size - 1))
        slots = padded[first[:, None] + in_group]

        memory = F.relu(self.embed(tokens))
        x = self.query_proj(slots).flatten(1)
        x, weights = self.layers(x, memory, attention=attention)

        # Drop the empty slots and restore the order of the queries.
        logits = self.pool(x, slots)[:, torch.arange(num_classes, device=x.device)]
        if order is not None:
            logits = logits[:, order.argsort()]
        if weights is None:
            return logits
        return logits, weights

    def pool(self, x: Tensor, slots: Tensor) -> Tensor:
        """Compute the logits of all slots [B, G g] from queries [B, G, D] and slots [G, g, D_w]."""
        with without_autocast(x.device):
            class_weights = slots.to(self.pool_proj.dtype) @ self.pool_proj.T  # [G, g, D]
            x = x.to(class_weights.dtype).transpose(0, 1)  # [G, B, D]
            logits = x @ class_weights.transpose(1, 2)  # [G, B, g]
            return logits.transpose(0, 1).flatten(1) + self.pool_bias


class WordGAP(nn.Module):
    """Compare one pooled vector per image with the word vector of each class.

    The logit of class i is l_i = (W mean(tokens) + w) . n_i / |n_i| + b, where n_i is its word
    vector. This is the baseline without a decoder: the classes do not attend to the tokens.

    Args:
        in_features: Width C of the tokens.
        num_classes: Number of training classes. Ignored.
        word_dim: Width D_w of word vectors.
        dropout: Dropout probability of the pooled features.
    """

    def __init__(
        self, in_features: int, num_classes: int, *, word_dim: int = 300, dropout: float = 0.0
    ) -> None:
        super().__init__()
        at_least_one(word_dim=word_dim)
        self.word_dim = word_dim
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(in_features, word_dim)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: Tensor, word_vectors: Tensor | None = None) -> Tensor:
        """Compute logits [B, K]; see `mldec.heads`."""
        tokens = as_tokens(tokens, self.fc.in_features)
        word_vectors = F.normalize(check_word_vectors(word_vectors, self.word_dim), dim=1)
        pooled = self.dropout(tokens.mean(1))

        dtype = self.fc.weight.dtype
        with without_autocast(tokens.device):
            image_vectors = self.fc(pooled.to(dtype))  # [B, D_w]
            return image_vectors @ word_vectors.to(dtype).T + self.bias


class Cosine(nn.Module):
    """Scaled cosine similarity between the embeddings of an image and of each class.

    The logit of class i is l_i = exp(s) cos(mean(tokens), n_i) + b, where n_i is its word vector.
    The scalars s and b come from the image-text model that computes both embeddings. No parameter
    belongs to a class.

    Source: CLIP (arXiv 2103.00020, figure 3); b: SigLIP (arXiv 2303.15343, algorithm 1).

    Args:
        in_features: Width C of both the tokens and the word vectors.
        num_classes: Ignored.
        bias: Whether to add the offset b.
    """

    def __init__(self, in_features: int, num_classes: int, *, bias: bool = False) -> None:
        super().__init__()
        self.word_dim = in_features
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.logit_bias = nn.Parameter(torch.zeros(())) if bias else None

    def forward(self, tokens: Tensor, word_vectors: Tensor | None = None) -> Tensor:
        """Compute logits [B, K]; see `mldec.heads`."""
        tokens = as_tokens(tokens, self.word_dim)
        word_vectors = check_word_vectors(word_vectors, self.word_dim)

        dtype = self.logit_scale.dtype
        with without_autocast(tokens.device):
            images = F.normalize(tokens.mean(1).to(dtype), dim=1)
            cosines = images @ F.normalize(word_vectors.to(dtype), dim=1).T
            logits = self.logit_scale.exp() * cosines
            if self.logit_bias is not None:
                logits = logits + self.logit_bias
            return logits
