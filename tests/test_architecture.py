import ast
import subprocess
import sys
from pathlib import Path

import mldec

PACKAGE = Path(mldec.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}

# The core, from the bottom up. Neighbors in a line do not import each other.
CORE = [
    ("mldec", "errors"),
    ("files", "model", "runtime"),
    ("backbones", "config", "evaluators", "losses", "names", "cli"),
    ("heads", "words"),
    ("data",),
    ("build",),
    ("checkpoint",),
    ("evaluation",),
    ("training",),
    ("train", "evaluate"),
    ("__main__",),
]
# A tool imports the core, `predict` and `pages`, but no other tool.
SHARED_TOOLS = {"predict", "pages"}


def room(module: str) -> str:
    """Return the folder of the package that a module is in, or its own name at the top level."""
    return module.split(".")[:2][-1]


def imports(module: str) -> set[str]:
    """Return what a module imports anywhere in its text, by full names."""
    names = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else str(node.module) for name in whole}
    return names - {module}


def importers(*libraries: str) -> set[str]:
    """Return the modules that import a library or a part of it."""
    starts = tuple(library + "." for library in libraries)
    return {
        module
        for module in MODULES
        if any((name + ".").startswith(starts) for name in imports(module))
    }


def test_imports_point_down() -> None:
    level = {name: number for number, names in enumerate([*CORE, ("tools",)]) for name in names}
    assert {room(module) for module in MODULES} == level.keys()

    for module in MODULES:
        here = room(module)
        for there in {room(name) for name in imports(module) & MODULES.keys()} - {here, "mldec"}:
            assert level[there] < level[here], f"{module} imports mldec.{there}"


def test_tools_do_not_import_each_other() -> None:
    for module in MODULES:
        if room(module) != "tools" or module == "mldec.tools":
            continue
        used = {name.split(".")[2] for name in imports(module) if name.startswith("mldec.tools.")}
        assert used - SHARED_TOOLS <= {module.split(".")[2]}, module


def test_only_the_commands_parse_arguments() -> None:
    allowed = {"mldec.cli", "mldec.train", "mldec.evaluate"}
    core = {module for module in importers("argparse") if room(module) != "tools"}
    assert core <= allowed


def test_there_are_no_circles() -> None:
    left = {module: imports(module) & MODULES.keys() for module in MODULES}
    while left:
        free = [module for module, needed in left.items() if not needed & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        for module in free:
            del left[module]


def test_libraries_stay_at_the_edge() -> None:
    edge = {"mldec.config.compose", "mldec.config.schema", "mldec.train"}
    assert importers("hydra", "omegaconf") == edge
    assert "data" not in {room(module) for module in importers("mldec.config")}
    assert importers("torch.distributed") == {"mldec.runtime.distributed"}
    # A loss receives the sum over all processes as a function.
    assert "losses" not in {room(module) for module in importers("mldec.runtime.distributed")}
    # The first switches off the telemetry, and the second imports it before.
    assert importers("onnxruntime") == {"mldec.tools.predict.engine", "mldec.tools.export"}


def test_nothing_is_named_that_only_unix_has() -> None:
    assert not importers("fcntl", "resource", "pwd", "grp")
    missing = {"SIGUSR1", "SIGALRM", "SIGCHLD", "SIGKILL", "fork", "sched_getaffinity", "getuid"}
    missing.add("pread")
    for module, path in MODULES.items():
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        named = {node.attr for node in tree if isinstance(node, ast.Attribute)}
        assert not named & missing, module


def test_what_a_run_does_not_use_is_not_imported() -> None:
    spared = {"backbones.hf_backbone", "heads.query2label", "losses.partial"}
    spared |= {"checkpoint.released", "checkpoint.sources", "evaluation.class_list"}
    spared |= {
        "data.digits",
        "words.vectors",
        "data.readers.coco",
        "evaluators.zero_shot",
    }
    code = "import sys, mldec.backbones, mldec.heads, mldec.losses, mldec.data.readers\n"
    code += "import mldec.train, mldec.training.trainer; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    assert not {f"mldec.{name}" for name in spared} & set(done.stdout.split())
