"""What earlier versions called a part leads to the part of today, with what its defaults were."""

import json
from pathlib import Path

import pytest

import mldec
from mldec import build
from mldec.config.moved import MOVED, RENAMED, completed, renamed
from mldec.errors import ConfigError

DEFAULTS = json.loads((Path(mldec.__file__).parent / "config" / "defaults_0_1.json").read_text())
KINDS = {"data": "data", "backbones": "backbone", "heads": "head", "losses": "loss"}


def kind_of(target: str) -> str:
    return KINDS[target.split(".")[1]]


@pytest.mark.parametrize("old", MOVED)
def test_what_has_moved_is_there(old: str) -> None:
    with pytest.raises(ConfigError, match=r"does not exist|is refused"):
        build.locate(kind_of(old), old)  # or there would be no need for an entry
    assert callable(build.locate(kind_of(old), MOVED[old]))


@pytest.mark.parametrize("old", DEFAULTS)
def test_a_part_of_the_first_version_is_built_with_its_defaults(old: str) -> None:
    """Every part of version 0.1, its required arguments apart, takes today what it took then."""
    node = renamed(completed({"_target_": old}))
    target = build.locate(kind_of(old), node["_target_"])
    accepted = build._accepted(kind_of(old), target)
    assert node.keys() - {"_target_"} <= accepted.keys()
    for name in node.keys() - {"_target_"}:
        assert build.matches(node[name], accepted[name].hint), name


def test_a_node_keeps_what_it_says() -> None:
    old = {"_target_": "mldec.data.coco.coco", "root": "/coco", "image_size": 64}
    whole = completed(old)
    assert whole["image_size"] == 64
    assert whole["cutout"] == 0.5
    assert renamed(whole) == {**whole, "_target_": "mldec.data.readers.coco.coco"}
    assert old == {"_target_": "mldec.data.coco.coco", "root": "/coco", "image_size": 64}


def test_a_renamed_argument_keeps_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RENAMED, "mldec.data.readers.coco.coco", {"size": "image_size"})
    for target in ("mldec.data.coco.coco", "mldec.data.readers.coco.coco"):
        node = renamed({"_target_": target, "size": 64})
        assert node == {"_target_": "mldec.data.readers.coco.coco", "image_size": 64}


@pytest.mark.parametrize(
    "node", [{"_target_": "mine.head.Head", "width": 3}, {"_target_": 5}, {"_target_": None}, {}]
)
def test_other_nodes_are_left_alone(node: dict[str, object]) -> None:
    assert completed(node) == node
    assert renamed(node) == {"_target_": None, **node}
