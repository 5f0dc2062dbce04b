#!/usr/bin/env python
"""List what became slower between two results of mldec.benchmark, of files or of folders of files.

    python scripts/compare_benchmarks.py OLD NEW [--limit 5]

A folder stands for its JSON files, which are compared by name. A figure is compared if its name
says which direction is better: see `direction`. The exit status is 1 if anything became slower by
more than the limit, else 0.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from mldec.errors import ConfigError, DataError, one_line, say

# Words in the name of a figure, between underscores.
LOWER_IS_BETTER = {"seconds", "ms", "gib", "mib"}
HIGHER_IS_BETTER = {"per_second", "mAP", "mfu", "share"}
# Names to which no rule applies: images/s.
BY_NAME = {"predict": 1, "one_process": 1}
# Of the environment, what differs between any two measurements.
PASSING = {"date", "commit"}


def direction(name: str) -> int | None:
    """Return 1 if a higher figure is better, -1 if a lower one is, None if neither.

    `times_X` is how many times faster than X something is, so higher is better; `X_times_Y` is how
    many times as long as Y it takes.

    Args:
        name: of the figure, with or without the path to it: `figures.coco_seconds`.
    """
    name = name.rpartition(".")[2]
    if name in BY_NAME:
        return BY_NAME[name]

    words = set(re.split(r"[^A-Za-z0-9]", name))
    if "per_second" in name or name.startswith("times_") or words & HIGHER_IS_BETTER:
        return 1
    if "_times_" in name or words & LOWER_IS_BETTER:
        return -1
    return None


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries and lists by their paths, such as `figures.ms`."""
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {path: value}

    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= flatten(item, f"{path}.{key}" if path else key)
    return flat


def read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file.

    Raises:
        DataError: if it cannot be read, or is not the result of a measurement.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; name two JSON files") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); name files of --json") from error

    if not isinstance(content, dict):
        raise DataError(f"{path} holds no figures; name files of --json")
    return content


def pairs(old: Path, new: Path) -> tuple[list[tuple[str, Path, Path]], list[str]]:
    """Return the files to compare with a name for each pair, and lines about files without one.

    Raises:
        ConfigError: for a file and a folder, or folders that have no file in common.
    """
    if old.is_dir() != new.is_dir():
        raise ConfigError(f"{old} and {new} are a file and a folder: name two of a kind")
    if not old.is_dir():
        return [("", old, new)], []

    old_names, new_names = ({file.name for file in path.glob("*.json")} for path in (old, new))
    if not old_names & new_names:
        raise ConfigError(f"{old} and {new} have no JSON file of the same name: nothing to compare")

    common = [(name, old / name, new / name) for name in sorted(old_names & new_names)]
    lines = [f"only in {old}: {name}" for name in sorted(old_names - new_names)]
    lines += [f"only in {new}: {name}" for name in sorted(new_names - old_names)]
    return common, lines


def compare(old: dict[str, Any], new: dict[str, Any], limit: float) -> tuple[list[str], int, int]:
    """Compare two results.

    Args:
        old: the content of a file.
        new: likewise.
        limit: percent by which a figure may be slower.

    Returns:
        Lines to print, the number of figures that were compared, and that of the slower ones.
    """
    environments = [flatten(content.get("environment", {})) for content in (old, new)]
    lines = [
        f"other environment: {key} {before} -> {after}"
        for key, before, after in differences(*environments)
        if key not in PASSING
    ]

    before_all, after_all = (
        flatten({key: value for key, value in content.items() if key != "environment"})
        for content in (old, new)
    )
    compared = slower = 0
    for path in [*before_all, *(path for path in after_all if path not in before_all)]:
        better = direction(path)
        if path not in after_all or path not in before_all:
            if better:
                lines.append(f"only in {'OLD' if path in before_all else 'NEW'}: {path}")
            continue

        before, after = before_all[path], after_all[path]
        if better is None:
            # Settings and names, not figures of which nothing is known.
            if before != after and not isinstance(before, float):
                lines.append(f"other measurement: {path} {before} -> {after}")
        elif not is_positive(before) or not is_positive(after):
            lines.append(f"not comparable: {path} {before} -> {after}")
        else:
            compared += 1
            times = before / after if better > 0 else after / before
            if times > 1 + limit / 100:
                slower += 1
                percent = 100 * (times - 1)
                lines.append(f"slower by {percent:.1f} %: {path} {before:,.4g} -> {after:,.4g}")
    return lines, compared, slower


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return key, old and new value of each entry that differs; an absent one is None."""
    return [
        (key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)
    ]


def is_positive(value: Any) -> bool:
    """Tell whether a value is a finite number above 0."""
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def percentage(text: str) -> float:
    """Read a number of percent, 0 or more."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("old", type=Path, metavar="OLD", help="JSON file, or a folder of them")
    arguments.add_argument("new", type=Path, metavar="NEW", help="likewise")
    arguments.add_argument(
        "--limit", type=percentage, default=5.0, metavar="PERCENT", help="default 5"
    )
    return arguments


def main() -> None:
    with one_line():
        args = parser().parse_args()
        files, lines = pairs(args.old, args.new)
        say(*lines)

        total = total_slower = 0
        for name, old, new in files:
            lines, compared, slower = compare(read(old), read(new), args.limit)
            say(*(f"{name}: {line}" if name else line for line in lines))
            total, total_slower = total + compared, total_slower + slower

        say(f"{total} figures compared, {total_slower} slower by more than {args.limit:g} %")
        sys.exit(total_slower > 0)


if __name__ == "__main__":
    main()
