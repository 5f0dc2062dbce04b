"""What more classes cost a zero-shot model: time and multiply-accumulates by the number of word queries."""

import argparse
from typing import Any

import torch
from torch.utils.benchmark import Timer

from mldec import build
from mldec.checkpoint.loading import MODEL_PARTS
from mldec.config.compose import compose
from mldec.data.base import Classes
from mldec.runtime import distributed
from mldec.runtime.cost import multiply_accumulates

MODEL = ["+experiment=nuswide_zsl_tresnet_m"]
IMAGE_SIZE = 224
WIDTH = 300  # of its word vectors
TIMED = (81, 1_006)  # unseen and all classes of NUS-WIDE
COUNTED = (*TIMED, 9_605)  # and those of Open Images
DECODING: dict[str, list[str]] = {
    "full": [],
    "group": ["head=ml_decoder_zsl_groups"],
}  # by name, their settings


def queries(words: argparse.Namespace) -> dict[str, Any]:
    """Time TResNet-M at 224 pixels with 81 and with 1,006 word queries; count the work of 9,605 too."""
    device = distributed.pick_device(words.device)
    found: dict[str, Any] = {"device": str(device), "batch_size": words.batch_size}
    for name, settings in DECODING.items():
        config = compose([*MODEL, *settings])
        model = (
            build.model(build.check(config, MODEL_PARTS), Classes(("any",)), pretrained=False)
            .to(device)
            .eval()
        )
        for number in COUNTED:
            found[f"gmac_{name}_{number}"] = (
                multiply_accumulates(model, IMAGE_SIZE, (number, WIDTH)) / 1e9
            )
        images = torch.randint(
            256, (words.batch_size, 3, IMAGE_SIZE, IMAGE_SIZE), dtype=torch.uint8, device=device
        )
        for number in TIMED:
            vectors = torch.randn(number, WIDTH, device=device)
            with torch.inference_mode():
                job = {"model": model, "images": images, "vectors": vectors}
                timer = Timer(
                    "model(images, vectors)", globals=job, num_threads=torch.get_num_threads()
                )
                timer.timeit(2)
                seconds = timer.blocked_autorange(
                    min_run_time=words.seconds
                ).median  # waits for the device
            found[f"ms_{name}_{number}"] = 1000 * seconds
        fewer, more = (found[f"ms_{name}_{number}"] for number in TIMED)
        found[f"times_{name}"] = more / fewer
    return found
