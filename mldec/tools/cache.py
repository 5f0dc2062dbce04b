"""Print the size of the cached features of frozen networks: `mldec cache`.

Features, tokens and networks that were converted to OpenVINO are listed by network and data set.
--clear removes them, and later runs compute them again. Other files in the cache folder are small
(parsed tables, word vectors) or downloads (zoo), and are kept.
"""

import argparse
import re
import shutil
from collections import Counter
from pathlib import Path

from mldec import cli
from mldec.errors import DataError, naming_errors, say, writing
from mldec.files.cache import cache_folder
from mldec.files.text import member, read_json

MB = 10**6
FOLDER = re.compile("(tokens|openvino)-[0-9a-f]{16}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = cli.command("cache", str(__doc__))
    arguments.add_argument(
        "--cache-dir",
        metavar="FOLDER",
        help="data.cache_dir of the runs; default: $XDG_CACHE_HOME/mldec or ~/.cache/mldec",
    )
    arguments.add_argument("--clear", action="store_true", help="remove these files")
    return arguments


def sizes_of(folder: Path) -> Counter[str]:
    """Return the number of bytes in a folder of the cache by content, see `describe_entry`."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    total: Counter[str] = Counter()
    for path in sorted(folder.glob("*.json")):
        with naming_errors(path, DataError, remedy="remove it"):
            entry = read_json(path)
            content = f"{member(entry, 'content', str)}  {member(entry, 'data', str)}".rstrip()
            # A stopped run lists the remaining files again when it continues.
            for name in [path.name, *member(entry, "files", list)]:
                total[content] += sizes.pop(name, 0)
    total["unknown: written by an earlier version"] = sum(sizes.values())
    return +total


def run(args: argparse.Namespace) -> None:
    """Print the table of cached features, or remove them with --clear."""
    cache = cache_folder(args.cache_dir)
    folders = [path for path in sorted(cache.glob("*-*")) if FOLDER.fullmatch(path.name)]
    if args.clear:
        for folder in folders:
            with writing(folder):
                shutil.rmtree(folder)
        say(f"{cache}: removed {len(folders)} folders")
        return

    total: Counter[str] = Counter()
    for folder in folders:
        total += sizes_of(folder)
    for content, size in total.most_common():
        say(f"{size / MB:>9,.1f} MB  {content}")
    say(f"{total.total() / MB:>9,.1f} MB in {cache}")


def main() -> None:
    """Run the command."""
    cli.run_command(parser().parse_args, run)
