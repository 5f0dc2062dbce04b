"""Write the sources of the site as plain Markdown: `python scripts/docs/build.py`.

The folder has the layout of the repository, so that links work here and there. It contains the
documents, the files that they link to, the reference (`reference.py`) and llms.txt, an index for
language models (llmstxt.org). Site generators need nothing else: `mkdocs build` reads mkdocs.yml.
"""

import argparse
import re
import shutil
from pathlib import Path
from posixpath import normpath

from reference import reference_pages

TOP = Path(__file__).parents[2]
OUT = TOP / "outputs" / "site_source"  # docs_dir of mkdocs.yml

# Documents with their pictures, and the other files that documents link to.
PATTERNS = (
    "*.md",
    "docs/*",
    "benchmarks/*",
    "examples/**/*",
    "tests/*/README.md",
    "CITATION.cff",
    "LICENSE",
    "configs/**/*.yaml",
    "scripts/**/*.*",
)

PAGE_LINK = re.compile(r"\[[^\]]*\]\(([^)]+\.md)\)")


def title(text: str) -> str:
    """Return the first heading of a page."""
    return text.partition("# ")[2].partition("\n")[0]


def index_line(name: str, text: str, description: str) -> str:
    """Return the line of a page in llms.txt, with its address on the site."""
    address = name.removesuffix("README.md").removesuffix("index.md")
    if address.endswith(".md"):
        address = f"{address.removesuffix('.md')}/"
    return f"- [{title(text)}]({address or './'}): {description}\n"


def llms_txt(pages: dict[str, str]) -> str:
    """Return llms.txt: the pages with a line each.

    A row of docs/README.md has a question and the pages that answer it, each with further words.

    Args:
        pages: Markdown of all pages by path.
    """
    summary = " ".join(pages["README.md"].split("\n\n")[1].split()).partition(". ")[0]
    text = f"# {title(pages['README.md'])}\n\n> {summary}.\n\n## Documentation\n\n"
    text += index_line("README.md", pages["README.md"], "Installation and first commands.")
    for row in re.findall(r"^\| (.*) \|$", pages["docs/README.md"], re.MULTILINE):
        question, _, answer = row.partition(" | ")
        pieces = PAGE_LINK.split(answer)
        for target, words in zip(pieces[1::2], pieces[2::2], strict=True):
            name = normpath(f"docs/{target}")
            words = words.strip(" ,;:")
            description = f"{question} {words[:1].upper()}{words[1:]}"
            text += index_line(name, pages[name], description.strip())
    text += index_line("benchmarks/README.md", pages["benchmarks/README.md"], "All figures.")

    text += "\n## Reference\n\n"
    for name, page in pages.items():
        if name.startswith("reference/") and name != "reference/index.md":
            first_sentence = page.splitlines()[2].partition(". ")[0].removesuffix(".")
            text += index_line(name, page, f"{first_sentence}.")
    return text


def build(out: Path) -> None:
    """Write the sources of the site to a folder, and remove its old content."""
    shutil.rmtree(out, ignore_errors=True)
    pages: dict[str, str] = {}
    for pattern in PATTERNS:
        for path in sorted(TOP.glob(pattern)):
            name = path.relative_to(TOP).as_posix()
            if path.suffix == ".md":
                pages[name] = path.read_text(encoding="utf-8")
            elif path.is_file() and path.suffix != ".pyc":
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, out / name)

    pages |= reference_pages()
    for name, text in (pages | {"llms.txt": llms_txt(pages)}).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=OUT)
    build(parser.parse_args().folder)


if __name__ == "__main__":
    main()
