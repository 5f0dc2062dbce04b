"""Group decoding of classes that are known by their word vectors only (paper section 2.4)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.errors import ConfigError
from mldec.heads.layers import DecoderLayer, at_least_one, check_tokens, check_words


class WordGroupDecoder(nn.Module):
    """Decode any K classes from G = ceil(K / g) group queries made of their word vectors; no parameter is a class's.

    With n_i the word vector of class i: the query of a group is the concatenation of A n_i over its g classes, A being
    [D / g, D_w], and the logit of class i is (B n_i) . x + b, where x is what its group's query has become, B is
    [D, D_w] and b a number. So the group size is fixed and the number of groups follows the classes.

    The public code has full decoding only (`MLDecoder` with word_dim), so this was compared with nothing official. Our
    choices: vectors are brought to length 1, a slot without a class holds zeros, the
    bias b, and how classes come into groups. In evaluation they are taken in their order; in training they are dealt
    anew at every call, because other classes share a group later. A class's logit therefore depends a little on which
    classes are with it in its group, which is not so with full decoding.

    Args:
        in_features: width C of the tokens.
        num_classes: of training; has no effect.
        word_dim: width D_w of word vectors.
        group_size: classes g a group; divides embed_dim.
        embed_dim: decoder width D.
        num_heads: attention heads.
        mlp_dim: hidden width of the feed-forward part.
        num_layers: decoder layers.
        dropout: probability, everywhere in the decoder.

    Raises:
        ConfigError: for a size below 1, or a group size that does not divide embed_dim.
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
        at_least_one(word_dim=word_dim, group_size=group_size, embed_dim=embed_dim, mlp_dim=mlp_dim)
        at_least_one(num_layers=num_layers)
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
        # B: decoded queries have length sqrt(D) and words length 1, so logits begin with a spread of about 1.
        self.pool_proj = nn.Parameter(torch.randn(embed_dim, word_dim) * embed_dim**-0.5)
        self.pool_bias = nn.Parameter(torch.zeros(1))

    def forward(
        self, tokens: Tensor, queries: Tensor | None = None, *, attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map tokens [B, N, C] and word vectors [K, D_w] to logits [B, K].

        Args:
            tokens: of the backbone.
            queries: word vectors of any number of classes.
            attention: also return the attention of the last layer, averaged over heads.

        Returns:
            logits [B, K], and the attention of each group over the tokens [B, G, N] if asked for.

        Raises:
            ConfigError: if queries are missing or of another width.
            ValueError: if the tokens have another form.
        """
        check_tokens(tokens, self.embed.in_features)
        words = F.normalize(check_words(queries, self.word_dim).to(self.pool_bias.dtype), dim=1)
        order = torch.randperm(len(words), device=words.device) if self.training else None
        if order is not None:
            words = words[order]
        missing = -len(words) % self.group_size
        slots = F.pad(words, (0, 0, 0, missing)).unflatten(0, (-1, self.group_size))  # [G, g, D_w]
        memory = F.relu(self.embed(tokens))
        x = self.query_proj(slots).flatten(1).expand(len(tokens) if self.training else 1, -1, -1)
        weights = None
        for layer in self.layers:
            x, weights = layer(x, memory, need_weights=attention and layer is self.layers[-1])
        logits = self.pool(x, slots)[:, : len(words)]
        if order is not None:
            logits = logits[:, order.argsort()]
        return logits if weights is None else (logits, weights)

    def pool(self, x: Tensor, slots: Tensor) -> Tensor:
        """Map decoded queries [B, G, D] and the words of their groups [G, g, D_w] to logits [B, G g]."""
        # Not in half precision, whatever autocast says: such logits tie, and ties move mAP.
        with torch.autocast(x.device.type, enabled=False):
            rows = slots.to(self.pool_proj.dtype) @ self.pool_proj.T  # [G, g, D]
            logits = x.to(rows.dtype).transpose(0, 1) @ rows.transpose(1, 2)  # [G, B, g]
            return logits.transpose(0, 1).flatten(1) + self.pool_bias
