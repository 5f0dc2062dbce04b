import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import mldec
from mldec.__main__ import COMMANDS

PACKAGE = Path(mldec.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}

# The folders and modules of the package, from the bottom up. Imports point down, or to a neighbor.
LAYERS = (
    ("mldec", "errors", "model", "tokens"),
    ("files", "runtime"),
    ("evaluators", "heads", "losses", "names"),
    ("backbones",),
    ("words",),
    ("data",),
    ("config",),
    ("build",),
    ("checkpoint",),
    ("evaluation",),
    ("training",),
    ("cli",),
    ("train", "evaluate"),
    ("tools", "__main__"),
    ("api",),
)


def folder(module: str) -> str:
    """Return the top-level folder or module of the package that contains a module."""
    return module.split(".")[:2][-1]


@cache
def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports(module: str, at_once: bool = False) -> set[str]:
    """Return the full names of the modules that a module imports.

    Args:
        module: Name of the importing module.
        at_once: Whether to ignore imports inside functions, which run later.
    """
    names = set()
    tree = parse(module)
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names.add(name if name in MODULES else str(node.module))
    return names - {module}


IMPORTS = {module: imports(module) for module in MODULES}


def importers(*libraries: str) -> set[str]:
    """Return the modules that import a library or a part of it."""
    prefixes = tuple(library + "." for library in libraries)
    found = set()
    for module, names in IMPORTS.items():
        if any((name + ".").startswith(prefixes) for name in names):
            found.add(module)
    return found


def test_imports_point_down() -> None:
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    assert {folder(module) for module in MODULES} == level.keys()
    for module, names in IMPORTS.items():
        for name in names & MODULES.keys():
            assert level[folder(name)] <= level[folder(module)], f"{module} imports {name}"


def test_modules_and_folders_have_no_import_cycles() -> None:
    folders: dict[str, set[str]] = {}
    for module, names in IMPORTS.items():
        used = {folder(name) for name in names & MODULES.keys()}
        folders.setdefault(folder(module), set()).update(used - {folder(module)})
    TopologicalSorter(IMPORTS).prepare()
    TopologicalSorter(folders).prepare()


def test_commands_do_not_import_each_other() -> None:
    commands = {name.replace("-", "_") for name in COMMANDS}
    for module, names in IMPORTS.items():
        if module.startswith("mldec.tools."):
            used = {name.split(".")[2] for name in names if name.startswith("mldec.tools.")}
            assert used & commands <= {module.split(".")[2], "predict"}, module


def test_libraries_are_used_in_one_place() -> None:
    assert {folder(module) for module in importers("hydra", "omegaconf")} == {"config", "train"}
    users = {folder(module) for module in importers("argparse")}
    assert users <= {"cli", "train", "evaluate", "tools", "api"}
    assert importers("torch.distributed") == {"mldec.runtime.distributed"}


def test_slow_packages_are_imported_when_they_are_used() -> None:
    # Each takes about half a second of the start of a prediction. The imports for type checks are
    # not at the top level.
    for package in ("pandas", "scipy.fft", "scipy.optimize"):
        assert importers(package)
        assert not [module for module in MODULES if package in imports(module, at_once=True)]


def test_package_needs_no_unix() -> None:
    assert not importers("fcntl", "resource", "pwd", "grp")
    unix = {"SIGUSR1", "SIGALRM", "SIGCHLD", "SIGKILL", "fork", "sched_getaffinity", "getuid"}
    unix.add("pread")
    for module in MODULES:
        nodes = ast.walk(parse(module))
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert not attributes & unix, module


def test_packages_import_parts_lazily() -> None:
    lazy = {
        "mldec.backbones.hf_backbone",
        "mldec.checkpoint.released",
        "mldec.checkpoint.sources",
        "mldec.data.digits",
        "mldec.data.readers.coco_json",
        "mldec.evaluation.class_list",
        "mldec.evaluators.zero_shot",
        "mldec.heads.query2label",
        "mldec.losses.partial",
        "mldec.words.vectors",
    }
    assert lazy <= MODULES.keys()
    imported = {"mldec.backbones", "mldec.heads", "mldec.losses", "mldec.data.readers"}
    imported |= {"mldec.train", "mldec.training.trainer"}
    found: set[str] = set()
    while imported > found:
        found = set(imported)
        for module in found:
            imported |= imports(module, at_once=True) & MODULES.keys()
    assert not lazy & imported
