from pathlib import Path

import pytest
import yaml
from hydra.errors import HydraException

from mldec import build
from mldec.config.compose import (
    check_key,
    compose,
    config_dir,
    diff,
    experiments,
    explain,
    override,
    parse,
    prepare,
    to_dict,
    to_yaml,
)
from mldec.config.schema import Config, Precision, ScheduleName
from mldec.errors import ConfigError


@pytest.fixture(scope="module")
def digits() -> Config:
    return compose(["+experiment=digits"])


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_composes_and_its_parts_fit(name: str) -> None:
    config = compose([f"+experiment={name}"])
    build.check(config)
    assert config.name == name


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_says_how_to_run_it(name: str) -> None:
    text = Path(config_dir(), "experiment", f"{name}.yaml").read_text()
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert any(f"# Command: python -m mldec.train +experiment={name}" in line for line in header)
    assert any(line.startswith("# Costs:") for line in header)


@pytest.mark.parametrize("part", ["data", "backbone", "head", "loss"])
def test_every_option_of_every_part_composes(part: str) -> None:
    names = sorted(path.stem for path in Path(config_dir(), part).glob("*.yaml"))
    assert names
    for name in names:
        # Two options have no default.
        model = [f"{part}.name=resnet18"] if name in ("timm", "hf") else []
        build.check(compose(["+experiment=digits", f"{part}={name}", *model]))


def test_a_part_takes_arguments_that_its_yaml_does_not_list() -> None:
    config = compose(["+experiment=digits", "head.num_groups=5", "loss.clip=0.1"])
    assert config.head["num_groups"] == 5
    assert config.loss["clip"] == 0.1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.epoch=3", "train.epoch: train has no setting 'epoch'; did you mean 'epochs'?"),
        ("+train.epoch=3", "train.epoch: train has no setting 'epoch'; did you mean 'epochs'?"),
        ("++optim.learning_rate=3", "optim.learning_rate: optim has no setting 'learning_rate'"),
        ("sede=3", "sede: the config has no setting 'sede'; did you mean 'seed'?"),
        ("experiment=digits", "write +experiment=digits, with a plus"),
        ("epochs=3", "epochs: the config has no setting 'epochs'; did you mean 'train.epochs'?"),
        ("train.lr=0.1", "train.lr: train has no setting 'lr'; did you mean 'optim.lr'?"),
        ("root=/data/coco", "root: the config has no setting 'root'; did you mean 'data.root'?"),
        (
            "--epochs",
            "--epochs is no option: settings are written train.epochs=VALUE, without dashes",
        ),
        (
            "--optim.lr=1",
            "--optim.lr is no option: settings are written optim.lr=VALUE, without dashes",
        ),
        ("epochs", "'epochs' is not understood: write key=value"),
        ("head=mldecoder", "head=mldecoder: there is no such option; did you mean 'ml_decoder'?"),
        (
            "backbone=tf_efficientnet_lite0",
            "backbone=tf_efficientnet_lite0 is a model of timm: write backbone=timm ",
        ),
        ("seed=" + 5000 * "9", "seed: a number of 5,000 digits is too long"),
        ("name=a\udc80", "name: the value is not UTF-8 text"),
        ("+experiment=digit", "there is no experiment 'digit'; did you mean 'digits'?"),
    ],
)
def test_a_misspelt_word_is_refused_with_the_right_one(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match="^" + message.replace("+", r"\+").replace("?", r"\?")):
        prepare([word])


@pytest.mark.parametrize(
    "word",
    [
        "backbone=0",
        "+data=1.5",
        "head=true",
        "loss=null",
        "~head=nan",
        "data=[[1]]",
        "~data=[a]",
        "+experiment=1.5",
    ],
)
def test_a_choice_that_is_no_name_is_refused(word: str) -> None:
    key = word.lstrip("+~").partition("=")[0]
    # With a folder of the user's own the known names are not all names.
    with pytest.raises(
        ConfigError, match=f"^{key}=.*: an option is chosen by its name, such as {key}=NAME"
    ):
        prepare(["--config-dir=own", word])


def test_a_key_added_to_the_composed_config_does_not_vanish() -> None:
    with pytest.raises(ConfigError, match="did you mean 'epochs'"):
        parse({**to_dict(compose(["+experiment=digits"])), "train": {"epoch": 3}})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("train", {"epochs": "abc"}, "train.epochs is 'abc': it must be a whole number"),
        ("train", {"epochs": 0}, "train.epochs is 0: it must be at least 1"),
        ("train", {"precision": "fp8"}, "train.precision is 'fp8': it must be one of auto, fp32"),
        ("train", {"ema_decay": 1.0}, "train.ema_decay is 1.0"),
        ("train", {"epochs": None}, "train.epochs is null: it must have a value"),
        ("train", {"compile": "maybe"}, "train.compile is 'maybe': it must be true or false"),
        ("train", {"clip_grad": "x"}, "train.clip_grad is 'x': it must be a number"),
        ("train", {"workers": -1}, "train.workers is -1"),
        ("train", {"workers": 100_000}, "train.workers is 100000: it must be from 0 to 1,024"),
        ("train", {"clip_grad": 0.0}, "train.clip_grad is 0.0"),
        ("optim", {"lr": 0.0}, "optim.lr is 0.0"),
        ("optim", {"weight_decay": -1.0}, "optim.weight_decay is -1.0"),
        ("optim", {"decay": "none"}, "optim.decay is 'none': it must be one of weights, all"),
        (
            "optim",
            {"decay": "all", "weight_decay": 0.0},
            "optim.decay=all has no effect with optim.weight_decay=0: leave it out",
        ),
        ("optim", {"backbone_lr": 0.0}, "optim.backbone_lr is 0.0: it must be above 0, or null"),
        ("optim", {"layer_decay": 1.0}, "optim.layer_decay is 1.0: it must be between 0 and 1"),
        ("optim", {"layer_decay": 0.0}, "optim.layer_decay is 0.0: it must be between 0 and 1"),
        ("train", {"freeze": "backbone"}, "train.freeze is no list: write train.freeze=[VALUE]"),
        (
            "train",
            {"freeze_batchnorm": "some"},
            "train.freeze_batchnorm is 'some': it must be one of frozen, all",
        ),
        (
            "train",
            {"freeze_batchnorm": "frozen"},
            "train.freeze_batchnorm=frozen has no effect without train.freeze",
        ),
        (
            "train",
            {"freeze_batchnorm": "all", "sync_batchnorm": True},
            "train.sync_batchnorm has no effect with train.freeze_batchnorm=all: leave it out",
        ),
        ("schedule", {"min_lr": 1e-6}, "schedule.min_lr has no effect with schedule.name=onecycle"),
        ("schedule", {"name": "cosine", "pct_start": 0.3}, "schedule.pct_start has no effect"),
        ("schedule", {"pct_start": 1.5}, "schedule.pct_start is 1.5"),
        (
            "schedule",
            {"name": "cosine", "warmup_lr": 1e-5},
            "schedule.warmup_lr has no effect with schedule.name=cosine",
        ),
        ("train", {"repeats": 0}, "train.repeats is 0: it must be at least 1"),
        ("mix", {"mixup": -1.0}, "mix.mixup is -1.0: it must be 0 (off) or more"),
        ("mix", {"prob": 1.5}, "mix.prob is 1.5"),
        ("mix", {"smoothing": 1.0}, "mix.smoothing is 1.0"),
        ("mix", {"mode": "half"}, "mix.mode is 'half': it must be one of batch, pair, elem"),
        ("mix", {"labels": "max"}, "mix.labels is 'max': it must be one of weighted, union"),
    ],
)
def test_a_value_that_cannot_be_is_refused(
    digits: Config, section: str, values: dict, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**to_dict(digits), section: values})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", "a/b"), ("name", ""), ("name", ".."), ("device", "tpu"), ("device", "cudaa")],
)
def test_a_name_that_is_no_folder_and_an_unknown_device_are_refused(
    digits: Config, key: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        parse({**to_dict(digits), key: value})


@pytest.mark.parametrize("seed", [-1, 2**63, 99999999999999999999])
def test_a_seed_that_no_generator_takes_is_refused(digits: Config, seed: int) -> None:
    with pytest.raises(ConfigError, match=f"^seed is {seed}: it must be from 0 to"):
        parse({**to_dict(digits), "seed": seed})


@pytest.mark.parametrize(
    "word",
    [
        "train={",
        "data.root=[",
        "data.val_images=!!python/object:os.system",
        "train.epochs=" + 5000 * "1",
        "name=\ud800",
    ],
)
def test_what_is_not_yaml_is_refused_in_one_line(digits: Config, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override(digits, [word])
    assert "\n" not in str(caught.value)
    assert word.partition("=")[0] in str(caught.value)
    assert len(str(caught.value)) < 200


def test_arguments_of_a_backbone_without_one_say_what_to_choose() -> None:
    with pytest.raises(HydraException) as caught:
        compose(["data=digits", "head=ml_decoder", "loss=asl", "name=x", "backbone.name=resnet18"])
    assert explain(caught.value).startswith(
        "backbone has arguments, but none is chosen: pass backbone=timm first"
    )


def test_any_model_of_timm_is_a_backbone() -> None:
    config = compose(["+experiment=digits", "backbone=timm", "backbone.name=tf_efficientnet_lite0"])
    assert config.backbone["name"] == "tf_efficientnet_lite0"
    with pytest.raises(
        ConfigError, match=r"nothing is chosen for backbone\.name: pass backbone\.name=NAME"
    ):
        compose(["+experiment=digits", "backbone=timm"])


@pytest.mark.parametrize("word", ["-sc", "--shell-completion"])
def test_the_words_of_tab_completion_pass(word: str) -> None:
    assert prepare([word, "install=bash"]) == [word, "install=bash"]


def test_the_recipes_of_authors_who_trained_in_half_precision_name_it() -> None:
    for name in ("coco_tresnet_l", "imagenet_resnet50_a2", "q2l_coco_resnet101_448"):
        config = compose([f"+experiment={name}"])
        assert config.train.precision is Precision.fp16
        assert config.train.channels_last


def test_resume_and_init_exclude_each_other(digits: Config) -> None:
    with pytest.raises(ConfigError, match="leave one out"):
        parse({**to_dict(digits), "resume": "auto", "init": "x.pt"})


def test_nothing_chosen_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"nothing is chosen for backbone, data"):
        parse({"name": "x"})


def test_plain_form_round_trips(digits: Config) -> None:
    plain = to_dict(digits)
    assert plain["train"]["precision"] == "auto"
    assert parse(plain) == digits
    assert yaml.safe_load(to_yaml(digits)) == plain


@pytest.mark.parametrize(
    "name", ["imagenet_resnet18_a2", "imagenet_resnet34_a2", "imagenet_resnet50_a2"]
)
def test_the_recipe_of_figure_6_is_that_of_the_official_command(name: str) -> None:
    config = compose([f"+experiment={name}"])
    assert config.train.batch_size == 2048
    assert config.train.epochs - (config.schedule.cooldown_epochs or 0) == 300
    assert (config.train.repeats, config.train.ema_decay, config.train.clip_grad) == (3, None, None)
    assert config.train.average_batchnorm
    assert (config.optim.name, config.optim.lr, config.optim.weight_decay) == ("lamb", 4e-3, 0.02)
    assert (config.schedule.name, config.schedule.warmup_epochs) == (ScheduleName.cosine_epochs, 5)
    assert (config.mix.mixup, config.mix.cutmix, config.mix.smoothing) == (0.1, 1.0, 0.0)
    assert (config.mix.prob, config.mix.switch_prob, config.mix.mode.value) == (1.0, 0.5, "batch")
    assert config.loss["target_threshold"] == 0.2
    assert (config.backbone["drop_path"], config.backbone["pretrained"]) == (0.05, False)
    wanted = {
        "augment": "rand-m7-mstd0.5-inc1",
        "interpolation": "bicubic",
        "erase": 0.0,
        "crop": 0.08,
        "flip": True,
    }
    made_of = build.recorded(config, build.check(config)).data
    assert wanted.items() <= {**made_of, "cutout": None}.items()
    assert made_of["cutout"] == 0.0


@pytest.mark.parametrize(
    ("name", "gammas", "simulation"),
    [
        ("coco_partial_rps", (0, 1, 4), (0.5, None)),
        ("coco_partial_fpc", (0, 3, 4), (0.0, 1000)),
    ],
)
def test_simulations_of_partial_labels_are_those_of_csls_examples(
    name: str, gammas: tuple[int, int, int], simulation: tuple[float, int | None]
) -> None:
    config = compose([f"+experiment={name}"])
    config = build.recorded(config, build.check(config))
    kinds = ("gamma_pos", "gamma_neg", "gamma_unannotated")
    assert tuple(config.loss[kind] for kind in kinds) == gammas
    assert (config.data["drop_labels"], config.data["keep_per_class"]) == simulation
    assert (config.loss["mode"], config.loss["clip"]) == ("selective", 0)
    assert (config.loss["likelihood_top_k"], config.loss["prior_threshold"]) == (5, 0.5)
    assert (config.train.epochs, config.train.batch_size, config.optim.lr) == (30, 64, 2e-4)


def test_the_prior_threshold_of_open_images_is_csls_default() -> None:
    assert compose(["+experiment=openimages_tresnet_m"]).loss["prior_threshold"] == 0.05


def test_override_changes_what_it_names(digits: Config) -> None:
    changed = override(
        digits, ["train.precision=bf16", "data.image_size=96", "train.clip_grad=null"]
    )
    assert changed.train.precision is Precision.bf16
    assert changed.data["image_size"] == 96
    assert digits.data["image_size"] == 64


def test_override_takes_another_dataset(digits: Config) -> None:
    config = override(digits, ["data=coco", "data.root=/x"])
    assert config.data["_target_"] == "mldec.data.readers.coco"
    assert config.data["root"] == "/x"
    with pytest.raises(ConfigError, match="did you mean 'coco'"):
        override(digits, ["data=cocoo"])


@pytest.mark.parametrize("word", ["foo", "--weights", "trai.epochs=3", "train.epochs=x"])
def test_override_refuses_what_it_does_not_know(digits: Config, word: str) -> None:
    with pytest.raises(ConfigError):
        override(digits, [word])


def test_diff_names_what_matters_and_forgives_what_does_not(digits: Config) -> None:
    other = override(
        digits, ["optim.lr=1", "head.num_heads=2", "train.workers=7", "train.epochs=99"]
    )
    assert diff(digits, other) == ["head.num_heads: 4 -> 2", "optim.lr: 0.01 -> 1.0"]


def test_a_cache_of_annotations_may_move() -> None:
    one = compose(["+experiment=digits", "data=csv", "data.cache_dir=/here"])
    assert diff(one, override(one, ["data.cache_dir=/there"])) == []
    assert diff(one, override(one, ["data.absent=skip"])) == ["data.absent: None -> skip"]


def test_check_key_lets_parts_pass() -> None:
    check_key("head.anything.at.all")
    check_key("optim.options.eps")
    with pytest.raises(ConfigError, match="the config has no setting 'had'; did you mean 'head'"):
        check_key("had.x")
