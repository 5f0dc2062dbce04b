"""Every text setting accepts any text, from the command line, `evaluate` and `mldec.fit`.

The settings are those of the schema and of the signatures of all option files.
"""

from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from omegaconf import OmegaConf
from support import experiment

import mldec.api
from mldec.config.compose import (
    compose,
    flat,
    option,
    options,
    override,
    parse,
    to_dict,
    to_hydra,
    to_yaml,
)
from mldec.config.schema import PARTS, Config, Init
from mldec.config.signatures import arguments_of, locate, signature
from mldec.config.values import literal, parsed
from mldec.errors import ConfigError

AWKWARD = [
    *(
        "Fotos Süd",
        "照片",
        "Bilder (2019)",
        "R&D",
        "it's",
        "#1",
        "a=b",
        "Emma+Tom!",
        "a,b",
        "münchen",
    ),
    *("1.10", "007", "2019-01-01", "12:30", "1e3", "0x10", "1_000", ".5", "-1", "inf", "nan"),
    *("yes", "no", "on", "True", "FALSE", "Null", "~", "None", "-", "--x", "@a", "a@b", "+"),
    *("${x}", "${x", "${oc.env:HOME}", "\\${x}", "C:\\${x}\\", "$x", "{a}b", "[a", "a]", "a[0]"),
    *(" a", "a ", "\ta", " ", "", "a: b", "*x", "&x", "!x", "|", "%20", "`a`", "?", "???x", ";"),
    *("C:\\photos", "C:\\photos\\", "\\", "\\\\", "\\'", '\\"', "'", '"', 'a"b', "'a", "a''b"),
    *("a/b", "choice(a,b)", "range(1,3)", "a\nb", "\u00a0", "e\u0301", "🐕", "a\\,b", "=v", "a#b"),
]
# Texts in quotes lose them.
VALUES = {text: text for text in AWKWARD} | {
    "'null'": "null",
    '"quoted"': "quoted",
    "''": "",
    "\"'a'\"": "'a'",
    "'[a]'": "[a]",
    '"true"': "true",
    "'it's'": "it's",
    "'{a: b}'": "{a: b}",
    '" a "': " a ",
}
# These are validated when a config is created.
VALIDATED = ("name", "device")


def takes_text(hint: Any) -> bool:
    return hint is str or (get_origin(hint) is UnionType and str in get_args(hint))


def text_arguments(part: str, name: str) -> dict[str, Any]:
    """Return the text settings of an option file and their annotations."""
    target = locate(part, option(part, name)["_target_"])
    arguments = arguments_of(part, target).items()
    return {f"{part}.{key}": hint for key, (hint, _) in arguments if takes_text(hint)}


@cache
def selections() -> list[tuple[list[str], list[str]]]:
    """Return groups of text settings, with the options of parts that have them."""
    keys = []
    for section, kind in {**get_type_hints(Config), "init": Init}.items():
        if is_dataclass(kind):
            hints = get_type_hints(kind).items()
            keys += [f"{section}.{name}" for name, hint in hints if takes_text(hint)]
        elif takes_text(kind) and section not in VALIDATED:
            keys.append(section)
    groups = [([], keys), ([], ["init"])]

    # Several readers share a setting with the same annotation. One of them is tried.
    seen: set[tuple[str, str]] = set()
    for part in PARTS:
        for name in options(part):
            found = text_arguments(part, name)
            if not {(key, str(hint)) for key, hint in found.items()} <= seen:
                seen |= {(key, str(hint)) for key, hint in found.items()}
                groups.append(([f"{part}={name}"], list(found)))
    return groups


def test_settings_are_those_of_schema_and_signatures():
    keys = {key for _, keys in selections() for key in keys}
    assert {"resume", "init", "init.path", "optim.name", "log.project", "data.root"} <= keys
    assert {"data.classes", "backbone.pretrained", "loss.class_prior"} <= keys
    assert "data.image_size" not in keys


@pytest.mark.parametrize("text", VALUES)
def test_text_survives_quotes_of_hydra(text):
    [argument, setting] = to_hydra([f"data.root={text}", f"resume={text}"])
    node = OmegaConf.create({"argument": parsed(argument), "setting": parsed(setting)})
    # The type of an argument of a part is not known yet, so the quotes are still there.
    assert OmegaConf.to_container(node, resolve=True) == {"argument": text, "setting": VALUES[text]}


def test_every_annotation_with_text_is_literal():
    hints = {str | dict | None}
    for part in PARTS:
        for name in options(part):
            hints |= set(text_arguments(part, name).values())
    for hint in hints:
        assert {text: literal(text, hint) for text in VALUES} == VALUES


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("null", str | None, None),
        ("null", str, "null"),
        ("true", bool | str, None),
        ("true", str | None, "true"),
        ("[0.1,0.2]", Sequence[float] | str | None, None),
        ("[0.1,0.2]", str | None, "[0.1,0.2]"),
        ("{path: x}", str | dict | None, None),
        ("{path: x}", str | None, "{path: x}"),
        (
            "[Tür, Orte/Köln,007 , it's]",
            str | list[str] | None,
            ["Tür", "Orte/Köln", "007", "it's"],
        ),
        ("""["a, b",'c',null, "]""", list[str], ["a, b", "c", "null", '"']),
        ("[]", list[str], []),
        ("3", int | None, None),
    ],
)
def test_other_types_have_their_own_meaning(text, hint, value):
    assert literal(text, hint) == value


@pytest.mark.parametrize("number", range(len(selections())))
def test_all_text_settings_are_literal(number):
    """Each setting has several values. The tests above have all values for each annotation."""
    chosen, keys = selections()[number]
    for start in (number, number + len(VALUES) // 2):
        texts = [list(VALUES)[(start + 5 * i) % len(VALUES)] for i in range(len(keys))]
        words = [f"{key}={text}" for key, text in zip(keys, texts, strict=True)]
        found = flat(to_dict(override(experiment("digits"), chosen + words)))
        assert [found[key] for key in keys] == [VALUES[text] for text in texts]


def test_command_line_and_fit_equal_override():
    chosen = ["data=csv", "loss=partial", "backbone=timm", "name=${x} 1.10"]
    keys = selections()[0][1] + list(text_arguments("data", "csv"))
    keys += list(text_arguments("loss", "partial")) + list(text_arguments("backbone", "timm"))
    texts = [
        "${x}",
        "${x",
        "007",
        "a,b",
        "[a",
        "C:\\photos\\",
        '"null"',
        "a: b",
        " it's",
        "Fotos (1)",
    ]
    words = chosen + [f"{key}={texts[i % len(texts)]}" for i, key in enumerate(keys)]
    words += ["data.image_size=96", "head.num_groups=5", "train.freeze=[007,'a,b']"]

    config = compose(["+experiment=digits", *words])
    assert config == override(experiment("digits"), words) == mldec.api._compose("digits", words)
    assert config.name == "${x} 1.10"
    assert (config.data["image_size"], config.head["num_groups"]) == (96, 5)
    assert config.train.freeze == ["007", "a,b"]
    # A checkpoint and config.yaml have the same values.
    assert parse(to_dict(config)) == config
    assert parse(OmegaConf.create(to_yaml(config))) == config


def test_a_sweep_is_divided_at_commas_outside_quotes(here):
    [_, *words] = to_hydra(["-m", "data.val=a,007", "name='x,y',z", "optim.lr=1e-3,1e-4"])
    assert words == ["++data.val='a','007'", "name='x,y','z'", "optim.lr=1e-3,1e-4"]
    assert to_hydra(["-m", "head.num_groups=range(1,4)"])[1] == "++head.num_groups=range(1,4)"
    (here / "a,b").mkdir()
    with pytest.raises(ConfigError, match=r"^data\.root: .*a,b"):
        to_hydra(["--multirun", "data.root=a,b"])
    with pytest.raises(ConfigError, match=r"^optim\.lr"):
        override(experiment("digits"), ["optim.lr=1,2"])


def test_words_of_other_kinds_still_work():
    words = ["head=gap", "head._target_=mldec.heads.MLDecoder", "plugins=[a,b]", "loss=bce"]
    words += ["train.epochs=3", "loss.pos_weight=2", "hydra.sweep.dir=x y"]
    config = compose(["+experiment=digits", *words])
    assert config.head["_target_"] == "mldec.heads.MLDecoder"
    assert (config.plugins, config.train.epochs) == (["a", "b"], 3)
    assert config.loss["pos_weight"] == 2
    assert "image_size" not in compose(["+experiment=digits", "~data.image_size"]).data


def test_target_on_the_command_line_replaces_the_part():
    words = ["head=csra", "head.embed_dim=32", "head._target_=mldec.heads.MLDecoder"]
    expected = {"_target_": "mldec.heads.MLDecoder", "embed_dim": 32}
    assert len(option("head", "csra")) > 1
    assert compose(["+experiment=digits", *words]).head == expected
    assert override(experiment("digits"), words[1:]).head == expected

    # The settings of all readers belong to the recipe.
    words = ["data=voc2012", "data.flip=false", "data.root=a"]
    before = compose(["+experiment=digits", *words]).data
    data = compose(["+experiment=digits", *words, "data._target_=mldec.data.readers.coco"]).data
    assert "year" in before
    assert "year" not in data
    assert (data["root"], data["flip"]) == ("a", False)
    assert data["image_size"] == before["image_size"]


def test_annotation_of_an_unknown_name_is_a_config_error():
    def mine(*, root: str) -> "Missing":  # noqa: F821
        pass

    with pytest.raises(ConfigError, match=r"mine.*Missing"):
        signature(mine)
