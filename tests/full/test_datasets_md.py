"""DATASETS.md speaks of options and arguments that exist, and messages of sections that it has."""

import re
from inspect import signature
from pathlib import Path

import pytest
from support import read_option

from mldec.build import SHARED
from mldec.config.compose import config_dir
from mldec.data.settings import VectorSettings

TEXT = (Path(__file__).parents[2] / "DATASETS.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
PACKAGE = Path(__file__).parents[2] / "mldec"


@pytest.mark.parametrize("group", ["data", "loss"])
def test_options_and_arguments_exist(group: str) -> None:
    options = {path.stem: read_option(path) for path in Path(config_dir(), group).glob("*.yaml")}
    named = set(re.findall(rf"\b{group}=(\w+)", TEXT))
    assert named <= set(options)
    if group == "data":
        assert named == set(options), "an option without a section"
    known = {name for part, _ in options.values() for name in signature(part).parameters}
    if group == "data":
        groups = (*SHARED, VectorSettings)
        known |= {name for kind in groups for name in signature(kind).parameters}
        known.add("changed")
    arguments = set(re.findall(rf"(?<!/)\b{group}\.(\w+)", TEXT))
    assert arguments - {"csv", "jpg"} <= known


def test_messages_name_sections_that_are_there() -> None:
    sections = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"DATASETS.md, section (.+?)\"", path.read_text())
    }
    assert len(sections) >= 10
    assert {
        name for name in sections if not any(heading.startswith(name) for heading in HEADINGS)
    } == set()


def test_the_contents_lead_to_every_section() -> None:
    anchors = re.findall(r"\]\(#([^)]*)\)", TEXT)
    assert anchors == [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADINGS
    ]
