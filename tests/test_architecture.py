import ast
from pathlib import Path

import mldec

PACKAGE = Path(mldec.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}

# A folder or module may import from layers below its own. Inside a folder there are no circles.
LAYERS = [
    ("mldec", "mldec.errors", "mldec.model"),
    ("mldec.backbones", "mldec.figures", "mldec.files", "mldec.runtime"),
    ("mldec.__main__", "mldec.config", "mldec.evaluators", "mldec.heads", "mldec.losses"),
    ("mldec.data",),
    ("mldec.build",),
    ("mldec.checkpoint",),
    ("mldec.evaluation",),
    ("mldec.calibrate", "mldec.evaluate", "mldec.predict", "mldec.training"),
    (
        "mldec.benchmark",
        "mldec.check_data",
        "mldec.demo",
        "mldec.export",
        "mldec.summary",
        "mldec.train",
    ),
    ("mldec.report",),
    ("mldec.publish",),
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


def test_imports_point_down() -> None:
    for module in MODULES:
        for other in imports(module) - {"mldec"}:
            message = f"{module} imports {other}, which stands above it"
            assert layer(other) <= layer(module), message


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
    assert importers("onnxruntime") == {"mldec.predict.engine"}


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
