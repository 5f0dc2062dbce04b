"""The job of `mldec benchmark` that measures how fast photos are answered."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
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
    """Yield the images/s of `mldec predict`, beside its two halves alone, after each round.

    If both halves share the processors, no program can be faster than 1 / (1 / decode + 1 / model);
    with a model on a GPU none can be faster than the slower half. All of it is timed in turns, and
    `share` is the median over the rounds of the speed divided by this bound.
    """
    engine, rule = opened(args.checkpoint, {"device": args.device})
    on_gpu = engine.device.type == "cuda"
    batch_size = BATCH_SIZE_GPU if on_gpu else BATCH_SIZE
    items = list(islice(Inputs([args.images]), args.count))
    decoder = Decoder(engine.transform, decoder=engine.decoder)

    # A batch in memory; images are repeated if there are few.
    first = map(decoder.__getitem__, items[:batch_size])
    readable = [image for image in first if isinstance(image, torch.Tensor)]
    if len({image.shape for image in readable}) != 1:
        raise DataError(
            "the first images cannot be read, or are of several sizes (--any-size): choose others"
        )
    batch = torch.stack((readable * batch_size)[:batch_size])
    if on_gpu:
        batch = batch.pin_memory()

    def decode() -> None:
        for _ in decoded(items, decoder, batch_size=batch_size, workers=processors()):
            pass

    def score() -> None:
        for start in range(0, len(items), batch_size):
            scores = engine.answer(batch[: len(items) - start]).scores
        scores.cpu()  # waits once: the host runs ahead of a GPU, as in mldec predict

    def answer(predictor: Predictor) -> None:
        for _ in predictor.rows(iter(items), StopRequest()):
            pass

    jobs: dict[str, Callable[[], None]] = {
        "decode": decode,
        "model": score,
        "predict": partial(answer, Predictor(engine, rule)),
        "one_process": partial(answer, Predictor(engine, rule, workers=0)),
    }

    yield {"images": len(items), "workers": processors()}
    rounds: dict[str, list[float]] = {}
    for number in range(args.rounds + 1):
        speeds = {}
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            speeds[name] = len(items) / (time.perf_counter() - start)

        halves = speeds["decode"], speeds["model"]
        speeds["bound"] = min(halves) if on_gpu else 1 / sum(1 / half for half in halves)
        speeds["share"] = speeds["predict"] / speeds["bound"]
        # The first round warms up: files come from the disk, and the network chooses its kernels.
        if number > 0:
            for name, speed in speeds.items():
                rounds.setdefault(name, []).append(speed)
            yield {name: statistics.median(speeds) for name, speeds in rounds.items()}
