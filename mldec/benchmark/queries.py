"""Time and multiply-accumulates of a zero-shot model by the number of its word queries."""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from mldec import build
from mldec.config.compose import compose
from mldec.data.base import Classes
from mldec.runtime import distributed
from mldec.runtime.facts import multiply_accumulates

MODEL = ["+experiment=nuswide_zsl_tresnet_m"]
IMAGE_SIZE = 224
WORD_DIM = 300  # width of its word vectors
TIMED = (81, 1_006)  # unseen classes and all classes of NUS-WIDE
COUNTED = (*TIMED, 9_605)  # and the classes of Open Images
DECODING: dict[str, list[str]] = {  # settings by the name of the decoding
    "full": [],
    "group": ["head=ml_decoder_zsl_groups"],
}


def queries(args: argparse.Namespace) -> dict[str, Any]:
    """Time TResNet-M at 224 pixels with 81 and 1,006 word queries, and count its work."""
    device = distributed.pick_device(args.device)
    figures: dict[str, Any] = {"device": str(device), "batch_size": args.batch_size}
    shape = (args.batch_size, 3, IMAGE_SIZE, IMAGE_SIZE)

    for decoding, settings in DECODING.items():
        # One class will do: the queries are made of the word vectors of each call.
        parts = build.check(compose([*MODEL, *settings]), build.MODEL_PARTS)
        model = build.model(parts, Classes(("any",)), pretrained=False).to(device).eval()

        for number in COUNTED:
            macs = multiply_accumulates(model, IMAGE_SIZE, (number, WORD_DIM))
            figures[f"gmac_{decoding}_{number}"] = macs / 1e9

        images = torch.randint(256, shape, dtype=torch.uint8, device=device)
        for number in TIMED:
            vectors = torch.randn(number, WORD_DIM, device=device)
            seconds = _median_seconds(model, images, vectors, args.seconds)
            figures[f"ms_{decoding}_{number}"] = 1000 * seconds

        fewer, more = (figures[f"ms_{decoding}_{number}"] for number in TIMED)
        figures[f"times_{decoding}"] = more / fewer
    return figures


@torch.inference_mode()
def _median_seconds(model: nn.Module, images: Tensor, vectors: Tensor, min_seconds: float) -> float:
    """Return the median time of a forward pass, measured for at least some seconds."""
    timer = Timer(
        "model(images, vectors)",
        globals={"model": model, "images": images, "vectors": vectors},
        num_threads=torch.get_num_threads(),
    )

    # The first calls allocate memory and choose kernels. The timer waits for the device.
    timer.timeit(2)
    return timer.blocked_autorange(min_run_time=min_seconds).median
