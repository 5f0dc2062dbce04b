"""A resumed run equals an uninterrupted run to the last bit."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from squares import check_resume, settings, trainer
from support import assert_equal

from mldec.checkpoint import load_model
from mldec.config.compose import compose
from mldec.data.sampling import Sampling
from mldec.files.torch_files import read_torch
from mldec.losses.cross_entropy import BinaryCrossEntropy
from mldec.train import run

ONE_LABEL = ["optim.name=lamb", "schedule.name=cosine_epochs", "schedule.warmup_epochs=1"]
ONE_LABEL += ["schedule.cooldown_epochs=1", "train.repeats=3", "train.accumulate=2"]
STEPS = ["optim.name=momentum", "schedule.name=step", "schedule.milestones=[1,2]"]
STEPS += ["schedule.warmup_epochs=1.5", "schedule.gamma=0.3"]
FINE_TUNING = [
    "train.freeze=[backbone.network.conv1,backbone.network.bn1,backbone.network.layer1]",
    "train.freeze_batchnorm=frozen",
    "train.accumulate=2",
    "optim.name=adamw",
    "optim.decay=all",
    "optim.backbone_lr=0.005",
    "optim.layer_decay=0.7",
]
# Micro-batches of 3 images. The image in the middle is mixed with itself.
MIXED = ["mix.mixup=0.5", "mix.cutmix=1", "mix.mode=elem"]
MIXED += ["train.batch_size=6", "train.accumulate=2"]
REPEATED = Sampling(sampler="repeat_factor", repeat_threshold=0.6)
SETTINGS = [
    ([], {}),
    (["train.accumulate=2", "train.clip_grad=0.5", "train.precision=fp16"], {}),
    (["train.ema_decay=null"], {}),
    (STEPS, {}),
    (["train.ema_start_epoch=2"], {}),
    (["train.ema_start_epoch=3"], {}),
    ([*ONE_LABEL, "mix.mixup=0.1", "mix.cutmix=1.0"], {"loss": "bce"}),
    (FINE_TUNING, {"network": "test_resnet"}),
    (FINE_TUNING, {"network": "test_resnet", "sampling": REPEATED}),
    (MIXED, {"network": "test_resnet", "sampling": Sampling(sampler="class_aware")}),
    ([*MIXED, "mix.labels=weighted"], {"network": "test_resnet"}),
    ([*MIXED, "mix.labels=union"], {"network": "test_resnet"}),
]
CASES = [(words, options, 6) for words, options in SETTINGS] + [([], {}, 3), ([], {}, 8)]


@pytest.mark.usefixtures("fp16_on_a_cpu")
@pytest.mark.parametrize(("words", "options", "step"), CASES)
def test_resumed_run_equals_uninterrupted_run(words, options, step, tmp_path):
    if options.get("loss"):
        options = {**options, "loss": BinaryCrossEntropy(target_threshold=0.2)}
    config = settings(*words, "train.epochs=3", "train.save_every_steps=1")
    check_resume(partial(trainer, config, **options), tmp_path, step=step)


def zero_shot(*words):
    small = ["data.train_images=32", "data.val_images=60", "data.image_size=32"]
    small += ["data.colours=2", "data.unseen=2", "train.batch_size=8", "train.workers=0"]
    narrow = ["head.embed_dim=16", "head.num_heads=2", "head.mlp_dim=16", "train.epochs=2"]
    config = compose(["+experiment=digits_zsl", *small, *narrow, "device=cpu", *words])
    return replace(config, plugins=["patches"], backbone={"_target_": "patches.Patches"})


@pytest.mark.parametrize(
    "head", ["ml_decoder_zsl_small", "ml_decoder_zsl_groups_small", "ml_decoder_zsl_single_small"]
)
def test_resumed_zero_shot_run_keeps_word_vectors(head, tmp_path):
    words = ["train.query_noise=0.3", "train.random_queries=1", "train.precision=bf16"]
    words += [f"head={head}", "train.keep_last=4"]
    run(zero_shot(*words), tmp_path / "whole")
    middle = tmp_path / "whole" / "checkpoints" / "last.2.pt"
    assert (read_torch(middle)["epoch"], read_torch(middle)["step"]) == (1, 4)
    torch.manual_seed(99)
    run(zero_shot(*words, f"resume={middle}"), tmp_path / "again")

    files = [tmp_path / name / "checkpoints" / "last.pt" for name in ("whole", "again")]
    one, other = (read_torch(file) for file in files)
    for state in (one, other):
        del state["log"]["lines"]  # the new folder has a new log
    assert_equal(one, other)
    assert one["classes"]["queries"].shape == (20, 300)
    assert next(iter(one["metrics"])) == "val/zsl_mAP"

    loaded = load_model(tmp_path / "whole" / "checkpoints" / "best.pt", plugins=["patches"])
    logits = loaded.model(
        torch.zeros(1, 3, 32, 32, dtype=torch.uint8), loaded.classes.word_vectors[:7]
    )
    assert logits.shape == (1, 7)
