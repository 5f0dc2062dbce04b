"""Links, paths, settings, commands and code in the documents are valid."""

import argparse
import ast
import importlib
import inspect
import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import official
import pytest
import torch
from sklearn.metrics import average_precision_score
from support import read_option
from timm.layers.ml_decoder import MLDecoder as TimmMLDecoder

from mldec import build
from mldec.__main__ import COMMANDS, module_of
from mldec.config import signatures
from mldec.config.compose import check_key, check_option, compose, config_dir, options
from mldec.config.schema import PARTS, RETIRED
from mldec.errors import ConfigError
from mldec.heads import MLDecoder

TOP = Path(__file__).parents[2]
DOCUMENTS: dict[str, str] = {}  # their texts by path
for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "examples/*.md", "tests/**/*.md"):
    for path in sorted(TOP.glob(pattern)):
        DOCUMENTS[path.relative_to(TOP).as_posix()] = path.read_text(encoding="utf-8")
PAGES = [name for name in DOCUMENTS if name.startswith("docs/") or "/" not in name]
MAX_README_BYTES = 7_000
MAX_PAGE_WORDS = 1_500

# Files that the reader writes, and the output of a machine with a GPU.
NOT_IN_GIT = re.compile(r"mine\b|benchmarks/gpu\.json|backbone/conv\.yaml")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(
    r"(?<![\w/.*:-])((?:mldec|scripts|tests|configs|benchmarks|docs|examples)/[\w./-]*[\w/]|\.ci/run)"
)
SECTIONS = "|".join(PARTS + ("train", "optim", "schedule", "mix", "log"))
PART_SETTING = re.compile(rf"(?<![\w./])((?:{SECTIONS})\.[a-z_]+)\b(?!\.\w)")
PART_OPTION = re.compile(rf"(?:^|\s)(\+?(?:{'|'.join(PARTS)}|experiment)=\w+)")
# They look like settings.
FILE_NAMES = {"data.csv", "data.json", "data.yaml", "train.csv", "train.json", "train.txt"}
OPTIONAL = re.compile(r"\[((?:--|\w[\w.]*=)[^\]]*)\]")
COMMAND = re.compile(r"(?:[A-Z]+=\S+ )*(?:python |torchrun |sbatch |scripts/\S+ |mldec(?: |$))")
SCRIPT = re.compile(r"(?:scripts|examples)/[\w/]+\.(py|sh)")

each_document = pytest.mark.parametrize("name", DOCUMENTS)


def code_blocks(text: str, *languages: str) -> list[str]:
    """Return the fenced code blocks in some languages; "" is a block without a language."""
    return [code for language, code in FENCE.findall(text) if language in languages]


def prose(text: str) -> str:
    """Return a document without its fenced code."""
    return FENCE.sub("", text)


# Links and pages


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as on GitHub."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_links_are_valid(name: str) -> None:
    text = DOCUMENTS[name]
    for link in LINK.findall(CODE_SPAN.sub("", prose(text))):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = TOP / name
        if path:
            target = target.parent / path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def linked_pages(name: str) -> set[str]:
    """Return the pages that a document links to, relative to the top folder."""
    links = {link.partition("#")[0] for link in LINK.findall(DOCUMENTS[name])}
    return {os.path.normpath(Path(name).parent / link) for link in links}


def test_readme_leads_to_all_pages() -> None:
    assert "docs/README.md" in linked_pages("README.md")
    assert set(PAGES) - {"README.md", "docs/README.md"} <= linked_pages("docs/README.md")

    assert "benchmarks/README.md" in linked_pages("docs/results.md")
    files = {f"benchmarks/{path.name}" for path in (TOP / "benchmarks").glob("*.json*")}
    assert files <= linked_pages("benchmarks/README.md")


def test_pages_are_short() -> None:
    assert len(DOCUMENTS["README.md"].encode()) <= MAX_README_BYTES
    words = {name: len(DOCUMENTS[name].split()) for name in PAGES}
    long_pages = {name for name, count in words.items() if count > MAX_PAGE_WORDS}
    assert long_pages == set()


# Paths and the tree of the package


@each_document
def test_paths_exist(name: str) -> None:
    for path in PATH.findall(DOCUMENTS[name]):
        assert (TOP / path).exists() or NOT_IN_GIT.search(path), path


def documented_tree() -> list[str]:
    """Return the paths in the two trees of CONTRIBUTING.md. Folders end with a slash."""
    blocks = code_blocks(DOCUMENTS["CONTRIBUTING.md"], "")
    trees = [code for code in blocks if code.startswith("mldec/\n")]
    assert len(trees) == 2

    paths = ["mldec/"]
    folders: list[str] = []
    for line in "\n".join(trees).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        folder = re.match(r" *(\w+/)", line)
        if folder is None:
            paths += ["".join(folders) + file for file in re.findall(r"\w+\.py\b", line)]
            continue
        folders.append(folder[1])
        if depth:
            paths.append("".join(folders))
    return paths


def test_documented_tree_is_complete() -> None:
    actual = set()
    for path in (TOP / "mldec").rglob("*.py"):
        relative = path.relative_to(TOP)
        actual.add(f"{relative.parent.as_posix()}/")
        if path.name != "__init__.py":
            actual.add(relative.as_posix())

    documented = documented_tree()
    assert len(documented) == len(set(documented))
    assert set(documented) - actual == set(), "these files do not exist"
    assert actual - set(documented) == set(), "these files are not in CONTRIBUTING.md"


# Settings


@cache
def part_arguments(part: str) -> set[str]:
    """Return the arguments of all options of a part."""
    names: set[str] = set()
    for path in Path(config_dir(), part).glob("*.yaml"):
        target, _ = read_option(path)
        names |= signatures.arguments_of(part, target).keys()
    return names


def check_setting(setting: str) -> None:
    """Raise an error unless a setting exists, such as `data.root=/data/coco`."""
    key, _, value = setting.lstrip("+").partition("=")
    part, dot, argument = key.partition(".")
    is_name = re.fullmatch(r"[a-z]\w*", value) is not None
    if key == "experiment":
        assert value in options("experiment") or not is_name, setting
    elif key.startswith("hydra."):
        return
    elif part in PARTS and not dot:
        if is_name and value != "mine":
            check_option(key, value)
    elif part in PARTS:
        name = argument.partition(".")[0]
        assert name == "_target_" or name in part_arguments(part), setting
    else:
        check_key(key)


@each_document
def test_settings_in_text_exist(name: str) -> None:
    settings: set[str] = set()
    for span in CODE_SPAN.findall(prose(DOCUMENTS[name])):
        settings |= set(PART_SETTING.findall(span))
        settings |= set(PART_OPTION.findall(span))
    for setting in sorted(settings - FILE_NAMES):
        # The changelog lists removed settings.
        if setting.lstrip("+") not in RETIRED:
            check_setting(setting)


# Commands


class Command(NamedTuple):
    """A command in a document."""

    name: str  # such as "train", or the path of a script; "" is `mldec` without a command
    words: list[str]
    output: str  # the next line of the document


def shell_lines(code: str) -> Iterator[tuple[str, str]]:
    """Yield each command line of a block, and the line after it."""
    lines = re.sub(r"\\\n\s*", "", code).splitlines()
    has_prompt = any(line.startswith("$ ") for line in lines)
    for line, output in zip(lines, lines[1:] + [""], strict=True):
        if line.startswith("$ ") or not has_prompt:
            for piece in line.removeprefix("$ ").split(" && "):
                yield piece, output


def parse_line(line: str, output: str) -> Command | None:
    """Return the command of a line, or None if it is not ours."""
    if not COMMAND.match(line):
        return None
    line = OPTIONAL.sub(r"\1", line).replace("$SLURM_ARRAY_TASK_ID", "0")
    words = shlex.split(line, comments=True)
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        if word == "mldec.train" or word.startswith("scripts/launch/"):
            return Command("train", rest, output)
        if word == "mldec.evaluate":
            return Command("evaluate", rest, output)
        if SCRIPT.fullmatch(word):
            return Command(word, rest, output)
        if word == "mldec":
            if not rest or rest[0].startswith("-"):
                return Command("", rest, output)
            return Command(rest[0].replace("_", "-"), rest[1:], output)
    return None


@cache
def commands_in(name: str) -> list[Command]:
    """Return the commands in the code blocks and code spans of a document."""
    text = DOCUMENTS[name]
    lines: list[tuple[str, str]] = []
    for code in code_blocks(text, "", "bash", "sh"):
        lines += shell_lines(code)
    for span in CODE_SPAN.findall(prose(text)):
        # A span such as `mldec predict --json` names an option.
        if not re.search(r" --[\w-]+$", span):
            lines.append((" ".join(span.split()), ""))

    commands = [parse_line(line, output) for line, output in lines]
    return [command for command in commands if command is not None]


@cache
def help_of(name: str, *job: str) -> str:
    """Return the help of a command, or of a script or its job, which run in this process."""
    words = [str(TOP / name)]
    if name in COMMANDS:
        words = [str(TOP / "mldec" / "__main__.py"), name]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", [*words, *job, "--help"])
        patch.syspath_prepend(str((TOP / name).parent))
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(words[0], run_name="__main__")
    assert not stop.value.code
    return out.getvalue()


def check_train(words: list[str]) -> None:
    """Compose the config of a training, and check its parts without building them."""
    if "--help" in words:
        return
    # tests/unit/config/test_plugin_example.py runs the example of a plugin.
    if "--config-dir=configs" in words:
        return
    if "--cfg" in words:
        place = words.index("--cfg")
        words = words[:place] + words[place + 2 :]
    if "-m" in words:
        # Check the first value of each setting of a sweep.
        words = [word.partition(",")[0] for word in words if word != "-m"]
    words = [word for word in words if not word.startswith("hydra.")]

    if "+experiment=NAME" in words:
        for word in words:
            check_setting(word)
    elif words:
        build.check(compose(words))


def check_script(script: str, words: list[str]) -> None:
    """Look for the arguments of a script in its help."""
    text = ""
    if script.endswith(".py"):
        text = help_of(script)
    if "JOB" in text:
        text = help_of(script, words[0])
    for word in words:
        if word.startswith("--"):
            assert re.search(rf"{word}\b", text), f"{script} has no option {word}"
        elif "=" in word and word not in text:
            check_setting(word)


# `mldec train` has no parser: Hydra reads its arguments.
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    name: importlib.import_module(module_of(name)).parser for name in COMMANDS if name != "train"
}


def check_command(command: Command) -> None:
    """Raise an error unless the arguments of a command are valid."""
    words = [word for word in command.words if word != "..."]
    if words == ["--version"] or not words:
        return
    if SCRIPT.fullmatch(command.name):
        check_script(command.name, words)
    elif command.name == "train":
        check_train(words)
    elif command.name in ("", "NAME"):
        assert words == ["--help"]
    else:
        args, rest = PARSERS[command.name]().parse_known_args(words)
        settings = getattr(args, "settings", []) + rest
        for setting in settings:
            assert "=" in setting, setting
            assert not setting.startswith("-"), setting
            check_setting(setting)


@each_document
def test_commands_are_valid(name: str) -> None:
    for command in commands_in(name):
        is_error = command.output.startswith("mldec: ") and "stopped by" not in command.output
        if is_error:
            with pytest.raises(ConfigError) as caught:
                check_command(command)
            assert f"mldec: {caught.value}" == command.output
        else:
            check_command(command)


ALL_COMMANDS = [command for name in DOCUMENTS for command in commands_in(name)]
# The changelog lists removed commands.
NAMES = {command.name for command in ALL_COMMANDS if f"mldec {command.name}" not in RETIRED}
NAMES -= {"", "NAME"}
SCRIPTS = {name for name in NAMES if SCRIPT.fullmatch(name)}


def test_all_commands_are_documented() -> None:
    assert set(COMMANDS) == NAMES - SCRIPTS
    assert len(ALL_COMMANDS) > 60


@pytest.mark.parametrize("name", sorted(name for name in NAMES if not name.endswith(".sh")))
def test_named_commands_have_help(name: str) -> None:
    assert help_of(name)


# Python code


@each_document
def test_python_examples_compile_and_import(name: str) -> None:
    for code in code_blocks(DOCUMENTS[name], "python"):
        tree = ast.parse(code)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), name, "exec"), {})


@pytest.mark.parametrize("number", [0, 1, 2])
def test_examples_of_own_model_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The third example reads a head with 20 classes for features of width 768.
    shapes = official.read("head_full_decoding.keys")
    shapes["decoder.embed_standart.weight"] = [768, 768]
    torch.save(official.rebuilt(shapes), tmp_path / "official_head.pth")
    monkeypatch.chdir(tmp_path)

    examples = code_blocks(DOCUMENTS["docs/own_model.md"], "python")
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


def test_table_of_arguments_is_complete() -> None:
    text = DOCUMENTS["docs/own_model.md"].partition("## Coming from the official code")[2]
    rows = [line.split("|")[2:4] for line in text.partition("## ")[0].splitlines() if "|" in line]
    columns = ["".join(cells) for cells in zip(*rows[2:], strict=True)]
    heads: list[Callable[..., Any]] = [TimmMLDecoder, MLDecoder]
    for head, column in zip(heads, columns, strict=True):
        documented = set(re.findall(r"`([a-z_]+(?:=[^`]+)?)`", column))
        expected = set()
        for name, parameter in inspect.signature(head).parameters.items():
            is_required = parameter.default is parameter.empty or name == "num_classes"
            default = str(parameter.default).replace("random", '"random"')
            expected.add(name if is_required else f"{name}={default}")
        assert documented == expected


def test_examples_of_losses_and_metrics_run() -> None:
    namespace: dict[str, Any] = {}
    expected: list[str] = []
    output = io.StringIO()
    for code in code_blocks(DOCUMENTS["docs/losses_and_metrics.md"], "python"):
        with redirect_stdout(output):
            exec(compile(code, "docs/losses_and_metrics.md", "exec"), namespace)
        # A comment after `print` has the output. A loop prints one line per loss.
        for comment in re.findall(r"print\(.*\)  # (.*)", code):
            expected += [comment] if "[" in comment else comment.split(", ")
    assert output.getvalue().splitlines() == expected

    logits = namespace["logits"]
    targets = namespace["targets"]
    positive = logits.sigmoid()
    negative = (1 - positive + 0.05).clamp(max=1)
    asymmetric = -targets * positive.log() - (1 - targets) * (1 - negative) ** 4 * negative.log()
    assert f"{asymmetric.sum().item():.4f}" == expected[0]

    smooth = 0.9 * targets + 0.05
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, smooth)
    assert f"{entropy.item():.4f}" == expected[1]

    ignored = namespace["partial"] == -1
    focal = -targets * positive.log() - (1 - targets) * positive * (1 - positive).log()
    assert f"{focal.masked_fill(ignored, 0).sum().item():.4f}" == expected[2]

    assumed = namespace["observed"]
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, assumed)
    assert float(expected[3]) == pytest.approx(entropy.item(), abs=1e-3)

    per_class = [average_precision_score(targets[:, k], logits[:, k]) for k in range(3)]
    assert expected[-5].split()[0] == expected[-3] == f"{100 * sum(per_class) / 3:.2f}"
