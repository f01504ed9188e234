"""Flags: those of the command and those of job(), read from one line, with errors that say what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_job import write_job
from trimaran.cli.flags import job_arguments, parse_with_job
from trimaran.cli.main import main
from trimaran.cli.train import Train
from trimaran.errors import UsageError

HEAD = """
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Optional

@dataclass(frozen=True)
class Beta:
    first: float = 0.9
    second: float = 0.95
"""


def parse(signature: str, *words: str) -> tuple[Train, dict[str, object]]:
    names: dict[str, object] = {}
    exec(f"{HEAD}\ndef job({signature}): pass", names)
    return parse_with_job(Train, names["job"], ["job.py", *words], program="trimaran train")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("signature", "words", "wanted"),
    [
        ("hidden_size: int = 3", "--hidden-size 4", {"hidden_size": 4}),
        ("hidden_size: int = 3", "--hidden_size=4", {"hidden_size": 4}),
        ("lr: float = 1.0", "--lr=-1e-3", {"lr": -0.001}),
        ("lr: float = 1.0", "--lr -2", {"lr": -2.0}),
        ("on: bool = False", "--on", {"on": True}),
        ("on: bool = True", "--no-on", {"on": False}),
        ("no_bias: bool = False", "--no-bias", {"no_bias": True}),
        ("mode: Literal['a', 'b'] = 'a'", "--mode b", {"mode": "b"}),
        ("size: Optional[int] = None", "--size 4", {"size": 4}),
        ("size: int | None = 4", "--size None", {"size": None}),
        ("size: tuple[int, int] = (1, 2)", "--size 3 4", {"size": (3, 4)}),
        ("sizes: tuple[int, ...] = ()", "--sizes 3 4 5", {"sizes": (3, 4, 5)}),
        ("names: list[str] = ['a']", "--names b c", {"names": ["b", "c"]}),
        ("names: list[str] = ['a']", "", {"names": ["a"]}),
        ("where: Path = Path('x')", "--where /tmp/y", {"where": Path("/tmp/y")}),
        (
            "width=3, ratio=0.5, name='x', on=False",
            "--width 4 --on",
            {"width": 4, "ratio": 0.5, "name": "x", "on": True},
        ),
        ("*, width: int = 3", "--width 4", {"width": 4}),
        ("width: int", "--width 4", {"width": 4}),
        ("steps: int = 2", "--", {"steps": 2}),
        ("verb: int = 1, arguments: int = 2", "--verb 3 --arguments 4", {"verb": 3, "arguments": 4}),
    ],
)
def test_arguments_of_a_job_are_flags(signature: str, words: str, wanted: dict[str, object]) -> None:
    assert parse(signature, *words.split())[1] == wanted


def test_a_dataclass_argument_is_a_group_of_dotted_flags() -> None:
    beta = parse("beta: Beta = Beta(), lr: float = 1.0", "--beta.first", "0.5", "--lr=2")[1]["beta"]
    assert (beta.first, beta.second) == (0.5, 0.95)  # type: ignore[attr-defined]


def test_each_call_has_its_own_list() -> None:
    names: dict[str, object] = {}
    exec("def job(names: list[str] = ['a']): pass", names)
    first, second = (job_arguments(names["job"])().names for _ in range(2))  # type: ignore[arg-type]
    assert first == second == ["a"]
    first.append("b")
    assert second == ["a"]


def test_flags_of_the_command_and_of_the_job_stand_on_one_line() -> None:
    command, arguments = parse(
        "width: int = 3", "--steps", "5", "--width", "4", "--layout=dp=1", "--evaluate-every=2steps"
    )
    assert (command.steps, command.layout, arguments) == (5, "dp=1", {"width": 4})
    assert command.options.evaluate_every == "2steps"


def test_after_two_dashes_every_flag_is_the_jobs() -> None:
    command, arguments = parse("steps: int = 2, run: str = 'q'", "--steps", "4", "--", "--steps", "3", "--run", "u")
    assert (command.steps, command.run, arguments) == (4, None, {"steps": 3, "run": "u"})
    command, arguments = parse("steps: int = 2", "--steps", "4", "--")
    assert (command.steps, arguments) == (4, {"steps": 2})


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Runs `trimaran train` on the tiny job in its folder; gives the exit code and what was said on stderr."""
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        code = main(["train", *words])
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert not Path("runs").exists() or code == 0
        return code, said

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tiny.py --widht 4", "--widht is no flag of trimaran train tiny.py.|Did you mean --width?"),
        ("tiny.py --stpes=4", "--stpes is no flag of trimaran train tiny.py.|Did you mean --steps?"),
        ("tiny.py --stpes 4 --", "--stpes is no flag of trimaran train tiny.py.|Did you mean --steps?"),
        ("tiny.py -- --widht 4", "--widht is no flag of|Flags: --epochs, --fault,|Did you mean --width?"),
        ("tiny.py -- --steps 4", "--steps is no flag of trimaran train tiny.py --."),
        ("tiny.py -s 4", "-s is no flag of trimaran train tiny.py."),
        ("tiny.py surplus", "'surplus' was given to trimaran train tiny.py, and follows no flag that takes it."),
        ("tiny.py --deterministic True", "'True' was given|a switch is --name or --no-name"),
        ("tiny.py --width four", "--width: invalid literal for int() with base 10: 'four'."),
        ("tiny.py --steps four", "--steps: no type matching INT could be instantiated from ['four']."),
        ("tiny.py --steps None", "--steps: no type matching INT"),
        ("tiny.py --steps", "Missing value for argument '--steps'."),
        ("tiny.py --device tpu", "invalid choice 'tpu' for argument '--device'. Expected one of ('auto',"),
        ("tiny.py --log-every 0", "log_every=0. |It counts steps"),
        ("tiny.py --num-workers -1", "num_workers=-1."),
        ("tiny.py --evaluate-every 10s", "evaluate_every='10s' is wall time."),
        ("tiny.py --evaluate-every often", "'often' is not a span such as"),
        ("tiny.py --procs 0", "--procs 0.|It counts processes."),
        ("tiny.py --port 70000 --procs 2", "--port 70000."),
        ("tiny.py --run .", "--run '.' names no directory of its own."),
        ("--steps 4 tiny.py", "was given '--steps' before the job file.|Write trimaran train JOB.py"),
        ("", "trimaran train was given no job file."),
        ("tiny.py --layout pp=2", "pp=2 is not built yet.|Leave pp out."),
        ("tiny.py --layout dpp=2", "'dpp' is no axis of a layout.|Did you mean"),
        ("tiny.py --layout dp=2", "is 2 ranks, and there are 1.|--procs 2"),
        ("tiny.py --layout precision=bf61", "Did you mean 'bf16'?"),
    ],
)
def test_wrong_usage_is_told_in_words_and_exits_2(told, words: str, said: str) -> None:  # type: ignore[no-untyped-def]
    code, text = told(*words.split())
    for part in said.split("|"):
        assert part.strip() in " ".join(text.split())
    assert code == 2
    assert text.count("\n") == 2, "an error is its value, then rule and remedy"


def test_a_clash_names_both_and_how_to_separate_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_job(tmp_path, ("length: int = 6", "steps: int = 6"), ("else length", "else steps"))
    assert main(["train", str(path), "--steps", "3"]) == 2
    said = capsys.readouterr().err
    assert "--steps is a flag of this command and an argument of job()." in said
    assert "--steps VALUE -- for the command's, or -- --steps VALUE for the job's" in said


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("width", "job()'s argument width has no type."),
        ("width=None", "job()'s argument width has no type."),
        ("*args", "job() takes *args."),
        ("**more", "job() takes **more."),
        ("width, /", "job() takes width."),
        ("width: 'Unheard' = 1", "the arguments of job cannot be read: NameError: name 'Unheard' is not defined."),
        ("help: bool = False", "job() takes help."),
        ("steps: int", "job()'s argument steps has the name of a flag of this command, and no default."),
    ],
)
def test_arguments_that_cannot_be_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], signature: str, said: str
) -> None:
    path = tmp_path / "one.py"
    path.write_text(f"def job({signature}): pass\n")
    assert main(["train", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"JobError: {said}\n")


def test_a_missing_argument_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.py"
    path.write_text("def job(width: int): pass\n")
    assert main(["train", str(path)]) == 2
    assert "--width INT (required)" in capsys.readouterr().err


def help_of(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, "--help"])
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def test_help_of_the_verb_names_the_job_file(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys=capsys)
    assert text.startswith("usage: trimaran train [-h] [OPTIONS] PATH")
    assert "--procs INT" in text
    assert "--num-workers INT" in text


def test_help_with_a_job_file_shows_its_arguments_in_a_box_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(str(write_job(tmp_path)), capsys=capsys)
    assert "A tiny regression." in text
    ours, theirs = text.split("job() options")
    assert "--procs INT" in ours
    assert "--width INT" in theirs
    assert "verb" not in text


def test_help_of_a_job_that_has_a_flag_of_ours_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.py"
    path.write_text("def job(steps: int = 3, width: int = 1): pass\n")
    assert "job() has --steps, too: a bare -- separates" in help_of(str(path), capsys=capsys)
    assert "--width INT" in help_of(str(path), "--", capsys=capsys)


@pytest.mark.parametrize("words", ["--drill a --drill b", "--lr=1 --lr 2", "--lr 1 --global-batch 4 --global_batch 5"])
def test_a_flag_that_is_given_twice_is_refused(words: str) -> None:
    with pytest.raises(UsageError, match=r"--(drill|lr|global-batch) is given twice\."):
        parse("lr: float = 1.0", *words.split())
