"""Train, evaluate and use image classifiers with the ML-Decoder head (arXiv 2111.12933)."""

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "1.0.0rc1"

# torch reads this when it is imported: what it cannot do on an Apple GPU is done on the CPU.
if sys.platform == "darwin":
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")


def lazily(package: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports a module when a name of it is used."""

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return load


__all__ = ["load"]

__getattr__ = lazily(__name__, {"load": "predict"})


def __dir__() -> list[str]:
    """Return the public names and the submodules that are imported."""
    names = [name for name in globals() if name.startswith("__")]
    for name, value in globals().items():
        if isinstance(value, ModuleType) and value.__name__ == f"{__name__}.{name}":
            names.append(name)
    return sorted(__all__ + names)
