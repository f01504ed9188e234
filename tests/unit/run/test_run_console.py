"""What is printed, to a file and to a terminal of any width."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trimaran.run.console import Console, Progress


def progress(**changes: Any) -> Progress:
    values: dict[str, Any] = {
        "step": 120,
        "total_steps": 1000,
        "loss": 2.41324,
        "grad_norm": 0.611,
        "lr": 9.9e-4,
        "skipped": False,
        "rate": 14_200.0,
        "rate_unit": "tok/s",
        "mfu": 0.414,
        "memory_bytes": 231 * 2**20,
        "eta_seconds": 792.0,
    }
    return Progress(**values | changes)


def test_the_line_of_a_step() -> None:
    line = "step  120/1000  loss 2.4132  grad 0.61  lr 9.9e-4  14.2 k tok/s  mfu 41 %  mem 231 MiB  eta 13:12"
    assert str(progress(grad_norm=0.61)) == line
    assert "mfu" not in str(progress(mfu=None))


def test_a_skipped_step_is_told_and_any_figure_can_be_shown() -> None:
    line = str(progress(skipped=True, loss=math.nan, grad_norm=math.inf))
    assert "loss nan  grad inf  skipped  lr" in line


@pytest.mark.parametrize("width", [40, 60, 80, 95, 200])
def test_a_narrow_line_leaves_out_the_least_urgent(width: int) -> None:
    line = progress().line(width)
    assert len(line) <= max(width, len("step  120/1000  loss 2.4132  14.2 k tok/s  eta 13:12"))
    assert "loss 2.4132" in line
    assert "eta 13:12" in line
    assert ("mem" in line) == (width >= 99)


def test_a_file_gets_a_line_every_so_many_steps() -> None:
    file = io.StringIO()
    console = Console(active=True, log_every=4, file=file)
    for step in range(1, 11):
        console.progress(progress(step=step, total_steps=10))
    console.end_live()
    steps = [line.split()[1] for line in file.getvalue().splitlines()]
    assert steps == ["1/10", "4/10", "8/10", "10/10"]
    assert "\x1b" not in file.getvalue()


def test_other_ranks_print_nothing() -> None:
    file = io.StringIO()
    console = Console(active=False, log_every=1, file=file)
    console.head("title", [("name", "left", "right")])
    console.progress(progress())
    console.lines(["a"])
    console.end_live()
    assert file.getvalue() == ""


def test_the_head_is_a_table_without_trailing_blanks() -> None:
    file = io.StringIO()
    Console(active=True, log_every=1, file=file).head("t", [("one", "a", "x"), ("two", "abc", ""), ("three", "", "y")])
    assert file.getvalue() == "t\none      a     x\ntwo      abc\nthree          y\n\n"


def test_marks_in_a_text_are_text() -> None:
    file = io.StringIO()
    Console(active=True, log_every=1, file=file).line("[red]not red[/red] :smile: " + "x" * 300)
    assert file.getvalue() == "[red]not red[/red] :smile: " + "x" * 300 + "\n"


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    """As in `trimaran train ... | head -3`."""
    script = "from trimaran.run.console import Console\nc = Console(active=True, log_every=1)\n"
    script += "for i in range(20000): c.line(f'line {i}')\nopen('done', 'w').close()"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "done").exists()
