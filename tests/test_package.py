"""What is packed: a source distribution holds every document that a message, a script or the README names."""

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
INCLUDED = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
    "sdist"
]["include"]


def named_documents() -> set[str]:
    """Return the top-level files that the package and its scripts name, and all paths that README.md links to."""
    sources = [
        path.read_text()
        for folder in ("mldec", "scripts", "configs")
        for path in (TOP / folder).rglob("*.*y*")
    ]
    documents = {name for text in sources for name in re.findall(r"(?<![/\w])[A-Z_]+\.md\b", text)}
    readme = (TOP / "README.md").read_text()
    links = {target for target in re.findall(r"\]\(([^)#]+)\)", readme) if "://" not in target}
    figures = set(re.findall(r"`(benchmarks/\w+\.\w+)`", readme))
    return documents | links | figures


def test_every_document_that_is_named_exists() -> None:
    names = named_documents()
    assert {"DATASETS.md", "MODEL_ZOO.md", "SECURITY.md"} <= names

    missing = {name for name in names if not (TOP / name).exists()}
    assert missing <= {"benchmarks/gpu.json"}  # which a GPU would write


def test_every_document_that_is_named_is_in_the_source_distribution() -> None:
    assert {f"/{name.split('/')[0]}" for name in named_documents()} <= set(INCLUDED)


@pytest.mark.slow
def test_a_built_source_distribution_holds_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(TOP)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    assert {name for name in named_documents() if (TOP / name).exists()} <= packed
