"""The generated reference is complete, and documents render on the site as on GitHub."""

import dataclasses
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import forked
import pytest
import yaml
from support import Cli

from mldec.__main__ import COMMANDS
from mldec.config import signatures
from mldec.config.compose import compose, options, to_dict
from mldec.config.schema import PARTS
from mldec.heads import MLDecoder

pytest.importorskip("griffe")
markdown = pytest.importorskip("markdown")
markdown_it = pytest.importorskip("markdown_it")

TOP = Path(__file__).parents[2]
DOCUMENTS = [*TOP.glob("*.md"), *TOP.glob("docs/*.md"), *TOP.glob("benchmarks/*.md")]
SECTIONS = ("train", "mix", "optim", "schedule", "log")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the site."""
    folder = tmp_path_factory.mktemp("site")
    script = TOP / "scripts" / "docs" / "build.py"
    done = forked.run(forked.script, str(script), str(folder))
    assert done.status == 0, done.err
    return folder


@pytest.fixture(scope="module")
def pages(sources: Path) -> dict[str, str]:
    """The generated pages."""
    reference = sources / "reference"
    return {f"reference/{path.name}": path.read_text("utf-8") for path in reference.glob("*.md")}


class Row(NamedTuple):
    """A row of a table in a generated page."""

    section: str
    name: str
    description: str


def rows(page: str) -> Iterator[Row]:
    """Yield the rows of all tables in a page."""
    section = ""
    columns: list[str] = []
    for line in page.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            columns = []
        elif not columns:
            columns = cells
        elif cells[0] != "---":
            assert len(cells) == len(columns), line
            description = "content" if "content" in columns else "description"
            yield Row(section, cells[0].strip("`"), cells[columns.index(description)])


def names(page: str, section: str | None = None) -> set[str]:
    """Return the names in the tables of a page or of one section."""
    return {row.name for row in rows(page) if section in (None, row.section)}


def test_no_description_is_empty(pages: dict[str, str]) -> None:
    # A page about settings, commands or experiments has tables.
    for name in pages.keys() - {"reference/api.md"}:
        table = list(rows(pages[name]))
        assert table, name
        assert [row for row in table if not row.description] == []


def test_all_settings_are_listed(pages: dict[str, str]) -> None:
    settings = to_dict(compose(["+experiment=digits"]))
    expected = {key for key in settings if key not in SECTIONS}
    for section in SECTIONS:
        expected |= {f"{section}.{key}" for key in settings[section]}
    expected |= {"init.path", "init.classes", "init.synonyms"}
    assert names(pages["reference/settings.md"]) == expected


@pytest.mark.parametrize("part", PARTS)
def test_all_arguments_are_listed(part: str, pages: dict[str, str]) -> None:
    page = pages[f"reference/{part}.md"]
    assert {f"{part}={name}" for name in options(part)} <= names(page)

    for name in options(part):
        node = yaml.safe_load((TOP / "configs" / part / f"{name}.yaml").read_text())
        target = signatures.locate(part, node.pop("_target_"))
        expected = set(node)
        for parameter in inspect.signature(target, eval_str=True).parameters.values():
            if dataclasses.is_dataclass(parameter.annotation):
                expected |= {field.name for field in dataclasses.fields(parameter.annotation)}
            else:
                expected.add(parameter.name)
        expected.difference_update(signatures.RUNTIME_ARGUMENTS[part])

        listed = names(page, target.__name__)
        if part == "data":
            listed |= names(page, "Shared")
        assert {f"{part}.{key}" for key in expected} <= listed


def test_all_experiments_are_listed(pages: dict[str, str]) -> None:
    expected = {f"[`{name}`](#{name})" for name in options("experiment")}
    assert names(pages["reference/experiments.md"]) == expected


COMMAND_LINES = [(name,) for name in COMMANDS if name != "train"]


@pytest.mark.parametrize("words", COMMAND_LINES, ids=" ".join)
def test_all_options_are_listed(words: tuple[str, ...], pages: dict[str, str], cli: Cli) -> None:
    # argparse prints an option at the start of a line, after two spaces.
    out = cli(*words, "--help").out
    expected = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", out, re.MULTILINE))
    expected -= {"--help", "--version"}
    assert expected

    listed = names(pages["reference/commands.md"], f"mldec {' '.join(words)}")
    assert {name for name in listed if name.startswith("--")} == expected


def test_public_objects_are_listed(pages: dict[str, str]) -> None:
    headings = set(re.findall(r"^### `(\S+)`$", pages["reference/api.md"], re.MULTILINE))
    for module_name in ("mldec", "mldec.heads", "mldec.losses", "mldec.checkpoint"):
        module = importlib.import_module(module_name)
        assert {f"{module_name}.{name}" for name in module.__all__} <= headings


def test_objects_have_signatures_and_arguments(pages: dict[str, str]) -> None:
    page = pages["reference/api.md"]
    head = page.partition("\n### `mldec.heads.MLDecoder`\n")[2].partition("\n### ")[0]
    assert (
        "MLDecoder(\n    in_features: int,\n    num_classes: int | None = None,\n    *,\n" in head
    )
    described = set(re.findall(r"^- `(\w+)`: \S", head, re.MULTILINE))
    assert set(inspect.signature(MLDecoder).parameters) <= described
    assert "\n#### `MLDecoder.forward`\n" in head


def test_llms_txt_lists_all_pages(sources: Path) -> None:
    title, _, summary, _, *lines = (sources / "llms.txt").read_text("utf-8").splitlines()
    assert title == "# mldec"
    assert re.fullmatch(r"> [A-Z].*\.", summary)

    listed = set()
    for line in lines:
        if not line or line.startswith("## "):
            continue
        entry = re.fullmatch(r"- \[[^\]]+\]\(([^)]+)\): [A-Z].*[^ ]", line)
        assert entry, line
        listed.add(entry[1].removesuffix("/"))
    expected = {"."}
    for pattern in ("*.md", "docs/*.md", "reference/*.md", "benchmarks"):
        for path in sources.glob(pattern):
            if path.name not in ("README.md", "index.md"):
                expected.add(path.relative_to(sources).with_suffix("").as_posix())
    assert listed == expected


TAGS = ("ul", "ol", "li", "table", "tr", "blockquote", "h2", "h3", "img")


def count_tags(html: str) -> Counter[str]:
    return Counter(re.findall(rf"<({'|'.join(TAGS)})[ >]", html))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(TOP).as_posix())
def test_documents_render_as_on_github(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    on_github = markdown_it.MarkdownIt("gfm-like", {"linkify": False}).render(text)
    # The extensions of mkdocs and of mkdocs.yml.
    extensions = ["tables", "attr_list", "admonition", "pymdownx.superfences", "pymdownx.details"]
    on_site = markdown.markdown(text, extensions=extensions)
    assert count_tags(on_site) == count_tags(on_github)
