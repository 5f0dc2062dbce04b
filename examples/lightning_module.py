"""ML-Decoder in PyTorch Lightning: `attach`, the asymmetric loss and mAP in a LightningModule.

Install it with `pip install lightning timm`. The data is generated: images with dots in the colors
of their classes. Replace `Dots` with your own torch Dataset:

    python examples/lightning_module.py
"""

import timm
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.heads import attach
from mldec.losses import AsymmetricLoss

CLASSES = 3


class Dots(Dataset[tuple[Tensor, Tensor]]):
    """Images [3, 64, 64] with red, green and blue dots, and targets [3] of 1 and 0."""

    def __init__(self, images: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(2, (images, CLASSES), generator=generator).float()
        self.places = torch.randint(64, (images, CLASSES), generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        dots = torch.zeros(CLASSES, 64)
        dots.scatter_(1, self.places[index, :, None], self.targets[index, :, None])
        image = dots.view(CLASSES, 8, 8).repeat_interleave(8, 1).repeat_interleave(8, 2)
        return image, self.targets[index]


class Decoder(LightningModule):
    """A timm network with ML-Decoder.

    Args:
        name: Name of the network in timm.
        num_classes: Number of classes K.
        lr: Maximum learning rate of one cycle of AdamW.
    """

    def __init__(self, name: str, num_classes: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        model = timm.create_model(name, pretrained=False)  # True downloads its weights
        self.model = attach(model, num_classes, embed_dim=64, num_heads=4, mlp_dim=128)
        # A mean instead of the sum of the paper, because `log` averages over batches.
        self.loss = AsymmetricLoss(gamma_neg=2, reduction="mean")
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        images, targets = batch
        loss = self.loss(self.model(images), targets)
        self.log("train/loss", loss)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Start with an empty evaluator."""
        self.evaluator = MultiLabelEvaluator(self.hparams["num_classes"])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Collect the logits of a batch."""
        images, targets = batch
        self.evaluator.update(self.model(images), targets)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of all images."""
        # It exchanges the scores of all ranks, which therefore log the same values.
        metrics = self.evaluator.compute()
        self.log_dict({f"val/{name}": metrics[name] for name in ("mAP", "CF1", "OF1")})

    def configure_optimizers(self) -> dict:
        """Return AdamW with one cycle of the learning rate."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def main(images: int = 512, epochs: int = 5) -> Trainer:
    """Train and validate; returns the trainer."""
    train = DataLoader(Dots(images, seed=0), batch_size=32, shuffle=True)
    val = DataLoader(Dots(128, seed=1), batch_size=64)
    torch.manual_seed(0)
    trainer = Trainer(max_epochs=epochs, accelerator="auto", devices=1, log_every_n_steps=5)
    trainer.fit(Decoder("test_resnet", CLASSES, lr=3e-3), train, val)
    return trainer


if __name__ == "__main__":
    print(main().callback_metrics)
