"""What the contract tests share: the repository's files, and the imports a module makes, read without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "trimaran"


@dataclass(frozen=True)
class Import:
    """One imported name, absolute: `module` alone (`import a.b`), or with the `name` taken out of it."""

    module: str
    name: str | None
    line: int
    at_run_time: bool
    """False under `if TYPE_CHECKING:`."""
    at_import: bool
    """False inside a function, or under `if TYPE_CHECKING:`."""


def sources() -> dict[str, ast.Module]:
    """Dotted module name -> its syntax tree, for every file of the package ("trimaran" is the public face)."""
    return {module_name(path): ast.parse(path.read_text(), filename=str(path)) for path in _python_files()}


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_package(module: str) -> bool:
    """Whether a module of the package is a folder."""
    return PACKAGE.parent.joinpath(*module.split("."), "__init__.py").is_file()


def _python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(tree: ast.Module, *, module: str, package: bool = False) -> list[Import]:
    """Every import of a module: in functions, under TYPE_CHECKING and through `import_module("...")` too."""
    return list(_imports(tree, module.split(".") if package else module.split(".")[:-1], False, False))


def _imports(node: ast.AST, here: list[str], in_function: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        function = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        found = [(module, name, child.lineno) for module, name in _imported(child, here)]
        for module, name, line in found:
            yield Import(module, name, line, not for_types, not (function or for_types))
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            yield from _imports(ast.Module(child.body, []), here, function, True)
            yield from _imports(ast.Module(child.orelse, []), here, function, for_types)
        else:
            yield from _imports(child, here, function, for_types)


def _imported(node: ast.AST, here: list[str]) -> list[tuple[str, str | None]]:
    match node:
        case ast.Import(names=names):
            return [(alias.name, None) for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            base = here[: len(here) - level + 1] if level else []
            return [(".".join([*base, *([module] if module else [])]), alias.name) for alias in names]
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"), args=[at, *_]
        ):
            text = at.values[0] if isinstance(at, ast.JoinedStr) and at.values else at
            return [(text.value.rstrip("."), None)] if isinstance(text, ast.Constant) else []
        case _:
            return []


def _is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in {getattr(test, "id", None), getattr(test, "attr", None)}
