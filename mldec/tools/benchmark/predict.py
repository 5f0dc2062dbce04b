"""The job `predict`: images/s of `mldec predict`."""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice

import torch

from mldec.errors import DataError
from mldec.runtime.devices import processors
from mldec.runtime.signals import StopRequest
from mldec.tools.predict import opened
from mldec.tools.predict.answers import BATCH_SIZE, BATCH_SIZE_GPU, Predictor
from mldec.tools.predict.decode import Decoder, decoded
from mldec.tools.predict.inputs import Inputs


def predict(args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Time `mldec predict`, decoding alone and the model alone. Yields figures after each round.

    `bound` is the highest possible speed of predict: 1 / (1 / decode + 1 / model) if both share the
    processors, and min(decode, model) with a GPU. `share` is the measured speed divided by `bound`.
    All figures are medians over the rounds, in images/s.
    """
    engine, rule = opened(args.checkpoint, {"device": args.device})
    on_gpu = engine.device.type == "cuda"
    batch_size = BATCH_SIZE_GPU if on_gpu else BATCH_SIZE
    items = list(islice(Inputs([args.images]), args.count))
    decoder = Decoder(engine.transform, decoder=engine.decoder)

    # The model is timed on one batch in memory, with repeated images if there are few.
    images = []
    for item in items[:batch_size]:
        image = decoder[item]
        if isinstance(image, torch.Tensor):
            images.append(image)
    if len({image.shape for image in images}) != 1:
        raise DataError(f"{args.images}: no readable images of one size; choose other images")
    batch = torch.stack((images * batch_size)[:batch_size])
    if on_gpu:
        batch = batch.pin_memory()
    predictor = Predictor(engine, rule)

    def decode() -> None:
        for _ in decoded(items, decoder, batch_size=batch_size, workers=processors()):
            pass

    def score() -> None:
        for start in range(0, len(items), batch_size):
            scores = engine.answer(batch[: len(items) - start]).scores
        scores.cpu()  # the only synchronization with a GPU

    def answer() -> None:
        for _ in predictor.rows(iter(items), StopRequest()):
            pass

    jobs: dict[str, Callable[[], None]] = {"decode": decode, "model": score, "predict": answer}
    yield {"images": len(items), "workers": processors()}
    rounds: dict[str, list[float]] = defaultdict(list)
    for number in range(args.rounds + 1):
        speeds = {}
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            speeds[name] = len(items) / (time.perf_counter() - start)

        speeds["bound"] = 1 / (1 / speeds["decode"] + 1 / speeds["model"])
        if on_gpu:
            speeds["bound"] = min(speeds["decode"], speeds["model"])
        speeds["share"] = speeds["predict"] / speeds["bound"]
        # The first round is a warm-up: files are read from the disk.
        if number > 0:
            for name, speed in speeds.items():
                rounds[name].append(speed)
            yield {name: statistics.median(values) for name, values in rounds.items()}
