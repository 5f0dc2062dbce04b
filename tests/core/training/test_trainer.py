import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from patches import Exploding, MeanSquare, Patches
from support import assert_equal, numbers
from torch import nn

from mldec import build, checkpoint
from mldec.backbones import TimmBackbone
from mldec.checkpoint import Best
from mldec.config.compose import compose, override
from mldec.config.schema import Config
from mldec.data.randomness import SampleRandom
from mldec.data.transforms import EvalTransform
from mldec.data.types import SHUFFLED, Classes, DataModule, Sampling, Split
from mldec.errors import CheckpointError, DataError, NonFiniteError
from mldec.evaluation import Results
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.files import torch_files
from mldec.files.torch_files import read_torch
from mldec.heads.ml_decoder import MLDecoder
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.losses.cross_entropy import BinaryCrossEntropy
from mldec.model import Classifier
from mldec.runtime import distributed
from mldec.runtime.devices import Precision
from mldec.training.log import RunLog
from mldec.training.step import Learner
from mldec.training.trainer import (
    Trainer,
    evaluate_weights,
    few_per_batch_norm,
    images_per_batch_norm,
    opening,
    run_facts,
)


class Squares:
    """Images with a bright square in one of four corners; the label is its colour."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def load(self, index: int, rng: SampleRandom) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(rng.initial_seed)
        image = torch.randint(60, (3, 16, 16), dtype=torch.uint8, generator=generator)
        row, column = torch.randint(2, (2,), generator=generator).tolist()
        colour = index % 4
        channels = slice(None) if colour == 3 else slice(colour, colour + 1)
        image[channels, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 150
        return image, torch.nn.functional.one_hot(torch.tensor(colour), 4).to(torch.int8)

    def name(self, index: int) -> str:
        return f"square {index}"


def squares(train: int = 32, sampling: Sampling = SHUFFLED) -> DataModule:
    classes = Classes(("red", "green", "blue", "white"))
    return DataModule(
        load_train=lambda: Split(Squares(train), classes),
        load_val=lambda: Split(Squares(24), classes),
        make_evaluator=lambda classes: MultiLabelEvaluator(len(classes), top_k=1),
        transform=EvalTransform(image_size=16),
        sampling=sampling,
    )


@pytest.fixture
def config() -> Config:
    words = [
        "train.epochs=4",
        "train.batch_size=8",
        "train.workers=0",
        "optim.lr=0.01",
        "train.ema_decay=0.9",
    ]
    config = override(compose(["+experiment=digits"]), words)
    return build.recorded(config, build.check(config))


CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    ],
)


def trainer(
    config: Config,
    folder: Path,
    *,
    loss: nn.Module | None = None,
    train: int = 32,
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
    model = Classifier(backbone, head).to(dtype)
    loss = loss or AsymmetricLoss()
    device = torch.device("cpu" if config.device == "auto" else config.device)
    return Trainer(
        config,
        model.to(device),
        loss,
        squares(train, sampling),
        folder=folder / "checkpoints",
        device=device,
    )


def fit(job: Trainer, folder: Path) -> dict[str, float]:
    folder.mkdir(exist_ok=True)
    (folder / "checkpoints").mkdir(exist_ok=True)
    log = RunLog(folder, step=job.learner.step, lines=job.lines)
    try:
        return job.fit(log)
    finally:
        log.close()


def resume(job: Trainer, folder: Path) -> None:
    path = folder / "checkpoints" / "last.pt"
    job.resume(checkpoint.load(path), path)


def test_it_learns(config: Config, tmp_path: Path) -> None:
    metrics = fit(trainer(override(config, ["train.epochs=12"]), tmp_path), tmp_path)
    assert metrics["val_raw/mAP"] > 95
    lines = numbers(tmp_path)
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0] / 2
    assert list(lines[-1])[:3] == ["step", "epoch", "val/mAP"]


ONE_LABEL = [
    "optim.name=lamb",
    "schedule.name=cosine_epochs",
    "schedule.warmup_epochs=1",
    "schedule.cooldown_epochs=1",
]
ONE_LABEL += ["train.repeats=3", "train.accumulate=2", "mix.mixup=0.1", "mix.cutmix=1.0"]


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["train.accumulate=2", "train.clip_grad=0.5", "train.precision=fp16"],
        ["train.ema_decay=null"],
        ["train.ema_start_epoch=2"],
        ["train.ema_start_epoch=3"],  # the first one after the resume
        ["train.ema_start_epoch=4"],
        ONE_LABEL,
    ],
)
@pytest.mark.usefixtures("fp16_on_a_cpu")
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_resumed_run_equals_one_that_was_not_stopped(
    config: Config, tmp_path: Path, extra: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = override(config, [*extra, f"device={device}"])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    make = partial(
        trainer, loss=BinaryCrossEntropy(target_threshold=0.2) if config.mix.on else None
    )
    fit(make(config, whole), whole)

    first = make(config, parts)
    log_progress = RunLog.progress

    def killed(self: RunLog, items: Any, **arguments: Any) -> Any:
        if first.epoch == 2 and not resumed:
            raise Killed
        return log_progress(self, items, **arguments)

    resumed = False
    monkeypatch.setattr(RunLog, "progress", killed)
    with pytest.raises(Killed):
        fit(first, parts)
    resumed = True
    torch.manual_seed(99)
    second = make(override(config, ["train.workers=2"]), parts)
    resume(second, parts)
    assert second.epoch == 2
    fit(second, parts)

    for name in ("last.pt", "best.pt"):
        one, other = (
            read_torch(whole / "checkpoints" / name),
            read_torch(parts / "checkpoints" / name),
        )
        other["config"]["train"]["workers"] = 0
        assert_equal(one, other)
    assert numbers(whole) == numbers(parts)


class Killed(Exception):
    pass


STEM = ("backbone.network.conv1.", "backbone.network.bn1.", "backbone.network.layer1.")
FINE_TUNING = [
    "train.freeze=[backbone.network.conv1,backbone.network.bn1,backbone.network.layer1]",
    "train.freeze_batchnorm=frozen",
    "train.accumulate=2",
    "optim.name=adamw",
    "optim.decay=all",
    "optim.backbone_lr=0.005",
    "optim.layer_decay=0.7",
]


# Micro-batches of 3 images: of an odd number, the one in the middle has no partner.
MIXED = ["mix.mixup=0.5", "mix.cutmix=1", "mix.mode=elem"]
MIXED += ["train.batch_size=6", "train.accumulate=2"]


@pytest.mark.parametrize(
    ("extra", "sampling"),
    [
        (FINE_TUNING, SHUFFLED),
        (FINE_TUNING, Sampling(sampler="repeat_factor", repeat_threshold=0.6)),
        ([*MIXED, "mix.labels=weighted"], SHUFFLED),
        ([*MIXED, "mix.labels=union"], SHUFFLED),
    ],
)
def test_a_run_goes_on_in_the_middle_of_an_epoch_to_the_last_bit(
    config: Config, tmp_path: Path, extra: list[str], sampling: Sampling
) -> None:
    config = override(config, [*extra, "train.epochs=2", "train.save_every_steps=1"])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    make = partial(trainer, config, network="test_resnet", sampling=sampling)
    fit(make(whole), whole)

    first = make(parts)
    # Each colour is a quarter of 32 images, and appears sqrt(0.6 / 0.25) times: 49.6 images.
    assert first.batches.num_images == (32 if sampling is SHUFFLED else 50)
    learn = first.learner.learn

    def killed(*arguments: Any, **named: Any) -> Any:
        if first.learner.step == first.batches.steps + 2:
            raise Killed
        return learn(*arguments, **named)

    first.learner.learn = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        fit(first, parts)

    torch.manual_seed(99)
    second = make(parts)
    resume(second, parts)
    assert (second.epoch, second.position) == (1, 2)
    fit(second, parts)

    for name in ("last.pt", "best.pt"):
        assert_equal(*(read_torch(run / "checkpoints" / name) for run in (whole, parts)))
    assert numbers(whole) == numbers(parts)


def test_what_is_frozen_stays_as_it_was_and_all_else_changes(
    config: Config, tmp_path: Path
) -> None:
    job = trainer(override(config, FINE_TUNING), tmp_path, network="test_resnet")
    before = {key: value.clone() for key, value in job.learner.model.state_dict().items()}
    fit(job, tmp_path)

    changed = {
        key
        for key, value in job.learner.model.state_dict().items()
        if not torch.equal(value, before[key])
    }
    fixed = ("backbone.mean", "backbone.std", "head.queries")  # buffers that are never trained
    assert changed == {key for key in before if not key.startswith((*STEM, *fixed))}

    # The moving average of what does not change is the same to the last bit.
    average = job.learner.ema.module.state_dict()
    assert all(torch.equal(average[key], before[key]) for key in before if key.startswith(STEM))

    inside = {p for group in job.learner.optimizer.param_groups for p in group["params"]}
    for name, parameter in job.learner.model.named_parameters():
        assert parameter.requires_grad is (parameter in inside) is not name.startswith(STEM), name


def test_frozen_batch_norms_everywhere_keep_their_statistics(
    config: Config, tmp_path: Path
) -> None:
    config = override(config, ["train.freeze_batchnorm=all"])
    job = trainer(config, tmp_path, network="test_resnet")
    norms = [
        name
        for name, module in job.learner.model.named_modules()
        if isinstance(module, nn.BatchNorm2d)
    ]
    before = {key: value.clone() for key, value in job.learner.model.state_dict().items()}
    fit(job, tmp_path)

    after = job.learner.model.state_dict()
    of_norms = [key for key in before if key.rpartition(".")[0] in norms]
    assert len(of_norms) == 5 * len(norms) > 0
    assert all(torch.equal(after[key], before[key]) for key in of_norms)


def test_the_start_says_how_many_parameters_train(config: Config, tmp_path: Path) -> None:
    usual = trainer(config, tmp_path, network="test_resnet")
    total = sum(parameter.numel() for parameter in usual.learner.model.parameters())
    assert f": {total / 1e6:.2f} M trainable parameters, 4 classes" in opening(
        usual, Precision.auto
    )

    job = trainer(override(config, FINE_TUNING), tmp_path, network="test_resnet")
    stem = sum(
        parameter.numel()
        for name, parameter in job.learner.model.named_parameters()
        if name.startswith(STEM)
    )
    queries = job.learner.model.head.queries.numel()
    millions = [number / 1e6 for number in (total - stem, total + queries)]
    assert f": {millions[0]:.2f} of {millions[1]:.2f} M parameters train, 4" in opening(
        job, Precision.auto
    )
    saved = run_facts(job)
    assert (saved.parameters, saved.all_parameters) == (total - stem, total + queries)


def test_a_checkpoint_from_before_these_settings_goes_on(config: Config, tmp_path: Path) -> None:
    fit(trainer(override(config, ["train.epochs=1"]), tmp_path), tmp_path)
    path = tmp_path / "checkpoints" / "last.pt"
    state = read_torch(path)
    for section, names in {
        "train": ("freeze", "freeze_batchnorm"),
        "optim": ("decay", "backbone_lr", "layer_decay"),
        "mix": ("labels",),
    }.items():
        for name in names:
            del state["config"][section][name]
    torch_files.save(path, state)

    job = trainer(override(config, ["train.epochs=2"]), tmp_path)
    resume(job, tmp_path)
    assert job.epoch == 1
    with pytest.raises(CheckpointError, match=r"other settings \(optim.decay: weights -> all\)"):
        resume(trainer(override(config, ["optim.decay=all"]), tmp_path), tmp_path)


# Of the evaluation after each epoch; that of epoch 4 is as good as the best one before it.
SCORES = (50.0, 40.0, 60.0, 60.0, 55.0, 70.0, 40.0)


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the evaluation after epoch n score `SCORES[n - 1]`, whatever the weights are."""

    def scored(learner: Learner, *arguments: Any, **named: Any) -> dict[str, Results]:
        results = evaluate_weights(learner, *arguments, **named)
        steps_per_epoch = learner.steps // learner.config.train.epochs
        metrics = {"mAP": SCORES[learner.step // steps_per_epoch - 1]}
        return {
            weights: dataclasses.replace(result, metrics=metrics)
            for weights, result in results.items()
        }

    monkeypatch.setattr("mldec.training.trainer.evaluate_weights", scored)


@pytest.mark.usefixtures("scores")
@pytest.mark.parametrize("step", [3, 6, 8, 15, 18])
def test_patience_and_a_late_average_survive_a_kill_in_any_epoch(
    config: Config, tmp_path: Path, step: int
) -> None:
    words = ["train.epochs=7", "train.patience=2", "train.ema_start_epoch=3"]
    config = override(config, [*words, "train.save_every_steps=1"])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(trainer(config, whole), whole)

    first = trainer(config, parts)
    learn = first.learner.learn

    def killed(*arguments: Any, **named: Any) -> Any:
        if first.learner.step == step:
            raise Killed
        return learn(*arguments, **named)

    first.learner.learn = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        fit(first, parts)

    second = trainer(config, parts)
    resume(second, parts)
    assert second.learner.step == step
    fit(second, parts)

    assert second.epoch == 5
    assert second.ended == "train.patience is 2, evaluations since the best one in epoch 3: 2"
    for name in ("last.pt", "best.pt"):
        one, other = (read_torch(run / "checkpoints" / name) for run in (whole, parts))
        assert_equal(one, other)
    assert numbers(whole) == numbers(parts)
    evaluated = [line for line in numbers(whole) if "val/mAP" in line]
    assert [line["epoch"] for line in evaluated if "val_raw/mAP" in line] == [3, 4, 5]


@pytest.mark.usefixtures("scores")
def test_a_run_that_patience_ended_goes_on_with_more_of_it(config: Config, tmp_path: Path) -> None:
    patient = override(config, ["train.epochs=7", "train.patience=2"])
    fit(trainer(patient, tmp_path), tmp_path)
    before = numbers(tmp_path)

    again = trainer(patient, tmp_path)
    resume(again, tmp_path)
    assert again.ended
    fit(again, tmp_path)
    assert (again.epoch, numbers(tmp_path)) == (5, before)

    longer = trainer(override(patient, ["train.patience=3"]), tmp_path)
    resume(longer, tmp_path)
    fit(longer, tmp_path)
    assert longer.ended == "train.epochs is 7"
    assert longer.best == Best("mAP", 70.0, "ema", 6, evaluations_since=1)


def test_a_checkpoint_without_the_count_of_evaluations_starts_it_at_none(
    config: Config, tmp_path: Path
) -> None:
    fit(trainer(config, tmp_path), tmp_path)
    path = tmp_path / "checkpoints" / "last.pt"
    state = read_torch(path)
    del state["best"]["evaluations_since"]
    torch_files.save(path, state)

    job = trainer(config, tmp_path)
    resume(job, tmp_path)

    assert job.best == Best(**state["best"], evaluations_since=0)


def test_a_stopped_run_is_the_beginning_of_the_planned_one(config: Config, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(trainer(config, whole), whole)
    stopping = override(config, ["train.stop_epoch=2", "train.eval_every=3"])
    stopped = trainer(stopping, parts)

    metrics = fit(stopped, parts)

    assert stopped.ended == "train.stop_epoch is 2, of 4 planned epochs"
    first_epochs = [line for line in numbers(whole) if line["step"] <= 8]
    assert numbers(parts)[-1] == first_epochs[-1], "the epoch at which it stops is evaluated"
    assert metrics.items() <= first_epochs[-1].items()

    rest = trainer(config, parts)
    resume(rest, parts)
    fit(rest, parts)
    states = [read_torch(run / "checkpoints" / "last.pt") for run in (whole, parts)]
    for part in ("model", "ema", "optimizer", "best", "metrics"):
        assert_equal(states[0][part], states[1][part])


def test_a_late_average_starts_as_a_copy_of_the_weights(config: Config, tmp_path: Path) -> None:
    job = trainer(override(config, ["train.ema_start_epoch=3"]), tmp_path)
    bias = job.learner.model.head.pool_bias
    assert isinstance(bias, nn.Parameter)
    values = []
    job.learner.optimizer.register_step_post_hook(lambda *_: values.append(bias.detach().clone()))

    fit(job, tmp_path)

    # Two epochs of four steps are over when it starts.
    expected = values[7]
    for value in values[8:]:
        expected = 0.9 * expected + 0.1 * value
    assert job.learner.average is not None
    torch.testing.assert_close(job.learner.average.state_dict()["head.pool_bias"], expected)


def test_images_per_batch_norm_are_counted(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = trainer(override(config, ["train.batch_size=32", "train.accumulate=2"]), tmp_path)
    assert images_per_batch_norm(job) is None
    assert "batches of 32 images, epoch" in opening(job, Precision.auto)

    norm = nn.BatchNorm2d(3)
    job.learner.model.add_module("norm", norm)
    assert images_per_batch_norm(job) == 16
    assert few_per_batch_norm(job) is None

    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    assert "batches of 32 images, 4 for each batch norm" in opening(job, Precision.auto)
    warning = few_per_batch_norm(job)
    assert warning is not None
    assert "only 4 images" in warning

    job.config.train.sync_batchnorm = True
    assert images_per_batch_norm(job) == 16
    job.learner.frozen_norms = [norm]
    assert images_per_batch_norm(job) is None


def test_a_best_that_a_kill_left_behind_is_mended_at_a_resume(
    config: Config, tmp_path: Path
) -> None:
    config = override(config, ["train.epochs=1"])
    fit(trainer(config, tmp_path), tmp_path)
    folder = tmp_path / "checkpoints"
    assert checkpoint.load(folder / "last.pt").best.epoch == 1

    # As if the run had been killed after last.pt was written, and before best.pt was.
    older = {**read_torch(folder / "best.pt"), "epoch": 0, "step": 0}
    torch_files.save(folder / "best.pt", older)
    resume(trainer(override(config, ["train.epochs=2"]), tmp_path), tmp_path)
    assert (folder / "best.pt").read_bytes() == (folder / "last.pt").read_bytes()


def test_resume_takes_a_longer_run_and_refuses_another_one(config: Config, tmp_path: Path) -> None:
    fit(trainer(override(config, ["train.epochs=2"]), tmp_path), tmp_path)
    longer = trainer(config, tmp_path)
    resume(longer, tmp_path)
    fit(longer, tmp_path)
    assert longer.epoch == 4
    assert longer.learner.optimizer.param_groups[0]["lr"] == pytest.approx(
        config.optim.lr / 25 / 1e4, rel=1e-3
    )
    with pytest.raises(
        CheckpointError,
        match=r"other settings \(optim.lr: 0.01 -> 0.02\): put them back, or start a new",
    ):
        resume(trainer(override(config, ["optim.lr=0.02"]), tmp_path), tmp_path)


@pytest.mark.parametrize("loss", [AsymmetricLoss, MeanSquare])
@pytest.mark.parametrize("train", [32, 29])
def test_accumulation_changes_nothing(
    config: Config, tmp_path: Path, loss: type[nn.Module], train: int
) -> None:
    results = []
    for accumulate in (1, 2, 4):
        job = trainer(
            override(
                config, [f"train.accumulate={accumulate}", "train.batch_size=16", "train.epochs=2"]
            ),
            tmp_path / str(accumulate),
            loss=loss(),
            train=train,
            dropout=0.0,
            dtype=torch.float64,
        )
        fit(job, tmp_path / str(accumulate))
        results.append((job.learner.model.state_dict(), numbers(tmp_path / str(accumulate))))
    for weights, lines in results[1:]:
        torch.testing.assert_close(weights, results[0][0], rtol=1e-9, atol=1e-9)
        for line, other in zip(lines, results[0][1], strict=True):
            assert line == pytest.approx(other, rel=1e-6)


def test_auto_and_fp16_on_a_cpu_are_fp32_to_the_bit(config: Config, tmp_path: Path) -> None:
    runs = {}
    for precision in ("fp32", "auto", "fp16"):
        job = trainer(
            override(config, [f"train.precision={precision}", "train.epochs=2"]),
            tmp_path / precision,
        )
        fit(job, tmp_path / precision)
        runs[precision] = job

        used = "fp32" if precision == "fp32" else f"fp32 (train.precision={precision})"
        assert f", {used} on cpu" in opening(job, Precision(precision))
    for precision in ("auto", "fp16"):
        assert_equal(runs[precision].learner.state(), runs["fp32"].learner.state())


@pytest.mark.usefixtures("fp16_on_a_cpu")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("channels_last", ["true", "false"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_every_precision_trains_and_keeps_float32_weights(
    config: Config, tmp_path: Path, precision: str, channels_last: str, device: str
) -> None:
    words = [
        f"train.precision={precision}",
        f"train.channels_last={channels_last}",
        "train.clip_grad=10",
    ]
    words.append(f"device={device}")
    job = trainer(override(config, words), tmp_path)
    metrics = fit(job, tmp_path)
    assert math.isfinite(metrics["val/mAP"])
    assert all(tensor.dtype == torch.float32 for tensor in job.learner.model.parameters())
    assert all(tensor.isfinite().all() for tensor in job.learner.model.parameters())
    losses = [line["train/loss"] for line in numbers(tmp_path) if "train/loss" in line]
    assert losses[-1] < losses[0]


def test_a_loss_that_is_not_finite_stops_with_the_weights_before_it(
    config: Config, tmp_path: Path
) -> None:
    job = trainer(config, tmp_path, loss=Exploding())
    after: list[dict[str, torch.Tensor]] = []
    learn = job.learner.learn

    def watched(*arguments: Any, **named: Any) -> Any:
        outcome = learn(*arguments, **named)
        parameters = job.learner.model.named_parameters()
        after.append({name: tensor.detach().clone() for name, tensor in parameters})
        return outcome

    job.learner.learn = watched  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError) as caught:
        fit(job, tmp_path)

    # The fault is in step 3, and the host learns of it at the end of the epoch.
    assert len(after) == job.batches.steps > 3
    assert not torch.equal(after[0]["head.pool_bias"], after[1]["head.pool_bias"])
    for later in after[2:]:
        assert_equal(later, after[1])
    message = str(caught.value)
    assert message.startswith("the loss is ")
    assert "in step 3 (epoch 1)" in message
    named = message.partition("look at these images and their labels: ")[2].split(", ")
    assert len(named) == 8
    assert all(name.startswith("square ") for name in named)


class Spoilt(nn.Module):
    """Asymmetric loss that is nan in its third call, or has nan gradients there."""

    reduction = "sum"

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls, self.good = what, 0, AsymmetricLoss()

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = self.good(logits, targets)
        if self.calls != 3:
            return loss
        if self.what == "loss":
            return loss * math.nan
        zero = (logits - logits.detach()).abs().sum()
        return loss + zero.sqrt()  # 0, with an infinite gradient


@pytest.mark.parametrize("what", ["loss", "gradients"])
@pytest.mark.parametrize("clip", ["null", "1.0"])
def test_a_step_that_is_not_finite_stops_or_is_skipped(
    config: Config, tmp_path: Path, what: str, clip: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = override(config, [f"train.clip_grad={clip}"])
    message = "the loss is nan" if what == "loss" else "the gradients are not finite"
    with pytest.raises(
        NonFiniteError, match=f"{message}.* in step 3 .*weights are those before it.*square "
    ):
        fit(trainer(config, tmp_path / "stop", loss=Spoilt(what)), tmp_path / "stop")
    job = trainer(
        override(config, ["train.nonfinite=skip", "train.log_every=1"]), tmp_path, loss=Spoilt(what)
    )
    assert job.learner.ema is not None
    for net in (job.learner.model, job.learner.ema.module):
        net.register_buffer("seen", torch.zeros(()))
    before: list[dict[str, torch.Tensor]] = []
    learn = job.learner.learn

    def watched(*arguments: Any, **named: Any) -> Any:
        job.learner.model.seen += 1  # as batch norm would
        before.append(
            {name: tensor.clone() for name, tensor in job.learner.model.state_dict().items()}
        )
        return learn(*arguments, **named)

    job.learner.learn = watched  # type: ignore[method-assign]
    fit(job, tmp_path)
    skipped, after = before[2], before[3]
    after["seen"] -= 1
    assert_equal(skipped, after)
    assert not torch.equal(before[1]["head.pool_bias"], skipped["head.pool_bias"])
    assert [line["train/skipped_steps"] for line in numbers(tmp_path) if "train/loss" in line][
        :5
    ] == [0, 0, 1, 1, 1]
    assert any(message in text and "it is left out" in text for text in caplog.messages)


@pytest.mark.usefixtures("fp16_on_a_cpu")
def test_overflow_in_fp16_is_the_scalers_and_is_counted(config: Config, tmp_path: Path) -> None:
    job = trainer(override(config, ["train.precision=fp16"]), tmp_path, loss=Spoilt("gradients"))
    fit(job, tmp_path)
    assert job.learner.skipped >= 1
    assert numbers(tmp_path)[-2]["train/skipped_steps"] == job.learner.skipped
    assert all(tensor.isfinite().all() for tensor in job.learner.model.parameters())


class Holes(Squares):
    """Squares of which three cannot be read."""

    def load(self, index: int, rng: SampleRandom) -> tuple[torch.Tensor, torch.Tensor]:
        if index in (3, 4, 21):
            raise DataError(f"square {index} is broken; restore it")
        return super().load(index, rng)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_images_that_cannot_be_read(
    config: Config, tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = squares()
    holes = Split(Holes(32), good.train.classes)
    data = DataModule(lambda: holes, lambda: holes, good.make_evaluator, good.transform, policy)
    model = trainer(config, tmp_path).learner.model
    folder = tmp_path / "checkpoints"
    job = Trainer(config, model, AsymmetricLoss(), data, folder=folder, device=torch.device("cpu"))
    if policy == "stop":
        with pytest.raises(DataError, match=r"square \d+ is broken; restore it"):
            fit(job, tmp_path)
        return
    fit(job, tmp_path)
    assert job.bad_images == 3 * config.train.epochs == numbers(tmp_path)[-2]["train/bad_images"]
    assert caplog.messages.count("left out: square 21 is broken; restore it") == config.train.epochs
    assert "3 validation images are left out, 29 count" in "".join(caplog.messages)


def test_best_holds_the_weights_that_scored(config: Config, tmp_path: Path) -> None:
    fit(trainer(config, tmp_path), tmp_path)
    best = read_torch(tmp_path / "checkpoints" / "best.pt")
    assert best["best"]["epoch"] == best["epoch"]
    key = "val/mAP" if best["best"]["weights"] == "ema" else "val_raw/mAP"
    assert best["metrics"][key] == best["best"]["value"]
    scores = [
        line[key] for line in numbers(tmp_path) for key in ("val/mAP", "val_raw/mAP") if key in line
    ]
    assert best["best"]["value"] == max(scores)


def test_evaluation_leaves_training_as_it_was(config: Config, tmp_path: Path) -> None:
    always, once = tmp_path / "always", tmp_path / "once"
    fit(trainer(config, always), always)
    fit(trainer(override(config, ["train.eval_every=4"]), once), once)
    assert_equal(
        read_torch(always / "checkpoints" / "last.pt")["model"],
        read_torch(once / "checkpoints" / "last.pt")["model"],
    )
    assert sum("val/mAP" in line for line in numbers(once)) == 1


def test_metrics_that_are_not_finite_become_null(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.scalars(1, 0, {"val/x": math.nan})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["val/x"] is None


@pytest.mark.slow
def test_compiled_training_gives_the_same_weights(config: Config, tmp_path: Path) -> None:
    results = []
    for word in ("train.compile=false", "train.compile=true"):
        words = [
            word,
            "train.epochs=1",
            "optim.name=sgd",
        ]  # adam would turn rounding noise into steps
        job = trainer(override(config, words), tmp_path / word, dropout=0.0)
        fit(job, tmp_path / word)
        results.append(job.learner.model.state_dict())
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)
