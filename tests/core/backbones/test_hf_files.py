"""Files as transformers writes them, read as plain data."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mldec.backbones.hf_backbone import (
    CONFIG,
    PROCESSOR,
    normalisation,
    published_weights,
    read_json,
)
from mldec.errors import ConfigError

WRITTEN = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1]}


def test_weights_of_a_folder_prefer_safetensors(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    assert published_weights(str(tmp_path))["a"].tolist() == [0, 0]
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert published_weights(str(tmp_path))["a"].tolist() == [1, 1]


def test_a_folder_without_weights_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        published_weights(str(tmp_path))
    message = str(caught.value)
    assert message.startswith(f"backbone.pretrained=true: the weights of {tmp_path} cannot be had")
    assert "backbone.pretrained=FILE" in message
    assert "\n" not in message


def test_json_is_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text('{"model_type": "vit"}')
    assert read_json(str(tmp_path), CONFIG, "config") == {"model_type": "vit"}


@pytest.mark.parametrize("text", [None, "", "[1]", "{", "\udcff"])
def test_a_json_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / PROCESSOR).write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError) as caught:
        read_json(str(tmp_path), PROCESSOR, "mean")
    message = str(caught.value)
    assert message.startswith(f"backbone.name={tmp_path}: {PROCESSOR} cannot be had from")
    assert message.endswith("give backbone.mean=[R,G,B] backbone.std=[R,G,B]")
    assert "\n" not in message


def test_the_normalisation_is_that_of_the_processor() -> None:
    assert normalisation("x", WRITTEN) == ([0.5, 0.4, 0.3], [0.2, 0.2, 0.1])
    off = {**WRITTEN, "do_normalize": False}
    assert normalisation("x", off) == ([0.0] * 3, [1.0] * 3)


@pytest.mark.parametrize(
    ("processor", "fault"),
    [
        ({}, "names no image_mean and image_std"),
        ({**WRITTEN, "image_std": 0.5}, "names no image_mean and image_std"),
        ({**WRITTEN, "do_flip_channel_order": True}, "in the order blue, green and red"),
    ],
)
def test_another_form_of_input_is_refused(processor: dict, fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"backbone\.name=x: .*{fault}"):
        normalisation("x", processor)
