"""Whole runs on squares of four colors. test_step.py tests single steps."""

import math
import shlex
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from pictures import picture
from squares import Spoilt, check_resume, fit, resume, settings, trainer
from support import QUICK, assert_equal, numbers

from mldec.checkpoint.loading import load
from mldec.checkpoint.state import Best
from mldec.config.schema import Train
from mldec.data.fingerprint import Fingerprint
from mldec.data.sampling import Sampling
from mldec.data.types import Classes, fixed_sample
from mldec.errors import CheckpointError, UserError
from mldec.evaluation.output import Results
from mldec.files import torch_files
from mldec.files.torch_files import read_torch
from mldec.losses import PseudoNegatives
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.losses.partial import PartialAsymmetricLoss
from mldec.runtime import distributed
from mldec.runtime.devices import Precision
from mldec.training import trainer as module
from mldec.training.describe import next_commands
from mldec.training.start import check_same_run, used_precision
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
# Results of the evaluation after each epoch. Epoch 4 ties with the best result before it.
SCORES = (50.0, 40.0, 60.0, 60.0, 55.0, 70.0, 40.0)


@pytest.fixture
def scores(monkeypatch):
    """Replace the metrics of each evaluation by `SCORES`."""
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
    """Folder of a run of one epoch. Tests must not change it."""
    folder = tmp_path_factory.mktemp("ended")
    fit(trainer(settings("train.epochs=1"), folder), folder)
    return folder


def test_run_learns_and_keeps_best_weights(tmp_path):
    job = trainer(settings("train.epochs=2", "train.min_steps=45"), tmp_path)
    assert job.config.train.epochs == 12
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


@pytest.mark.parametrize(
    ("words", "weights"), [([], "ema"), (["train.ema_decay=null", "loss=bce"], "raw")]
)
def test_warning_names_constant_classes_with_low_ap(tmp_path, monkeypatch, caplog, words, weights):
    evaluate_all = module.evaluate_all

    def scored(*arguments, **named):
        columns = {"AP": [10.0, 50.5, math.nan, 50.0]}
        return [replace(r, per_class=columns) for r in evaluate_all(*arguments, **named)]

    monkeypatch.setattr(module, "evaluate_all", scored)
    monkeypatch.setattr(module.ConstantScores, "classes", lambda self: [0, 1, 2, 3])
    fit(trainer(settings("train.epochs=1", *words), tmp_path), tmp_path)
    [line] = [text for text in caplog.messages if "constant" in text]
    assert "red, blue, white" in line
    assert f" {weights} " in line
    assert ("loss.clip=0" in line) == (not words)


def test_validation_loss_is_logged_but_no_metric(tmp_path):
    job = trainer(settings("train.epochs=1"), tmp_path)
    metrics = fit(job, tmp_path)
    line = numbers(tmp_path)[-1]

    samples = [fixed_sample(job.data.val.dataset, index) for index in range(24)]
    images, targets = (torch.stack(tensors) for tensors in zip(*samples, strict=True))
    for prefix, model in (("val", job.learner.average), ("val_raw", job.learner.model)):
        with torch.no_grad():
            loss = AsymmetricLoss()(model.eval()(images, None), targets)
        # The training loss is a sum over the 8 images of a batch.
        assert line[f"{prefix}/loss"] == pytest.approx(loss.item() / 24 * 8, rel=1e-5)

    assert "val/loss" not in metrics
    assert "val/loss" not in read_torch(tmp_path / "checkpoints" / "last.pt")["metrics"]
    assert job.best.metric == "mAP"


def test_validation_loss_needs_the_training_classes(tmp_path):
    job = trainer(settings("train.epochs=1"), tmp_path)
    classes = Classes(("red", "green", "blue", "black"))
    job.data.__dict__["val"] = replace(job.data.val, classes=classes)
    fit(job, tmp_path)
    line = numbers(tmp_path)[-1]
    assert "val_raw/mAP" in line
    assert not {"val/loss", "val_raw/loss"} & line.keys()


def test_losses_with_an_all_reduce_are_not_evaluated_on_several_ranks(tmp_path, monkeypatch):
    job = trainer(settings(), tmp_path, loss=PartialAsymmetricLoss())
    assert job._mean_loss(1) is not None
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    assert job._mean_loss(1) is None


def test_resume_restores_order_and_augmentation_mid_epoch(tmp_path):
    words = ["train.epochs=2", "train.save_every_steps=1", "train.batch_size=6"]
    words += ["train.accumulate=2", "mix.mixup=0.5", "mix.cutmix=1", "mix.mode=elem"]
    sampling = Sampling(sampler="repeat_factor", repeat_threshold=0.6)
    make = partial(trainer, settings(*words), images=16, sampling=sampling)

    # Each color is a quarter of 16 images, and appears sqrt(0.6 / 0.25) times: 24.8 images.
    assert make(tmp_path).batches.num_images == 25
    check_resume(make, tmp_path, step=6)


def test_resume_before_the_first_step_of_an_epoch_repeats_pseudo_labels(tmp_path):
    labels = torch.nn.functional.one_hot(torch.arange(32) % 4, 4)
    config = settings("train.save_every_steps=1", "train.epochs=3")

    def make(folder):
        loss = PseudoNegatives(warmup_epochs=1, train_labels=labels)
        return trainer(config, folder, loss=loss, dropout=0.5)

    # Step 8 is the first step of epoch 2, whose scores were computed before the kill.
    resumed = check_resume(make, tmp_path, step=8)
    assert (resumed.learner.loss.pseudo >= 0).any()


@pytest.mark.usefixtures("scores")
def test_resume_restores_patience_and_late_average(tmp_path):
    words = ["train.epochs=7", "train.patience=2", "train.ema_start_epoch=3"]
    make = partial(trainer, settings(*words, "train.save_every_steps=1"), images=16)
    resumed = check_resume(make, tmp_path, step=7)
    assert resumed.epoch == 5
    # Epoch 4 has the metric of epoch 3: the lower loss is the best result, but no progress.
    losses = {line["epoch"]: line for line in numbers(tmp_path / "whole") if "val/loss" in line}
    lowest = min((losses[e][key], e) for e in (3, 4) for key in ("val/loss", "val_raw/loss"))
    assert (resumed.best.loss, resumed.best.epoch) == lowest
    assert resumed.ended == (
        "train.patience is 2, evaluations without progress: 2, the best one was in epoch "
        f"{lowest[1]}"
    )
    assert load(tmp_path / "parts" / "checkpoints" / "best.pt").epoch == lowest[1]
    averaged = [line["epoch"] for line in numbers(tmp_path / "whole") if "val_raw/mAP" in line]
    assert averaged == [3, 4, 5]

    config = settings("train.epochs=7", "train.patience=3", *words[2:])
    longer = trainer(config, tmp_path / "parts", images=16)
    resume(longer, tmp_path / "parts")
    fit(longer, tmp_path / "parts")
    assert longer.ended == "train.epochs is 7"
    best = longer.best
    assert (best.value, best.epoch) == (70.0, 6)
    assert best.evaluations_since == 1


@pytest.mark.usefixtures("scores")
def test_run_ends_after_a_drop_of_more_points(tmp_path):
    # The second score is 10 points below the first one.
    equal = trainer(settings("train.epochs=2", "train.max_drop=10"), tmp_path / "equal", images=16)
    fit(equal, tmp_path / "equal")
    assert equal.ended == "train.epochs is 2"

    folder = tmp_path / "lower"
    lower = trainer(settings("train.epochs=3", "train.max_drop=9.5"), folder, images=16)
    fit(lower, folder)
    assert lower.epoch == 2
    assert lower.ended == (
        "train.max_drop is 9.5, the last mAP is 40.00, the best one was 50.00 in epoch 1"
    )
    assert resume(trainer(lower.config, folder, images=16), folder).ended == lower.ended

    # The average is still good, so the run continues.
    lower.metrics = {"val/mAP": 49.0, "val_raw/mAP": 10.0}
    assert lower.ended is None

    config = settings("train.epochs=3", "train.max_drop=11")
    assert resume(trainer(config, folder, images=16), folder).ended is None


@pytest.mark.parametrize(
    ("before", "scores", "losses", "after"),
    [
        (Best(), {"ema": 4.0, "raw": 5.0}, {}, Best("mAP", 5.0, "raw", 7, 0, 5.0, 4.0, False)),
        (Best(), {"raw": 0.0}, {"raw": 2.0}, Best("mAP", 0.0, "raw", 7, 0, 0.0, loss=2.0)),
        (Best(), {"ema": 5.0, "raw": 5.0}, {}, Best("mAP", 5.0, "ema", 7, 0, 5.0, 5.0, False)),
        (
            Best(),
            {"ema": 5.0, "raw": 5.0},
            {"ema": 2.0, "raw": 1.0},
            Best("mAP", 5.0, "raw", 7, 0, 5.0, 5.0, False, 1.0),
        ),
        # Of equal values without both losses, the later one is the best, but it is no progress.
        (
            Best("mAP", 5.0, "raw", 3, 0, 5.0, 5.0, loss=1.0),
            {"ema": 5.0, "raw": 5.0},
            {},
            Best("mAP", 5.0, "ema", 7, 1, 5.0, 5.0),
        ),
        (
            Best("mAP", 5.0, "raw", 3, 0, 5.0, loss=1.0),
            {"raw": 5.0},
            {"raw": 1.5},
            Best("mAP", 5.0, "raw", 3, 1, 5.0, loss=1.0),
        ),
        (
            Best("mAP", 5.0, "raw", 3, 1, 5.0, loss=1.0),
            {"raw": 5.0},
            {"raw": 0.5},
            Best("mAP", 5.0, "raw", 7, 2, 5.0, loss=0.5),
        ),
        # A higher value is better, whatever its loss.
        (
            Best("mAP", 5.0, "raw", 3, 1, 5.0, loss=1.0),
            {"raw": 6.0},
            {"raw": 9.0},
            Best("mAP", 6.0, "raw", 7, 0, 6.0, loss=9.0),
        ),
        # The raw weights improve, but not beyond the best average: patience restarts.
        (
            Best("mAP", 5.0, "ema", 3, 2, 3.0, 5.0),
            {"ema": 4.0, "raw": 4.5},
            {},
            Best("mAP", 5.0, "ema", 3, 0, 4.5, 5.0),
        ),
        (Best(), {"ema": math.nan, "raw": 1.0}, {}, Best("mAP", 1.0, "raw", 7, 0, 1.0)),
    ],
)
def test_best_result_is_highest_then_of_lowest_loss_then_latest(before, scores, losses, after):
    found = {
        weights: Results({"mAP": value, "CF1": 99.0}, {}, 3, [], None)
        for weights, value in scores.items()
    }
    assert update_best(before, "mAP", found, losses, 7) == after


def test_stop_epoch_keeps_schedule_of_whole_run(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(trainer(settings("train.epochs=2"), whole), whole)
    words = ["train.epochs=2", "train.stop_epoch=1", "train.eval_every=2"]
    stopped = trainer(settings(*words), parts)
    metrics = fit(stopped, parts)

    assert stopped.ended == "train.stop_epoch is 1, of 2 planned epochs"
    first_epochs = [line for line in numbers(whole) if line["step"] <= 4]
    assert numbers(parts)[-1] == first_epochs[-1], "the last epoch is evaluated"
    assert metrics.items() <= first_epochs[-1].items()
    assert sum("val/mAP" in line for line in numbers(parts)) == 1

    fit(resume(trainer(settings("train.epochs=2"), parts), parts), parts)
    states = [read_torch(run / "checkpoints" / "last.pt") for run in (whole, parts)]
    for part in ("model", "ema", "optimizer", "best", "metrics"):
        assert_equal(states[0][part], states[1][part])


@pytest.mark.parametrize(
    ("words", "images", "changes", "name"),
    [
        (["seed=3"], 32, {}, "seed: 0 -> 3"),
        (["optim.lr=1"], 32, {}, "optim.lr: 0.01 -> 1.0"),
        ([], 40, {}, "steps per epoch"),
        ([], 33, {}, "32 training images, now"),
        ([], 32, {"classes": Classes(("red", "green"))}, "classes"),
        ([], 32, {"val_fingerprint": Fingerprint(48, "", "", "")}, "validation classes"),
    ],
)
def test_resume_raises_for_other_settings_or_data(ended, tmp_path, words, images, changes, name):
    path = ended / "checkpoints" / "last.pt"
    job = trainer(settings(*words), tmp_path, images=images)
    with pytest.raises(CheckpointError, match=name):
        check_same_run(job, replace(load(path), **changes), path)


def test_resume_allows_harmless_settings_and_changed_data(ended, tmp_path):
    harmless = ["train.epochs=9", "train.workers=1", "data.changed=allow", "train.log_every=1"]
    job = resume(trainer(settings(*harmless), tmp_path, images=33), ended)
    assert job.epoch == 1

    # Checkpoints of earlier versions have no fingerprint.
    path = ended / "checkpoints" / "last.pt"
    job = trainer(settings(), tmp_path)
    check_same_run(job, replace(load(path), val_fingerprint=None), path)


def test_resume_keeps_pieces_of_micro_batches(ended, tmp_path):
    path = ended / "checkpoints" / "last.pt"
    saved = load(path)
    job = trainer(settings("train.pieces=1"), tmp_path)
    job.resume(saved, path)
    assert job.learner.pieces == 1

    train = {**saved.config["train"], "pieces": 4}
    job.resume(replace(saved, config={**saved.config, "train": train}), path)
    assert job.learner.pieces == 4
    assert job.checkpoint().config["train"]["pieces"] == 4


def test_resume_restores_best_after_kill(tmp_path):
    fit(trainer(settings("train.epochs=1"), tmp_path), tmp_path)
    last, best = (tmp_path / "checkpoints" / name for name in ("last.pt", "best.pt"))
    good = last.read_bytes()

    # A run that was killed between last.pt and best.pt has an older best.pt.
    torch_files.save(best, {**read_torch(best), "epoch": 0, "step": 0})
    resume(trainer(settings(), tmp_path), tmp_path)
    assert best.read_bytes() == good

    # A checkpoint of another folder does not change the files.
    other = trainer(settings(), tmp_path / "other")
    other.resume(load(last), last)
    assert not (tmp_path / "other").exists()


def test_saves_are_due_and_unchanged_by_training(tmp_path, monkeypatch):
    job = trainer(settings("train.save_every_steps=3", "train.save_every_minutes=2"), tmp_path)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    job.files._saved_at = now
    assert [step for step in range(1, 8) if job.files.is_due(step)] == [3, 6]
    now += 120
    assert job.files.is_due(1)

    # Training changes the tensors while the file is written.
    weight = job.learner.model.head.pool_bias
    before = weight.detach().clone()
    job.save()
    with torch.no_grad():
        weight += 5
    job.files.wait()
    assert not job.files.is_due(1), "the interval restarts after a save"
    assert torch.equal(read_torch(job.files.last)["model"]["head.pool_bias"], before)

    monkeypatch.setattr(distributed, "is_main", lambda: False)
    job.files.save(lambda: pytest.fail("it was built"), best=True)


def test_next_save_raises_error_of_failed_save(tmp_path, monkeypatch):
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


def test_frozen_parameters_do_not_change(tmp_path):
    job = trainer(settings(*FINE_TUNING, "train.epochs=1"), tmp_path, network="test_resnet")
    before = {key: value.clone() for key, value in job.learner.model.state_dict().items()}
    fit(job, tmp_path)

    after = job.learner.model.state_dict()
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    fixed = ("backbone.mean", "backbone.std", "head.queries")  # buffers that are never trained
    assert changed == {key for key in before if not key.startswith((*STEM, *fixed))}

    # The moving average of a constant is exact.
    average = job.learner.ema.module.state_dict()
    assert all(torch.equal(average[key], before[key]) for key in before if key.startswith(STEM))

    inside = {p for group in job.learner.optimizer.param_groups for p in group["params"]}
    for name, parameter in job.learner.model.named_parameters():
        assert parameter.requires_grad is (parameter in inside) is not name.startswith(STEM), name


def test_late_average_starts_as_copy_of_weights(tmp_path):
    job = trainer(settings("train.ema_start_epoch=3"), tmp_path)
    bias = job.learner.model.head.pool_bias
    values = []
    job.learner.optimizer.register_step_post_hook(lambda *_: values.append(bias.detach().clone()))
    fit(job, tmp_path)

    # It starts after two epochs of four steps.
    expected = values[7]
    for value in values[8:]:
        expected = 0.9 * expected + 0.1 * value
    torch.testing.assert_close(job.learner.average.state_dict()["head.pool_bias"], expected)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"loss": Spoilt(3, "loss")}, "loss is nan.* step 3 .*square "),
        ({"broken": (3, 4, 21)}, r"square \d+ is broken"),
    ],
)
def test_fault_that_stops_run_names_its_images(tmp_path, options, name):
    with pytest.raises(UserError, match=name):
        fit(trainer(settings(), tmp_path, **options), tmp_path)


def test_step_with_nonfinite_gradients_is_skipped(tmp_path):
    words = ["train.nonfinite=skip", "train.log_every=1", "train.epochs=2"]
    job = trainer(settings(*words), tmp_path, loss=Spoilt(3, "gradients"))
    fit(job, tmp_path)
    counts = [line["train/skipped_steps"] for line in numbers(tmp_path) if "train/loss" in line]
    assert counts[:5] == [0, 0, 1, 1, 1]


def test_unreadable_images_are_skipped_and_counted(tmp_path):
    config = settings("train.epochs=2")
    job = trainer(config, tmp_path, broken=(3, 4, 21), bad_images="skip")
    fit(job, tmp_path)
    assert job.bad_images == 6 == numbers(tmp_path)[-2]["train/bad_images"]


def test_cfg_job_prints_recorded_config(cli, digits_run, here):
    printed = yaml.safe_load(cli("train", *QUICK, "--cfg", "job").out)
    assert printed == yaml.safe_load((digits_run / "config.yaml").read_text())
    assert printed["head"]["num_layers"] == 1  # a default of the signature
    assert list(here.iterdir()) == []


def test_last_line_has_next_two_commands(cli, here):
    out = cli.out("train", *QUICK, "train.epochs=1", "name=my run")
    last = out.splitlines()[-1]
    assert last in Path("outputs", "my run", "train.log").read_text().splitlines()[-1]

    first, second = last.removeprefix("next: ").split("; ")
    (here / "photos").mkdir()
    picture(40, 40).save(here / "photos" / "a.png")
    assert shlex.split(first)[:3] == ["mldec", "calibrate", "outputs/my run"]
    cli.out(*shlex.split(first)[1:])
    assert "calibrated.pt" in cli.out(*shlex.split(second)[1:])


@pytest.mark.parametrize(
    ("classes", "calibration", "first"),
    [
        (Classes(("a", "b")), None, "calibrate"),
        (Classes(("a", "b")), "of the fit", "evaluate"),
        (Classes(("a", "b"), exclusive=True), None, "evaluate"),
        (Classes(("a", "b"), word_vectors=torch.ones(2, 3)), None, "evaluate"),
    ],
)
def test_next_command_depends_on_classes(classes, calibration, first, here):
    data = SimpleNamespace(val=SimpleNamespace(classes=classes))
    job = SimpleNamespace(config=settings(), data=data, calibration=calibration)
    inside = f"mldec {first} outputs/x; mldec predict outputs/x photos/"
    assert next_commands(here / "outputs" / "x", job) == inside
    outside = here.parent / "x y"
    assert f"mldec {first} '{outside}';" in next_commands(outside, job)


@pytest.mark.parametrize(
    ("wanted", "saved", "on_cpu", "on_gpu"),
    [
        ("auto", None, "fp32", "bf16"),
        ("fp16", None, "fp32", "fp16"),
        ("fp32", None, "fp32", "fp32"),
        ("auto", "bf16", "bf16", "bf16"),
        ("auto", "fp16", "fp32", "fp16"),
        ("fp16", "fp32", "fp32", "fp32"),
    ],
)
def test_resume_keeps_precision_if_setting_allows(wanted, saved, on_cpu, on_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    checkpoint = saved and SimpleNamespace(config={"train": {"precision": saved}})
    for name, expected in (("cpu", on_cpu), ("cuda:0", on_gpu)):
        train = Train(precision=Precision(wanted))
        assert used_precision(train, checkpoint, torch.device(name)).value == expected


@pytest.mark.parametrize(
    ("wanted", "saved", "with_instructions", "without"),
    [
        ("auto", None, "bf16", "fp32"),
        ("auto", "fp32", "fp32", "fp32"),
        ("auto", "bf16", "bf16", "bf16"),
        ("fp32", None, "fp32", "fp32"),
        ("bf16", None, "bf16", "bf16"),
    ],
)
def test_tokens_are_bf16_on_cpus_with_instructions_for_it(
    wanted, saved, with_instructions, without, monkeypatch
):
    checkpoint = saved and SimpleNamespace(config={"train": {"precision": saved}})
    train = Train(precision=Precision(wanted), freeze=["backbone"], cache_features=True)
    for instructions, expected in (({"amx_bf16": True}, with_instructions), ({}, without)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", dict(instructions).copy)
        assert used_precision(train, checkpoint, torch.device("cpu")).value == expected
