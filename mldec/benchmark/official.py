"""The job of `mldec.benchmark` that compares a training step with that of the official code."""

import argparse
import copy
import statistics
from typing import Any

import torch

from mldec.benchmark import trial
from mldec.benchmark.official_forms import OfficialHead, OfficialLoop
from mldec.benchmark.timing import in_turns, times_as_long
from mldec.benchmark.trial import Trial
from mldec.errors import ConfigError
from mldec.heads.ml_decoder import MLDecoder
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.model import Classifier


def official(args: argparse.Namespace) -> dict[str, Any]:
    """Time a training step of an experiment, and one of the official loop, in turns.

    The official side has the same backbone, the official head and loss, and the official loop with
    the learning rate and the number format of the experiment. Both begin with a batch in main
    memory, as their loaders hand it over: float32 images and labels per size of objects there,
    uint8 images and labels here.

    Returns:
        The figures; `times_official_step` is how many times faster our step is.

    Raises:
        ConfigError: for a wrong setting, or an experiment that the official loop cannot train.
    """
    config = trial.settings(args)
    tried = trial.prepare(config, args.classes)
    batch_size = config.train.batch_size

    # Before the learner changes the weights: both sides begin with the same ones.
    loop = official_loop(tried)
    batches = tried.random_batches()
    images = torch.cat([batch.images for batch in batches]).float() / 255
    targets = torch.cat([batch.targets for batch in batches]).long()
    targets = targets[:, None].repeat(1, 3, 1)  # present in every size
    if tried.device.type == "cuda":
        images, targets = images.pin_memory(), targets.pin_memory()

    learner = tried.learner()
    learner.train()
    times = in_turns(
        {
            "ours": lambda: learner.learn(batches, batch_size),
            "official": lambda: loop.step(images, targets),
        },
        device=tried.device,
        rounds=args.repeats,
        warmup=3,
    )
    return {
        "experiment": args.experiment,
        "settings": args.settings,
        "precision": config.train.precision.on(tried.device).value,
        "compile": config.train.compile,
        "channels_last": config.train.channels_last,
        "batch_size": batch_size,
        "image_size": tried.image_size,
        "classes": len(tried.classes),
        "step_ms": 1000 * statistics.median(times["ours"]),
        "official_step_ms": 1000 * statistics.median(times["official"]),
        "times_official_step": times_as_long(times, "official", "ours"),
    }


def official_loop(tried: Trial) -> OfficialLoop:
    """Return the official loop for a model with the backbone and the weights of an experiment.

    Raises:
        ConfigError: if the experiment has another head or loss than the official code.
    """
    config, head = tried.config, tried.model.head
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
    model = Classifier(copy.deepcopy(tried.model.backbone), official_head.to(tried.device))

    precision = config.train.precision.on(tried.device)
    return OfficialLoop(
        model,
        device=tried.device,
        autocast=precision.half,
        steps=trial.STEPS,
        lr=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        ema_decay=config.train.ema_decay or 0.9997,
    )
