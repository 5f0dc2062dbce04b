"""Cached tokens: equal to those of the backbone, computed once, and never stale."""

import os
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from photos import write_photos
from pictures import picture, saved
from support import experiment
from torch import nn

from mldec import build
from mldec.backbones import TimmBackbone
from mldec.config.compose import compose, override
from mldec.data.loader import eval_loader
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError, DataError, Stopped
from mldec.evaluation import frozen_features
from mldec.evaluation.frozen_features import StoredTokens, reuse_tokens, with_tokens
from mldec.model import Classifier
from mldec.runtime import distributed
from mldec.runtime.signals import StopRequest
from mldec.training.optim import check_trainable

CPU = torch.device("cpu")
DATA = ["data=csv", "data.root=own", "data.cache_dir=cache"]
DATA += ["data.augment=none", "data.cutout=0", "data.image_size=32"]
CACHED = ["train.freeze=[backbone]", "train.cache_features=true"]
PARTS = ["name=tokens", "backbone=tiny", "head=gap", "loss=asl", "train.workers=0", *DATA]


@pytest.fixture(autouse=True)
def own_photos(tmp_path, monkeypatch):
    """Create 16 training and 8 validation images in a new working folder."""
    monkeypatch.chdir(tmp_path)
    return write_photos(Path("own"))


class Counting(nn.Module):
    """A backbone that counts its input images."""

    num_features = 6

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(18.0).reshape(6, 3))
        self.images = 0

    def forward(self, images):
        self.images += len(images)
        assert not self.training
        pooled = nn.functional.adaptive_avg_pool2d(images.float(), 2).flatten(2)
        return (self.weight @ pooled).transpose(1, 2)


def cached(backbone, *settings, stop=None):
    config, data = composed(*settings)
    stop = StopRequest() if stop is None else stop
    return with_tokens(data, model_of(backbone), config, device=CPU, stop=stop)


def model_of(backbone):
    return Classifier(backbone, nn.Identity())


@cache
def cached_config():
    return compose([*PARTS, *CACHED])


def composed(*settings):
    config = override(cached_config(), list(settings))
    parts = build.check(config)
    return build.recorded(config, parts), build.data(parts)


def test_tokens_equal_those_of_backbone():
    network = TimmBackbone("test_resnet")
    data = cached(network.train())
    assert network.training
    _, plain = composed()

    network.eval()
    for split, expected in ((data.train, plain.train), (data.val, plain.val)):
        assert len(split.dataset) == len(expected.dataset)
        for index in range(len(split.dataset)):
            tokens, target = fixed_sample(split.dataset, index)
            image, label = fixed_sample(expected.dataset, index)
            torch.testing.assert_close(tokens, network(image[None])[0].detach())
            assert torch.equal(target, label)
            assert split.dataset.name(index) == expected.dataset.name(index)


def test_loader_processes_start_once_for_both_splits(monkeypatch):
    loaders = []

    def counted(*args, **options):
        loaders.append(eval_loader(*args, **options))
        return loaders[-1]

    monkeypatch.setattr(frozen_features, "eval_loader", counted)
    data = cached(Counting(), "train.workers=1")
    # Token files are read in the main process.
    for split in (data.val, data.train):
        for index in range(len(split.dataset)):
            fixed_sample(split.dataset, index)
    assert [loader.num_workers for loader in loaders] == [1]


def test_splits_with_other_classes_share_a_batch():
    _, plain = composed()
    config, data = composed("train.eval_batch_size=100")
    few = replace(data.val, dataset=data.val.dataset.select_classes([0]))
    data = replace(data, load_val=lambda: few)
    backbone = Counting()
    data = with_tokens(data, model_of(backbone), config, device=CPU, stop=StopRequest())
    backbone.eval()
    for split, expected in ((data.train, plain.train), (data.val, plain.val)):
        tokens, target = fixed_sample(split.dataset, 3)
        image, label = fixed_sample(expected.dataset, 3)
        torch.testing.assert_close(tokens, backbone(image[None])[0].detach())
        assert torch.equal(target, label[: len(target)])
    assert len(target) == 1


def test_folds_share_tokens():
    backbone = Counting()
    for fold in (1, 2, 3):
        data = cached(backbone, f"data.fold={fold}/3")
        data.load_train()
        data.load_val()
        assert backbone.images == 16
    cached(backbone).load_val()
    assert backbone.images == 24


@pytest.mark.parametrize(
    ("change", "computed"), [("weights", 24), ("image", 1), ("size", 24), ("setting", 24)]
)
def test_stale_tokens_are_not_read(change, computed, own_photos):
    backbone, settings = Counting(), []
    cached(backbone).load_train()

    if change == "weights":
        nn.init.ones_(backbone.weight)
    elif change == "image":
        # Another image with the same modification time.
        before = (own_photos / "3.png").stat()
        saved(picture(seed=99), own_photos / "3.png")
        os.utime(own_photos / "3.png", ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "size":
        settings = ["data.image_size=48"]
    else:
        settings = ["backbone.model_args.stem_width=8"]

    config, data = composed(*settings)
    again = with_tokens(data, model_of(backbone), config, device=CPU, stop=StopRequest())
    backbone.eval()
    expected = backbone(fixed_sample(data.train.dataset, 3)[0][None])[0]
    torch.testing.assert_close(fixed_sample(again.train.dataset, 3)[0], expected.detach())
    assert backbone.images == 24 + computed + 1


def test_tokens_of_another_precision_are_not_read():
    backbone = Counting()
    samples = {}
    for precision in ("fp32", "bf16", "fp32"):
        data = cached(backbone, f"train.precision={precision}")
        tokens, _ = fixed_sample(data.train.dataset, 3)
        assert torch.equal(samples.setdefault(precision, tokens), tokens)
    assert not torch.equal(samples["fp32"], samples["bf16"])
    assert backbone.images == 48


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        (None, []),
        ("off", ["train.cache_features=false"]),
        ("size", ["data.image_size=48"]),
        ("whole network", []),
        ("views", []),
        ("processes", []),
    ],
)
def test_evaluation_reuses_tokens_of_same_input(reason, settings, monkeypatch):
    trained, data = composed()
    model = model_of(Counting())
    model.views = "flip" if reason == "views" else None
    loaded = SimpleNamespace(config=trained, model=model, transform=data.transform)
    config, data = composed(*settings)
    if reason == "whole network":
        loaded.config = override(trained, ["train.cache_features=false"])
    if reason == "processes":
        monkeypatch.setattr(distributed, "world_size", lambda: 2)

    reused = reuse_tokens(data, loaded, config, device=CPU)
    assert isinstance(reused.val.dataset, StoredTokens) == (reason is None)
    assert model.backbone.images == (8 if reason is None else 0)
    assert len(reused.val.dataset) == 8


def test_evaluation_computes_tokens_of_its_precision_once(caplog):
    caplog.set_level("INFO", "mldec")
    trained, data = composed("train.precision=bf16")
    backbone = Counting()
    cached(backbone, "train.precision=bf16").load_train()
    model = SimpleNamespace(backbone=backbone, head=nn.Identity(), needs_blocks=False, views=None)
    loaded = SimpleNamespace(config=trained, model=model, transform=data.transform)
    assert backbone.images == 24

    # The tokens of training are in bf16, those of the evaluation in fp32.
    for computed in (32, 32):
        config = override(trained, ["train.precision=fp32"])
        [tokens, _] = fixed_sample(reuse_tokens(data, loaded, config, device=CPU).val.dataset, 3)
        assert backbone.images == computed
    backbone.eval()
    expected = backbone(fixed_sample(data.val.dataset, 3)[0][None])[0]
    torch.testing.assert_close(tokens, expected.detach())
    assert "fp32" in caplog.text
    assert "bf16" in caplog.text


def test_unreadable_files_are_named_or_skipped(own_photos):
    (own_photos / "2.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"own/2\.png"):
        cached(Counting()).load_train()
    dataset = cached(Counting(), "data.bad_images=skip").train.dataset
    assert fixed_sample(dataset, 3)[0].isfinite().all()

    damaged, missing = dataset.files[4], dataset.files[5]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    missing.unlink()
    for index, name in ((2, "own/2.png"), (4, str(damaged)), (5, str(missing))):
        with pytest.raises(DataError, match=name):
            fixed_sample(dataset, index)


def test_token_files_of_another_image_or_content_are_named():
    dataset = cached(Counting()).train.dataset
    first, second, other, line, network = dataset.files[:5]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    np.save(other, np.zeros((3, 6), np.float32))
    np.save(line, np.zeros(6, np.float32))

    backbone = Counting()
    nn.init.zeros_(backbone.weight)
    network.write_bytes(cached(backbone).train.dataset.files[4].read_bytes())
    for index, file in enumerate((first, second, other, line, network)):
        with pytest.raises(DataError, match=f"^{file} "):
            fixed_sample(dataset, index)
    assert fixed_sample(dataset, 5)[0].shape == (4, 6)


def test_stopped_computation_continues():
    backbone, stop = Counting(), StopRequest()

    def stop_after_the_first_batch(*_):
        stop.note(signal.SIGTERM, None)

    hook = backbone.register_forward_hook(stop_after_the_first_batch)
    with pytest.raises(Stopped, match="6 of 24") as raised:
        cached(backbone, "train.eval_batch_size=6", stop=stop).load_train()
    assert raised.value.status == 143
    hook.remove()

    assert len(cached(backbone).train.dataset) == 16
    assert backbone.images == 24


def of_generated_images():
    config = experiment("digits")
    data = build.data(build.check(config))
    with_tokens(data, model_of(Counting()), config, device=CPU, stop=StopRequest()).load_train()


@pytest.mark.parametrize(
    ("call", "processes", "name"),
    [
        (of_generated_images, 1, "train.cache_features"),
        (lambda: cached(Counting()), 2, "train.cache_features"),
        (
            lambda: check_trainable(composed("data.augment=official", "data.flip=true")[0]),
            1,
            "data.augment.*data.flip",
        ),
    ],
)
def test_unsupported_settings_are_named(call, processes, name, monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: processes)
    with pytest.raises(ConfigError, match=name):
        call()
