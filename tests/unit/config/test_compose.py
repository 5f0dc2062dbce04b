"""Composition of configs, and the settings of the published recipes."""

from pathlib import Path

import pytest
import yaml
from support import experiment

from mldec import build
from mldec.config.compose import (
    check_key,
    compose,
    config_dir,
    diff,
    options,
    override,
    parse,
    to_dict,
    to_hydra,
    to_yaml,
)
from mldec.config.schema import PARTS, RETIRED, Precision, ScheduleName
from mldec.errors import ConfigError


@pytest.fixture(scope="module")
def digits():
    return experiment("digits")


@pytest.mark.parametrize("name", options("experiment"))
def test_experiments_compose_and_document_their_command(name):
    config = experiment(name)
    build.check(config)
    assert config.name == name

    text = Path(config_dir(), "experiment", f"{name}.yaml").read_text()
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert any(f"# Command: mldec train +experiment={name}" in line for line in header)
    assert any(line.startswith("# Cost:") for line in header)


def test_the_parent_of_an_experiment_has_no_parent():
    folder = Path(config_dir(), "experiment")
    parents = {}
    for file in folder.glob("*.yaml"):
        entries = yaml.safe_load(file.read_text())["defaults"]
        names = [entry for entry in entries if isinstance(entry, str) and entry != "_self_"]
        assert len(names) <= 1, file.name
        parents[file.stem] = names
    assert all(parents[parent] == [] for names in parents.values() for parent in names)


@pytest.mark.parametrize("part", PARTS)
def test_every_option_of_every_part_composes(part, digits):
    for name in options(part):
        # These options require a value.
        required = {"timm": "name=resnet18"}
        words = [f"{part}={name}"]
        if name in required:
            words.append(f"{part}.{required[name]}")
        build.check(override(digits, words), [part])


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("train.epoch=3", ["train.epoch", "'train.epochs'"]),
        ("sede=3", ["sede", "'seed'"]),
        ("epochs=3", ["epochs", "'train.epochs'"]),
        ("train.lr=0.1", ["train.lr", "'optim.lr'"]),
        ("head=mldecoder", ["head=mldecoder", "'ml_decoder'"]),
        ("+experiment=digit", ["experiment=digit", "'digits'"]),
        # Errors of Hydra and OmegaConf in one line.
        ("epochs", ["epochs"]),
        ("train.epochs=abc", ["train.epochs", "'abc'"]),
        ("schedule.milestones=[a]", ["schedule.milestones", "'a'"]),
        ("train.precision=fp8", ["train.precision", "'fp8'"]),
        ("backbone=timm", ["backbone.name"]),
        ("init.classes=by_name", ["init.path"]),
        ("train.epochs=!!python/object:os.system", ["train.epochs"]),
        # Complete commands.
        (["experiment=digits"], ["+experiment=digits"]),
        (["data=digits", "head=ml_decoder", "loss=asl", "name=x"], ["backbone"]),
    ],
)
def test_wrong_word_is_named_in_one_line(digits, word, names):
    calls = [lambda: compose(word)]
    if isinstance(word, str):
        calls = [lambda: compose(["+experiment=digits", word]), lambda: override(digits, [word])]
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert call is not calls[0] or all(name in str(caught.value) for name in names)


@pytest.mark.parametrize("name", [name for name in RETIRED if not name.startswith("mldec ")])
def test_removed_name_ends_in_one_line_with_its_replacement(name):
    word = name if "=" in name else f"{name}=true"
    if name.startswith("mldec."):
        part = {"heads": "head", "losses": "loss"}[name.split(".")[1]]
        word = f"{part}._target_={name}"
    with pytest.raises(ConfigError) as caught:
        build.check(compose(["+experiment=digits", word.replace("experiment=", "+experiment=")]))
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)
    assert RETIRED[name] in str(caught.value)


def test_changelog_lists_removed_names():
    text = Path(config_dir()).with_name("CHANGELOG.md").read_text()
    # Commit 5852d40b had already removed these settings.
    earlier = {"train.fit_memory", "log.classes", "log.trackio"}
    text = text.replace("`+", "`").replace("`mldec predict ", "`")
    names = [name for name in RETIRED if not name.startswith("mldec.")]
    names = [name.removeprefix("mldec predict ") for name in names]
    assert {name for name in names if f"`{name}`" not in text} == earlier


def test_prepare_moves_flags_first():
    words = ["head.a=1", "--multirun", "train.epochs=2"]
    assert to_hydra(words) == ["--multirun", "++head.a='1'", "train.epochs=2"]


def test_home_folder_is_expanded(digits, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    words = ["data=csv", "data.root=~/my photos", "init=~/best.pt"]
    config = compose(["+experiment=finetune_frozen", *words])
    assert (config.data["root"], config.init) == ("/home/me/my photos", "/home/me/best.pt")
    changed = override(digits, words)
    assert (changed.data["root"], changed.init) == ("/home/me/my photos", "/home/me/best.pt")


def test_parts_accept_arguments_that_their_yaml_lacks():
    words = ["backbone=timm", "backbone.name=tf_efficientnet_lite0", "head.num_groups=5"]
    config = compose(["+experiment=digits", *words])
    assert (config.backbone["name"], config.head["num_groups"]) == ("tf_efficientnet_lite0", 5)


def test_auto_batch_size_keeps_batch_size_of_experiment():
    train = compose(["+experiment=digits", "train.batch_size=auto"]).train
    assert (train.batch_size, train.pieces) == (32, 1)


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("optim.options={eps:1e-6}", {"eps": 1e-6}),
        ("optim.options.momentum=0.9", {"momentum": 0.9}),
        ("+optim.options.momentum=0.9", {"momentum": 0.9}),
    ],
)
def test_options_of_optimizer_need_no_plus(word, options):
    assert compose(["+experiment=digits", word]).optim.options == options


def test_dict_and_yaml_round_trip(digits):
    plain = to_dict(digits)
    assert plain["train"]["precision"] == "auto"
    assert parse(plain) == digits
    # A checkpoint of an earlier version has settings that no longer exist.
    train = {**plain["train"], "focus_few_images": True}
    assert parse({**plain, "log": {**plain["log"], "trackio": True}, "train": train}) == digits
    assert yaml.safe_load(to_yaml(digits)) == plain


def test_override_changes_named_settings(digits):
    words = ["train.precision=bf16", "data.image_size=96", "train.clip_grad=null"]
    changed = override(digits, words)
    assert changed.train.precision is Precision.bf16
    assert changed.data["image_size"] == 96
    assert digits.data["image_size"] == 64

    other = override(digits, ["data=coco", "data.root=/x"])
    assert other.data["_target_"] == "mldec.data.readers.coco"


def test_diff_ignores_harmless_settings(digits):
    words = ["optim.lr=1", "head.num_heads=2", "train.workers=7", "train.epochs=99"]
    expected = ["head.num_heads: 4 -> 2", "optim.lr: 0.01 -> 1.0"]
    assert diff(digits, override(digits, words)) == expected
    check_key("head.anything.at.all")
    check_key("optim.options.eps")


def test_recipes_of_half_precision_papers_use_fp16():
    for name in ("coco_tresnet_l", "imagenet_resnet50_a2", "q2l_coco_resnet101_448"):
        config = experiment(name)
        assert config.train.precision is Precision.fp16
        assert config.train.channels_last


@pytest.mark.parametrize("name", ["dinov3_b", "dinov3_l_frozen", "clip_l_336"])
def test_transformer_recipes_equal_paddleclas(name):
    config = experiment(f"coco_{name}")
    train, optim, schedule = config.train, config.optim, config.schedule
    assert (train.epochs, train.batch_size, train.ema_decay) == (40, 16, 0.9997)
    assert (optim.name, optim.lr, optim.weight_decay) == ("adamw", 5e-5, 1e-4)
    assert (schedule.name, schedule.warmup_epochs) == (ScheduleName.cosine, 5)

    # Half precision halves the cost of a frozen backbone.
    frozen = "backbone" in train.freeze
    assert train.precision is (Precision.bf16 if frozen else Precision.fp32)
    assert (train.tf32, optim.backbone_lr) == ((False, None) if frozen else (True, 1e-5))


@pytest.mark.parametrize("network", ["resnet18", "resnet34", "resnet50"])
def test_the_recipe_of_figure_6_matches_the_official_command(network):
    config = compose(["+experiment=imagenet_resnet50_a2", f"backbone={network}_scratch"])
    train, optim, schedule, mix = config.train, config.optim, config.schedule, config.mix
    assert train.batch_size == 2048
    assert train.epochs - (schedule.cooldown_epochs or 0) == 300
    assert (train.repeats, train.ema_decay, train.clip_grad) == (3, None, None)
    assert train.average_batchnorm
    assert (optim.name, optim.lr, optim.weight_decay) == ("lamb", 4e-3, 0.02)
    assert (schedule.name, schedule.warmup_epochs) == (ScheduleName.cosine_epochs, 5)
    assert (mix.mixup, mix.cutmix, mix.smoothing) == (0.1, 1.0, 0.0)
    assert (mix.prob, mix.switch_prob, mix.mode.value) == (1.0, 0.5, "batch")
    assert config.loss["target_threshold"] == 0.2
    assert (config.backbone["drop_path"], config.backbone["pretrained"]) == (0.05, False)

    wanted = {"augment": "rand-m7-mstd0.5-inc1", "interpolation": "bicubic", "erase": 0.0}
    wanted |= {"crop": 0.08, "flip": True, "cutout": 0.0}
    assert wanted.items() <= build.recorded(config, build.check(config)).data.items()


@pytest.mark.parametrize(
    "name", [name for name in options("experiment") if "single_positive" in name]
)
def test_single_positive_recipes_equal_papers(name):
    config = experiment(name)
    config = build.recorded(config, build.check(config))
    wanted = {"single_positive": 0, "augment": "none", "cutout": 0.0, "flip": True}
    assert {**wanted, "unobserved": "negative"}.items() <= config.data.items()
    assert config.loss["_target_"].startswith("mldec.losses.")
    # The rates and batch sizes of main.py of SPML-AckTheUnknown.
    published = {"voc": (8, 1e-5), "coco": (16, 1e-5), "nuswide": (16, 1e-5), "cub": (8, 1e-4)}
    found = (config.train.batch_size, config.optim.lr)
    assert found == published[name.removesuffix("_single_positive")]
    assert config.optim.backbone_lr is None
    assert config.schedule.min_lr == config.optim.lr
    assert config.train.ema_decay is None
    assert config.train.precision is Precision.fp32

    # A held-out fifth selects the epoch, which the second command of the header tests.
    assert (config.data["fold"], config.train.patience) == ("1/5", 1)
    header = Path(config_dir(), "experiment", f"{name}.yaml").read_text()
    assert f"mldec evaluate outputs/{name} data.fold=null" in header


@pytest.mark.parametrize(
    ("settings", "gammas", "simulation"),
    [
        ([], (0, 1, 4), (0.5, None)),
        (
            ["data.drop_labels=0", "data.keep_per_class=1000", "loss.gamma_neg=3"],
            (0, 3, 4),
            (0.0, 1000),
        ),
    ],
)
def test_partial_label_simulations_match_the_examples_of_csl(settings, gammas, simulation):
    config = override(experiment("coco_partial_rps"), settings)
    config = build.recorded(config, build.check(config))
    kinds = ("gamma_pos", "gamma_neg", "gamma_unannotated")
    assert tuple(config.loss[kind] for kind in kinds) == gammas
    assert (config.data["drop_labels"], config.data["keep_per_class"]) == simulation
    assert (config.loss["mode"], config.loss["clip"]) == ("selective", 0)
    assert (config.loss["likelihood_top_k"], config.loss["prior_threshold"]) == (5, 0.5)
    assert (config.train.epochs, config.train.batch_size, config.optim.lr) == (30, 64, 2e-4)
    assert experiment("openimages_tresnet_m").loss["prior_threshold"] == 0.05
