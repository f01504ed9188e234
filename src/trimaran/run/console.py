"""What a run prints: head, live line, end. Plain lines where the output is not a terminal; nothing on other ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimaran.units import format_bytes, format_count, format_number, format_seconds

_BAR_WIDTH = 16


@dataclass(frozen=True)
class Progress:
    """The figures of the line that shows a step. `step` counts from 1."""

    step: int
    total_steps: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    rate: float
    rate_unit: str
    mfu: float | None
    memory_bytes: int
    eta_seconds: float

    def __str__(self) -> str:
        return self.line()

    def line(self, width: int | None = None) -> str:
        """All figures on one line; where they do not fit into `width` columns, the least urgent are left out."""
        words = {
            "step": f"step {self.step:>{len(str(self.total_steps))}}/{self.total_steps}",
            "loss": f"loss {self.loss:.4f}",
            "grad": f"grad {format_number(self.grad_norm)}",
            "skipped": "skipped" if self.skipped else "",
            "lr": f"lr {format_number(self.lr)}",
            "rate": f"{format_count(self.rate)} {self.rate_unit}",
            "mfu": f"mfu {100 * self.mfu:.0f} %" if self.mfu is not None else "",
            "memory": f"mem {format_bytes(self.memory_bytes)}",
            "eta": f"eta {format_seconds(self.eta_seconds)}",
        }
        shown = {name: word for name, word in words.items() if word}
        for name in ("memory", "mfu", "lr", "grad"):
            if width is None or len("  ".join(shown.values())) <= width:
                break
            shown.pop(name, None)
        return "  ".join(shown.values())


class _PatientConsole(RichConsole):
    """Says no more, instead of ending the process, when whoever read its output has gone (`| head`)."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # What is still buffered would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Console:
    """Prints for rank 0; on other ranks (`active` False) every call does nothing."""

    def __init__(self, *, active: bool, log_every: int, file: TextIO | None = None) -> None:
        self._active = active
        self._log_every = log_every
        self._rich = _PatientConsole(file=file or sys.stdout, highlight=False, soft_wrap=True)
        self._live: Live | None = None

    def head(self, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
        """The block before step 1: a title, then (name, left, right) rows."""
        self.line(title)
        width = max(len(left) for _, left, _ in rows) + 2
        for name, left, right in rows:
            self.line(f"{name:<8} {left:<{width}} {right}".rstrip())
        self.line("")

    def line(self, text: str) -> None:
        """One line, above the live one where there is one."""
        if self._active:
            self._rich.print(Text(text))

    def lines(self, texts: Iterable[str]) -> None:
        """Several lines."""
        for text in texts:
            self.line(text)

    def progress(self, progress: Progress) -> None:
        """Shows a step: in place on a terminal, else a line every `log_every` steps."""
        if not self._active:
            return
        if self._rich.is_terminal:
            self._show_live(progress)
        elif progress.step == 1 or progress.step % self._log_every == 0 or progress.step == progress.total_steps:
            self.line(str(progress))

    def end_live(self) -> None:
        """Leaves the live line where it is; what is printed next stands below it."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show_live(self, progress: Progress) -> None:
        if self._live is None:
            self._live = Live(console=self._rich, refresh_per_second=8, transient=False)
            self._live.start()
        text = progress.line(self._rich.width)
        row: list[RenderableType] = [Text(text, no_wrap=True, overflow="ellipsis")]
        if len(text) + 2 + _BAR_WIDTH <= self._rich.width:
            row.append(ProgressBar(total=progress.total_steps, completed=progress.step, width=_BAR_WIDTH))
        grid = Table.grid(padding=(0, 2))
        grid.add_row(*row)
        self._live.update(grid)
