"""Twenty training steps in float64 against the official training loop."""

import fill
import numpy as np
import official
import torch

from mldec import build
from mldec.config.compose import compose
from mldec.data.loader import Batch
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, DataModule, Split
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.training.trainer import Trainer


def test_losses_rates_and_final_weights(tmp_path):
    facts = official.read("trajectory_tresnet_m")
    images, labels = (torch.from_numpy(array) for array in fill.training_set())
    words = ["head.dropout=0.0", "train.precision=fp32", "device=cpu", "train.workers=0"]
    words += ["backbone.pretrained=false"]
    words += [f"train.{key}={facts[key]}" for key in ("epochs", "batch_size", "ema_decay")]
    words += [f"optim.lr={facts['max_lr']}", f"optim.weight_decay={facts['weight_decay']}"]
    config = compose(["+experiment=coco_tresnet_m", *words])
    classes = Classes(tuple(map(str, range(facts["classes"]))))
    parts = build.check(config)
    model = build.model(parts, classes).double()
    weights = official.model_weights(official.read("tresnet_m_coco_224.keys"))
    model.load_state_dict(weights, strict=False)
    split = Split(torch.utils.data.TensorDataset(images, labels), classes)
    transform = EvalTransform(image_size=64)
    data = DataModule(lambda: split, lambda: split, MultiLabelEvaluator, transform)
    loss = build.loss(parts)
    job = Trainer(config, model, loss, data, folder=tmp_path, device=torch.device("cpu"))
    learner = job.learner
    learner.net.train()

    size = facts["batch_size"]
    for expected in facts["steps"]:
        group = learner.optimizer.param_groups[0]
        np.testing.assert_allclose(group["lr"], expected["lr"], rtol=1e-6)
        np.testing.assert_allclose(group["betas"][0], expected["beta1"], rtol=1e-6)
        start = expected["step"] % facts["steps_per_epoch"] * size
        rows = slice(start, start + size)
        learner.learn([Batch(images[rows].double(), labels[rows], torch.arange(size))], size)
        [numbers] = learner.read()
        np.testing.assert_allclose(numbers.loss, expected["loss"], rtol=1e-6)

    assert learner.ema is not None
    nets = {"final_logits": learner.model, "final_ema_logits": learner.ema.module}
    for key, net in nets.items():
        with torch.no_grad():
            logits = net.eval()(images[:4].double())[:, :8]
        np.testing.assert_allclose(logits, facts[key], rtol=1e-6, atol=1e-9)
