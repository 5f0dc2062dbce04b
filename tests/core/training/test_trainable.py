import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support import one_line
from timm.layers import freeze_batch_norm_2d
from timm.utils import freeze as timm_freeze
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from mldec.backbones import TimmBackbone
from mldec.config.schema import FreezeBatchNorm, Train
from mldec.errors import ConfigError
from mldec.heads.ml_decoder import MLDecoder
from mldec.model import Classifier
from mldec.runtime.distributed import synchronised_batch_norm
from mldec.training.optim import freeze

NETWORKS = {
    "resnet18": ["conv1", "bn1", "layer1"],
    "tresnet_m": ["body.conv1", "body.layer1"],
    "vit_tiny_patch16_224": ["patch_embed", "blocks.0"],
    "convnext_atto": ["stem", "stages.0"],
}
BATCH_NORMS = (nn.BatchNorm2d, FrozenBatchNorm2d)


def classifier(name: str) -> Classifier:
    backbone = TimmBackbone(name)
    return Classifier(backbone, MLDecoder(backbone.num_features, 4, embed_dim=32))


def trainable_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize("name", NETWORKS)
def test_frozen_parts_are_those_of_timm(name: str) -> None:
    with torch.device("meta"):
        ours, theirs = classifier(name), timm.create_model(name, num_classes=0)
        has_batch_norm = any(batch_norms(ours))
        timm_freeze(theirs, NETWORKS[name], include_bn_running_stats=has_batch_norm)

    train = Train(
        freeze=[f"backbone.network.{part}" for part in NETWORKS[name]],
        freeze_batchnorm=FreezeBatchNorm.frozen if has_batch_norm else None,
    )
    norms = freeze(ours, train)

    assert trainable_names(ours.backbone.network) == trainable_names(theirs)
    assert trainable_names(ours.head) == {key for key, _ in ours.head.named_parameters()}
    # timm replaces a frozen batch norm by another module.
    assert len(batch_norms(ours)) - len(norms) == len(batch_norms(theirs))
    assert bool(norms) is has_batch_norm


@pytest.mark.parametrize("name", ["test_resnet", "tresnet_m"])
def test_a_network_with_frozen_batch_norms_computes_what_timms_does(name: str) -> None:
    """timm's FrozenBatchNorm2d, like Query2Label's, has buffers only: nothing of it can train."""
    ours = classifier(name)
    for norm in batch_norms(ours):
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            nn.init.normal_(tensor)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
    theirs = copy.deepcopy(ours)
    theirs.backbone.network = freeze_batch_norm_2d(theirs.backbone.network)
    assert not batch_norms(theirs)

    norms = freeze(ours, Train(freeze_batchnorm=FreezeBatchNorm.all))
    ours.train()
    for norm in norms:
        norm.eval()
    theirs.train()

    images = torch.rand(2, 3, 64, 64)
    tokens, expected = ours.backbone(images), theirs.backbone(images)
    torch.testing.assert_close(tokens, expected, rtol=1e-4, atol=1e-4)
    assert trainable_names(ours) == trainable_names(theirs)


def test_a_batch_norm_in_evaluation_mode_is_the_one_of_torchvision() -> None:
    """torchvision's is the one that DETR and Query2Label copy."""
    norm, frozen = nn.BatchNorm2d(5), FrozenBatchNorm2d(5)
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 2.0)
    frozen.load_state_dict(norm.state_dict(), strict=False)
    images = torch.randn(2, 5, 3, 3)
    torch.testing.assert_close(norm.eval()(images), frozen(images))


def test_synchronised_batch_norms_are_frozen_too() -> None:
    model = synchronised_batch_norm(classifier("test_resnet"))
    norms = freeze(model, Train(freeze_batchnorm=FreezeBatchNorm.all))
    assert len(norms) == sum(isinstance(m, nn.SyncBatchNorm) for m in model.modules()) > 0


def test_a_name_stands_for_itself_and_for_what_is_inside() -> None:
    model = nn.ModuleDict({"layer1": nn.Linear(2, 2), "layer10": nn.Linear(2, 2)})
    freeze(model, Train(freeze=["layer1", "layer10.bias"]))
    assert trainable_names(model) == {"layer10.weight"}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("backbone.network.layr1", "backbone.network.layer1"),
        ("layer1", "backbone.network.layer1"),
        ("backbone.layer1.0", "backbone.network.layer1.0"),
        ("head.pool_wieght", "head.pool_weight"),
    ],
)
def test_a_name_of_nothing_is_refused_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        freeze(classifier("test_resnet"), Train(freeze=[name]))
    message = str(caught.value)
    assert message.startswith(f"train.freeze: '{name}' is neither a parameter nor a module with")
    assert message.endswith(f"did you mean '{meant}'?")


def test_a_model_without_parameters_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves no parameter to train"):
        freeze(classifier("test_resnet"), Train(freeze=["backbone", "head"]))


@pytest.mark.parametrize(
    ("network", "train", "where"),
    [
        ("test_vit", Train(freeze_batchnorm=FreezeBatchNorm.all), "in the model"),
        (
            "test_resnet",
            Train(freeze=["head"], freeze_batchnorm=FreezeBatchNorm.frozen),
            "in a frozen part",
        ),
    ],
)
def test_no_batch_norm_to_freeze_is_refused(network: str, train: Train, where: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no batch norm {where}; leave it out"):
        freeze(classifier(network), train)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.freeze=[backbone.network.layr1]"], "did you mean 'backbone.network.layer1'?"),
        (["train.freeze=[hed]"], "train.freeze: 'hed' is neither a parameter nor a module"),
        (["optim.name=adm"], "optim.name 'adm' is unknown; did you mean 'adam'?"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--cfg", "job"]])
def test_it_is_refused_before_the_data_is_looked_for(
    words: list[str],
    message: str,
    more: list[str],
    cli: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cli(
        "train",
        "+experiment=coco_tresnet_l",
        f"data.root={tmp_path}/nowhere",
        "backbone=timm",
        "backbone.name=test_resnet",
        "backbone.pretrained=true",
        *words,
        *more,
    )
    assert outcome.status == 1
    one_line(outcome.err, message)


def test_a_name_in_the_head_is_refused_before_the_first_step(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cli(
        "train",
        "+experiment=digits",
        "data.train_images=16",
        "data.val_images=8",
        "train.batch_size=8",
        "train.freeze=[head.embed_standart]",
    )
    assert outcome.status == 1
    one_line(outcome.err, "'head.embed_standart' is neither", "did you mean")
    assert not list(tmp_path.rglob("*.pt"))
