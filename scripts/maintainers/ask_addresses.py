#!/usr/bin/env python
"""Check that the URLs of weights and data sets can be reached.

    python scripts/maintainers/ask_addresses.py [--only TEXT]

The URLs of `zoo:` names and of DATASETS.md are checked by a request for the first byte. The script
prints a table in Markdown. The exit status is 1 if a URL cannot be reached.
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
# A URL in Markdown, without the punctuation of its sentence. Braces contain several files.
URL = re.compile(r"https?://[^\s)|`>]+[^\s)|`>.,;:]")
TIMEOUT = 30  # seconds


def find_urls() -> list[str]:
    """Return all URLs without duplicates, starting with the model zoo."""
    urls = [file.url for file in RELEASED.values()]
    for text in URL.findall((TOP / "DATASETS.md").read_text(encoding="utf-8")):
        urls += expand(text)
    return list(dict.fromkeys(urls))


def expand(url: str) -> list[str]:
    """Expand a list {a,b,c} in a URL, and return all URLs."""
    choice = re.search(r"\{([^{}]*)\}", url)
    if choice is None:
        return [url]
    names = (name.strip() for name in choice[1].split(","))
    return [url[: choice.start()] + name + url[choice.end() :] for name in names]


def check(url: str) -> tuple[bool, str]:
    """Return True if a URL can be reached, and its status and size as text, or the error."""
    headers = {"Range": "bytes=0-0", "User-Agent": "mldec ask_addresses"}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            size = total or response.headers.get("Content-Length", "")
            known_size = f", {int(size):,} bytes" if size.isdigit() else ""
            return True, f"{response.status}{known_size}"
    except urllib.error.HTTPError as error:
        return False, f"{error.code} {error.reason}"
    except OSError as error:
        return False, f"no response ({getattr(error, 'reason', None) or error})"


def main() -> None:
    """Check all URLs in parallel, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="check URLs that contain TEXT")
    args = parser.parse_args()

    urls = [url for url in find_urls() if args.only in url]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(check, urls))

    print(f"Checked on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.\n")
    print("| URL | response |\n|---|---|")
    for url, (_, text) in zip(urls, results, strict=True):
        print(f"| {url} | {text} |")
    sys.exit(not all(is_reachable for is_reachable, _ in results))


if __name__ == "__main__":
    main()
