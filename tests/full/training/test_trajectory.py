"""Twenty training steps in float64 against the official training loop."""

import fill
import numpy as np
import official
import torch
from trajectory import check_steps


def test_losses_rates_and_final_weights(tmp_path):
    facts = official.read("trajectory_tresnet_m")
    learner = check_steps(tmp_path, len(facts["steps"]))
    assert learner.ema is not None
    images = torch.from_numpy(fill.training_set()[0][:4]).double()
    nets = {"final_logits": learner.model, "final_ema_logits": learner.ema.module}
    for key, net in nets.items():
        with torch.no_grad():
            logits = net.eval()(images)[:, :8]
        np.testing.assert_allclose(logits, facts[key], rtol=1e-6, atol=1e-9)
