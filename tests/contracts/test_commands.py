"""What the README and the docs tell people to type exists; help answers without loading torch."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from contract_reading import PACKAGE, ROOT

from trimaran.cli.main import VERBS
from trimaran.job import Job

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SHELLS = {"console", "bash", "sh", "shell"}


@dataclass(frozen=True)
class Command:
    """`trimaran VERB ...` or `make TARGET`, as a page shows it."""

    program: str
    verb: str
    job: str | None = None
    """The job file named, where there is one."""
    flags: frozenset[str] = field(default_factory=frozenset)


def commands(page: str) -> list[Command]:
    """Every command in a page's shell blocks and in its inline code."""
    lines = []
    for _, language, block in FENCE.findall(page):
        if language in SHELLS:
            lines += block.replace("\\\n", " ").splitlines()
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", page))
    return [command for line in lines for command in _commands_in(line)]


def _commands_in(line: str) -> Iterator[Command]:
    words = shlex.split(line, comments=True) if line.count('"') % 2 == line.count("'") % 2 == 0 else line.split()
    for at, word in enumerate(words[:-1]):
        program, verb, rest = Path(word).name, words[at + 1], words[at + 2 :]
        in_python = at > 0 and words[at - 1] in ("import", "from")
        if program in ("trimaran", "make") and re.fullmatch(r"\.?[a-z][a-z-]*", verb) and not in_python:
            job = next((word for word in rest if word.endswith(".py")), None)
            flags = frozenset(word.partition("=")[0] for word in rest if re.match(r"--[a-z]", word))
            yield Command(program, verb, job, flags)


def command_faults(
    page: str,
    *,
    verbs: Collection[str],
    targets: Collection[str],
    flags_of: Callable[[str, str | None], Collection[str]],
) -> list[str]:
    """What a page tells people to type, and does not exist. `flags_of(verb, job file)` is asked for known verbs."""
    faults = []
    for command in commands(page):
        known = targets if command.program == "make" else verbs
        if command.verb not in known:
            faults.append(f"{command.program} {command.verb} does not exist")
        elif command.program == "trimaran":
            unknown = command.flags - {"--help"} - set(flags_of(command.verb, command.job))
            faults += [f"trimaran {command.verb} has no {flag}" for flag in sorted(unknown)]
    return faults


def make_targets() -> set[str]:
    """The targets that `make help` lists."""
    return set(re.findall(r"^([a-z.][a-z-]*):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def flags_in_help(verb: str, job: str | None) -> frozenset[str]:
    """The flags that `trimaran VERB [JOB] --help` shows; a job file that is not in the repository is left out."""
    there = [job] if job is not None and (ROOT / job).is_file() else []
    ran = _trimaran(verb, *there, "--help")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return frozenset(re.findall(r"--[a-z][a-z0-9-]*", ran.stdout))


RUN_AND_TELL = """
import sys
from trimaran.cli.main import main
sys.argv[0] = "trimaran"
try:
    code = main()
except SystemExit as stop:
    code = stop.code
print("torch is loaded" if "torch" in sys.modules else "torch is not loaded", file=sys.stderr)
sys.exit(code)
"""


def _trimaran(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN_AND_TELL, *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]], ids=" ".join)
def test_help_does_not_load_torch(words: list[str]) -> None:
    ran = _trimaran(*words)
    assert ran.returncode == 0, ran.stderr
    assert "train" in ran.stdout
    assert "torch is not loaded" in ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_tells_people_to_type_exists(page: Path) -> None:
    assert command_faults(page.read_text(), verbs=VERBS, targets=make_targets(), flags_of=flags_in_help) == []


def test_each_verb_has_its_file() -> None:
    assert [verb for verb in VERBS if not (PACKAGE / "cli" / f"{verb}.py").is_file()] == []


def test_the_readme_begins_with_make_train_and_make_test() -> None:
    made = [command.verb for command in commands((ROOT / "README.md").read_text()) if command.program == "make"]
    assert made[:2] == ["train", "test"]


def test_the_job_that_the_readme_shows_can_be_built() -> None:
    blocks = [block for _, language, block in FENCE.findall((ROOT / "README.md").read_text()) if language == "python"]
    (block,) = [block for block in blocks if "def job(" in block]
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec", dont_inherit=True), names)
    assert isinstance(names["job"](), Job)


def test_a_command_that_does_not_exist_is_found() -> None:
    def faults(page: str) -> list[str]:
        return command_faults(page, verbs={"train"}, targets={"test"}, flags_of=lambda verb, job: {"--procs"})

    fine = "Run `make test`.\n```console\n.venv/bin/trimaran train a.py --procs 2 --help  # --not a flag\n```"
    assert faults(fine) == []
    assert faults("```python\ntrimaran = make(fun)\n```\nTrimaran is. `trimaran` trains. `import trimaran as tm`") == []
    assert faults("`trimaran fly`") == ["trimaran fly does not exist"]
    assert faults("  ```bash\n  make tea\n  ```") == ["make tea does not exist"]
    assert faults("```sh\ntorchrun --standalone --no-python trimaran train \\\n  a.py --prcs=2\n```") == [
        "trimaran train has no --prcs"
    ]
