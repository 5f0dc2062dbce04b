#!/usr/bin/env python
"""The method in one file: ML-Decoder with the recipe of the paper for MS-COCO (arXiv 2111.12933).

    python examples/train_minimal.py --data /data/coco
    python examples/train_minimal.py --data /data/mine/data.csv --backbone resnet18.tv_in1k \
        --image-size 224 --batch-size 32 --epochs 10 --lr 3e-4 --ema-decay 0.99

A CSV file has the columns path, labels (separated by semicolons) and split (train or val). A test
compares the steps with `mldec train +experiment=coco_tresnet_l`, without augmentation. RandAugment
and cutout of torchvision differ in detail from the official code, which mldec follows.
"""

import argparse
import csv
from pathlib import Path

import timm.optim
import torch
from PIL import Image
from pycocotools.coco import COCO
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.heads import MLDecoder
from mldec.losses import AsymmetricLoss

IMAGE_SIZE = 448
BATCH_SIZE = 56
EPOCHS = 40
LR = 1e-4  # maximum of the schedule
WEIGHT_DECAY = 1e-4  # L2 regularization, not of biases and norms
EMA_DECAY = 0.9997  # of the moving average of the weights

Rows = list[tuple[Path, set[str]]]  # path and labels of each image


def read_coco(folder: Path, split: str) -> tuple[Rows, list[str]]:
    """Return the images of "train" or "val" that have an object, and the class names."""
    coco = COCO(folder / f"annotations/instances_{split}2014.json")
    rows = []
    for number in sorted(coco.imgToAnns):
        labels = {coco.cats[entry["category_id"]]["name"] for entry in coco.imgToAnns[number]}
        rows.append((folder / f"{split}2014" / coco.imgs[number]["file_name"], labels))
    return rows, [coco.cats[number]["name"] for number in sorted(coco.cats)]


def read_csv(file: Path, split: str) -> tuple[Rows, list[str]]:
    """Return the images of "train" or "val", and the sorted class names of both."""
    rows = []
    classes: set[str] = set()
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            labels = {name.strip() for name in row["labels"].split(";") if name.strip()}
            classes |= labels
            if row["split"] == split:
                rows.append((file.parent / row["path"], labels))
    return rows, sorted(classes)


class Images(Dataset):
    """Images [3, H, W] and targets [K]."""

    def __init__(self, rows: Rows, classes: list[str], transform: v2.Transform) -> None:
        self.rows = rows
        self.classes = classes
        self.transform = transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path, labels = self.rows[index]
        targets = torch.tensor([float(name in labels) for name in self.classes])
        return self.transform(Image.open(path).convert("RGB")), targets


def make_transform(backbone: nn.Module, size: int, *, augment: bool) -> v2.Transform:
    """Return the transform from an RGB image to a normalized tensor [3, size, size]."""
    normalization = timm.data.resolve_model_data_config(backbone)
    steps = [v2.Resize((size, size)), v2.PILToTensor()]
    if augment:
        # Cutout of a square with half the side of the image.
        steps.append(v2.RandomErasing(1.0, scale=(0.25, 0.25), ratio=(1, 1), value=[127, 127, 127]))
        steps.append(v2.RandAugment())
    normalize = v2.Normalize(normalization["mean"], normalization["std"])
    return v2.Compose(steps + [v2.ToDtype(torch.float32, scale=True), normalize])


class Network(nn.Module):
    """A network of timm with feature maps [B, C, H, W], and the ML-Decoder head."""

    def __init__(self, name: str, num_classes: int, *, pretrained: bool) -> None:
        super().__init__()
        self.backbone = timm.create_model(name, pretrained=pretrained, num_classes=0)
        self.head = MLDecoder(self.backbone.num_features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map normalized images [B, 3, H, W] to logits [B, K]."""
        return self.head(self.backbone.forward_features(images))


class Training:
    """A model in training, with everything that changes in an optimizer step."""

    def __init__(self, model: nn.Module, *, steps: int, lr: float, ema_decay: float) -> None:
        self.model = model
        self.loss = AsymmetricLoss(gamma_neg=4, gamma_pos=0, clip=0.05)  # sum over the batch

        groups = timm.optim.param_groups_weight_decay(model, WEIGHT_DECAY)
        self.optimizer = torch.optim.Adam(groups, lr=lr, fused=True)

        # The rate rises from lr / 25 and falls to almost 0. Adam's beta1 cycles from 0.95 to 0.85.
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=lr, total_steps=steps, pct_start=0.2
        )
        self.ema = ModelEmaV3(model, decay=ema_decay)
        self.device = next(model.parameters()).device.type
        self.scaler = torch.amp.GradScaler(self.device, enabled=self.device == "cuda")

    def step(self, images: Tensor, targets: Tensor) -> Tensor:
        """Do a step with normalized images [B, 3, H, W] and targets [B, K]. Returns the loss."""
        # 1. Compute the logits in float16 on a GPU, and the loss in float32.
        with torch.autocast(self.device, torch.float16, enabled=self.scaler.is_enabled()):
            logits = self.model(images.to(self.device))
        loss = self.loss(logits.float(), targets.to(self.device))

        # 2. Update the weights. The scaler skips the update if a gradient overflows.
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

        # 3. Update the learning rate and the moving average of the weights.
        self.schedule.step()
        self.ema.update(self.model)
        return loss.detach()


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader, device: str) -> float:
    """Return the mean average precision in percent."""
    model.eval()
    evaluator = MultiLabelEvaluator(model.head.num_classes)
    for images, targets in batches:
        evaluator.update(model(images.to(device)), targets)
    return evaluator.compute()["mAP"]


def main() -> None:
    """Train a model, and save the weights with the best mAP."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    option = parser.add_argument
    option("--data", type=Path, required=True, help="CSV file, or folder of MS-COCO 2014")
    option("--out", type=Path, default="minimal.pt", help="file of the best weights")
    option("--backbone", default="tresnet_v2_l.miil_in21k", help="convolutional network of timm")
    option("--pretrained", action=argparse.BooleanOptionalAction, default=True, help="its weights")
    option("--image-size", type=int, default=IMAGE_SIZE, help="pixels per side")
    option("--batch-size", type=int, default=BATCH_SIZE, help="images per step")
    option("--epochs", type=int, default=EPOCHS, help="length of the schedule")
    option("--lr", type=float, default=LR, help="maximum learning rate")
    option("--ema-decay", type=float, default=EMA_DECAY, help="lower it for short runs")
    option("--workers", type=int, default=4, help="processes that read images")
    args = parser.parse_args()

    read = read_csv if args.data.is_file() else read_coco
    train_rows, classes = read(args.data, "train")
    val_rows, _ = read(args.data, "val")

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Network(args.backbone, len(classes), pretrained=args.pretrained).to(device)
    augmented = make_transform(model.backbone, args.image_size, augment=True)
    plain = make_transform(model.backbone, args.image_size, augment=False)
    loading = {"batch_size": args.batch_size, "num_workers": args.workers}
    train_batches = DataLoader(Images(train_rows, classes, augmented), shuffle=True, **loading)
    val_batches = DataLoader(Images(val_rows, classes, plain), **loading)

    steps = args.epochs * len(train_batches)
    training = Training(model, steps=steps, lr=args.lr, ema_decay=args.ema_decay)
    best = -1.0
    for epoch in range(1, args.epochs + 1):
        model.train()
        losses = [training.step(images, targets) for images, targets in train_batches]
        line = f"epoch {epoch}/{args.epochs} loss {torch.stack(losses).mean():.4g} val mAP"

        for name, candidate in (("ema", training.ema.module), ("raw", model)):
            score = evaluate(candidate, val_batches, device)
            line += f" {name} {score:.4f}"
            if score > best:
                best = score
                torch.save({"model": candidate.state_dict(), "classes": classes}, args.out)
        print(line, flush=True)
    print(f"saved the weights with mAP {best:.4f} in {args.out}")


if __name__ == "__main__":
    main()
