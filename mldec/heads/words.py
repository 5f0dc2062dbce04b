"""Zero-shot heads other than ML-Decoder: classes are defined by their word vectors."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.errors import ConfigError
from mldec.heads.layers import (
    DecoderLayer,
    as_tokens,
    at_least_one,
    check_words,
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
        num_classes: Number of training classes. Ignored.
        word_dim: Width D_w of word vectors.
        group_size: Number of classes g per group. Must divide D.
        embed_dim: Decoder width D.
        num_heads: Number of attention heads. Must divide D.
        mlp_dim: Hidden width of the feed-forward block.
        num_layers: Number of decoder layers.
        dropout: Dropout probability in all parts of the decoder.

    Raises:
        ConfigError: If a size is below 1, or `group_size` or `num_heads` does not divide
            `embed_dim`.
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
                f"head.group_size {group_size} does not divide head.embed_dim {embed_dim}"
            )

        self.word_dim = word_dim
        self.group_size = group_size
        self.embed = nn.Linear(in_features, embed_dim)
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            layer = DecoderLayer(embed_dim, num_heads, mlp_dim, dropout, query_step="double")
            self.layers.append(layer)
        self.query_proj = nn.Linear(word_dim, embed_dim // group_size, bias=False)  # A

        # B. Decoded queries have norm sqrt(D) and word vectors have norm 1. The initial logits
        # therefore have a standard deviation of about 1.
        self.pool_proj = nn.Parameter(torch.randn(embed_dim, word_dim) * embed_dim**-0.5)
        self.pool_bias = nn.Parameter(torch.zeros(1))

    def forward(
        self, tokens: Tensor, word_vectors: Tensor | None = None, *, attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the logits of a batch.

        Args:
            tokens: Tokens [B, N, C] or a feature map [B, C, H, W].
            word_vectors: Word vectors [K, D_w] of any classes. Required.
            attention: Whether to return the cross-attention weights of the last layer too.

        Returns:
            Logits [B, K]. With `attention`, also the attention weights [B, G, N], averaged over
            heads.

        Raises:
            ConfigError: If `word_vectors` is missing or has another width.
        """
        tokens = as_tokens(tokens, self.embed.in_features)
        word_vectors = check_words(word_vectors, self.word_dim).to(self.pool_bias.dtype)
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

        # The queries are only expanded in training, because dropout must differ between images.
        batch_size = tokens.shape[0] if self.training else 1
        x = x.expand(batch_size, -1, -1)

        weights = None
        for layer in self.layers:
            x, weights = layer(x, memory, need_weights=attention and layer is self.layers[-1])

        # Drop the empty slots and restore the order of the queries.
        logits = self.pool(x, slots)[:, torch.arange(num_classes, device=x.device)]
        if order is not None:
            logits = logits[:, order.argsort()]
        if weights is None:
            return logits
        return logits, weights

    def pool(self, x: Tensor, slots: Tensor) -> Tensor:
        """Compute the logits of all slots, without autocast.

        Args:
            x: Decoded queries [B, G, D].
            slots: Word vectors of the slots [G, g, D_w].

        Returns:
            Logits [B, G g].
        """
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
        """Compute logits [B, K].

        Args:
            tokens: Tokens [B, N, C] or a feature map [B, C, H, W].
            word_vectors: Word vectors [K, D_w] of any classes. Required.

        Returns:
            Logits [B, K].
        """
        tokens = as_tokens(tokens, self.fc.in_features)
        word_vectors = F.normalize(check_words(word_vectors, self.word_dim), dim=1)
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
        """Compute logits [B, K].

        Args:
            tokens: Tokens [B, N, C] or a feature map [B, C, H, W].
            word_vectors: Word vectors [K, C] of any classes. Required.

        Returns:
            Logits [B, K].
        """
        tokens = as_tokens(tokens, self.word_dim)
        words = check_words(word_vectors, self.word_dim)

        dtype = self.logit_scale.dtype
        with without_autocast(tokens.device):
            images = F.normalize(tokens.mean(1).to(dtype), dim=1)
            cosines = images @ F.normalize(words.to(dtype), dim=1).T
            logits = self.logit_scale.exp() * cosines
            if self.logit_bias is not None:
                logits = logits + self.logit_bias
            return logits
