"""The source distribution contains all documents."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

TOP = Path(__file__).parents[2]


def documents():
    """Return the documents, the files that they link to, and the documents named in code."""
    names = set()
    for folder in ("mldec", "scripts", "configs"):
        files = [*(TOP / folder).rglob("*.py"), *(TOP / folder).rglob("*.y*ml")]
        for path in files:
            names |= set(
                re.findall(r"(?<![/\w])(?:docs/\w+|[A-Z_]+)\.md\b", path.read_text("utf-8"))
            )

    for document in list(TOP.glob("*.md")) + list(TOP.glob("docs/*.md")):
        text = document.read_text(encoding="utf-8")
        names.add(document.relative_to(TOP).as_posix())
        names |= set(re.findall(r"`(benchmarks/\w+\.\w+)`", text))
        for link in re.findall(r"\]\(([^)#]+)", text):
            if "://" not in link:
                path = (document.parent / link).resolve()
                names.add(path.relative_to(TOP.resolve()).as_posix())
    return {name for name in names if (TOP / name).exists()}


def test_source_distribution_contains_documents(tmp_path):
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(TOP)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    assert documents() <= packed
