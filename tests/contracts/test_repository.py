"""The files around the code are true: docs, changelog, pins, licence."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from contract_reading import PACKAGE, ROOT

FOLDERS = ("src", "tests", "recipes", "benchmarks", "docs", ".ci", ".github")
TEXTS = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".jsonl", ".csv", ".cfg", ".sh", ""}
LOCAL_PATH = re.compile(r"(?<![\w.-])/(?:work|root|home/\w+|Users/\w+)(?![\w-])")
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==[0-9][A-Za-z0-9.!]*")


def nav_faults(config: str, pages: Iterable[str]) -> list[str]:
    """Pages that the site's navigation leaves out, and entries of it without a page."""
    listed, there = set(re.findall(r"[\w./-]+\.md", config)), set(pages)
    return [f"{page} is not in nav" for page in sorted(there - listed)] + [
        f"{page} is in nav and does not exist" for page in sorted(listed - there)
    ]


def tour_faults(tour: str, files: Iterable[str]) -> list[str]:
    """Files of the package that the tour does not name, and files it names that do not exist."""
    named, there = set(re.findall(r"`([\w/]+\.py)`", tour)), set(files)
    return [f"{file} is not in the tour" for file in sorted(there - named)] + [
        f"{file} is in the tour and does not exist" for file in sorted(named - there)
    ]


def pin_faults(constraints: str, dependencies: Iterable[str]) -> list[str]:
    """Lines that are not exact pins without a build tag, and dependencies that no line pins."""
    lines = [line for line in constraints.splitlines() if line and not line.startswith("#")]
    pinned = {_plain_name(line.partition("==")[0]) for line in lines}
    needed = {_plain_name(re.split(r"[^\w.-]", dependency)[0]) for dependency in dependencies} - {"trimaran"}
    return [f"{line!r} is not an exact pin" for line in lines if not PIN.fullmatch(line)] + [
        f"{name} is not pinned" for name in sorted(needed - pinned)
    ]


def _plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def local_paths(text: str) -> list[str]:
    """Folders of one person's machine."""
    return LOCAL_PATH.findall(text)


def has_unreleased(changelog: str) -> bool:
    """Whether there is a section that the next change can be written into."""
    return re.search(r"^## \[?Unreleased\]?$", changelog, re.MULTILINE) is not None


def texts() -> list[Path]:
    """Every text file of the repository; none of what a build, a run or an environment leaves behind."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    files = [path for path in [*ROOT.iterdir(), *inside] if path.is_file() and path.suffix in TEXTS]
    return [path for path in files if path.name != ".git"]  # a file where the checkout is a worktree


def test_every_page_of_the_docs_is_in_nav() -> None:
    docs = ROOT / "docs"
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    assert nav_faults((ROOT / "mkdocs.yml").read_text(), pages) == []
    assert nav_faults("nav:\n  - Home: index.md\n  - how-to/a.md", ["index.md", "b.md"]) == [
        "b.md is not in nav",
        "how-to/a.md is in nav and does not exist",
    ]


def test_the_tour_names_every_file() -> None:
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert tour_faults((ROOT / "docs" / "tour.md").read_text(), files) == []
    assert tour_faults("- `job.py`: what\n- `run/loop.py`: how", ["job.py", "layout.py"]) == [
        "layout.py is not in the tour",
        "run/loop.py is in the tour and does not exist",
    ]


def test_constraints_pin_every_dependency_exactly() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [*project["dependencies"], *(name for extra in ("recipes", "test", "docs", "dev") for name in extras[extra])]
    constraints = (ROOT / "constraints.txt").read_text()
    assert pin_faults(constraints, used) == []
    assert "torch==2.13.0" in constraints.splitlines()


def test_a_loose_pin_is_found() -> None:
    assert pin_faults("# all\nnumpy==2.4.6\nscikit_learn==1.9", ["numpy>=2", "scikit-learn[x]>=1"]) == []
    assert pin_faults("numpy>=2", []) == ["'numpy>=2' is not an exact pin"]
    assert pin_faults("torch==2.13.0+cpu", ["torch"]) == ["'torch==2.13.0+cpu' is not an exact pin"]
    assert pin_faults("--index-url=https://example.org", []) != []
    assert pin_faults("numpy==2.4.6", ["numpy", "rich>=14"]) == ["rich is not pinned"]


def test_the_changelog_has_an_unreleased_section() -> None:
    assert has_unreleased((ROOT / "CHANGELOG.md").read_text())
    assert not has_unreleased("# Changelog\n\n## [0.1.0]\n\nThe Unreleased section is empty.\n")


def test_no_file_names_a_folder_of_one_machine() -> None:
    assert {str(path.relative_to(ROOT)): found for path in texts() if (found := local_paths(path.read_text()))} == {}
    assert local_paths("see " + "/home/" + "ann/runs") != []
    assert local_paths("open('" + "/wo" + "rk/main')") != []
    assert local_paths("net/work, home/a and /roots") == []


def test_the_package_is_typed_and_licensed() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert (ROOT / "LICENSE").read_text().split()[:2] == ["Apache", "License"]
