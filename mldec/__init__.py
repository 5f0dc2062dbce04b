"""Train, evaluate and use image classifiers with the ML-Decoder head (arXiv 2111.12933)."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

__version__ = "1.0.0rc1"


def triton_can_compile() -> bool:
    """Return True if Triton can launch a kernel, which needs a C compiler and Python.h.

    The search is the same as in triton/runtime/build.py.
    """
    if sys.platform != "linux":
        return True

    compiler = os.environ.get("CC")
    if compiler is None:
        found = shutil.which("gcc") or shutil.which("clang")
    else:
        found = shutil.which(compiler)

    # The default scheme of Debian has no header.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    return found is not None and header.is_file()


# torch reads both variables when it is imported. Operations that MPS lacks run on the CPU.
if sys.platform == "darwin":
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")

# Without a compiler, torch must not use its Triton kernels.
if "torch" not in sys.modules and not triton_can_compile():
    os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")


def lazily(package: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package, which imports the module of a name on first use."""

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return load


__all__ = ["Config", "Model", "Run", "UserError", "fit", "load"]

_MODULES = dict.fromkeys(["Model", "Run", "fit", "load"], "api")
__getattr__ = lazily(__name__, {**_MODULES, "Config": "config.schema", "UserError": "errors"})


def __dir__() -> list[str]:
    """Return the public names and the submodules that are imported."""
    names = set(__all__)
    for name, value in globals().items():
        is_submodule = isinstance(value, ModuleType) and value.__name__ == f"{__name__}.{name}"
        if name.startswith("__") or is_submodule:
            names.add(name)
    return sorted(names)
