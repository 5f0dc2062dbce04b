"""What is packed: a source distribution holds every document that something names."""

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

TOP = Path(__file__).parents[2]
INCLUDED = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
    "sdist"
]["include"]


def named_documents():
    """Return the documents that the package and its scripts name, and what documents link to."""
    sources = [
        path.read_text()
        for folder in ("mldec", "scripts", "configs")
        for path in (TOP / folder).rglob("*.*y*")
    ]
    pattern = r"(?<![/\w])(?:docs/\w+|[A-Z_]+)\.md\b"
    named = {name for text in sources for name in re.findall(pattern, text)}
    for document in [*TOP.glob("*.md"), *TOP.glob("docs/*.md")]:
        text = document.read_text(encoding="utf-8")
        named.add(document.relative_to(TOP).as_posix())
        for link in re.findall(r"\]\(([^)#]+)", text):
            if "://" not in link:
                named.add((document.parent / link).resolve().relative_to(TOP.resolve()).as_posix())
        named |= set(re.findall(r"`(benchmarks/\w+\.\w+)`", text))
    return named


def test_every_document_that_is_named_is_in_the_source_distribution():
    assert {f"/{name.split('/')[0]}" for name in named_documents()} <= set(INCLUDED)


def test_a_built_source_distribution_holds_them(tmp_path):
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(TOP)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    assert {name for name in named_documents() if (TOP / name).exists()} <= packed
