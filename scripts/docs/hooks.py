"""Hooks of mkdocs.yml: the site has the layout of the repository, so that links work on both."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import reference_pages

TOP = Path(__file__).parents[2]

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

# Links to these sources lead to the generated page on the site.
REFERENCE = {
    "mldec/config/schema.py": "reference/settings.md",
    "mldec/cli.py": "reference/commands.md",
    "mldec/api.py": "reference/api.md",
    "configs/experiment": "reference/experiments.md",
    "configs/data": "reference/data.md",
    "configs/backbone": "reference/backbone.md",
    "configs/head": "reference/head.md",
    "configs/loss": "reference/loss.md",
}

LINK = re.compile(r"\]\(([^)\s#:]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ with the documents of the repository and the reference."""
    # The other files are parts of the theme.
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)

    for pattern in PATTERNS:
        for path in sorted(TOP.glob(pattern)):
            if path.is_file() and path.suffix != ".pyc":
                name = path.relative_to(TOP).as_posix()
                files.append(File(name, str(TOP), config.site_dir, config.use_directory_urls))
    for name, text in reference_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Replace the links to sources that have a generated page."""
    folder = PurePosixPath(page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        target = REFERENCE.get(normpath(folder / link[1]))
        return link[0] if target is None else f"]({relpath(target, folder)})"

    return LINK.sub(replace, markdown)
