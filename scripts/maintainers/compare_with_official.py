#!/usr/bin/env python
"""Compare the speed of our code with the official code. Both sides are timed alternately.

    compare_with_official.py head [--device cpu] [--precision bf16] [--json FILE]
    compare_with_official.py step [--experiment digits] [--json FILE] [key=value ...]
    compare_with_official.py transform FOLDER [--json FILE]

The official head, loss, training loop and transform are implemented here from their description,
without parts of mldec. Parameters have the official names, so that our head can load the weights.
A figure `X_times_Y` is the time of X divided by the time of Y. `times_X` is our speed-up over X.

Source: Alibaba-MIIL/ML_Decoder, train.py and, in src_files, ml_decoder/ml_decoder.py,
loss_functions/losses.py and helper_functions/helper_functions.py; randaugment 1.0.2.
"""

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageEnhance
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torchvision import transforms

from mldec.cli import positive
from mldec.data.images import check_decoder
from mldec.data.official_augment import (
    GRAY,
    OPERATIONS,
    PROBABILITY,
    Operation,
    draw_operation,
)
from mldec.errors import ConfigError, one_line
from mldec.files.atomic import check_targets
from mldec.heads.ml_decoder import MLDecoder
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.model import Classifier
from mldec.runtime import distributed
from mldec.runtime.devices import Precision, autocast, memory_format

# The folder of benchmark.py.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmark import (
    SIZE,
    STEPS,
    Pipeline,
    Trial,
    add_experiment,
    build_trial,
    compose_experiment,
    in_turns,
    photos_in,
    pipeline,
    record,
    split_repeats,
    step_figures,
    time_pipelines,
    times_as_long,
)

IN_FEATURES = 2048
EMBED_DIM = 768  # the only official width
ROUNDS = 9
CALLS = {"cpu": 1, "cuda": 10}  # calls of the head per round, by type of device
Cast = Callable[[], torch.autocast]


class Size(NamedTuple):
    """Numbers of classes K, groups G, tokens N per image, and images B."""

    classes: int
    groups: int
    tokens: int
    images: int = 16


OPEN_IMAGES = Size(9605, 200, 7 * 7)  # 224 pixels
COCO = Size(80, 80, 14 * 14)  # 448 pixels


# The official forms


def group_projection(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply the official GroupFC, which loops over the groups.

    Args:
        x: Decoded queries [B, G, D].
        weight: Weights [G, D, g].
        bias: Biases [K].

    Returns:
        Logits [B, K].
    """
    out = torch.zeros(len(x), len(weight), weight.shape[2], device=x.device, dtype=x.dtype)
    for group in range(len(weight)):
        out[:, group, :] = x[:, group, :] @ weight[group]

    # The last group may have more outputs than classes.
    return out.flatten(1)[:, : len(bias)] + bias


class OfficialLayer(nn.Module):
    """The decoder layer, sequence first: `TransformerDecoderLayerOptimal`."""

    def __init__(self, embed_dim: int, num_heads: int, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.multihead_attn = nn.MultiheadAttention(embed_dim, num_heads, dropout=dropout)
        self.linear1 = nn.Linear(embed_dim, mlp_dim)
        self.linear2 = nn.Linear(mlp_dim, embed_dim)
        self.norm1 = nn.LayerNorm(embed_dim)
        self.norm2 = nn.LayerNorm(embed_dim)
        self.norm3 = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.dropout3 = nn.Dropout(dropout)

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        """Cross-attend from queries [G, B, D] to the memory [N, B, D]. Returns [G, B, D]."""
        x = self.norm1(queries + self.dropout1(queries))

        # The official code also computes the attention weights, which it does not use.
        attended = self.multihead_attn(x, memory, memory)[0]
        x = self.norm2(x + self.dropout2(attended))

        mlp = self.linear2(self.dropout(F.relu(self.linear1(x))))
        return self.norm3(x + self.dropout3(mlp))


class OfficialHead(nn.Module):
    """The official head `MLDecoder` for known classes.

    Args:
        in_features: Width C of the tokens.
        num_classes: Number of classes K.
        num_groups: Number of groups G, at most K.
        embed_dim: Decoder width D, officially 768.
        num_heads: Number of attention heads, officially 8.
        mlp_dim: Hidden width of the feed-forward part, officially 2048.
        dropout: Dropout probability, officially 0.1.
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
        # The parameters have the prefix "decoder." in the official code.
        self.decoder = nn.Module()
        self.decoder.embed_standart = nn.Linear(in_features, embed_dim)
        self.decoder.query_embed = nn.Embedding(num_groups, embed_dim).requires_grad_(False)
        layer = OfficialLayer(embed_dim, num_heads, mlp_dim, dropout)
        self.decoder.layers = nn.ModuleList([layer])

        group_size = -(-num_classes // num_groups)  # rounded up
        weight = nn.init.xavier_normal_(torch.empty(num_groups, embed_dim, group_size))
        self.decoder.duplicate_pooling = nn.Parameter(weight)
        self.decoder.duplicate_pooling_bias = nn.Parameter(torch.zeros(num_classes))

    def forward(self, tokens: Tensor, word_vectors: None = None) -> Tensor:
        """Map tokens [B, N, C] to logits [B, K]. Word queries are not supported."""
        decoder: Any = self.decoder
        memory = F.relu(decoder.embed_standart(tokens), inplace=True).transpose(0, 1)
        x = decoder.query_embed.weight.unsqueeze(1).expand(-1, len(tokens), -1)
        x = decoder.layers[0](x, memory).transpose(0, 1)
        return group_projection(x, decoder.duplicate_pooling, decoder.duplicate_pooling_bias)


def asymmetric_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of `AsymmetricLoss` with the settings of train.py.

    Args:
        logits: Logits, float32 [B, K].
        targets: Labels 0 and 1, [B, K].
    """
    positive = logits.sigmoid()
    negative = (1 - positive + 0.05).clamp(max=1)
    loss = targets * torch.log(positive.clamp(min=1e-8))
    loss = loss + (1 - targets) * torch.log(negative.clamp(min=1e-8))

    # gamma_pos is 0 and gamma_neg is 4. The weight has no gradient.
    with torch.no_grad():
        probability = positive * targets + negative * (1 - targets)
        weight = torch.pow(1 - probability, 4 * (1 - targets))
    return -(loss * weight).sum()


class OfficialLoop:
    """The training step of train.py: Adam, OneCycle, autocast, GradScaler and moving average.

    Args:
        model: Maps images, float32 [B, 3, H, W] in [0, 1], to logits [B, K].
        device: Device of the model.
        autocast: Number format of the forward pass, officially float16; None for float32.
        steps: Number of steps of the schedule.
        lr: Peak learning rate.
        weight_decay: Weight decay of all parameters except for biases and norms.
        ema_decay: Decay of the moving average.
        channels_last: Whether images and weights have this memory format.
        compiled: Whether the model is compiled.
        compile_mode: Mode of torch.compile.
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
        self.model = model
        self.device = device
        self.autocast = autocast
        self.ema = copy.deepcopy(model).eval()
        self.ema_decay = ema_decay

        bare = []
        decayed = []
        for name, value in model.named_parameters():
            if value.requires_grad and (value.ndim == 1 or name.endswith(".bias")):
                bare.append(value)
            elif value.requires_grad:
                decayed.append(value)
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
            images: Images on the host, float32 [B, 3, H, W].
            targets: Labels on the host, int64 [B, 3, K], for small, medium and large objects.
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
        """Update the moving average of each tensor of the state."""
        pairs = zip(self.ema.state_dict().values(), self.model.state_dict().values(), strict=True)
        for average, value in pairs:
            average.copy_(self.ema_decay * average + (1 - self.ema_decay) * value)


def official_transform(size: int) -> Pipeline:
    """Return the steps of the official transform, with Pillow and torchvision.

    The result is float32 [3, S, S]. With the same random numbers, its pixels equal ours.
    """
    resize = transforms.Resize((size, size))
    tensor = transforms.ToTensor()
    return {
        "decode": lambda path, _: Image.open(path).convert("RGB"),
        "resize": lambda image, _: resize(image),
        "cutout": _official_cutout,
        "operations": _official_operations,
        "tensor": lambda image, _: tensor(image),
    }


def _official_cutout(image: Image.Image, rng: Random) -> Image.Image:
    """Draw a rectangle of half the side on the image in place."""
    half_width, half_height = (int(0.5 * side + 0.5) // 2 for side in image.size)
    x, y = (rng.randrange(side) for side in image.size)
    color = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
    corners = (x - half_width, y - half_height, x + half_width, y + half_height)
    ImageDraw.Draw(image).rectangle(corners, fill=color)
    return image


def _official_operations(image: Image.Image, rng: Random) -> Image.Image:
    """Draw two operations, and apply each with probability 0.5.

    Shears and sharpness, which mldec implements, use Pillow.
    """
    for name, row in [draw_operation(rng), draw_operation(rng)]:
        if rng.random() < PROBABILITY:
            operation, levels = OPERATIONS[name]
            image = PILLOW_OPERATIONS.get(name, operation)(image, levels[row], rng)
    return image


def _official_shear(image: Image.Image, slope: float, rng: Random, *, entry: int) -> Image.Image:
    """Shear by an affine transform. `entry` is the position of the slope in its matrix."""
    matrix = [1.0, 0, 0, 0, 1, 0]
    matrix[entry] = slope * rng.choice((-1, 1))
    bicubic = Image.Resampling.BICUBIC
    return image.transform(image.size, Image.Transform.AFFINE, matrix, bicubic, fillcolor=GRAY)


def _official_sharpness(image: Image.Image, strength: float, rng: Random) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(1 + strength * rng.choice((-1, 1)))


PILLOW_OPERATIONS: dict[str, Operation] = {
    "shear_x": partial(_official_shear, entry=1),
    "shear_y": partial(_official_shear, entry=3),
    "sharpness": _official_sharpness,
}


# Jobs


def transform(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time our training transform and the official one on the photos of a folder."""
    check_decoder("simplejpeg")
    pipelines = {
        "official": official_transform(SIZE),
        "default": pipeline(SIZE),
        "fast": pipeline(SIZE, decoder="simplejpeg", resize="tensor"),
    }
    figures = time_pipelines(pipelines, photos_in(args.folder))
    # The official transform does not seed each image.
    official = figures["official_all_ms"] - figures["official_seeding_ms"]
    figures["times_official"] = official / figures["default_all_ms"]
    figures["times_official_fast"] = official / figures["fast_all_ms"]
    yield figures


def head(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time the group projection and the whole head."""
    device = distributed.pick_device(args.device)
    open_images = OPEN_IMAGES._replace(images=args.batch_size)
    coco = COCO._replace(images=args.batch_size)
    yield {"precision": args.precision, "batch_size": args.batch_size}

    cast = partial(autocast, device, Precision(args.precision))
    yield _projection(open_images, device, cast)
    yield _whole_head("open_images", open_images, device, cast, training=True)
    yield _whole_head("coco_inference", coco, device, cast, training=False)
    yield _whole_head("coco_training", coco, device, cast, training=True)


def _projection(size: Size, device: torch.device, cast: Cast) -> dict[str, float]:
    """Time forward and backward pass of the group projection."""
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
    """Time both heads with the same weights. `training` includes dropout and backward pass."""
    official = OfficialHead(IN_FEATURES, size.classes, num_groups=size.groups).to(device)
    ours = MLDecoder(IN_FEATURES, size.classes, num_groups=size.groups).to(device)
    ours.load_state_dict(official.state_dict())
    tokens = torch.randn(size.images, size.tokens, IN_FEATURES, device=device)

    job = _forward_backward if training else _forward
    jobs = {"ours": job(ours, tokens, cast), "official": job(official, tokens, cast)}
    times = in_turns(jobs, device=device, rounds=ROUNDS, steps=CALLS[device.type])
    figures = {}
    for side, values in times.items():
        figures[f"{name}_{side}_ms"] = 1000 * statistics.median(values)
    figures[f"{name}_times_official"] = times_as_long(times, "ours", "official")
    return figures


def _forward(module: nn.Module, tokens: Tensor, cast: Cast) -> Callable[[], None]:
    """Return a function for a forward pass of inference."""
    module.eval()

    @torch.no_grad()
    def run() -> None:
        with cast():
            module(tokens)

    return run


def _forward_backward(module: nn.Module, tokens: Tensor, cast: Cast) -> Callable[[], None]:
    """Return a function for a forward and a backward pass."""
    module.train()

    def run() -> None:
        inputs = tokens.detach().requires_grad_()
        with cast():
            logits = module(inputs)
        logits.sum().backward()
        module.zero_grad(set_to_none=True)

    return run


def step(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time training steps of an experiment: ours, and two versions of the official loop.

    The official loop has the same backbone and learning rate, and the official head and loss. One
    version is as released (fp16 on CUDA, neither compiled nor channels_last). The other version
    has our number format, memory format and compilation. A step starts with a batch in main memory.
    Our loop has uint8 images. The official loop has float32 images, and labels per object size.

    Yields:
        The figures after each round. `times_official_step` is our speed-up over the released
        version, and `times_official_step_equal` over the version with equal settings.

    Raises:
        ConfigError: If the official code does not support the experiment.
    """
    config = compose_experiment(args)
    trial = build_trial(config, args.classes)
    batch_size = config.train.batch_size

    # All sides start with the same weights, so copy them before the first step.
    model = official_model(trial)
    released = official_loop(trial, copy.deepcopy(model), as_released=True)
    equal = official_loop(trial, model)
    batches = trial.random_batches()
    images = torch.cat([batch.images for batch in batches]).float() / 255
    targets = torch.cat([batch.targets for batch in batches]).long()
    targets = targets[:, None].repeat(1, 3, 1)  # objects of each size
    if trial.device.type == "cuda":
        images = images.pin_memory()
        targets = targets.pin_memory()

    learner = trial.learner()
    learner.train()
    jobs: dict[str, Callable[[], Any]] = {
        "ours": lambda: learner.learn(batches, batch_size),
        "official": lambda: released.step(images, targets),
        "equal": lambda: equal.step(images, targets),
    }
    yield trial.facts(args) | {"batch_size": batch_size}

    # Yield after each round, because a time limit may end the script.
    timed = split_repeats(args.repeats)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(timed["rounds"]):
        options = {"rounds": 1, "warmup": int(number == 0), "steps": timed["steps"]}
        measured = in_turns(jobs, device=trial.device, **options)
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


def official_model(trial: Trial) -> Classifier:
    """Return the backbone of an experiment with the official head, and copy its weights to ours.

    Raises:
        ConfigError: If the official code does not have this head or loss.
    """
    head = trial.model.head
    if not isinstance(head, MLDecoder) or head.word_dim is not None or len(head.layers) > 1:
        raise ConfigError(
            "head: the official code has an ML-Decoder with one layer for known classes; "
            "pass head=ml_decoder"
        )
    if trial.parts["loss"].target is not AsymmetricLoss:
        raise ConfigError("loss: the official code has the asymmetric loss; pass loss=asl")

    arguments = trial.parts["head"].arguments
    names = ("embed_dim", "num_heads", "mlp_dim", "dropout")
    official_head = OfficialHead(
        head.embed.in_features,
        len(trial.classes),
        num_groups=len(head.queries),
        **{name: arguments[name] for name in names},
    )
    head.load_state_dict(official_head.state_dict())
    return Classifier(copy.deepcopy(trial.model.backbone), official_head.to(trial.device))


def official_loop(trial: Trial, model: nn.Module, *, as_released: bool = False) -> OfficialLoop:
    """Return the official loop for a model, as released or with our settings."""
    train = trial.config.train
    precision = Precision.fp16 if as_released else train.precision
    return OfficialLoop(
        model,
        device=trial.device,
        autocast=precision.for_device(trial.device).half,
        steps=STEPS,
        lr=trial.config.optim.lr,
        weight_decay=trial.config.optim.weight_decay,
        ema_decay=train.ema_decay or 0.9997,
        channels_last=train.channels_last and not as_released,
        compiled=bool(train.compile) and not as_released,
        compile_mode=train.compile_mode,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    jobs = parser.add_subparsers(required=True, dest="job", metavar="JOB")
    head_job = jobs.add_parser("head")
    head_job.add_argument("--device", default="auto", help="auto, cpu or cuda")
    head_job.add_argument("--batch-size", type=positive, default=16, help="default: 16")
    precisions = [precision.value for precision in Precision]
    head_job.add_argument("--precision", choices=precisions, default="fp32", help="default: fp32")
    step_job = jobs.add_parser("step")
    add_experiment(step_job)
    transform_job = jobs.add_parser("transform")
    transform_job.add_argument("folder", metavar="FOLDER", help="folder of photos")
    for job in (head_job, step_job, transform_job):
        job.add_argument("--json", metavar="FILE", help="write figures and environment")

    with one_line():
        args = parser.parse_args()
        check_targets(json=args.json)
        figures = {"head": head, "step": step, "transform": transform}[args.job](args)
        record(f"official_{args.job}", figures, args.json)


if __name__ == "__main__":
    main()
