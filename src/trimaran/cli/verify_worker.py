"""One process of `trimaran verify`: python -m trimaran.cli.verify_worker FILE WORDS... (rank 0 prints the results)."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.cli.job_file import describe_problem
from trimaran.cli.main import run_safely
from trimaran.cli.verify import Verify, plan, read_command
from trimaran.errors import JobError, LayoutError, TrimaranError
from trimaran.prove.verify import Ranks
from trimaran.prove.verify_layouts import choose_steps
from trimaran.prove.verify_report import render_line, render_verification, verification_as_json
from trimaran.units import format_seconds
from trimaran.world.environment import discover

if TYPE_CHECKING:
    from trimaran.job import Job


@dataclass(frozen=True)
class Result:
    """What came of one layout: `line` for people, `told` for machines, and whether it is equal; None: it is refused."""

    line: str
    told: dict[str, Any]
    equal: bool | None


def main(words: Sequence[str]) -> int:
    """Runs this rank's part of all sides; rank 0 leaves in the file whether all is equal. `words` are the command's."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it even where it waits for the others in compiled code
    file, *rest = words
    return run_safely(lambda: _run(Path(file), rest), show_traceback="--traceback" in rest)


def _run(file: Path, words: Sequence[str]) -> int:
    command, job = read_command(words)
    ranks = Ranks(job, discover(), steps=choose_steps(job, command.steps), device=command.device)
    equal = _verify_all(command, job, ranks) if command.layouts else _verify_one(command, job, ranks)
    if ranks.rank == 0:
        file.write_text(json.dumps(equal), encoding="utf-8")
    return 0


def _verify_one(command: Verify, job: Job, ranks: Ranks) -> bool:
    ((layout, reference),) = plan(command, job)
    verification = ranks.verify(layout, reference, recut=not command.against)
    if verification is None:
        return True
    if command.json:
        _print_json(verification_as_json(verification))
    else:
        print(render_verification(verification))
    return verification.equal


def _verify_all(command: Verify, job: Job, ranks: Ranks) -> bool:
    began = time.monotonic()
    results = []
    for result in _results(command, job, ranks):
        results.append(result)
        if not command.json:
            print(result.line, flush=True)
    differ, equal, refused = (sum(each.equal is what for each in results) for what in (False, True, None))
    if ranks.rank == 0 and command.json:
        _print_json({"job": job.name, "layouts": [each.told for each in results]})
    elif ranks.rank == 0:
        counts = {"equal": equal, "not equal": differ, "refused": refused}
        summary = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        print(f"\nlayouts  {summary} in {format_seconds(time.monotonic() - began)}")
    return equal > 0 and not differ


def _results(command: Verify, job: Job, ranks: Ranks) -> Iterator[Result]:
    """One for each layout, on rank 0. A layout that is refused is refused by all ranks; any other error ends all."""
    for layout, reference in plan(command, job):
        try:
            verification = ranks.verify(layout, reference, recut=not command.against)
        except LayoutError as refusal:
            if ranks.rank == 0:
                told = {"layout": str(layout), "equal": None, "refused": refusal.value}
                yield Result(f"refused  {layout}  {refusal.value}", told, None)
        except TrimaranError as problem:
            problem.value = f"in {layout}: {problem.value}"
            raise
        except Exception as problem:
            raise JobError(
                f"in {layout}: {describe_problem(problem)}.",
                "Each layout trains the job's first steps.",
                "Verify this layout alone, with --traceback.",
            ) from problem
        else:
            if verification is not None:
                yield Result(render_line(verification), verification_as_json(verification), verification.equal)


def _print_json(told: dict[str, Any]) -> None:
    print(json.dumps(told, ensure_ascii=False, allow_nan=False))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
