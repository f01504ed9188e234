"""`trimaran train` as processes of their own: equal figures over any number, other launchers, a real terminal."""

from __future__ import annotations

import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_job import SOURCE, events_of, lines_of, losses_of, run_command, write_job

pytestmark = [pytest.mark.usefixtures("no_process_left"), pytest.mark.timeout(300)]


def test_two_processes_repeat_themselves_and_agree_with_one(tmp_path: Path) -> None:
    write_job(tmp_path)
    for run, procs in (("one", 1), ("two", 2), ("again", 2)):
        words = (
            "--procs",
            str(procs),
            "--run",
            run,
            "--evaluate-every",
            "2steps",
            "--samples",
            "21",
            "--global-batch",
            "7",
        )
        code, out, err = run_command("train", "tiny.py", *words, cwd=tmp_path)
        assert (code, err) == (0, "")
        assert out.count("step 1/6") == 1, "rank 0 alone prints"
    assert (tmp_path / "two/metrics.jsonl").read_bytes() == (tmp_path / "again/metrics.jsonl").read_bytes()
    _compare(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_three_processes_agree_with_one(tmp_path: Path) -> None:
    write_job(tmp_path)
    for run, procs, workers in (("one", 1, 0), ("three", 3, 2)):
        words = (
            "--procs",
            str(procs),
            "--run",
            run,
            "--num-workers",
            str(workers),
            "--epochs",
            "1.5",
            "--samples",
            "21",
        )
        assert run_command("train", "tiny.py", *words, cwd=tmp_path)[0] == 0
    _compare(tmp_path / "one", tmp_path / "three")


def _compare(one: Path, several: Path) -> None:
    assert losses_of(several) == pytest.approx(losses_of(one), rel=1e-5)
    for ours, theirs in zip(lines_of(several / "metrics.jsonl"), lines_of(one / "metrics.jsonl"), strict=True):
        assert (ours["step"], ours["weight"], ours["lr"]) == (theirs["step"], theirs["weight"], theirs["lr"])
        assert ours.get("validation") == (
            pytest.approx(theirs["validation"], rel=1e-5) if "validation" in theirs else None
        )


def test_torchrun_starts_the_same_command(tmp_path: Path) -> None:
    write_job(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        # Without the two dashes torchrun takes --run for one of its own flags.
        [*launcher, "-m", "--", "trimaran", "train", "tiny.py", "--run", "a"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    assert "2 processes on 1 node, gloo" in ran.stdout
    assert events_of(tmp_path / "a") == [("started", 0), ("saved", 6), ("finished", 6)]


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    write_job(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = run_command("train", "tiny.py", "--procs", "2", "--port", str(port), cwd=tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith(f"UsageError: port={port} is taken.")


def test_wrong_usage_starts_no_process(tmp_path: Path) -> None:
    """An unknown flag of a job on several processes is found by all of them, and told once."""
    write_job(tmp_path)
    code, out, err = run_command("train", "tiny.py", "--procs", "2", "--widht", "3", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("UsageError: --widht is no flag of trimaran train tiny.py.")
    assert err.count("\n") == 2


def run_in_terminal(*words: str, cwd: Path, columns: int = 120) -> tuple[int, str]:
    """Exit code and all that `trimaran` wrote to a terminal."""
    ours, theirs = pty.openpty()
    environ = os.environ | {"PYTHONPATH": str(SOURCE), "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-m", "trimaran", *words], cwd=cwd, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux says so when the other end has closed
            break
        if not chunk:
            break
        written += chunk
    os.close(ours)
    return process.wait(60), written.decode()


def screen_of(written: str) -> list[str]:
    """What a terminal shows after such output: the few sequences that a live line uses."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
        elif part.endswith("A"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
    return [line.rstrip() for line in lines]


def test_a_terminal_shows_one_live_line_and_the_end_below_it(tmp_path: Path) -> None:
    write_job(tmp_path)
    words = ("--run", "a", "--length", "30", "--sleep", "0.02", "--evaluate-every", "15steps")
    code, written = run_in_terminal("train", "tiny.py", *words, cwd=tmp_path)
    assert code == 0
    assert written.count("step") > 3, "the line is drawn more than once"
    assert "\x1b[?25h" in written, "the cursor is shown again"
    shown = screen_of(written)
    steps = [line for line in shown if line.startswith("step") and "eta" in line]
    assert len(steps) == 1
    assert re.match(r"step 30/30  loss \d+\.\d{4}  grad \S+  lr 0\.01  .*  eta 0 s", steps[0])
    at = {word: index for index, line in enumerate(shown) for word in line.split()[:1]}
    assert at["tiny"] < at["run"] < shown.index(steps[0]) < at["loss"] < at["weights"]
    assert len([line for line in shown if "validation" in line]) == 2
    assert [line for line in shown if line.startswith("step") and "validation" not in line] == steps


@pytest.mark.slow
def test_a_narrow_terminal_keeps_what_matters_on_one_line(tmp_path: Path) -> None:
    write_job(tmp_path)
    code, written = run_in_terminal("train", "tiny.py", "--run", "a", cwd=tmp_path, columns=60)
    (line,) = [line for line in screen_of(written) if line.startswith("step") and "eta" in line]
    assert code == 0
    assert re.match(r"step 6/6  loss .* samples/s  (mfu \S+ %  )?eta 0 s$", line)


def test_an_error_in_a_terminal_stands_below_the_live_line(tmp_path: Path) -> None:
    write_job(tmp_path)
    words = ("--run", "a", "--length", "30", "--sleep", "0.02", "--fault", "raise@20")
    code, written = run_in_terminal("train", "tiny.py", *words, cwd=tmp_path)
    assert code == 1
    shown = screen_of(written)
    live = next(index for index, line in enumerate(shown) if line.startswith("step") and "eta" in line)
    told = next(index for index, line in enumerate(shown) if line.startswith("JobError: RuntimeError: the forward"))
    assert told > live
    assert "\x1b[?25h" in written
