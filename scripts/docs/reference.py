"""Generate the reference pages of the site from the package.

A description is the comment of a field in a dataclass, the entry of an argument in a docstring, the
header of a YAML file, or the help of an option.
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import patch

import yaml
from griffe import Docstring, DocstringSectionKind
from omegaconf import MISSING

from mldec.__main__ import COMMANDS, module_of
from mldec.config import schema, signatures
from mldec.config.compose import config_dir, options
from mldec.data import readers, tasks

# Docstrings with the arguments that several readers have.
COMMON_ARGUMENTS = (readers, tasks.multi_label, tasks.single_label)

PARTS = {
    "data": "The data set. Readers of image files also accept the settings of the last section.",
    "backbone": "The network that maps images to tokens.",
    "head": "Maps tokens to logits.",
    "loss": "The training loss. The default is `cross_entropy` for single-label data, else `bce`.",
}

# Public objects by section. A name with `.*` is a module with `__all__`.
API = {
    "Training and prediction": ["mldec.*", "mldec.checkpoint.*"],
    "Heads": ["mldec.heads.*"],
    "Losses": ["mldec.losses.*"],
    "Backbones": ["mldec.backbones.*"],
    "Evaluators": [
        "mldec.evaluators.Evaluator",
        "mldec.evaluators.average_precision.average_precision",
        "mldec.evaluators.multi_label.MultiLabelEvaluator",
        "mldec.evaluators.partial.PartialLabelEvaluator",
        "mldec.evaluators.single_label.SingleLabelEvaluator",
        "mldec.evaluators.zero_shot.ZeroShotEvaluator",
    ],
    "Data": [
        "mldec.data.source.Source",
        "mldec.data.types.DataModule",
        "mldec.data.types.Split",
        "mldec.data.types.ImageDataset",
        "mldec.data.types.StoredImages",
        "mldec.data.types.Classes",
        "mldec.data.labels.Labels",
        "mldec.data.table.Table",
        "mldec.data.table.TableBuilder",
        "mldec.data.transforms.EvalTransform",
        "mldec.data.images.read_image",
    ],
}

MAX_LINE = 100  # of a signature
FIELD = re.compile(r"([A-Z]\w*(?: \w+){0,3}):(?: +|$)")  # field in the header of an experiment


def reference_pages() -> dict[str, str]:
    """Return the Markdown of the pages by path."""
    pages = {"settings": settings_page()}
    for part in PARTS:
        pages[part] = part_page(part)
    pages["experiments"] = experiments_page()
    pages["commands"] = commands_page()
    pages["api"] = api_page()

    rows = []
    for name, text in pages.items():
        title = text.splitlines()[0].lstrip("# ")
        rows.append([f"[{title}]({name}.md)", text.splitlines()[2]])
    pages["index"] = "# Reference\n\n" + table(["page", "content"], rows)
    return {f"reference/{name}.md": text for name, text in pages.items()}


# Markdown


def escape(text: str) -> str:
    """Escape plain text for Markdown, except code in backticks."""
    pieces = " ".join(text.split()).split("`")
    for place in range(0, len(pieces), 2):
        pieces[place] = re.sub(r"([|*\[\]])", r"\\\1", pieces[place]).replace("<", "&lt;")
    return "`".join(pieces)


def sentence(text: str) -> str:
    """Return a description with a capital and a period. Names of values stay lower-case."""
    text = escape(text)
    if re.match(r"[a-z][a-z-]+ ", text):
        text = text[0].upper() + text[1:]
    return text if not text or text.endswith(".") else f"{text}."


def type_name(hint: Any) -> str:
    """Return the name of a type for a table."""
    return escape(re.sub(r"\b(typing|collections\.abc)\.", "", schema.describe(hint)))


def fence(text: str) -> str:
    """Return a block of code."""
    return f"\n```\n{textwrap.dedent(text).strip()}\n```\n"


def code(value: Any) -> str:
    """Return a value as code, in the notation of YAML."""
    if isinstance(value, Enum):
        value = value.value
    if not isinstance(value, str) or value == "":
        value = json.dumps(value)
    return f"`{value}`"


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table. The cells are Markdown."""
    lines = [header, ["---"] * len(header)]
    lines += rows
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


# Descriptions


def comments(kind: Any) -> dict[str, str]:
    """Return the comments of the fields of a dataclass or enum: above a field and after it."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)

    found: dict[str, str] = {}
    for base in kind.__bases__:
        if dataclasses.is_dataclass(base):
            found |= comments(base)
    for node in definition.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        first = node.lineno - 1
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
        assert node.end_lineno is not None
        texts = lines[first : node.lineno - 1]
        texts.append(lines[node.end_lineno - 1][node.end_col_offset :])
        found[ast.unparse(target)] = " ".join(text.strip(" #") for text in texts).strip()
    return resolve(kind, found)


def sections(target: Any) -> dict[DocstringSectionKind, Any]:
    """Return the sections of a docstring; of several texts, the first one."""
    found: dict[DocstringSectionKind, Any] = {}
    for section in Docstring(inspect.getdoc(target) or "").parse("google", warnings=False):
        found.setdefault(section.kind, section.value)
    return found


def argument_descriptions(target: Any) -> dict[str, str]:
    """Return the descriptions of the arguments in a docstring."""
    arguments = sections(target).get(DocstringSectionKind.parameters, [])
    return resolve(target, {argument.name: argument.description for argument in arguments})


def resolve(target: Any, texts: dict[str, str]) -> dict[str, str]:
    """Replace "see `other`" with the description of the same name in `other`."""
    resolved = {}
    for name, text in texts.items():
        if reference := re.fullmatch(r"[Ss]ee `(\w+)`\.?", text):
            other = vars(sys.modules[target.__module__])[reference[1]]
            described = comments(other) if dataclasses.is_dataclass(other) else None
            text = (described or argument_descriptions(other))[name]
        resolved[name] = text
    return resolved


def summary(target: Any) -> str:
    """Return the text of a docstring before its sections."""
    text: str = sections(target)[DocstringSectionKind.text]
    return text


# Settings


def ranges(kind: type) -> dict[str, str]:
    """Return the valid values of the fields of a dataclass that `schema._require` checks."""
    found: dict[str, str] = {}

    def record(_: Any, prefix: str, names: str, rule: str, is_valid: Callable[..., bool]) -> None:
        for name in names.split():
            # A rule may contain the value of another setting.
            found.setdefault(name, re.sub(r" \([\d,]+\)", "", rule))

    with patch.object(schema, "_require", record):
        kind()
    return found


def field_row(prefix: str, field: dataclasses.Field[Any], hint: Any, text: str) -> list[str]:
    """Return the key, type, default and description of a setting."""
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    shown = "required" if default in (MISSING, dataclasses.MISSING) else code(default)

    kind = type_name(hint)
    for choice in (hint, *getattr(hint, "__args__", ())):
        if isinstance(choice, type) and issubclass(choice, Enum):
            names = ", ".join(str(member.value) for member in choice)
            kind = re.sub(rf"[\w.]*\b{choice.__name__}\b", escape(names), kind)
            text = (text or summary(choice)).removesuffix(".") + "."
            for name, comment in comments(choice).items():
                text += f" `{name}`: {comment}." if comment else ""
    return [f"`{prefix}{field.name}`", kind, shown, sentence(text)]


def settings_table(kind: Any, prefix: str = "") -> str:
    """Return the table of the fields of a dataclass, except its own sections."""
    texts = comments(kind)
    hints = get_type_hints(kind)
    limits = ranges(kind) if kind.__module__ == schema.__name__ else {}
    rows = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            continue
        row = field_row(prefix, field, hint, texts[field.name])
        if field.name in limits:
            row[1] += f"; {escape(limits[field.name])}"
        rows.append(row)
    return table(["key", "type and range", "default", "description"], rows)


def settings_page() -> str:
    """Return the page of the settings outside the parts."""
    intro = "Settings of a run, given as `key=value`. Each part has further settings: "
    intro += ", ".join(f"[{part}]({part}.md)" for part in PARTS)
    text = f"# Settings\n\n{intro}.\n\n## Run\n\n{settings_table(schema.Config)}"

    kinds = get_type_hints(schema.Config) | {"init": schema.Init}
    for name, kind in kinds.items():
        if dataclasses.is_dataclass(kind):
            text += f"\n## {name}\n\n{summary(kind)}\n\n"
            text += settings_table(kind, f"{name}.")
    return text


# Parts


def header(path: Path) -> list[str]:
    """Return the lines of the comment at the start of a YAML file."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.removeprefix("#").removeprefix(" "))
    return lines


def shared_fields() -> set[str]:
    """Return the names of the settings that all readers of image files share."""
    return {field.name for kind in signatures.SHARED for field in dataclasses.fields(kind)}


def part_descriptions(target: Callable[..., Any]) -> dict[str, str]:
    """Return the descriptions of the arguments of a part."""
    found: dict[str, str] = {}
    for common in COMMON_ARGUMENTS:
        found |= argument_descriptions(common)
    for parameter in inspect.signature(target, eval_str=True).parameters.values():
        if dataclasses.is_dataclass(parameter.annotation):
            found |= comments(parameter.annotation)
    return found | argument_descriptions(target)


def arguments_table(part: str, target: Callable[..., Any]) -> str:
    """Return the table of the arguments of a part, except shared settings."""
    accepted = signatures.arguments_of(part, target)
    if part == "data":
        omitted = {"changed"} | (shared_fields() if signatures.is_reader(target) else set())
        accepted = {name: value for name, value in accepted.items() if name not in omitted}
    if not accepted:
        return "No arguments.\n"

    texts = part_descriptions(target)
    rows = []
    for name, (hint, default) in accepted.items():
        shown = "required" if default is signatures.REQUIRED else code(default)
        text = sentence(texts.get(name, ""))
        rows.append([f"`{part}.{name}`", type_name(hint), shown, text])
    return table(["key", "type", "default", "description"], rows)


def part_page(part: str) -> str:
    """Return the page of a part: the YAML names and arguments of each class or function."""
    text = f"# {part.capitalize()}\n\n{PARTS[part]} Select it with `{part}=NAME`.\n"

    names_of: dict[str, list[str]] = {}
    nodes = {}
    for name in options(part):
        nodes[name] = yaml.safe_load(Path(config_dir(), part, f"{name}.yaml").read_text("utf-8"))
        names_of.setdefault(nodes[name].pop("_target_"), []).append(name)

    for target_name, names in names_of.items():
        target = signatures.locate(part, target_name)
        text += f"\n## {target.__name__}\n\n`{target_name}`: {summary(target)}\n\n"
        rows = []
        for name in names:
            values = ", ".join(f"`{key}={json.dumps(value)}`" for key, value in nodes[name].items())
            description = " ".join(header(Path(config_dir(), part, f"{name}.yaml")))
            rows.append([f"`{part}={name}`", escape(description), values])
        text += table(["option", "description", "arguments"], rows) + "\n"
        text += arguments_table(part, target)

    if part == "data":
        text += "\n## Shared\n\nSettings of all data sets:\n\n"
        text += settings_table(signatures.Resuming, "data.")
        for kind in signatures.SHARED:
            text += f"\n{summary(kind)}\n\n{settings_table(kind, 'data.')}"
    return text


# Experiments


def header_fields(lines: list[str]) -> dict[str, list[str]]:
    """Split the header of an experiment into fields. The text before them has the name ""."""
    fields: dict[str, list[str]] = {"": []}
    name = ""
    for line in lines:
        if found := FIELD.match(line):
            name = found[1]
            line = line[found.end() :]
            fields[name] = []
        if line:
            fields[name].append(line)
    return fields


def experiments_page() -> str:
    """Return the page of the experiments, with the fields of their headers."""
    rows = []
    text = ""
    for name in options("experiment"):
        fields = header_fields(header(Path(config_dir(), "experiment", f"{name}.yaml")))
        description = escape(" ".join(fields.pop("")))
        rows.append([f"[`{name}`](#{name})", description])
        text += f"\n## {name}\n\n{description}\n"
        for field, lines in fields.items():
            # Indented lines are a list, and commands are code.
            if lines[0].startswith(("  ", "mldec ", "torchrun ")):
                text += f"\n**{field}**\n" + fence("\n".join(lines))
            else:
                text += f"\n**{field}**: {escape(' '.join(lines))}\n"

    intro = "The files of `configs/experiment`. Train one with `mldec train +experiment=NAME`."
    overview = table(["experiment", "description"], rows)
    return f"# Experiments\n\n{intro}\n\n{overview}{text}"


# Commands


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and its subparsers."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


def option_row(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    """Return the name, values, default and help of an option."""
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    value = ""
    if action.choices is not None:
        value = ", ".join(map(str, action.choices))
    elif action.option_strings and action.nargs != 0:
        value = str(action.metavar or action.dest.upper())
    default = "" if action.default in (None, False, [], argparse.SUPPRESS) else code(action.default)
    help_text = parser._get_formatter()._expand_help(action) if action.help else ""
    return [f"`{name}`", escape(value), default, sentence(help_text)]


def commands_page() -> str:
    """Return the page of the command lines."""
    intro = "The options of each command. Every command also has `--help` and `--version`."
    text = f"# Commands\n\n{intro}\n"
    for name, purpose in COMMANDS.items():
        if name == "train":
            text += f"\n## mldec train\n\n{sentence(purpose)}\n{fence(train_help())}"
            continue
        for parser in parsers(importlib.import_module(module_of(name)).parser()):
            level = "###" if parser.prog.count(" ") > 1 else "##"
            text += f"\n{level} {parser.prog}\n\n{parser.description}\n"
            text += fence(parser.format_usage())
            for group in parser._action_groups:
                rows = []
                for action in group._group_actions:
                    is_option = not isinstance(action, argparse._SubParsersAction)
                    if is_option and action.dest not in ("help", "version"):
                        rows.append(option_row(parser, action))
                if rows:
                    text += f"\n{str(group.title).capitalize()}:\n\n"
                    text += table(["option", "value", "default", "description"], rows)
    return text


def train_help() -> str:
    """Return the help of `mldec train`, which has no parser."""
    words = [sys.executable, "-m", "mldec", "train", "--help"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


# Python


def public_objects(entries: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the public name and the object of each entry of `API`."""
    for entry in entries:
        module_name, _, name = entry.rpartition(".")
        module = importlib.import_module(module_name)
        for public in module.__all__ if name == "*" else [name]:
            yield f"{module_name}.{public}", getattr(module, public)


def signature_of(name: str, item: Any) -> str:
    """Return the call of a class or function as a block of Python code, or "" for other objects."""
    is_error = inspect.isclass(item) and issubclass(item, BaseException)
    if is_error or not callable(item):
        return ""

    call = inspect.signature(item)
    parts: list[str] = []
    for parameter in call.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        has_star = any(part.startswith("*") for part in parts)
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            parts.append("*")
        parts.append(str(parameter))
    result = ""
    if not inspect.isclass(item) and call.return_annotation is not call.empty:
        result = f" -> {inspect.formatannotation(call.return_annotation)}"

    line = f"{name}({', '.join(parts)}){result}"
    if len(line) > MAX_LINE:
        # One argument per line, as ruff would format it.
        lines = "".join(f"    {part},\n" for part in parts)
        line = f"{name}(\n{lines}){result}"
    return f"\n```python\n{line}\n```\n"


def docstring_of(item: Any) -> str:
    """Return a docstring in Google style as Markdown."""
    text = ""
    doc = Docstring(inspect.getdoc(item) or "")
    for section in doc.parse("google", warnings=False, returns_multiple_items=False):
        if section.kind is DocstringSectionKind.text:
            text += f"\n{section.value}\n"
            continue
        text += f"\n**{section.kind.value.capitalize()}**\n\n"
        for entry in section.value:
            name = getattr(entry, "name", "") or entry.annotation
            label = f"`{name}`: " if name else ""
            text += f"- {label}{' '.join(entry.description.split())}\n"
    return text


def api_page() -> str:
    """Return the page of the Python objects, with their signatures and docstrings."""
    text = "# Python API\n\nThe public classes and functions, with their docstrings.\n"
    for title, entries in API.items():
        text += f"\n## {title}\n"
        for entry in entries:
            module_name, _, name = entry.rpartition(".")
            if name == "*" and title != "Training and prediction":
                text += f"\n{inspect.getdoc(importlib.import_module(module_name))}\n"
        for name, item in public_objects(entries):
            text += f"\n### `{name}`\n{signature_of(name.rpartition('.')[2], item)}"
            text += docstring_of(item)
            if not inspect.isclass(item):
                continue
            for method, function in vars(item).items():
                function = getattr(function, "__func__", function)  # of a class or static method
                is_method = inspect.isfunction(function) or isinstance(function, property)
                if is_method and function.__doc__ and not method.startswith("_"):
                    text += f"\n#### `{item.__name__}.{method}`\n{signature_of(method, function)}"
                    text += docstring_of(function)
    return text
