#!/usr/bin/env python
"""Time the head, or a training step, beside those of the official code, in turns.

    compare_with_official.py head [--device cpu] [--precision bf16] [--json FILE]
    compare_with_official.py step [--experiment digits] [--json FILE] [key=value ...]

The official head, loss and training loop are written once more from their description: they share
nothing with the parts of the product. The names of the parameters are the official ones, so that a
head of the product can load the weights. A figure with `_times_` in its name is how many times as
long as the other side ours takes; `times_X` is how many times faster than X ours is.

Source: Alibaba-MIIL/ML_Decoder, train.py and, in src_files, ml_decoder/ml_decoder.py,
loss_functions/losses.py and helper_functions/helper_functions.py.
"""

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from mldec.cli import positive
from mldec.errors import ConfigError, one_line
from mldec.files.atomic import check_targets
from mldec.heads.ml_decoder import MLDecoder
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.model import Classifier
from mldec.runtime import distributed
from mldec.runtime.devices import Precision, autocast, memory_format
from mldec.tools.benchmark import add_experiment, report
from mldec.tools.benchmark.throughput import (
    STEPS,
    Trial,
    blocks,
    in_turns,
    prepare,
    settings,
    step_figures,
    times_as_long,
)

IN_FEATURES = 2048
EMBED_DIM = 768  # the default of the head, officially the only one
ROUNDS = 9
CALLS = {"cpu": 1, "cuda": 10}  # of the head in each round, by type of device
Cast = Callable[[], torch.autocast]


class Size(NamedTuple):
    """The size of a problem: classes K, groups G, tokens N per image, and images B."""

    classes: int
    groups: int
    tokens: int
    images: int = 16


OPEN_IMAGES = Size(9605, 200, 7 * 7)  # 224 pixels
COCO = Size(80, 80, 14 * 14)  # 448 pixels


# The official forms


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

    def forward(self, word_vectors: Tensor, memory: Tensor) -> Tensor:
        """Let queries [G, B, D] attend to the memory [N, B, D]; return [G, B, D]."""
        x = self.norm1(word_vectors + self.dropout1(word_vectors))

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

    def forward(self, tokens: Tensor, word_vectors: None = None) -> Tensor:
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
        channels_last: whether images, feature maps and weights lie in that order.
        compiled: whether the model is compiled.
        compile_mode: that of torch.compile; None is its default.
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
        channels_last: bool = False,
        compiled: bool = False,
        compile_mode: str | None = None,
    ) -> None:
        self.memory_format = memory_format(channels_last=channels_last)
        model = model.train().to(memory_format=self.memory_format)
        self.net: nn.Module = model
        if compiled:
            self.net = torch.compile(model, dynamic=False, mode=compile_mode)  # type: ignore[assignment]
        self.model, self.device, self.autocast = model, device, autocast
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
        images = images.to(self.device).contiguous(memory_format=self.memory_format)
        targets = targets.to(self.device)
        targets = targets.max(dim=1)[0]

        enabled = self.autocast is not None
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=enabled):
            logits = self.net(images).float()
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


# The head


def head(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time the group projection and the whole head, ours and the official one in turns."""
    device = distributed.pick_device(args.device)
    open_images, coco = (size._replace(images=args.batch_size) for size in (OPEN_IMAGES, COCO))
    yield {"precision": args.precision, "batch_size": args.batch_size}

    cast = partial(autocast, device, Precision(args.precision))
    yield _projection(open_images, device, cast)
    yield _whole_head("open_images", open_images, device, cast, training=True)
    yield _whole_head("coco_inference", coco, device, cast, training=False)
    yield _whole_head("coco_training", coco, device, cast, training=True)


def _projection(size: Size, device: torch.device, cast: Cast) -> dict[str, float]:
    """Time the group projection, forward and backward, and the official loop over groups."""
    model = MLDecoder(IN_FEATURES, size.classes, num_groups=size.groups).to(device)
    shape = (size.images, size.groups, EMBED_DIM)
    x = torch.randn(shape, device=device, requires_grad=True)  # decoded queries [B, G, D]

    def official(x: Tensor) -> Tensor:
        return group_projection(x, model.pool_weight, model.pool_bias)

    def step(projection: Callable[[Tensor], Tensor]) -> None:
        with cast():
            logits = projection(x)
        logits.sum().backward()
        model.zero_grad(set_to_none=True)
        x.grad = None

    # They are compared first: a faster projection with other logits would be worth nothing.
    difference = (model.pool(x) - official(x)).abs().max().item()
    jobs = {"official": partial(step, official), "ours": partial(step, model.pool)}
    times = in_turns(jobs, device=device, rounds=5, steps=CALLS[device.type])
    return {
        "official_loop_ms": 1000 * statistics.median(times["official"]),
        "batched_product_ms": 1000 * statistics.median(times["ours"]),
        "times_faster": times_as_long(times, "official", "ours"),
        "largest_difference": difference,
    }


def _whole_head(
    name: str, size: Size, device: torch.device, cast: Cast, *, training: bool
) -> dict[str, float]:
    """Time the head, and the official form with the same weights.

    Args:
        name: that the figures begin with.
        size: of the problem.
        device: to compute on.
        cast: returns the context of a forward pass.
        training: time the backward pass too, to the tokens, with dropout.
    """
    official = OfficialHead(IN_FEATURES, size.classes, num_groups=size.groups).to(device)
    ours = MLDecoder(IN_FEATURES, size.classes, num_groups=size.groups).to(device)
    ours.load_state_dict(official.state_dict())
    tokens = torch.randn(size.images, size.tokens, IN_FEATURES, device=device)

    pass_through = _forward_backward if training else _forward
    times = in_turns(
        {
            "ours": pass_through(ours, tokens, cast),
            "official": pass_through(official, tokens, cast),
        },
        device=device,
        rounds=ROUNDS,
        steps=CALLS[device.type],
    )
    milliseconds = {
        f"{name}_{side}_ms": 1000 * statistics.median(values) for side, values in times.items()
    }
    return {
        **milliseconds,
        f"{name}_times_official": times_as_long(times, "ours", "official"),
    }


def _forward(module: nn.Module, tokens: Tensor, cast: Cast) -> Callable[[], None]:
    """Return a function that does a forward pass for inference."""
    module.eval()

    @torch.no_grad()
    def run() -> None:
        with cast():
            module(tokens)

    return run


def _forward_backward(module: nn.Module, tokens: Tensor, cast: Cast) -> Callable[[], None]:
    """Return a function that does a forward and a backward pass, with new gradients each time."""
    module.train()

    def run() -> None:
        inputs = tokens.detach().requires_grad_()
        with cast():
            logits = module(inputs)
        logits.sum().backward()
        module.zero_grad(set_to_none=True)

    return run


# The training step


def step(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time a training step of an experiment, and two of the official loop, in turns.

    The official side has the same backbone, the official head and loss, and the official loop with
    the learning rate of the experiment: once as released, with fp16 on CUDA and nothing compiled or
    in channels_last, and once with the number format, the layout and the compilation of ours. All
    begin with a batch in main memory, as their loaders hand it over: float32 images and labels per
    size of objects there, uint8 images and labels here.

    Yields:
        The figures after each round. `times_official_step` is how many times faster our step is
        than the released one, and `times_official_step_equal` than the one with equal settings.

    Raises:
        ConfigError: for a wrong setting, or an experiment that the official loop cannot train.
    """
    config = settings(args)
    tried = prepare(config, args.classes)
    batch_size = config.train.batch_size

    # Before the learner changes the weights: all sides begin with the same ones.
    model = official_model(tried)
    released = official_loop(tried, copy.deepcopy(model), as_released=True)
    equal = official_loop(tried, model)
    batches = tried.random_batches()
    images = torch.cat([batch.images for batch in batches]).float() / 255
    targets = torch.cat([batch.targets for batch in batches]).long()
    targets = targets[:, None].repeat(1, 3, 1)  # present in every size
    if tried.device.type == "cuda":
        images, targets = images.pin_memory(), targets.pin_memory()

    learner = tried.learner()
    learner.train()
    jobs: dict[str, Callable[[], Any]] = {
        "ours": lambda: learner.learn(batches, batch_size),
        "official": lambda: released.step(images, targets),
        "equal": lambda: equal.step(images, targets),
    }
    yield {
        "experiment": args.experiment,
        "settings": args.settings,
        "precision": config.train.precision.for_device(tried.device).value,
        "compile": config.train.compile,
        "channels_last": config.train.channels_last,
        "batch_size": batch_size,
        "image_size": tried.image_size,
        "classes": len(tried.classes),
    }

    # The search for kernels in the warm-up takes long: what is measured until a limit is kept.
    timed = blocks(args.repeats)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(timed["rounds"]):
        warmup = 1 if number == 0 else 0
        measured = in_turns(
            jobs, device=tried.device, rounds=1, warmup=warmup, steps=timed["steps"]
        )
        for name, seconds in measured.items():
            times[name] += seconds
        yield {
            "rounds": number + 1,
            "times_official_step": times_as_long(times, "official", "ours"),
            "times_official_step_equal": times_as_long(times, "equal", "ours"),
            **step_figures("", times["ours"], batch_size),
            **step_figures("official_", times["official"], batch_size),
            **step_figures("official_equal_", times["equal"], batch_size),
        }


def official_model(tried: Trial) -> Classifier:
    """Return the official head on the backbone of an experiment, whose head gets its weights.

    Raises:
        ConfigError: if the experiment has another head or loss than the official code.
    """
    head = tried.model.head
    if not isinstance(head, MLDecoder) or head.word_dim is not None or len(head.layers) > 1:
        raise ConfigError(
            "head: the official side has an ML-Decoder of one layer for known classes; "
            "choose an experiment with head=ml_decoder"
        )
    if tried.parts["loss"].target is not AsymmetricLoss:
        raise ConfigError("loss: the official side has the asymmetric loss; pass loss=asl")

    arguments = tried.parts["head"].arguments
    names = ("embed_dim", "num_heads", "mlp_dim", "dropout")
    official_head = OfficialHead(
        head.embed.in_features,
        len(tried.classes),
        num_groups=len(head.queries),
        **{name: arguments[name] for name in names},
    )
    head.load_state_dict(official_head.state_dict())
    return Classifier(copy.deepcopy(tried.model.backbone), official_head.to(tried.device))


def official_loop(tried: Trial, model: nn.Module, *, as_released: bool = False) -> OfficialLoop:
    """Return the official loop for a model, as released or with the settings of an experiment."""
    train, optim = tried.config.train, tried.config.optim
    precision = Precision.fp16 if as_released else train.precision
    return OfficialLoop(
        model,
        device=tried.device,
        autocast=precision.for_device(tried.device).half,
        steps=STEPS,
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        ema_decay=train.ema_decay or 0.9997,
        channels_last=train.channels_last and not as_released,
        compiled=bool(train.compile) and not as_released,
        compile_mode=train.compile_mode,
    )


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, and in `settings` what follows those of `step`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    jobs = parser.add_subparsers(required=True, dest="job", metavar="JOB")
    of_head, of_step = jobs.add_parser("head"), jobs.add_parser("step")
    of_head.add_argument("--device", default="auto", help="auto, cpu or cuda")
    of_head.add_argument("--batch-size", type=positive, default=16, help="(default 16)")
    precisions = [precision.value for precision in Precision]
    of_head.add_argument("--precision", choices=precisions, default="fp32", help="(default fp32)")
    add_experiment(of_step)
    for job in (of_head, of_step):
        job.add_argument("--json", metavar="FILE", help="write figures and environment")

    args, settings = parser.parse_known_args(words)
    args.settings = settings
    if settings and args.job == "head":
        parser.error(f"'{settings[0]}' is not understood: head takes no settings")
    return args


def main() -> None:
    with one_line():
        args = parse()
        check_targets(args.json)

        # As in training.
        figures = {"head": head, "step": step}[args.job](args)
        report(f"official_{args.job}", figures, args.json)


if __name__ == "__main__":
    main()
