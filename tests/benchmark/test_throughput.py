"""Images per second of training and inference, for experiments of every kind."""

from collections.abc import Callable
from typing import Any

import pytest

SMALL = ["data.image_size=32", "train.batch_size=4", "device=cpu"]
HEAD = ["head.embed_dim=16", "head.mlp_dim=16"]


@pytest.mark.parametrize(
    ("experiment", "settings"),
    [
        ("digits", ["train.accumulate=2", *HEAD]),
        ("digits_single", HEAD),  # softmax
        ("nuswide_zsl_tresnet_m", ["backbone=tiny", *HEAD]),  # word queries
        # Mixed images and soft labels.
        pytest.param("imagenet_resnet18_a2", ["backbone=tiny", *HEAD], marks=pytest.mark.slow),
        # Stored tokens.
        pytest.param("finetune_frozen", ["backbone=tiny", *HEAD], marks=pytest.mark.slow),
    ],
)
def test_an_experiment_trains_and_infers(
    cli: Callable[..., Any], experiment: str, settings: list[str]
) -> None:
    options = ["--experiment", experiment, "--classes", "7", "--repeats", "1"]
    status, out, err = cli("benchmark", "throughput", *options, *SMALL, *settings)
    assert status == 0, err
    figures = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (figures["classes"], figures["batch_size"], figures["image_size"]) == ("7", "4", "32")
    assert float(figures["train_images_per_second"].replace(",", "")) > 0
    assert float(figures["infer_images_per_second"].replace(",", "")) > 0
