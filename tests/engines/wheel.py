"""An engine's real modules on a CPU, the rest of it stubbed.

Of a package below data/engines/src, the modules named are imported from its files; every other module of it, and of
packages that it needs and that are not here, exists and holds whatever is asked of it: a class for a name that begins
with a capital, else a mock. `set` puts something better in its place.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

SOURCES = Path(__file__).parents[2] / "data/engines/src"


class StubModule(ModuleType):
    """Has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (), {}) if name[0].isupper() and not name.isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


class Wheel(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `real` modules of `package`; in `with`, and for good: torch cannot register what they define twice."""

    def __init__(self, package: str, real: Iterable[str], absent: Sequence[str] = ()) -> None:
        """absent: other packages, not installed here, that are stubbed whole."""
        self._package = package
        self._real = set(real)
        self._stubbed = (package, *absent)
        sys.meta_path.insert(0, self)

    def set(self, path: str, value: Any) -> None:
        """Give an attribute of a stub a value: "vllm.distributed.get_engram_dp_size"."""
        module, _, name = path.rpartition(".")
        setattr(importlib.import_module(module), name, value)

    def load(self, module: str) -> ModuleType:
        assert module in self._real, f"{module} would be a stub"
        return importlib.import_module(module)

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self._stubbed:
            return None
        if name in self._real:
            file = source(name)
            packages = [str(file.parent)] if file.name == "__init__.py" else None
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=packages)
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def source(module: str) -> Path:
    """The file of a module of an engine."""
    plain = SOURCES / Path(*module.split(".")).with_suffix(".py")
    return plain if plain.is_file() else SOURCES / Path(*module.split("."), "__init__.py")
