"""Whole runs on squares of four colours; one step alone is in test_step.py."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from squares import Spoilt, check_resume, fit, resume, settings, trainer
from support import QUICK, assert_equal, numbers
from torch import nn

from mldec import build
from mldec.checkpoint.loading import load
from mldec.checkpoint.state import Best
from mldec.config.compose import compose
from mldec.data.sampling import Sampling
from mldec.data.types import Classes
from mldec.errors import CheckpointError, DataError, UserError
from mldec.evaluation.output import Results
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.files import torch_files
from mldec.files.torch_files import read_torch
from mldec.losses.missing import GeneralizedRobustLoss, LargeLoss
from mldec.losses.partial import PartialAsymmetricLoss
from mldec.runtime import distributed
from mldec.runtime.devices import Precision
from mldec.training import start
from mldec.training import trainer as module
from mldec.training.start import (
    describe_run,
    few_per_batch_norm,
    images_per_batch_norm,
    run_facts,
    start_weights,
)
from mldec.training.trainer import Trainer, update_best

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
# Of the evaluation after each epoch; that of epoch 4 is as good as the best one before it.
SCORES = (50.0, 40.0, 60.0, 60.0, 55.0, 70.0, 40.0)


@pytest.fixture
def scores(monkeypatch):
    """Let the evaluation of every fourth step score what `SCORES` says, whatever the weights."""
    evaluate_all, evaluate = module.evaluate_all, Trainer.evaluate

    def evaluated(job, log):
        metrics = {"mAP": SCORES[job.epoch]}

        def scored(*arguments, **named):
            return [
                replace(result, metrics=metrics) for result in evaluate_all(*arguments, **named)
            ]

        monkeypatch.setattr(module, "evaluate_all", scored)
        return evaluate(job, log)

    monkeypatch.setattr(Trainer, "evaluate", evaluated)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a run of one epoch; tests must not change it."""
    folder = tmp_path_factory.mktemp("ended")
    fit(trainer(settings("train.epochs=1"), folder), folder)
    return folder


def test_it_learns_and_keeps_the_weights_that_scored_best(tmp_path):
    job = trainer(settings("train.epochs=2", "train.min_steps=45"), tmp_path)
    assert job.config.train.epochs == 12, "of four steps"
    metrics = fit(job, tmp_path)
    assert metrics["val_raw/mAP"] > 95
    lines = numbers(tmp_path)
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0] / 2
    assert list(lines[-1])[:3] == ["step", "epoch", "val/mAP"]

    best = read_torch(tmp_path / "checkpoints" / "best.pt")
    keys = {"ema": "val/mAP", "raw": "val_raw/mAP"}
    assert best["best"]["epoch"] == best["epoch"]
    assert best["metrics"][keys[best["best"]["weights"]]] == best["best"]["value"]
    scores = [line[key] for line in lines for key in keys.values() if key in line]
    assert best["best"]["value"] == max(scores)


def test_the_order_of_images_and_augmentation_go_on_in_the_middle_of_an_epoch(tmp_path):
    words = ["train.epochs=2", "train.save_every_steps=1", "train.batch_size=6"]
    words += ["train.accumulate=2", "mix.mixup=0.5", "mix.cutmix=1", "mix.mode=elem"]
    sampling = Sampling(sampler="repeat_factor", repeat_threshold=0.6)
    make = partial(trainer, settings(*words), network="test_resnet", sampling=sampling)

    # Each colour is a quarter of 32 images, and appears sqrt(0.6 / 0.25) times: 49.6 images.
    assert make(tmp_path).batches.num_images == 50
    check_resume(make, tmp_path, step=10)


@pytest.mark.usefixtures("scores")
def test_patience_and_a_late_average_go_on(tmp_path):
    words = ["train.epochs=7", "train.patience=2", "train.ema_start_epoch=3"]
    make = partial(trainer, settings(*words, "train.save_every_steps=1"))
    resumed = check_resume(make, tmp_path, step=15)
    assert resumed.epoch == 5
    assert resumed.ended == (
        "train.patience is 2, evaluations without progress: 2, the best one was in epoch 3"
    )
    averaged = [line["epoch"] for line in numbers(tmp_path / "whole") if "val_raw/mAP" in line]
    assert averaged == [3, 4, 5]

    longer = trainer(settings("train.epochs=7", "train.patience=3", *words[2:]), tmp_path / "parts")
    resume(longer, tmp_path / "parts")
    fit(longer, tmp_path / "parts")
    assert longer.ended == "train.epochs is 7"
    best = longer.best
    assert (best.value, best.weights, best.epoch) == (70.0, "ema", 6)
    assert best.evaluations_since == 1


@pytest.mark.usefixtures("fp16_on_a_cpu")
def test_accumulation_the_scaler_and_the_state_of_a_loss_go_on(tmp_path):
    words = ["train.accumulate=2", "train.clip_grad=0.5", "train.precision=fp16"]
    config = settings(*words, "train.epochs=2", "train.save_every_steps=1")
    check_resume(lambda folder: trainer(config, folder, loss=estimating()), tmp_path, step=6)


@pytest.mark.parametrize(
    "make_loss", [partial(LargeLoss, delta=0.05), partial(GeneralizedRobustLoss, w=[0.0, 9.0])]
)
def test_a_loss_that_follows_the_run_goes_on(make_loss, tmp_path):
    config = settings("train.epochs=2", "train.save_every_steps=1")
    resumed = check_resume(
        lambda folder: trainer(config, folder, loss=make_loss()), tmp_path, step=5
    )
    assert resumed.learner.loss.progress == 7 / 8


def estimating():
    return PartialAsymmetricLoss(mode="selective", likelihood_top_k=2, class_prior="estimate")


@pytest.mark.parametrize(
    ("before", "scores", "after"),
    [
        (Best(), {"ema": 4.0, "raw": 5.0}, Best("mAP", 5.0, "raw", 7, 0, 5.0, 4.0, False)),
        (Best(), {"raw": 0.0}, Best("mAP", 0.0, "raw", 7, 0, 0.0)),
        (Best(), {"ema": 5.0, "raw": 5.0}, Best("mAP", 5.0, "ema", 7, 0, 5.0, 5.0, False)),
        (
            Best("mAP", 5.0, "raw", 3, 0, 5.0, 5.0),
            {"ema": 5.0, "raw": 5.0},
            Best("mAP", 5.0, "raw", 3, 1, 5.0, 5.0),
        ),
        # The raw weights improve below the best of the average: the count begins anew.
        (
            Best("mAP", 5.0, "ema", 3, 2, 3.0, 5.0),
            {"ema": 4.0, "raw": 4.5},
            Best("mAP", 5.0, "ema", 3, 0, 4.5, 5.0),
        ),
        (Best(), {"ema": math.nan, "raw": 1.0}, Best("mAP", 1.0, "raw", 7, 0, 1.0)),
    ],
)
def test_the_highest_and_of_equal_ones_the_earliest_is_the_best(before, scores, after):
    found = {
        weights: Results({"mAP": value, "CF1": 99.0}, {}, 3, [], None)
        for weights, value in scores.items()
    }
    assert update_best(before, "mAP", found, 7) == after


def test_a_resumed_run_keeps_its_metric(tmp_path):
    fit(trainer(settings("train.epochs=1"), tmp_path), tmp_path)

    job = trainer(settings("train.epochs=2"), tmp_path)
    evaluator = partial(MultiLabelEvaluator, 4, top_k=1, skip_empty=True)
    job.data = replace(job.data, make_evaluator=lambda classes: evaluator())
    resume(job, tmp_path)
    fit(job, tmp_path)
    assert job.best.metric == "mAP"
    assert list(numbers(tmp_path)[-1])[:3] == ["step", "epoch", "val/mAP"]


def test_a_stopped_run_is_the_beginning_of_the_planned_one(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(trainer(settings(), whole), whole)
    stopped = trainer(settings("train.stop_epoch=2", "train.eval_every=3"), parts)
    metrics = fit(stopped, parts)

    assert stopped.ended == "train.stop_epoch is 2, of 4 planned epochs"
    first_epochs = [line for line in numbers(whole) if line["step"] <= 8]
    assert numbers(parts)[-1] == first_epochs[-1], "the epoch at which it stops is evaluated"
    assert metrics.items() <= first_epochs[-1].items()
    assert sum("val/mAP" in line for line in numbers(parts)) == 1

    fit(resume(trainer(settings(), parts), parts), parts)
    states = [read_torch(run / "checkpoints" / "last.pt") for run in (whole, parts)]
    for part in ("model", "ema", "optimizer", "best", "metrics"):
        assert_equal(states[0][part], states[1][part])


# What a checkpoint fits


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=3"], r"other settings \(seed: 0 -> 3\): restore them, or start a new run with na"),
        (["optim.lr=1", "loss.clip=0.5"], r"\(loss.clip: .* -> 0.5; optim.lr: 0.01 -> 1.0\)"),
    ],
)
def test_other_settings_are_refused_with_both_values(ended, tmp_path, words, said):
    with pytest.raises(CheckpointError, match=said):
        resume(trainer(settings(*words), tmp_path), ended)


def test_other_data_is_refused_unless_it_is_allowed(ended, tmp_path, caplog):
    for images, said in (
        (40, "has 4 steps per epoch, this run 5"),
        (33, "32 training images, now"),
    ):
        with pytest.raises(CheckpointError, match=said):
            resume(trainer(settings(), tmp_path, images=images), ended)

    harmless = ["train.epochs=9", "train.workers=1", "data.changed=allow", "train.log_every=1"]
    job = resume(trainer(settings(*harmless), tmp_path, images=33), ended)
    assert job.epoch == 1
    assert "32 training images, now 33" in caplog.text

    path = ended / "checkpoints" / "last.pt"
    of_two_classes = replace(load(path), classes=Classes(("red", "green")))
    with pytest.raises(CheckpointError, match="other classes than the data, 2 and 4"):
        job.resume(of_two_classes, path)


def test_changed_validation_data_is_refused_unless_it_is_allowed(ended, tmp_path, caplog):
    path = ended / "checkpoints" / "last.pt"
    saved = load(path)
    assert saved.val_fingerprint is not None
    of_more = replace(saved, val_fingerprint=replace(saved.val_fingerprint, images=48))
    with pytest.raises(CheckpointError, match=r"evaluated on other data \(48 validation images, "):
        trainer(settings(), tmp_path).resume(of_more, path)

    trainer(settings("data.changed=allow"), tmp_path).resume(of_more, path)
    assert "48 validation images, now 24" in caplog.text

    # Checkpoints of earlier versions have no such fingerprint.
    trainer(settings(), tmp_path).resume(replace(saved, val_fingerprint=None), path)
    assert "has no fingerprint of its validation data" in caplog.text


def test_a_best_that_a_kill_left_behind_is_mended_at_a_resume(tmp_path):
    fit(trainer(settings("train.epochs=1"), tmp_path), tmp_path)
    last, best = (tmp_path / "checkpoints" / name for name in ("last.pt", "best.pt"))
    good = last.read_bytes()

    # As if the run had been killed after last.pt was written, and before best.pt was.
    torch_files.save(best, {**read_torch(best), "epoch": 0, "step": 0})
    resume(trainer(settings(), tmp_path), tmp_path)
    assert best.read_bytes() == good

    # The best of another run is its own.
    other = trainer(settings(), tmp_path / "other")
    other.resume(load(last), last)
    assert not (tmp_path / "other").exists()


def test_saves_are_due_and_hold_their_moment(tmp_path, monkeypatch):
    job = trainer(settings("train.save_every_steps=3", "train.save_every_minutes=2"), tmp_path)
    now = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    job.files._saved_at = now
    assert [step for step in range(1, 8) if job.files.is_due(step)] == [3, 6]
    now += 120
    assert job.files.is_due(1)

    # Training goes on to change the tensors while the file is written.
    weight = job.learner.model.head.pool_bias
    before = weight.detach().clone()
    job.save()
    with torch.no_grad():
        weight += 5
    job.files.wait()
    assert not job.files.is_due(1), "a save begins a new interval"
    assert torch.equal(read_torch(job.files.last)["model"]["head.pool_bias"], before)

    # What the processes tell each other of the last step arrives later, and counts.
    job.pending.append(SimpleNamespace(bad_images=2))
    assert job.checkpoint().log.bad_images == 2

    monkeypatch.setattr(distributed, "is_main", lambda: False)
    job.files.save(lambda: pytest.fail("it was built"), best=True)


def test_a_save_that_failed_is_told_by_the_next_one(tmp_path, monkeypatch):
    def full(*arguments, **named):
        raise CheckpointError("the disk is full")

    job = trainer(settings(), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch_files, "save", full)
        job.save()
        with pytest.raises(CheckpointError, match="the disk is full"):
            job.save()
    job.save(best=True)
    job.files.wait()
    assert {path.name for path in tmp_path.rglob("*.pt")} == {"last.pt", "best.pt"}


# What is trained


def test_what_is_frozen_stays_as_it_was_and_all_else_changes(tmp_path):
    job = trainer(settings(*FINE_TUNING), tmp_path, network="test_resnet")
    before = {key: value.clone() for key, value in job.learner.model.state_dict().items()}
    fit(job, tmp_path)

    after = job.learner.model.state_dict()
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    fixed = ("backbone.mean", "backbone.std", "head.queries")  # buffers that are never trained
    assert changed == {key for key in before if not key.startswith((*STEM, *fixed))}

    # The moving average of what does not change is the same to the last bit.
    average = job.learner.ema.module.state_dict()
    assert all(torch.equal(average[key], before[key]) for key in before if key.startswith(STEM))

    inside = {p for group in job.learner.optimizer.param_groups for p in group["params"]}
    for name, parameter in job.learner.model.named_parameters():
        assert parameter.requires_grad is (parameter in inside) is not name.startswith(STEM), name


def test_a_late_average_starts_as_a_copy_of_the_weights(tmp_path):
    job = trainer(settings("train.ema_start_epoch=3"), tmp_path)
    bias = job.learner.model.head.pool_bias
    values = []
    job.learner.optimizer.register_step_post_hook(lambda *_: values.append(bias.detach().clone()))
    fit(job, tmp_path)

    # Two epochs of four steps are over when it starts.
    expected = values[7]
    for value in values[8:]:
        expected = 0.9 * expected + 0.1 * value
    torch.testing.assert_close(job.learner.average.state_dict()["head.pool_bias"], expected)


# Numbers and images with a fault


@pytest.mark.parametrize("what", ["loss", "gradients"])
def test_a_step_that_is_not_finite_stops_or_is_skipped(tmp_path, what, caplog):
    message = "the loss is nan" if what == "loss" else "the gradients are not finite"
    with pytest.raises(UserError, match=f"{message}.* in step 3 .*labels: square "):
        fit(trainer(settings(), tmp_path / "stop", loss=Spoilt(3, what)), tmp_path / "stop")

    words = ["train.nonfinite=skip", "train.log_every=1", "train.epochs=2"]
    job = trainer(settings(*words), tmp_path, loss=Spoilt(3, what))
    fit(job, tmp_path)
    counts = [line["train/skipped_steps"] for line in numbers(tmp_path) if "train/loss" in line]
    assert counts[:5] == [0, 0, 1, 1, 1]
    assert any(message in text and "the step is skipped" in text for text in caplog.messages)


def test_images_that_cannot_be_read_stop_the_run_or_are_left_out(tmp_path, caplog):
    with pytest.raises(DataError, match=r"square \d+ is broken; restore it"):
        fit(trainer(settings(), tmp_path / "stop", broken=(3, 4, 21)), tmp_path / "stop")

    job = trainer(settings(), tmp_path, broken=(3, 4, 21), bad_images="skip")
    fit(job, tmp_path)
    assert job.bad_images == 12 == numbers(tmp_path)[-2]["train/bad_images"]
    assert caplog.messages.count("left out: square 21 is broken; restore it") == 4
    assert "3 images are left out, 21 " in "".join(caplog.messages)


# What the log and run.json say


def test_classes_whose_scores_are_all_the_same_are_named_once_at_the_end(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(module.Observer, "constant_classes", lambda observer: ["red"])
    fit(trainer(settings("train.epochs=2"), tmp_path), tmp_path)
    [message] = [text for text in caplog.messages if "the same for nearly all images" in text]
    assert ": red;" in message
    assert "loss=bce" in message


def test_the_start_says_how_many_parameters_train(tmp_path):
    usual = trainer(settings(), tmp_path, network="test_resnet")
    total = sum(parameter.numel() for parameter in usual.learner.model.parameters())
    job = trainer(settings(*FINE_TUNING), tmp_path, network="test_resnet")
    parameters = job.learner.model.named_parameters()
    stem = sum(parameter.numel() for name, parameter in parameters if name.startswith(STEM))
    with_queries = total + job.learner.model.head.queries.numel()
    said = describe_run(job, Precision.auto)
    millions = [number / 1e6 for number in (total - stem, with_queries)]
    assert f": {millions[0]:.2f} of {millions[1]:.2f} M parameters trainable, 4" in said
    assert run_facts(job).parameters == total - stem


def test_images_per_batch_norm_are_counted(tmp_path, monkeypatch):
    job = trainer(settings("train.batch_size=32", "train.accumulate=2"), tmp_path)
    assert images_per_batch_norm(job) is None
    norm = nn.BatchNorm2d(3)
    job.learner.model.add_module("norm", norm)
    assert images_per_batch_norm(job) == 16
    assert few_per_batch_norm(job) is None

    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    assert "batches of 32 images (4 per batch norm)" in describe_run(job, Precision.auto)
    assert "only 4 images" in str(few_per_batch_norm(job))
    job.config.train.sync_batchnorm = True
    assert images_per_batch_norm(job) == 16
    job.learner.frozen_norms = [norm]
    assert images_per_batch_norm(job) is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["+experiment=coco_tresnet_l"], "pretrained tresnet_v2_l.miil_in21k"),
        (["+experiment=coco_tresnet_l", "init=zoo:tresnet_l_pretrain"], "init=zoo:tresnet_l_pret"),
        (["+experiment=coco_tresnet_l", "backbone.pretrained=l.pth"], "backbone.pretrained=l.pth"),
        (["+experiment=coco_tresnet_xl_640"], "random"),
    ],
)
def test_the_log_names_the_weights_that_a_run_starts_from(words, expected):
    config = compose(words)
    config = build.recorded(config, build.check(config))
    assert start_weights(config).startswith(f"start weights: {expected}")
    resumed = start_weights(config, Path("last.pt"))
    assert resumed.startswith(f"resumed from last.pt; start weights: {expected}")

    own = replace(compose(["+experiment=digits"]), backbone={"_target_": "patches.Patches"})
    said = "start weights: defaults of patches.Patches"
    assert start_weights(own) == said


# The command


def test_the_config_that_is_shown_is_the_one_that_a_run_records(
    cli, digits_run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shown = cli("train", *QUICK, "--cfg", "job").out
    assert yaml.safe_load(shown) == yaml.safe_load((digits_run / "config.yaml").read_text())
    assert yaml.safe_load(shown)["head"]["num_layers"] == 1  # a default of the signature
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wanted", "saved", "on_cpu", "on_gpu"),
    [
        ("auto", None, "fp32", "bf16"),
        ("fp16", None, "fp32", "fp16"),
        ("fp32", None, "fp32", "fp32"),
        ("auto", "bf16", "bf16", "bf16"),
        ("auto", "fp16", "fp32", "fp16"),
        ("fp16", "fp32", "fp32", "fp32"),
        ("fp32", "bf16", "fp32", "fp32"),  # refused later, as another setting than before
    ],
)
def test_a_run_goes_on_in_the_precision_of_its_beginning(
    wanted, saved, on_cpu, on_gpu, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    checkpoint = saved and SimpleNamespace(config={"train": {"precision": saved}})
    for name, expected in (("cpu", on_cpu), ("cuda:0", on_gpu)):
        used = start.used_precision(Precision(wanted), checkpoint, torch.device(name))
        assert used.value == expected
