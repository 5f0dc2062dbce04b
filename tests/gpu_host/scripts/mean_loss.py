"""Print the counts of a batch of `MeanLoss` on the null GPU for every option of loss."""

from pathlib import Path

import torch
from null_gpu import counted, finish
from support import loss_of_option

from mldec.config.compose import config_dir
from mldec.evaluation.run import MeanLoss

DEVICE = torch.device("cuda")
logits = [torch.zeros(8, 5, device=DEVICE)] * 2
targets = torch.zeros(8, 5, dtype=torch.int8).pin_memory()

results = {}
for path in sorted(Path(config_dir(), "loss").glob("*.yaml")):
    loss = loss_of_option(path).to(DEVICE)
    mean_loss = MeanLoss(loss, progress=0.5, batch_size=8, models=2, device=DEVICE)
    mean_loss.update(logits, targets)
    with counted() as results[path.stem]:
        mean_loss.update(logits, targets)
finish(results)
