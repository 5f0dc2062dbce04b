#!/usr/bin/env python
"""Check that every address of weights and data sets answers.

    python scripts/maintainers/ask_addresses.py

The addresses are those of `zoo:` names and of DATASETS.md. Each is asked for its first byte, so
nothing is downloaded. The table that is printed is dated, in Markdown; the status is 1 if one of
them does not answer.
"""

import argparse
import re
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from mldec.checkpoint.sources import RELEASED

TOP = Path(__file__).resolve().parents[2]
# An address in Markdown, without the punctuation of its sentence; braces name several files.
ADDRESS = re.compile(r"https?://[^\s)|`>]+[^\s)|`>.,;:]")
SECONDS = 30


def addresses() -> list[str]:
    """Return all addresses, each once, those of the zoo first."""
    listed = [file.url for file in RELEASED.values()]
    for text in ADDRESS.findall((TOP / "DATASETS.md").read_text(encoding="utf-8")):
        listed += expanded(text)
    return list(dict.fromkeys(listed))


def expanded(address: str) -> list[str]:
    """Return the addresses that one with {a,b,c} stands for."""
    choice = re.search(r"\{([^{}]*)\}", address)
    if choice is None:
        return [address]
    names = (name.strip() for name in choice[1].split(","))
    return [address[: choice.start()] + name + address[choice.end() :] for name in names]


def ask(address: str) -> tuple[bool, str]:
    """Return whether an address answers, and its status and size, or what went wrong."""
    headers = {"Range": "bytes=0-0", "User-Agent": "mldec ask_addresses"}
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
            size = total or answer.headers.get("Content-Length", "")
            return True, f"{answer.status}, {int(size):,} bytes" if size.isdigit() else "200"
    except urllib.error.HTTPError as error:
        return False, f"{error.code} {error.reason}"
    except OSError as error:
        return False, f"no answer ({getattr(error, 'reason', None) or error})"


def main() -> None:
    """Ask all addresses side by side, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="addresses that hold this text")
    args = parser.parse_args()

    asked = [address for address in addresses() if args.only in address]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, asked))

    print(f"Asked on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.\n")
    print("| address | answer |\n|---|---|")
    for address, (_, answer) in zip(asked, answers, strict=True):
        print(f"| {address} | {answer} |")
    sys.exit(not all(is_there for is_there, _ in answers))


if __name__ == "__main__":
    main()
