"""The parts of docs/extending.md, section "Without option files"."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mldec.data.sampling import SampleRandom, seeded
from mldec.data.tasks import multi_label
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, DataModule, Split


class MaxHead(nn.Module):
    def __init__(self, in_features: int, num_classes: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias=bias)

    def forward(self, tokens: Tensor, word_vectors: None = None) -> Tensor:
        return self.linear(tokens).amax(1)


class SquaredError(nn.Module):
    reduction = "mean"

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return (logits.sigmoid() - targets).square().mean()


class Sides(Dataset):
    """Any torch Dataset: uint8 [3, S, S] and 0 or 1 per class, int8 [K]."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = torch.randint(100, (3, 64, 64), dtype=torch.uint8)
        image[:, :, 32 * (index % 2) :][:, :, :32] += 150
        return image, torch.tensor([index % 2 == 0, index % 2 == 1], dtype=torch.int8)


class Wrapped:
    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        with seeded(rng.initial_seed):
            return self.dataset[index]

    def name(self, index: int) -> str:
        return f"sample {index}"


def pairs(*, image_size: int = 64) -> DataModule:
    classes = Classes(("left", "right"))
    train = Split(Wrapped(Sides(64)), classes)
    val = Split(Wrapped(Sides(16)), classes)
    return DataModule(
        load_train=lambda: train,
        load_val=lambda: val,
        make_evaluator=multi_label(),
        transform=EvalTransform(image_size=image_size),
    )
