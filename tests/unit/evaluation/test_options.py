"""Options of a model, from the command line and from Python."""

import pickle
from pathlib import Path

import pytest

from mldec.errors import ConfigError, OptionError
from mldec.evaluation.options import EvalOptions, ModelOptions
from mldec.tools.predict import parser
from mldec.tools.predict.options import PredictOptions, ScoringOptions


@pytest.mark.parametrize(
    ("words", "keywords"),
    [
        ([], {"weights": None, "device": None}),
        (["--weights=raw", "--image-size=96"], {"weights": "raw", "image_size": "96"}),
        (["--plugin=a", "--plugin=b"], {"plugin": ["a", "b"]}),
        (["--plugin=a"], {"plugin": "a"}),
        (["--classes=a, b,"], {"classes": ["a", "b"]}),
        (["--class-names=n.txt"], {"class_names": Path("n.txt")}),
        (["--compile", "--engine=torch"], {"compile": True, "engine": "torch"}),
        (["--threshold=0.5", "--top=3"], {"threshold": 0.5, "top": 3}),
        (["--batch-size=4", "--workers=0"], {"batch_size": 4, "workers": 0}),
        (["--precision=bf16", "--views=flip"], {"precision": "bf16", "views": "flip"}),
    ],
)
def test_command_line_and_keywords_give_equal_options(words, keywords):
    typed = ScoringOptions.of(vars(parser().parse_args(["a.pt", *words])))
    assert typed == ScoringOptions.from_keywords(keywords, checkpoint="a.pt")
    assert pickle.loads(pickle.dumps(typed)) == typed


@pytest.mark.parametrize(
    "keywords",
    [
        {"top": 0},
        {"top": 1.5},
        {"threshold": 1.01},
        {"threshold": "high"},
        {"threshold": [0.5]},
        {"weights": "best"},
        {"image_size": 5000},
        {"workers": -1},
        {"classes": " , "},
        {"classes": ["a", "b", "a"]},
        {"classes": [1, 2]},
        {"compile": "no"},
        {"classes": "a", "class_names": "n.txt"},
        {"engine": "openvino", "compile": True},
        {"precision": "fp64"},
    ],
)
def test_invalid_value_names_its_keyword(keywords):
    name = next(iter(keywords))
    with pytest.raises(OptionError, match=f"^{name}: "):
        ScoringOptions.from_keywords(keywords, checkpoint="a.pt")


def test_unknown_and_positional_keywords_are_errors():
    for name in ("treshold", "checkpoint", "jsonl", "content"):
        with pytest.raises(ConfigError, match=name):
            ScoringOptions.from_keywords({name: "x"}, checkpoint="a.pt")
    assert PredictOptions.from_keywords({"jsonl": "x"}, checkpoint="a.pt").jsonl == "x"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--classes=a", "--class-names=n"], "--classes"),
        (["--classes=,"], "--classes"),
        (["--image-size=5000"], "--image-size"),
        (["--merge", "out"], "cat"),
        (["--progress=out"], "FILE.progress"),
        (["--shard=auto/4"], "I/4"),
        (["--shards=0/4"], "--shard"),
    ],
)
def test_error_of_the_command_names_the_option(words, named, cli, here):
    Path("a.pt").touch()
    status, _, error = cli("predict", "a.pt", "a.jpg", *words)
    assert status in (1, 2)
    assert named in error
    assert error.count("\n") == 1


def test_names_in_a_list_may_contain_commas():
    options = ModelOptions(checkpoint="a.pt", classes=["table, wooden", " cat "])
    assert options.classes == ("table, wooden", "cat")


def test_precision_is_a_setting_of_an_evaluation():
    options = EvalOptions(checkpoint="a.pt", settings=["data.root=x"], precision="bf16")
    assert options.overrides == ["data.root=x", "train.precision=bf16"]
    assert options.sets("train.precision")
    assert not options.sets("data")
    assert ModelOptions(checkpoint="a.pt").precision is None
