"""The job of `mldec.benchmark` that measures images per second of training and inference."""

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mldec.benchmark import trial
from mldec.benchmark.timing import peak_gib, seconds
from mldec.runtime.devices import Precision, autocast


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Time training and inference of an experiment, with random images on the device.

    A training step includes the optimiser and the moving average.
    """
    config = trial.settings(args)
    tried = trial.prepare(config, args.classes)
    device, batch_size = tried.device, config.train.batch_size
    timed = partial(seconds, device=device, repeats=args.repeats, warmup=3)

    batches = [
        batch._replace(images=batch.images.to(device), targets=batch.targets.to(device))
        for batch in tried.random_batches()
    ]
    learner = tried.learner()
    learner.train()
    train = timed(lambda: learner.learn(batches, batch_size))

    # The same weights, without gradients and in the precision of training. A head that was trained
    # on stored tokens answers images with its backbone.
    net = tried.model if config.train.cache_features else learner.net
    net.eval()
    images = tried.random_images(batch_size)
    infer = timed(lambda: _infer(net, images, learner.queries, config.train.precision))

    return {
        "experiment": args.experiment,
        "settings": args.settings,
        "precision": config.train.precision.on(device).value,
        "compile": config.train.compile,
        "channels_last": config.train.channels_last,
        "batch_size": batch_size,
        "image_size": tried.image_size,
        "classes": len(tried.classes),
        "train_images_per_second": batch_size / train,
        "infer_images_per_second": batch_size / infer,
        "peak_gib": peak_gib(device),
    }


@torch.no_grad()
def _infer(net: nn.Module, images: Tensor, queries: Tensor | None, precision: Precision) -> None:
    with autocast(images.device, precision):
        net(images, queries)
