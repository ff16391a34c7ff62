"""What the plugins rely on in an engine, read from its source without running it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache

from wheel import source


@dataclass(frozen=True)
class Seam:
    """A class, function or method as the plugin knows it."""

    module: str
    name: str
    """"Class", "function" or "Class.method"."""
    arguments: str | None = None
    """Names, separated by blanks, keyword-only ones behind a *; None = it is not called or replaced by signature."""
    decorators: str = ""
    uses: tuple[str, ...] = ()
    """Pieces of its source that must be there, blanks apart."""
    why: str = ""

    def moved(self) -> str:
        """A sentence that says what is not as the plugin knows it; empty when all is."""
        where = f"{self.module}.{self.name}"
        found = _find(self.module, self.name)
        if found is None:
            return f"{where} is gone. The plugin relies on it: {self.why}"
        if self.arguments is not None and isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            signature = _arguments(found)
            if signature != self.arguments:
                return f"{where} takes ({signature}), not ({self.arguments}). The plugin relies on it: {self.why}"
        decorators = " ".join(ast.unparse(decorator) for decorator in found.decorator_list)
        if decorators != self.decorators:
            return (
                f"{where} is decorated with {decorators or 'nothing'}, not {self.decorators or 'nothing'}. The plugin "
                f"relies on it: {self.why}"
            )
        text = _plain(ast.unparse(found))
        for piece in self.uses:
            if _plain(piece) not in text:
                return f"{where} no longer has `{piece}`. The plugin relies on it: {self.why}"
        return ""


def _find(module: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    try:
        nodes = _tree(module).body
    except FileNotFoundError:
        return None
    found = None
    for part in name.split("."):
        found = next(
            (
                node
                for node in nodes
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and node.name == part
            ),
            None,
        )
        if found is None:
            return None
        nodes = found.body
    return found


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(source(module).read_text())


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    if given.kwonlyargs:
        names += ["*", *(argument.arg for argument in given.kwonlyargs)]
    return " ".join(names)


def _plain(text: str) -> str:
    """Without blanks, and with one kind of quotes."""
    return "".join(text.split()).replace('"', "'")


def segment(module: str, name: str) -> str:
    """The source of a class or function, to be run alone."""
    found = _find(module, name)
    assert found is not None, f"{module}.{name} is gone"
    return ast.unparse(found)
