"""Small trainers for images of a colored square, and killed runs that resume."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from patches import Patches
from support import assert_equal, numbers
from torch import nn

from mldec import build
from mldec.backbones import TimmBackbone
from mldec.checkpoint import loading
from mldec.config.compose import compose, override
from mldec.config.schema import Config
from mldec.data.sampling import SHUFFLED, SampleRandom, Sampling
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, DataModule, Split
from mldec.errors import DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.files.torch_files import read_torch
from mldec.heads.ml_decoder import MLDecoder
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.model import Classifier
from mldec.training.log import RunLog
from mldec.training.start import check_same_run
from mldec.training.trainer import Trainer

SHORT = ["train.epochs=4", "train.batch_size=8", "train.workers=0"]
SHORT += ["optim.lr=0.01", "train.ema_decay=0.9", "log.images=0"]


class Killed(Exception):
    pass


class Squares:
    """Images with a bright square in one of four corners. The label is its color."""

    def __init__(self, count: int, broken: tuple[int, ...] = ()) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def load(self, index: int, rng: SampleRandom) -> tuple[torch.Tensor, torch.Tensor]:
        if index in self.broken:
            raise DataError(f"square {index} is broken; restore it")
        generator = torch.Generator().manual_seed(rng.initial_seed)
        image = torch.randint(60, (3, 16, 16), dtype=torch.uint8, generator=generator)
        row, column = torch.randint(2, (2,), generator=generator).tolist()
        color = index % 4
        channels = slice(None) if color == 3 else slice(color, color + 1)
        image[channels, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 150
        return image, nn.functional.one_hot(torch.tensor(color), 4).to(torch.int8)

    def name(self, index: int) -> str:
        return f"square {index}"


class Spoilt(nn.Module):
    """Asymmetric loss with a NaN loss or NaN gradients in one call."""

    reduction = "sum"

    def __init__(self, call: int, what: str = "loss") -> None:
        super().__init__()
        self.call, self.what, self.calls = call, what, 0

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = AsymmetricLoss()(logits, targets)
        if self.calls != self.call:
            return loss
        if self.what == "loss":
            return loss * torch.nan
        zero = (logits - logits.detach()).abs().sum()
        return loss + zero.sqrt()  # 0, with an infinite gradient


@cache
def short() -> Config:
    return compose(["+experiment=digits", *SHORT])


def settings(*words: str) -> Config:
    config = override(short(), list(words))
    return build.recorded(config, build.check(config))


def trainer(
    config: Config,
    folder: Path,
    *,
    loss: nn.Module | None = None,
    images: int = 32,
    broken: tuple[int, ...] = (),
    bad_images: str = "stop",
    dropout: float = 0.1,
    dtype: torch.dtype = torch.float32,
    network: str | None = None,
    sampling: Sampling = SHUFFLED,
) -> Trainer:
    torch.manual_seed(config.seed)
    backbone = TimmBackbone(network) if network else Patches()
    head = MLDecoder(
        backbone.num_features, 4, embed_dim=16, num_heads=2, mlp_dim=16, dropout=dropout
    )
    classes = Classes(("red", "green", "blue", "white"))
    data = DataModule(
        load_train=lambda: Split(Squares(images, broken), classes),
        load_val=lambda: Split(Squares(24, broken), classes),
        make_evaluator=lambda classes: MultiLabelEvaluator(len(classes), top_k=1),
        transform=EvalTransform(image_size=16),
        bad_images=bad_images,
        sampling=sampling,
    )
    device = torch.device("cpu" if config.device == "auto" else config.device)
    model = Classifier(backbone, head).to(device, dtype)
    checkpoints = folder / "checkpoints"
    loss = loss or AsymmetricLoss()
    return Trainer(config, model, loss, data, folder=checkpoints, device=device)


def fit(job: Trainer, folder: Path) -> dict[str, float]:
    (folder / "checkpoints").mkdir(exist_ok=True, parents=True)
    log = RunLog(folder, step=job.learner.step, lines=job.lines)
    try:
        return job.fit(log)
    finally:
        log.close()


def resume(job: Trainer, folder: Path) -> Trainer:
    path = folder / "checkpoints" / "last.pt"
    saved = loading.load(path)
    check_same_run(job, saved, path)
    job.resume(saved, path)
    return job


def check_resume(make: Callable[[Path], Trainer], folder: Path, *, step: int) -> Trainer:
    """Compare a run with a run that is killed before a step and resumed. Every step is saved."""
    whole, parts = folder / "whole", folder / "parts"
    fit(make(whole), whole)

    first = make(parts)
    learn = first.learner.learn

    def killed(*arguments: Any, **named: Any) -> Any:
        if first.learner.step == step:
            raise Killed
        return learn(*arguments, **named)

    first.learner.learn = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        fit(first, parts)

    torch.manual_seed(99)
    second = resume(make(parts), parts)
    assert second.learner.step == step
    fit(second, parts)

    for name in ("last.pt", "best.pt"):
        assert_equal(*(read_torch(run / "checkpoints" / name) for run in (whole, parts)))
    assert numbers(whole) == numbers(parts)
    return second
