"""Zero-shot heads beside ML-Decoder: classes that are known by their word vectors only."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.errors import ConfigError
from mldec.heads.layers import DecoderLayer, as_tokens, at_least_one, check_words


class WordGroupDecoder(nn.Module):
    """Decode any K classes from G = ceil(K / g) group queries that are made of their word vectors.

    With n_i the word vector of class i, the query of a group is the concatenation of A n_i over its
    g classes, with A a matrix [D / g, D_w]. The logit of class i is (B n_i) . x + b, where x is the
    decoded query of its group, B is a matrix [D, D_w] and b a number. No parameter belongs to a
    class: the group size is fixed, and the number of groups follows from the number of classes.

    This is our reading of paper section 2.4, which the public code lacks. Our choices: vectors have
    length 1, a slot without a class holds zeros, the logits have a bias b, and classes are grouped
    in their order in evaluation, at random in training. The logit of a class depends a little on
    the other classes of its group, which is not so with full decoding.

    Args:
        in_features: width C of the tokens.
        num_classes: number of training classes; has no effect.
        word_dim: width D_w of word vectors.
        group_size: classes g per group; divides embed_dim.
        embed_dim: decoder width D.
        num_heads: number of attention heads; divides D.
        mlp_dim: hidden width of the feed-forward part.
        num_layers: number of decoder layers.
        dropout: dropout probability in all parts of the decoder.
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

        self.word_dim, self.group_size = word_dim, group_size
        self.embed = nn.Linear(in_features, embed_dim)
        self.layers = nn.ModuleList(
            DecoderLayer(embed_dim, num_heads, mlp_dim, dropout, query_step="double")
            for _ in range(num_layers)
        )
        self.query_proj = nn.Linear(word_dim, embed_dim // group_size, bias=False)  # A

        # B: decoded queries have length sqrt(D) and word vectors length 1, so that the initial
        # logits have a spread of about 1.
        self.pool_proj = nn.Parameter(torch.randn(embed_dim, word_dim) * embed_dim**-0.5)
        self.pool_bias = nn.Parameter(torch.zeros(1))

    def forward(
        self, tokens: Tensor, queries: Tensor | None = None, *, attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map tokens [B, N, C], or a map, and word vectors [K, D_w] to logits [B, K].

        With `attention`, that of the last layer is returned too, averaged over heads: [B, G, N].
        """
        tokens = as_tokens(tokens, self.embed.in_features)
        word_vectors = check_words(queries, self.word_dim).to(self.pool_bias.dtype)
        word_vectors = F.normalize(word_vectors, dim=1)

        # Other classes share a group at test time: random groups keep the head from relying on
        # those of training.
        order = None
        if self.training:
            order = torch.randperm(len(word_vectors), device=word_vectors.device)
            word_vectors = word_vectors[order]

        # The last group is filled up with zeros: [K, D_w] -> [G, g, D_w]. Slots are picked by their
        # number, and sizes come from `shape`, so that an exported model takes any K.
        num_classes = word_vectors.shape[0]
        num_groups = (num_classes + self.group_size - 1) // self.group_size
        first = torch.arange(num_groups, device=word_vectors.device) * self.group_size
        in_group = torch.arange(self.group_size, device=word_vectors.device)
        slots = F.pad(word_vectors, (0, 0, 0, self.group_size - 1))[first[:, None] + in_group]

        memory = F.relu(self.embed(tokens))
        x = self.query_proj(slots).flatten(1)

        # One copy of the queries serves the whole batch, except in training, where dropout must
        # differ from image to image.
        x = x.expand(tokens.shape[0] if self.training else 1, -1, -1)
        weights = None
        for layer in self.layers:
            x, weights = layer(x, memory, need_weights=attention and layer is self.layers[-1])

        # Drop the empty slots, and put the classes back into the order of the queries.
        logits = self.pool(x, slots)[:, torch.arange(num_classes, device=x.device)]
        if order is not None:
            logits = logits[:, order.argsort()]
        return logits if weights is None else (logits, weights)

    def pool(self, x: Tensor, slots: Tensor) -> Tensor:
        """Map decoded queries [B, G, D] and their word vectors [G, g, D_w] to logits [B, G g]."""
        # Half precision would round different logits to the same value, and ties change the mAP:
        # autocast is off here.
        with torch.autocast(x.device.type, enabled=False):
            class_weights = slots.to(self.pool_proj.dtype) @ self.pool_proj.T  # [G, g, D]
            x = x.to(class_weights.dtype).transpose(0, 1)  # [G, B, D]
            logits = x @ class_weights.transpose(1, 2)  # [G, B, g]
            return logits.transpose(0, 1).flatten(1) + self.pool_bias


class WordGAP(nn.Module):
    """Logits from one pooled vector per image, compared with the word vector of each class.

    The logit of class i is l_i = (W mean(tokens) + w) . n_i / |n_i| + b, with n_i its word vector.
    What ML-Decoder adds to this baseline is that each class attends to the tokens itself.

    Args:
        in_features: width C of the tokens.
        num_classes: number of training classes; has no effect.
        word_dim: width D_w of word vectors.
        dropout: probability of dropping a pooled feature in training.
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

    def forward(self, tokens: Tensor, queries: Tensor | None = None) -> Tensor:
        """Map tokens [B, N, C], or a map, and word vectors [K, D_w] to logits [B, K]."""
        tokens = as_tokens(tokens, self.fc.in_features)
        word_vectors = F.normalize(check_words(queries, self.word_dim), dim=1)
        pooled = self.dropout(tokens.mean(1))

        # Half precision would round different logits to the same value, and ties change the mAP:
        # autocast is off here.
        dtype = self.fc.weight.dtype
        with torch.autocast(tokens.device.type, enabled=False):
            image_vectors = self.fc(pooled.to(dtype))  # [B, D_w]
            return image_vectors @ word_vectors.to(dtype).T + self.bias


class Cosine(nn.Module):
    """Logits from the cosine between the embedding of an image and that of each class.

    The logit of class i is l_i = exp(s) cos(mean(tokens), n_i) + b, with n_i its word vector; s and
    b are two numbers of the model that embeds both. Nothing is learnt for a class.

    Source: CLIP (arXiv 2103.00020, figure 3); b: SigLIP (arXiv 2303.15343, algorithm 1).

    Args:
        in_features: width C of the tokens, which is that of the word vectors too.
        num_classes: has no effect.
        bias: whether there is an offset b; it is 0 without.
    """

    def __init__(self, in_features: int, num_classes: int, *, bias: bool = False) -> None:
        super().__init__()
        self.word_dim = in_features
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.logit_bias = nn.Parameter(torch.zeros(())) if bias else None

    def forward(self, tokens: Tensor, queries: Tensor | None = None) -> Tensor:
        """Map tokens [B, N, C], or a map, and word vectors [K, C] to logits [B, K]."""
        tokens = as_tokens(tokens, self.word_dim)
        words = check_words(queries, self.word_dim)

        # Half precision would round different logits to the same value, and ties change the mAP:
        # autocast is off here.
        dtype = self.logit_scale.dtype
        with torch.autocast(tokens.device.type, enabled=False):
            images = F.normalize(tokens.mean(1).to(dtype), dim=1)
            cosines = images @ F.normalize(words.to(dtype), dim=1).T
            logits = self.logit_scale.exp() * cosines
            return logits if self.logit_bias is None else logits + self.logit_bias
