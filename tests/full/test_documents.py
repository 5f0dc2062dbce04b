"""The documents are true: links lead somewhere, and commands, settings, paths and the tree exist.

The code blocks and the text between backticks are read; nothing is trained or downloaded.
"""

import argparse
import ast
import importlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import official
import pytest
import torch
from support import read_option

from mldec import build
from mldec.__main__ import COMMANDS, module_of
from mldec.config.compose import check_key, check_option, compose, config_dir, options
from mldec.config.schema import PARTS
from mldec.errors import ConfigError
from mldec.tools import summary

TOP = Path(__file__).parents[2]
FILES = [
    *TOP.glob("*.md"),
    *TOP.glob("docs/**/*.md"),
    *TOP.glob("benchmarks/*.md"),
    *TOP.glob("tests/**/*.md"),
]
DOCUMENTS = {path.relative_to(TOP).as_posix(): path for path in sorted(FILES)}
LARGEST_README = 8_500  # bytes

# What a page tells you to write, and what only a machine with a GPU writes.
TO_BE_WRITTEN = re.compile(r"mine\b|benchmarks/gpu\.json|backbone/conv\.yaml")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(
    r"(?<![\w/.*:-])((?:mldec|scripts|tests|configs|benchmarks|docs)/[\w./-]*[\w/]|\.ci/run)"
)
SECTIONS = "|".join((*PARTS, "train", "optim", "schedule", "mix", "log"))
PART_SETTING = re.compile(rf"(?<![\w./])((?:{SECTIONS})\.[a-z_]+)\b(?!\.\w)")
FILE_NAMES = {"data.csv", "data.json", "data.yaml"}  # which look like settings of the data
OPTIONAL = re.compile(r"\[((?:--|\w[\w.]*=)[^\]]*)\]")
COMMAND = re.compile(r"(?:[A-Z]+=\S+ )*(?:python |torchrun |sbatch |scripts/\S+ |mldec(?: |$))")
LAUNCHERS = {
    "scripts/launch/one_node.sh",
    "scripts/launch/several_nodes.sh",
    "scripts/launch/slurm.sbatch",
}

each_document = pytest.mark.parametrize("name", DOCUMENTS)


def text_of(name: str) -> str:
    return DOCUMENTS[name].read_text(encoding="utf-8")


def blocks(text: str, *languages: str) -> list[str]:
    """Return the fenced code of some languages; "" is code without one."""
    return [code for language, code in FENCE.findall(text) if language in languages]


def prose(text: str) -> str:
    """Return a document without its fenced code."""
    return FENCE.sub("", text)


# Links


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, folder: Path) -> list[str]:
    """Return the relative links of a document in a folder that lead nowhere."""
    broken = []
    for link in LINK.findall(CODE_SPAN.sub("", prose(text))):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = folder / path if path else None
        if target is not None and not target.exists():
            broken.append(link)
        elif anchor:
            there = text if target is None else target.read_text(encoding="utf-8")
            broken += [link] if anchor not in anchors(there) else []
    return broken


@each_document
def test_links_lead_somewhere(name: str) -> None:
    assert broken_links(text_of(name), DOCUMENTS[name].parent) == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    assert "docs/README.md" in LINK.findall(text_of("README.md"))
    links = {link.partition("#")[0] for link in LINK.findall(text_of("docs/README.md"))}
    linked = {os.path.normpath(f"docs/{link}") for link in links}
    pages = {name for name in DOCUMENTS if not name.startswith(("tests/", "benchmarks/"))}
    assert pages - {"README.md", "docs/README.md"} <= linked

    assert "../benchmarks/README.md" in LINK.findall(text_of("docs/results.md"))
    studies = {name for name in DOCUMENTS if name.startswith("benchmarks/")}
    linked = {f"benchmarks/{link}" for link in LINK.findall(text_of("benchmarks/README.md"))}
    assert studies - {"benchmarks/README.md"} <= {link.partition("#")[0] for link in linked}


def test_the_readme_is_short() -> None:
    assert DOCUMENTS["README.md"].stat().st_size <= LARGEST_README


# Paths


def missing_paths(text: str) -> set[str]:
    """Return the paths of this project that a text names and that do not exist."""
    named = {path for path in PATH.findall(text) if not TO_BE_WRITTEN.search(path)}
    return {path for path in named if not (TOP / path).exists()}


@each_document
def test_paths_exist(name: str) -> None:
    if name != "CHANGELOG.md":  # which also names what is gone
        assert missing_paths(text_of(name)) == set()


# The tree of the package


def drawn_tree(text):
    """Return the paths in the two drawings of the package, folders with a slash at their end."""
    drawings = [code for code in blocks(text, "") if code.startswith("mldec/\n")]
    assert len(drawings) == 2
    paths, folders = ["mldec/"], []
    for line in "\n".join(drawings).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        files = re.findall(r"\w+\.py\b", line)
        folder = re.match(r" *(\w+/)", line)
        folders = folders[:depth]
        if folder:
            folders.append(folder[1])
            paths += ["".join(folders)] if depth else []
        else:
            paths += ["".join(folders) + file for file in files]
    return paths


def real_tree() -> set[str]:
    """Return the folders and modules of the package; a folder stands for its __init__.py."""
    modules = {path.relative_to(TOP) for path in (TOP / "mldec").rglob("*.py")}
    folders = {f"{path.parent.as_posix()}/" for path in modules}
    files = {path.as_posix() for path in modules if path.name not in ("__init__.py", "__main__.py")}
    return folders | files | {"mldec/__main__.py"}


def test_the_tree_is_the_real_one() -> None:
    drawn = drawn_tree(text_of("docs/extending.md"))
    assert len(drawn) == len(set(drawn))
    assert set(drawn) - real_tree() == set(), "drawn, but not there"
    assert real_tree() - set(drawn) == set(), "there, but not drawn"


# Settings


@cache
def part_arguments(part: str) -> set[str]:
    """Return the arguments that some option of a part takes."""
    names: set[str] = set()
    for path in Path(config_dir(), part).glob("*.yaml"):
        target, _ = read_option(path)
        names |= build._accepted(part, target).keys()
    return names


def check_setting(setting: str) -> None:
    """Raise a `ConfigError` unless a setting, such as `data.root=/data/coco`, exists."""
    key, _, value = setting.lstrip("+").partition("=")
    part, dot, argument = key.partition(".")
    is_name = re.fullmatch(r"[a-z]\w*", value) is not None
    if key == "experiment":
        if is_name and value not in options("experiment"):
            raise ConfigError(f"there is no experiment {value}")
    elif key.startswith("hydra."):
        return
    elif part in PARTS and not dot:
        if is_name and value != "mine":
            check_option(key, value)
    elif part in PARTS:
        if argument.partition(".")[0] not in part_arguments(part):
            raise ConfigError(f"no option of {part} takes {argument}")
    else:
        check_key(key)


def settings_in_prose(text: str) -> set[str]:
    """Return the settings that stand between backticks, outside of commands."""
    settings = set()
    for span in CODE_SPAN.findall(prose(text)):
        settings |= set(PART_SETTING.findall(span))
        chosen = re.findall(rf"(?:^|\s)(\+?(?:{'|'.join(PARTS)}|experiment)=\w+)", span)
        settings |= set(chosen)
    return settings - FILE_NAMES


def wrong_settings(text: str) -> list[str]:
    """Return what is wrong with the settings in a text."""
    faults = []
    for setting in sorted(settings_in_prose(text)):
        try:
            check_setting(setting)
        except ConfigError as error:
            faults.append(str(error))
    return faults


@each_document
def test_settings_in_the_text_exist(name: str) -> None:
    assert wrong_settings(text_of(name)) == []


# Commands


class Line(NamedTuple):
    """A command of a document: its name or script, its words, and the line that follows it."""

    command: str | None  # "" for `mldec` alone
    script: str | None
    words: list[str]
    answer: str


def shell_lines(code: str) -> Iterator[tuple[str, str]]:
    """Yield each command line of a block, and the line after it."""
    lines = re.sub(r"\\\n\s*", "", code).splitlines()
    has_prompt = any(line.startswith("$ ") for line in lines)
    for line, answer in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("$ ") or not has_prompt:
            for piece in line.removeprefix("$ ").split(" && "):
                yield piece, answer


def understood(line: str, answer: str = "") -> Line | None:
    """Return a command of ours; None for another line."""
    if not COMMAND.match(line):
        return None
    line = OPTIONAL.sub(r"\1", line)
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z]+=\S*", words[0]):
        del words[0]

    for place, word in enumerate(words):
        if word in LAUNCHERS:
            return Line(command="train", script=word, words=words[place + 1 :], answer=answer)
        if re.fullmatch(r"scripts/[\w/]+\.(py|sh)", word):
            return Line(command=None, script=word, words=words[place + 1 :], answer=answer)
        if word in ("mldec.train", "mldec.evaluate"):
            rest = words[place + 1 :]
            return Line(command=word.removeprefix("mldec."), script=None, words=rest, answer=answer)
        if word == "mldec":
            rest = words[place + 1 :]
            if not rest or rest[0].startswith("-"):
                return Line(command="", script=None, words=rest, answer=answer)
            name = rest[0].replace("_", "-")
            return Line(command=name, script=None, words=rest[1:], answer=answer)
    return None


def commands_of(text: str) -> list[Line]:
    """Return the commands in the code blocks of a document, and those between backticks."""
    lines = [line for code in blocks(text, "", "bash", "sh") for line in shell_lines(code)]
    for span in CODE_SPAN.findall(prose(text)):
        # An option alone, such as `mldec predict --json`, stands for itself.
        if not re.search(r" --[\w-]+$", span):
            lines.append((" ".join(span.split()), ""))
    found = [understood(line, answer) for line, answer in lines]
    return [line for line in found if line is not None]


class NotAccepted(Exception):
    """What a parser says of wrong words."""


def parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Parse words with the parser of a command, several times in one process."""

    def refuse(message: str) -> None:
        raise NotAccepted(message)

    parser.error = refuse  # type: ignore[method-assign, assignment]
    args, rest = parser.parse_known_args(words)
    wrong = [word for word in rest if word.startswith("-") or "=" not in word]
    if wrong:
        raise NotAccepted(f"unknown: {' '.join(wrong)}")
    args.settings = [*getattr(args, "settings", []), *rest]
    return args


def check_train(words: list[str]) -> None:
    """Compose the config of a training, and check its parts, without building them."""
    if "--help" in words or words == ["--version"]:
        return
    if "--cfg" in words:
        place = words.index("--cfg")
        words = [*words[:place], *words[place + 2 :]]
    # The example of a plugin is run by tests/unit/config/test_plugin_example.py.
    if "--config-dir=configs" in words:
        return
    words = [word for word in words if not word.startswith("hydra.")]
    if "-m" in words:
        # A sweep: the first of the values of each setting.
        words = [word.partition(",")[0] for word in words if word != "-m"]
    if words == ["..."] or not words:
        return
    build.check(compose(words))


def check_script(script: str, words: list[str]) -> None:
    """Look for the options of a script in what it answers to --help."""
    known = help_of(script) if script.endswith(".py") else ""
    for word in words:
        if word.startswith("--") and not re.search(rf"{word}\b", known):
            raise NotAccepted(f"{script} has no option {word}")
        is_argument = word in known  # such as SET=FOLDER
        if "=" in word and not word.startswith("--") and not is_argument:
            check_setting(word)


# The other commands have parsers of their own kinds.
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    name: importlib.import_module(module_of(name)).parser
    for name in COMMANDS
    if name not in ("train", "summary")
}


def check_command(line: Line) -> None:
    """Raise a `ConfigError` or `NotAccepted` unless the words of a command are accepted."""
    words = [word for word in line.words if word != "..."]
    if line.script is not None and line.command is None:
        assert (TOP / line.script).exists(), line.script
        check_script(line.script, words)
    elif line.command in ("", "NAME"):
        assert words in ([], ["--help"], ["--version"])
    elif line.command == "train":
        check_train(words)
    elif line.command == "summary":
        options = [word for word in words if word.startswith("--")]
        source = Path(summary.__file__).read_text(encoding="utf-8")
        assert all(f'"{option}"' in source for option in options), options
    else:
        if line.command not in PARSERS:
            raise NotAccepted(f"there is no command {line.command}")
        if not words or words == ["--version"]:  # the command by its name alone
            return
        args = parse(PARSERS[line.command](), words)
        for setting in args.settings:
            check_setting(setting)


@each_document
def test_commands_are_accepted(name: str) -> None:
    for line in commands_of(text_of(name)):
        # What predict refuses is about files, which are not there to be looked at here.
        is_refusal = line.answer.startswith("mldec: ") and "stopped by" not in line.answer
        if is_refusal and line.command != "predict":
            with pytest.raises(ConfigError) as caught:
                check_command(line)
            assert f"mldec: {caught.value}" == line.answer
        else:
            check_command(line)


def test_documents_hold_commands() -> None:
    found = [line for name in DOCUMENTS for line in commands_of(text_of(name))]
    assert set(COMMANDS) <= {line.command for line in found}
    assert len(found) > 60


def test_the_first_commands_are_those_that_ci_runs() -> None:
    lines = [
        line for line in text_of("README.md").splitlines() if line.startswith("pip install -e ")
    ]
    assert lines == [
        "pip install -e . && mldec train +experiment=digits",
        'pip install -e ".[dev]" && pytest',
    ]


# What can be run at once


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python as a shell would, in the folder of the project."""
    path = os.pathsep.join([str(TOP), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *words]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, cwd=TOP, env=environment)


@cache
def help_of(script: str) -> str:
    """Run a script with --help in this process, which has imported torch already."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", [script, "--help"])
        patch.syspath_prepend(str((TOP / script).parent))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(TOP / script), run_name="__main__")
    assert not ended.value.code
    return out.getvalue()


def named_commands() -> set[str]:
    found = [line.command for name in DOCUMENTS for line in commands_of(text_of(name))]
    return {command for command in found if command not in (None, "", "NAME")}


def named_scripts() -> set[str]:
    found = [line.script for name in DOCUMENTS for line in commands_of(text_of(name))]
    return {script for script in found if script is not None and script.endswith(".py")}


@pytest.mark.parametrize("command", sorted(named_commands()))
def test_named_commands_answer(command: str) -> None:
    done = run("-m", "mldec", command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("script", sorted(named_scripts()))
def test_named_scripts_answer(script: str) -> None:
    assert help_of(script)


def test_the_list_of_commands_is_that_of_the_documents() -> None:
    done = run("-m", "mldec")
    listed = set(re.findall(r"^  mldec ([\w-]+)", done.stdout, re.MULTILINE))
    assert done.returncode == 0
    assert listed == named_commands()


@each_document
def test_python_examples_compile_and_import(name: str) -> None:
    for code in blocks(text_of(name), "python"):
        tree = ast.parse(code)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), name, "exec"), {})


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_examples_of_own_model_run_as_they_stand(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The head of 20 classes that the third example reads, for features of width 768.
    shapes = official.read("head_full_decoding.keys")
    shapes["decoder.embed_standart.weight"] = [768, 768]
    torch.save(official.rebuilt(shapes), tmp_path / "official_head.pth")
    monkeypatch.chdir(tmp_path)

    examples = blocks(text_of("docs/own_model.md"), "python")
    assert len(examples) == 3
    namespace: dict[str, Any] = {}
    exec(compile(examples[number], "docs/own_model.md", "exec"), namespace)

    if number == 0:
        losses = namespace["losses"]
        assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
        assert namespace["accuracy"] > 0.9
    elif number == 1:
        assert namespace["scores"].shape == (1, 80)
        assert namespace["attention"].shape == (1, 20, 196)
    else:
        assert namespace["logits"].shape == (2, 20)
        bias = official.rebuilt(shapes)["decoder.duplicate_pooling_bias"]
        assert torch.equal(namespace["model"].heads.pool_bias, bias)
