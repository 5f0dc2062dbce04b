"""Backbones converted to OpenVINO."""

import logging
import os
import shutil
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from mldec.backbones import TimmBackbone, openvino_backbone
from mldec.backbones.openvino_backbone import OpenVinoBackbone, convert
from mldec.checkpoint import load_model
from mldec.errors import ConfigError
from mldec.runtime.devices import EngineName
from mldec.tools.predict.engine import TorchEngine

# `importorskip` would import its telemetry.
pytestmark = pytest.mark.skipif(find_spec("openvino") is None, reason="an extra")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # All other tests compute backbones in torch.
    monkeypatch.setattr("mldec.backbones.openvino_backbone.is_installed", lambda: True)
    return tmp_path / "mldec"


class ThroughNumpy(nn.Module):
    """An operation that a trace does not follow: its output is a constant there."""

    def forward(self, images):
        return torch.from_numpy(images.float().mean((2, 3)).numpy().copy())


def images(count, size=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("name", ["test_efficientnet.r160_in1k", "test_vit.r160_in1k"])
@torch.no_grad()
def test_converted_backbone_computes_the_same_tokens_for_any_batch(name):
    settings = {"image_size": 64} if "vit" in name else {}
    backbone = TimmBackbone(name, pretrained=False, **settings).eval()
    converted = convert(backbone, 64)
    assert isinstance(converted, OpenVinoBackbone)
    for count in (1, 5):
        batch = images(count).contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(converted(batch), backbone(batch), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_conversion_is_stored_by_weights(cache):
    backbone = TimmBackbone("test_efficientnet.r160_in1k", pretrained=False).eval()
    convert(backbone, 64)
    [folder] = cache.iterdir()
    times = [file.stat().st_mtime_ns for file in sorted(folder.iterdir())]
    convert(backbone, 64)
    assert [file.stat().st_mtime_ns for file in sorted(folder.iterdir())] == times

    next(backbone.parameters()).add_(0.1)
    converted = convert(backbone, 64)
    assert len(list(cache.iterdir())) == 2
    torch.testing.assert_close(converted(images(2)), backbone(images(2)), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_conversion_needs_no_writable_cache(cache, monkeypatch):
    backbone = TimmBackbone("test_efficientnet.r160_in1k", pretrained=False).eval()
    # A killed process with the same number has left its folder.
    monkeypatch.setattr(openvino_backbone, "network_hash", lambda *_: "0")
    (cache / f".openvino-0.{os.getpid()}.tmp").mkdir(parents=True)
    assert isinstance(convert(backbone, 64), OpenVinoBackbone)
    assert [path.name for path in cache.iterdir()] == ["openvino-0"]

    shutil.rmtree(cache)
    cache.write_text("a file")
    converted = convert(backbone, 64)
    assert isinstance(converted, OpenVinoBackbone)
    torch.testing.assert_close(converted(images(2)), backbone(images(2)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", [EngineName.auto, EngineName.openvino])
def test_predictions_with_openvino_equal_those_with_torch(digits_run, engine):
    loaded = load_model(digits_run, plugins=["patches"])
    size = loaded.transform.image_size
    batch = images(3, size)
    expected = TorchEngine(loaded, engine=EngineName.torch).answer(batch, features=True)
    found = TorchEngine(loaded, engine=engine)
    assert isinstance(found._network.backbone, OpenVinoBackbone)
    answers = found.answer(batch, features=True)
    torch.testing.assert_close(answers.scores, expected.scores, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(answers.features, expected.features, rtol=1e-4, atol=1e-4)


def test_missing_package_is_named_only_if_it_is_required(digits_run, monkeypatch):
    monkeypatch.setattr("mldec.backbones.openvino_backbone.is_installed", lambda: False)
    loaded = load_model(digits_run, plugins=["patches"])
    assert TorchEngine(loaded).program == "torch"
    with pytest.raises(ConfigError, match=r"^engine=openvino.*\[cpu\]"):
        TorchEngine(loaded, engine=EngineName.openvino)


def test_backbone_that_is_not_converted_correctly_stays_in_torch(caplog):
    backbone = ThroughNumpy()
    with caplog.at_level(logging.WARNING, "mldec"):
        assert convert(backbone, 64) is backbone
    [record] = caplog.records
    assert "OpenVINO" in record.message
