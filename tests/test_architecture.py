import ast
from pathlib import Path

import pytest

import mldec

PACKAGE = Path(mldec.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}

# A module may import from rows below its own, and from its own row without a circle.
ROWS = [
    ("mldec", "mldec.errors", "mldec.config.schema", "mldec.files.results", "mldec.files.run_folder"),
    (
        "mldec.heads",
        "mldec.losses",
        "mldec.evaluators",
        "mldec.backbones",
        "mldec.optim",
        "mldec.training.word_queries",
        "mldec.runtime.distributed",
        "mldec.checkpoint.zoo",
        "mldec.files.archive",
        "mldec.fast",
        "mldec.files.torch_files",
        "mldec.training.run_lock",
        "mldec.runtime.signals",
        "mldec.files.plain",
        "mldec.files.text",
        "mldec.data.names",
    ),
    (
        "mldec.data.base",
        "mldec.data.transforms",
        "mldec.data.official_augment",
        "mldec.data.labels",
        "mldec.data.mixing",
        "mldec.data.fingerprint",
    ),
    ("mldec.data.loader", "mldec.data.files", "mldec.data.tables", "mldec.files.arrays"),
    (
        "mldec.config",
        "mldec.runtime.out_of_memory",
        "mldec.model",
        "mldec.training.runlog",
        "mldec.data",
    ),  # its readers
    ("mldec.build", "mldec.checkpoint.released"),
    ("mldec.checkpoint",),
    ("mldec.cli", "mldec.evaluation", "mldec.runtime.cost"),
    ("mldec.training.step",),
    ("mldec.training.trainer",),
    (
        "mldec.train",
        "mldec.evaluate",
        "mldec.predict",
        "mldec.prediction",
        "mldec.check_data",
        "mldec.check_data.pictures",
        "mldec.summary",
        "mldec.check_data.examine",
    ),
    ("mldec.benchmark", "mldec.benchmark.data", "mldec.benchmark.model", "mldec.benchmark.queries", "mldec.__main__"),
]


def row(module: str) -> int:
    """Return the row of a module: that of its own name, else of the package that holds it."""
    while True:
        for number, names in enumerate(ROWS):
            if module in names:
                return number
        module = module.rpartition(".")[0]
        assert module, "a module without a row"


def imports(module: str) -> set[str]:
    """Return the modules of the package that a module imports anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return {name for name in found if name in MODULES and name != module}


def importers(*libraries: str) -> set[str]:
    """Return the modules that import one of the libraries."""
    found = set()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(name == lib or name.startswith(lib + ".") for name in names for lib in libraries):
                found.add(module)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    for other in imports(module):
        assert row(other) <= row(module), f"{module} imports {other}, which stands above it"


def test_there_are_no_circles() -> None:
    left = {module: imports(module) for module in MODULES}
    while left:
        free = [module for module, needed in left.items() if not needed & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        for module in free:
            del left[module]


def test_every_module_has_a_row() -> None:
    for module in MODULES:
        row(module)


def test_only_the_edge_knows_hydra() -> None:
    assert importers("hydra", "omegaconf") == {"mldec.config", "mldec.config.schema", "mldec.train"}


def test_one_module_knows_torch_distributed() -> None:
    # train names elastic's `record`, which is about processes, not about tensors.
    assert importers("torch.distributed") - {"mldec.train"} == {"mldec.runtime.distributed"}


def test_parts_know_no_rank_and_do_not_print() -> None:
    for module, path in MODULES.items():
        if row(module) <= row("mldec.data.base"):
            calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            # Evaluators add up over processes; what they find must not depend on which one they are in.
            asked = {call.attr for call in calls if isinstance(call, ast.Attribute)} & {"rank", "world_size", "is_main"}
            assert not asked or module == "mldec.runtime.distributed", f"{module} asks for its {asked}"
            printed = [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
            assert not printed or module == "mldec.errors", f"{module} prints"


def test_files_hold_one_idea() -> None:
    for module, path in MODULES.items():
        lines = path.read_text().count("\n")
        assert lines <= 400, f"{module} has {lines} lines: does it hold two ideas?"
