import ast
from pathlib import Path

import pytest

import mldec

PACKAGE = Path(mldec.__file__).parent
TESTS = Path(__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}

# A folder or module may import from layers below its own. Inside a folder there are no circles.
LAYERS = [
    ("mldec.errors", "mldec.model", "mldec.tokens", "mldec"),
    (
        "mldec.files",
        "mldec.figures",
        "mldec.clip",
        "mldec.runtime",
        "mldec.heads",
        "mldec.backbones",
        "mldec.optim",
    ),
    ("mldec.config", "mldec.losses", "mldec.evaluators"),
    ("mldec.cli", "mldec.data"),
    ("mldec.build", "mldec.__main__"),
    ("mldec.checkpoint", "mldec.explain"),
    (
        "mldec.evaluation",
        "mldec.summary",
        "mldec.calibration",
        "mldec.exported",
    ),
    ("mldec.inference",),
    (
        "mldec.training",
        "mldec.evaluate",
        "mldec.predict",
        "mldec.calibrate",
        "mldec.check_data",
        "mldec.export",
    ),
    ("mldec.train", "mldec.benchmark", "mldec.report", "mldec.publish", "mldec.demo"),
]
PARTS = ("mldec.heads", "mldec.backbones", "mldec.losses", "mldec.evaluators", "mldec.data")


def top(module: str) -> str:
    """Return the folder that a module is in, or a module at the top itself."""
    return ".".join(module.split(".")[:2])


def layer(module: str) -> int:
    """Return the layer of a module's folder."""
    return next(number for number, names in enumerate(LAYERS) if top(module) in names)


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
            if any(
                name == lib or name.startswith(lib + ".") for name in names for lib in libraries
            ):
                found.add(module)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    for other in imports(module):
        assert (
            layer(other) < layer(module)
            or top(other) == top(module)
            or other == "mldec"
            or layer(other) == layer(module)
        ), f"{module} imports {other}, which stands above it"


def test_there_are_no_circles() -> None:
    left = {module: imports(module) for module in MODULES}
    while left:
        free = [module for module, needed in left.items() if not needed & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        for module in free:
            del left[module]


def test_every_layer_is_there() -> None:
    assert {top(module) for module in MODULES} == {name for names in LAYERS for name in names}


def test_only_the_edge_knows_hydra() -> None:
    assert importers("hydra", "omegaconf") == {
        "mldec.config.compose",
        "mldec.config.schema",
        "mldec.train",
    }


def test_one_module_knows_torch_distributed() -> None:
    # train names elastic's `record`, which is about processes, not about tensors.
    assert importers("torch.distributed") - {"mldec.train"} == {"mldec.runtime.distributed"}


def test_one_module_imports_onnx_runtime() -> None:
    # It switches off the telemetry before.
    assert importers("onnxruntime") == {"mldec.exported.onnx_file"}


def test_parts_know_no_rank_and_do_not_print() -> None:
    for module, path in MODULES.items():
        if top(module) in PARTS:
            calls = [
                node.func
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call)
            ]
            # Evaluators add up over processes; their result must not depend on the process.
            asked = {call.attr for call in calls if isinstance(call, ast.Attribute)} & {
                "rank",
                "world_size",
                "is_main",
            }
            assert not asked, f"{module} asks for its {asked}"
            printed = [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
            assert not printed, f"{module} prints"


def test_files_hold_one_idea() -> None:
    for module, path in MODULES.items():
        lines = sum(not line.isspace() for line in path.read_text().splitlines(keepends=True))
        assert lines <= 400, f"{module} has {lines} lines: does it hold two ideas?"


# Modules without a test file of their name, and the file that tests them: what can only be seen in
# a whole command.
TESTED_ELSEWHERE: dict[str, str] = {
    "mldec.benchmark.__main__": "test_main.py",
    "mldec.check_data.__main__": "test_main.py",
    "mldec.demo.__main__": "test_main.py",
    "mldec.export.__main__": "test_main.py",
    "mldec.publish.__main__": "test_main.py",
    "mldec.report.__main__": "test_main.py",
    "mldec.report.content": "report/test_page.py",
    "mldec.summary.__main__": "test_main.py",
}


def only_exports(module: str) -> bool:
    """Tell whether a module is an `__init__.py` that states names and interfaces, and does nothing.

    Interfaces are the protocols; a function or any other class has something to test.
    """
    if MODULES[module].name != "__init__.py":
        return False

    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = ast.parse(MODULES[module].read_text()).body
    return all(
        isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
        for node in nodes
        if isinstance(node, definitions)
    )


def mirror(module: str) -> Path:
    """Return the test file that has the name of a module: of `__init__.py` it is test_init.py."""
    path = MODULES[module].relative_to(PACKAGE)
    return path.with_name(f"test_{path.stem.strip('_')}.py")


def names(test: Path, module: str) -> bool:
    """Tell whether a test file imports a module, or names it as `python -m` does."""
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.Import) and module in {alias.name for alias in node.names}:
            return True
        if isinstance(node, ast.ImportFrom) and node.module == module:
            return True
        if isinstance(node, ast.Constant) and node.value == module.removesuffix(".__main__"):
            return True
    return False


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_a_test_file_of_its_name_or_is_tested_elsewhere(module: str) -> None:
    test = TESTS / mirror(module)
    if module in TESTED_ELSEWHERE:
        assert not test.is_file(), f"{module} has {test}: take it out of the table"
        test = TESTS / TESTED_ELSEWHERE[module]
        assert names(test, module), f"{test} does not name {module}"
    else:
        assert test.is_file() or only_exports(module), f"{module} has no {test}"


def test_the_table_of_what_is_tested_elsewhere_names_modules() -> None:
    assert TESTED_ELSEWHERE.keys() <= MODULES.keys()
    assert not [module for module in TESTED_ELSEWHERE if only_exports(module)]
