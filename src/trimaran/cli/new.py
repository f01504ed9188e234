"""`trimaran new NAME`: writes a recipe as a job file to start from."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import tyro

from trimaran.cli.flags import parse_whole_verb
from trimaran.errors import UsageError

_PROGRAM = "trimaran new"
# In a checkout a link to the recipes at its root; a wheel holds the files.
_FOLDER = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class New:
    """Write a recipe as a job file to start from. The file is yours: plain PyTorch, with a function job()."""

    name: tyro.conf.Positional[str | None] = None
    """The recipe; without it they are listed."""
    into: Path | None = None
    """The file to write; without it NAME.py in the current folder."""


def main(words: Sequence[str]) -> int:
    """Copies the recipe, and the files beside it that it imports, and prints what to run. Loads no torch."""
    command = parse_whole_verb(New, words, program=_PROGRAM)
    recipes = find_recipes()
    if command.name is None:
        print(describe_recipes(recipes))
        return 0
    recipe = _find(command.name, recipes)
    path = command.into or Path(recipe.name)
    targets = {recipe: path} | {helper: path.parent / helper.name for helper in find_helpers(recipe)}
    texts = {target: _text_for(source, targets) for source, target in targets.items()}
    for target, text in texts.items():
        _refuse_to_overwrite(target, None if target == path else text)
    for target, text in texts.items():
        _write(target, text)
        print(f"wrote    {target}: {_summary(text)}")
    if missing := missing_packages(texts.values(), besides={target.stem for target in texts}):
        print(f"needs    {', '.join(missing)}, not installed here: the extras trimaran[recipes,hf] bring them")
    print(f"next     trimaran train {path} --procs 2")
    print(f"         trimaran train {path} --help shows its arguments")
    return 0


def find_recipes() -> dict[str, Path]:
    """Name, as it is typed -> file, of every recipe of this installation: what has a function job()."""
    return {path.stem.replace("_", "-"): path for path in sorted(_FOLDER.glob("*.py")) if _has_job(path)}


def find_helpers(recipe: Path) -> list[Path]:
    """The files beside a recipe that it imports, and that those import."""
    found = [recipe]
    for path in found:  # grows as it goes
        beside = [recipe.with_name(f"{name}.py") for name in sorted(_imported(_parse(path)))]
        found += [each for each in beside if each.is_file() and each not in found]
    return found[1:]


def describe_recipes(recipes: Mapping[str, Path]) -> str:
    """A line for each recipe: the command that writes it, and the first line of its own words."""
    width = max(map(len, recipes), default=0)
    summaries = {name: _summary(path.read_text(encoding="utf-8")) for name, path in recipes.items()}
    return "\n".join(f"{_PROGRAM} {name:<{width}}  {summary}" for name, summary in summaries.items())


def missing_packages(texts: Iterable[str], *, besides: Set[str] = frozenset()) -> list[str]:
    """The packages that files import, in their functions too, and that are not installed; `besides` are files."""
    packages = {name for text in texts for name in _imported(ast.parse(text))}
    return sorted(name for name in packages - besides if importlib.util.find_spec(name) is None)


def _find(name: str, recipes: Mapping[str, Path]) -> Path:
    if name in recipes:
        return recipes[name]
    close = difflib.get_close_matches(name.replace("_", "-").removesuffix(".py"), recipes, n=1, cutoff=0.4)
    raise UsageError(
        f"{name!r} is no recipe.",
        f"Recipes: {', '.join(recipes)}.",
        f"Did you mean {close[0]!r}?" if close else f"{_PROGRAM} alone lists them.",
    )


def _text_for(source: Path, targets: Mapping[Path, Path]) -> str:
    """The recipe's text, with the commands in it naming the files where they are written."""
    text = source.read_text(encoding="utf-8")
    for each, target in targets.items():
        text = text.replace(f"recipes/{each.name}", str(target))
    return text


def _refuse_to_overwrite(path: Path, same: str | None) -> None:
    """Raises UsageError where there is such a file, unless it has the text `same` already."""
    if path.exists() and (same is None or path.read_bytes() != same.encode()):
        raise UsageError(
            f"{path} exists{'' if same is None else ', and is another'}.",
            "A recipe is written to new files: nothing of yours is overwritten.",
            "Name another file, or one in another folder, with --into FILE.",
        )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UsageError(
            f"{path} cannot be written: {problem.strerror}.",
            "The recipe is written to a file in a folder that exists.",
            "Name another one with --into FILE.",
        ) from problem


def _has_job(path: Path) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "job" for node in _parse(path).body)


def _imported(tree: ast.AST) -> set[str]:
    """First parts of the names of all modules imported anywhere in a file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _summary(text: str) -> str:
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
