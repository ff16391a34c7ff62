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
from collections.abc import Iterable, Sequence, Set
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import tokenizers

SOURCES = Path(__file__).parents[2] / "data/engines/src"


class StubClass(type):
    """Of classes that have every attribute, and take every parameter as a generic."""

    def __getattr__(cls, name: str) -> Any:
        return _made(name)

    def __getitem__(cls, parameters: object) -> StubClass:
        return cls


class StubModule(ModuleType):
    """Has every attribute, and keeps it."""

    def __init__(self, name: str, real: Set[str]) -> None:
        super().__init__(name)
        self.__real = real

    def __getattr__(self, name: str) -> Any:
        if (full := f"{self.__name__}.{name}") in self.__real:
            return importlib.import_module(full)
        made = _made(name)
        setattr(self, name, made)
        return made


def _made(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    is_class = name[0].isupper() and not name.isupper()
    return (
        StubClass(name, (), {"__init__": lambda self, *_, **__: None}) if is_class else MagicMock(name=name)
    )


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
        package, _, below = name.partition(".")
        if package not in self._stubbed or below.rpartition(".")[2][:1].isupper():
            return None  # a class is no module
        if name in self._real:
            file = source(name)
            packages = [str(file.parent)] if file.name == "__init__.py" else None
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=packages)
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StubModule(spec.name, self._real)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Tokenizer:
    """As much of a fast tokenizer of transformers as a token map needs."""

    def __init__(self, content: bytes) -> None:
        self.backend_tokenizer = tokenizers.Tokenizer.from_buffer(content)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    @cache
    def of(cls, path: Path) -> Tokenizer:
        return cls(path.read_bytes())


def maps_once(engram: Any) -> None:
    """Have an engine's module make the same token map once, for all models: it takes seconds."""
    engram.build_compressed_token_map = cache(engram.build_compressed_token_map)


def source(module: str) -> Path:
    """The file of a module of an engine."""
    plain = SOURCES / Path(*module.split(".")).with_suffix(".py")
    return plain if plain.is_file() else SOURCES / Path(*module.split("."), "__init__.py")
