"""Job files that cannot be used: each told in two lines, with the file and line, and never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trimaran.cli.main import main

Say = Callable[[str], tuple[int, str]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Say]:
    """Trains the job file `one.py` with this text; gives the exit code and what was said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(text: str) -> tuple[int, str]:
        Path("one.py").write_text(text)
        code = main(["train", "one.py"])
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        assert not Path("runs").exists()
        return code, captured.err

    yield run
    for name in ("job_file_one", "helper_of_one"):
        sys.modules.pop(name, None)


def test_a_missing_file_names_those_nearby(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    Path("real.py").write_text("")
    assert main(["train", "reel.py"]) == 2
    assert "There is no job file 'reel.py'." in (said := capsys.readouterr().err)
    assert "Job files nearby: real.py." in said
    assert main(["train", "."]) == 2
    assert "'.' is a folder." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ndef job(:\n", "one.py does not import: SyntaxError: invalid syntax, at {here}/one.py:2."),
        ("\nimport unheard_of\n", "No module named 'unheard_of', at {here}/one.py:2: import unheard_of."),
        ("def f():\n    return {}['a']\nf()\n", "KeyError: 'a', at {here}/one.py:2: return {}['a']."),
        ("import sys\nsys.exit(3)\n", "one.py does not import: SystemExit: 3, at {here}/one.py:2: sys.exit(3)."),
        ("x = 1\n", "one.py has no job."),
        ("job = 1\n", "job in one.py is int, not a function."),
        ("def job(): return 3\n", "job() in one.py returned int."),
        ("def job(): pass\n", "job() in one.py returned NoneType."),
        ("def job(a: int = 1):\n    raise OSError('gone')\n", "job(a=1) raised OSError: gone, at {here}/one.py:2:"),
        ("import sys\ndef job():\n    sys.exit('no')\n", "job() raised SystemExit: no, at {here}/one.py:3:"),
        ("import trimaran as tm\njob = tm.Job\n", "the arguments of job cannot be read: NameError"),
    ],
)
def test_a_file_that_gives_no_job(say: Say, text: str, said: str) -> None:
    code, told = say(text)
    assert code == 1
    assert told.startswith("JobError: ")
    assert said.replace("{here}", str(Path.cwd())) in told
    assert told.count("\n") == 2


def test_a_mistake_in_a_module_that_the_job_file_imports_is_named_there(say: Say) -> None:
    Path("helper_of_one.py").write_text("\n\nx = (\n")
    code, told = say("import helper_of_one\n")
    assert code == 1
    assert f"at {Path.cwd()}/helper_of_one.py:3." in told
    Path("helper_of_one.py").write_text("\n\n1 / 0\n")
    assert f"at {Path.cwd()}/helper_of_one.py:3: 1 / 0." in say("import helper_of_one\n")[1]


def test_an_error_of_ours_in_the_job_file_is_told_as_it_is(say: Say) -> None:
    code, told = say("import trimaran as tm\ndef job(): return tm.Layout(dp=0)\n")
    assert (code, told.splitlines()[0]) == (2, "LayoutError: dp=0.")


def test_traceback_shows_all(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    say("def job():\n    return 1 / 0\n")
    assert main(["train", "one.py", "--traceback"]) == 1
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert "ZeroDivisionError: division by zero" in said
    assert said.splitlines()[-2].startswith("JobError: job() raised ZeroDivisionError")


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "x.py"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        assert "train a job" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("trimaran ")
