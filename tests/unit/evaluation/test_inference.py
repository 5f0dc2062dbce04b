"""Folded batch norms, padded batches and compiled networks in evaluations, predict and export."""

import copy

import networks
import pytest
import torch
from random_weights import batch_norms, randomize_norms
from support import assert_equal

from mldec import build
from mldec.backbones import TimmBackbone
from mldec.config.compose import compose
from mldec.errors import ConfigError
from mldec.evaluation.inference import for_inference
from mldec.evaluation.run import score
from mldec.heads import GAP
from mldec.model import Classifier
from mldec.tools.export import Program
from mldec.tools.predict.engine import TorchEngine

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    """A network whose batch norms have random statistics."""
    torch.manual_seed(0)
    backbone = randomize_norms(TimmBackbone("test_resnet"))
    return Classifier(backbone, GAP(backbone.num_features, 10)).eval()


def settings(*words):
    config = compose(["+experiment=digits", "data.val_images=6", "train.workers=0", *words])
    return build.data(build.check(config, ["data"])), config


def logits(model, *words, **options):
    scored = score([model], *settings(*words), device=CPU, **options)
    return torch.cat([batch_logits for _, [batch_logits] in scored])


@pytest.fixture
def shapes(monkeypatch):
    """Shapes of the batches of a network that counts as compiled."""
    shapes = []

    def compiled(function, **options):
        if not isinstance(function, TimmBackbone):
            return function
        network = copy.deepcopy(function)
        network.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape[0]))
        return network

    monkeypatch.setattr(torch, "compile", compiled)
    return shapes


def test_folded_evaluation_gives_the_same_logits_and_does_not_change_the_model(model):
    before = copy.deepcopy(model.state_dict())
    expected = logits(model, "train.fold_batchnorms=false")
    found = logits(model, "train.fold_batchnorms=true")
    assert_equal(dict(model.state_dict()), dict(before))
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def test_padding_does_not_change_the_logits(model, shapes):
    expected = logits(model, "train.eval_batch_size=6")
    found = logits(model, "train.eval_batch_size=4", compiled=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert shapes == [4, 4]

    # A single batch is not padded.
    shapes.clear()
    assert len(logits(model, "train.eval_batch_size=50", compiled=True)) == 6
    assert shapes == [6]


def test_predict_folds_and_pads(model, shapes):
    loaded = networks.loaded("gap", model.backbone, size=64)
    images = networks.noise(3, 64)
    expected = TorchEngine(loaded).answer(images, features=True)
    found = TorchEngine(loaded, compiled=True).answer(images, features=True, size=5)
    assert shapes == [5]
    for values, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        unfolded = loaded.model(images).sigmoid()
    torch.testing.assert_close(found.scores, unfolded, rtol=1e-4, atol=1e-5)


def test_folded_convolutions_have_the_half_precision_of_autocast(model):
    images = networks.noise(2, 64)
    folded = for_inference(model, 64, None, fold=True)
    half = for_inference(model, 64, torch.bfloat16, fold=True)
    assert not batch_norms(folded)
    assert half.backbone.network.conv1[0].weight.dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(half(images), folded(images))


def test_exported_network_has_no_batch_norms(model):
    loaded = networks.loaded("gap", model.backbone, size=64)
    program = Program(loaded, [0.5])
    assert not batch_norms(program)
    assert batch_norms(loaded.model)
    images = networks.noise(2, 64)
    with torch.no_grad():
        expected = loaded.model(images).sigmoid()
        torch.testing.assert_close(program(images)[0], expected, rtol=1e-4, atol=1e-5)


def test_failing_compiler_is_a_user_error(model, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(ConfigError, match="--compile"):
        for_inference(model, 64, None, fold=False, compiled=True)
