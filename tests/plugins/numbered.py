"""A dataset that records the indices and random numbers of the loader."""

import torch
from torch import Tensor

from mldec.data.sampling import SampleRandom
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, DataModule, Split
from mldec.errors import DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator


class Numbers:
    """Dataset whose samples contain their index and random numbers."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count = count
        self.broken = broken

    def __len__(self) -> int:
        return self.count

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        if index == self.broken:
            raise DataError(f"number {index} is broken; restore it")
        drawn = [rng.random() for _ in range(3)]
        return torch.tensor([float(index), *drawn]), torch.tensor([index % 2], dtype=torch.int8)

    def name(self, index: int) -> str:
        return str(index)


def as_data(dataset: Numbers, bad_images: str = "stop") -> DataModule:
    split = Split(dataset, Classes(("odd",)))
    return DataModule(
        lambda: split, lambda: split, MultiLabelEvaluator, EvalTransform(image_size=1), bad_images
    )
