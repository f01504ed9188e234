"""`trimaran new NAME`: writes a recipe as a job file to start from."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from trimaran.cli.flags import parse_whole_verb
from trimaran.errors import UsageError

_PROGRAM = "trimaran new"
# In a checkout a link to the recipes at its root; a wheel holds the files.
_RECIPES = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class New:
    """Write a recipe as a job file to start from. The file is yours: plain PyTorch, with a function job()."""

    name: tyro.conf.Positional[str | None] = None
    """The recipe; without it they are listed."""
    into: Path | None = None
    """The file to write; without it NAME.py in the current folder."""


def main(words: Sequence[str]) -> int:
    """Copies the recipe and prints what to run next. Returns the exit code. Loads no torch."""
    recipes = find_recipes()
    command = parse_whole_verb(New, words, program=_PROGRAM)
    if command.name is None:
        print(describe_recipes(recipes))
        return 0
    source = _find(command.name, recipes)
    text = source.read_text(encoding="utf-8")
    path = command.into or Path(source.name)
    _write(path, text.replace(f"recipes/{source.name}", str(path)))
    print(f"wrote    {path}: {_summary(text)}")
    if missing := missing_packages(text):
        print(f"needs    {', '.join(missing)}, not installed here: the extras trimaran[recipes,hf] bring them")
    print(f"next     trimaran train {path} --procs 2")
    print(f"         trimaran train {path} --help shows its arguments")
    return 0


def find_recipes() -> dict[str, Path]:
    """Name, as it is typed -> file, of every recipe of this installation."""
    return {path.stem.replace("_", "-"): path for path in sorted(_RECIPES.glob("*.py"))}


def describe_recipes(recipes: Mapping[str, Path]) -> str:
    """A line for each recipe: the command that writes it, and the first line of its own words."""
    width = max(map(len, recipes), default=0)
    summaries = {name: _summary(path.read_text(encoding="utf-8")) for name, path in recipes.items()}
    return "\n".join(f"{_PROGRAM} {name:<{width}}  {summary}" for name, summary in summaries.items())


def missing_packages(text: str) -> list[str]:
    """The packages that a job file imports, in its functions too, and that are not installed."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module)
    packages = {name.partition(".")[0] for name in imported}
    return sorted(name for name in packages if name not in sys.modules and importlib.util.find_spec(name) is None)


def _find(name: str, recipes: Mapping[str, Path]) -> Path:
    if name in recipes:
        return recipes[name]
    close = difflib.get_close_matches(name.replace("_", "-").removesuffix(".py"), recipes, n=1, cutoff=0.4)
    raise UsageError(
        f"{name!r} is no recipe.",
        f"Recipes: {', '.join(recipes)}.",
        f"Did you mean {close[0]!r}?" if close else f"{_PROGRAM} alone lists them.",
    )


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"{path} exists.",
            "A recipe is written to a new file: nothing of yours is overwritten.",
            "Name another one with --into FILE.",
        ) from None
    except OSError as problem:
        raise UsageError(
            f"{path} cannot be written: {problem.strerror}.",
            "The recipe is written to a file in a folder that exists.",
            "Name another one with --into FILE.",
        ) from problem


def _summary(text: str) -> str:
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
