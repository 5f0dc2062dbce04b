"""The official head, loss and training loop, written once more from their description.

They are the other side of comparisons, and share nothing with the parts of the product. The names
of the parameters are the official ones, so that a head of the product can load the weights.

Source: Alibaba-MIIL/ML_Decoder, train.py and, in src_files, ml_decoder/ml_decoder.py,
loss_functions/losses.py and helper_functions/helper_functions.py.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR


def group_projection(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply the group projection as the official GroupFC does, group by group into a buffer.

    Args:
        x: decoded queries [B, G, D].
        weight: [G, D, g].
        bias: [K].

    Returns:
        logits [B, K].
    """
    out = torch.zeros(len(x), len(weight), weight.shape[2], device=x.device, dtype=x.dtype)
    for group in range(len(weight)):
        out[:, group, :] = x[:, group, :] @ weight[group]

    # The last group may have room for more classes than there are.
    return out.flatten(1)[:, : len(bias)] + bias


class OfficialLayer(nn.Module):
    """The decoder layer, sequence first: `TransformerDecoderLayerOptimal`."""

    def __init__(self, embed_dim: int, num_heads: int, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.multihead_attn = nn.MultiheadAttention(embed_dim, num_heads, dropout=dropout)
        self.linear1 = nn.Linear(embed_dim, mlp_dim)
        self.linear2 = nn.Linear(mlp_dim, embed_dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(embed_dim) for _ in range(3))
        self.dropout, self.dropout1 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.dropout2, self.dropout3 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        """Let queries [G, B, D] attend to the memory [N, B, D]; return [G, B, D]."""
        x = self.norm1(queries + self.dropout1(queries))

        # The weights of the attention are computed too, and thrown away.
        attended = self.multihead_attn(x, memory, memory)[0]
        x = self.norm2(x + self.dropout2(attended))

        mlp = self.linear2(self.dropout(F.relu(self.linear1(x))))
        return self.norm3(x + self.dropout3(mlp))


class OfficialDecoder(nn.Module):
    """All parameters of the head; the arguments are those of `OfficialHead`."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        num_groups: int,
        embed_dim: int,
        num_heads: int,
        mlp_dim: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.embed_standart = nn.Linear(in_features, embed_dim)
        self.query_embed = nn.Embedding(num_groups, embed_dim).requires_grad_(False)
        self.layers = nn.ModuleList([OfficialLayer(embed_dim, num_heads, mlp_dim, dropout)])

        group_size = -(-num_classes // num_groups)  # rounded up
        weight = torch.empty(num_groups, embed_dim, group_size)
        self.duplicate_pooling = nn.Parameter(nn.init.xavier_normal_(weight))
        self.duplicate_pooling_bias = nn.Parameter(torch.zeros(num_classes))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [B, N, C] to logits [B, K]."""
        memory = F.relu(self.embed_standart(tokens), inplace=True).transpose(0, 1)
        x = self.query_embed.weight.unsqueeze(1).expand(-1, len(tokens), -1)
        for layer in self.layers:
            x = layer(x, memory)
        return group_projection(
            x.transpose(0, 1), self.duplicate_pooling, self.duplicate_pooling_bias
        )


class OfficialHead(nn.Module):
    """The head `MLDecoder` of the official code for known classes.

    Args:
        in_features: width C of the tokens.
        num_classes: K.
        num_groups: G, at most K.
        embed_dim: decoder width D.
        num_heads: number of attention heads, officially 8.
        mlp_dim: hidden width of the feed-forward part, officially 2048.
        dropout: officially 0.1.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        num_groups: int,
        embed_dim: int = 768,
        num_heads: int = 8,
        mlp_dim: int = 2048,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.decoder = OfficialDecoder(
            in_features,
            num_classes,
            num_groups=num_groups,
            embed_dim=embed_dim,
            num_heads=num_heads,
            mlp_dim=mlp_dim,
            dropout=dropout,
        )

    def forward(self, tokens: Tensor, queries: None = None) -> Tensor:
        """Map tokens [B, N, C] to logits [B, K]; there are no word queries."""
        return self.decoder(tokens)


def asymmetric_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the loss `AsymmetricLoss` with the settings of train.py.

    Args:
        logits: float32 [B, K].
        targets: 0 and 1, [B, K].
    """
    positive = logits.sigmoid()
    negative = (1 - positive + 0.05).clamp(max=1)
    loss = targets * torch.log(positive.clamp(min=1e-8))
    loss = loss + (1 - targets) * torch.log(negative.clamp(min=1e-8))

    # gamma_pos is 0 and gamma_neg 4; no gradient flows through the weight.
    with torch.no_grad():
        probability = positive * targets + negative * (1 - targets)
        weight = torch.pow(1 - probability, 4 * (1 - targets))
    return -(loss * weight).sum()


class OfficialLoop:
    """The training step of train.py: Adam, OneCycle, autocast, GradScaler and moving average.

    Args:
        model: images float32 [B, 3, H, W] in [0, 1] -> logits [B, K], on its device.
        device: of the model.
        autocast: the number format of the forward pass, officially float16; None for float32.
        steps: of the whole run, for the schedule.
        lr: highest learning rate.
        weight_decay: of all parameters but biases and those of norms.
        ema_decay: of the moving average.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        autocast: torch.dtype | None,
        steps: int,
        lr: float = 1e-4,
        weight_decay: float = 1e-4,
        ema_decay: float = 0.9997,
    ) -> None:
        self.model, self.device, self.autocast = model.train(), device, autocast
        self.ema, self.ema_decay = copy.deepcopy(model).eval(), ema_decay

        trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        bare = [value for name, value in trained if value.ndim == 1 or name.endswith(".bias")]
        decayed = [value for name, value in trained if value.ndim > 1 and name[-5:] != ".bias"]
        groups = [
            {"params": bare, "weight_decay": 0.0},
            {"params": decayed, "weight_decay": weight_decay},
        ]
        self.optimizer = torch.optim.Adam(groups, lr=lr, weight_decay=0)
        self.schedule = OneCycleLR(self.optimizer, max_lr=lr, total_steps=steps, pct_start=0.2)
        self.scaler = torch.amp.GradScaler(device.type, enabled=autocast is torch.float16)

    def step(self, images: Tensor, targets: Tensor) -> Tensor:
        """Do one step and return its loss.

        Args:
            images: float32 [B, 3, H, W], on the host.
            targets: int64 [B, 3, K], one plane per size of the objects, on the host.
        """
        images, targets = images.to(self.device), targets.to(self.device)
        targets = targets.max(dim=1)[0]

        enabled = self.autocast is not None
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=enabled):
            logits = self.model(images).float()
        loss = asymmetric_loss(logits, targets)

        self.model.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self._average()
        return loss.detach()

    @torch.no_grad()
    def _average(self) -> None:
        """Update the moving average of all tensors of the state, one by one."""
        pairs = zip(self.ema.state_dict().values(), self.model.state_dict().values(), strict=True)
        for average, value in pairs:
            average.copy_(self.ema_decay * average + (1 - self.ema_decay) * value)
