"""`trimaran check JOB`: starts small, on one device: does the job learn at all, and is it what it says?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from trimaran.cli.flags import parse_verb, parse_with_job
from trimaran.cli.job_file import call_job_function, load_job_function, require_job_first
from trimaran.errors import UsageError
from trimaran.options import Device, RunOptions
from trimaran.units import format_seconds
from trimaran.world.environment import discover

if TYPE_CHECKING:
    from trimaran.job import Job
    from trimaran.prove import Finding

_PROGRAM = "trimaran check"
_SHOWN = ("name", "status", "value", "rule", "remedy")


@dataclass(frozen=True)
class Check:
    """Start small: minutes on one device, before any large run. One line for each check; exit code 1 if one failed."""

    job: tyro.conf.Positional[Path]
    """The job file: Python, with a function job() that returns a trimaran.Job."""
    json: bool = False
    """Print one JSON object in place of lines."""
    device: Device = "auto"
    """auto takes cuda, else the CPU; mps is taken only when named."""
    num_workers: int = 0
    """Processes that will load data, for each rank: whether they keep up is judged for so many."""
    seed: int | None = None
    """Seed of weights, order and randomness, in place of the job's own."""
    global_batch: int | None = None
    """Samples of one optimizer step over all processes, in place of the job's own."""
    traceback: bool = False
    """Show the whole Python traceback of an error."""

    def __post_init__(self) -> None:
        RunOptions(device=self.device, num_workers=self.num_workers)  # the same values, the same refusals


def main(words: Sequence[str]) -> int:
    """Checks the job in this process. Returns the exit code: 0 where nothing failed, else 1."""
    require_job_first(words, _PROGRAM)
    own = list(words[: words.index("--")] if "--" in words else words)
    if own[0] in ("-h", "--help"):
        parse_verb(Check, own, program=_PROGRAM)
    path = Path(words[0])
    function = load_job_function(path)
    command, arguments = parse_with_job(Check, function, words, program=f"{_PROGRAM} {path}")
    _refuse_several_processes()
    job = call_job_function(function, arguments, path)
    job = job.with_overrides(steps=None, seed=command.seed, global_batch=command.global_batch)
    return _check(job, command, arguments)


def _check(job: Job, command: Check, arguments: Mapping[str, Any]) -> int:
    from trimaran.prove import check_job
    from trimaran.run import Origin
    from trimaran.run.checked import mark_checked
    from trimaran.run.describe import identify

    began = time.monotonic()
    findings: list[Finding] = []
    for finding in check_job(job, device=command.device, num_workers=command.num_workers):
        findings.append(finding)
        if command.traceback and finding.traceback:
            print(finding.traceback, file=sys.stderr)
        if not command.json:
            print(_line(finding), flush=True)
    failures = sum(finding.status == "failed" for finding in findings)
    seconds = time.monotonic() - began
    if not failures:
        origin = Origin(command.job, arguments)
        mark_checked(identify(job, origin), origin)
    if command.json:
        told = {"job": job.name, "passed": not failures, "seconds": round(seconds, 3)}
        listed = [{name: getattr(finding, name) for name in _SHOWN} for finding in findings]
        print(json.dumps({**told, "findings": listed}, ensure_ascii=False))
    else:
        print("\n" + _summary(findings, seconds, command.job))
    return 1 if failures else 0


def _line(finding: Finding) -> str:
    """One line; under a failed one its rule and remedy."""
    from trimaran.prove import CHECKS

    width = max(map(len, CHECKS.values()))
    line = f"{finding.status:<8} {CHECKS[finding.name]:<{width}}  {finding.value}"
    more = f"\n{'':<{width + 11}}{finding.rule} {finding.remedy}" if finding.status == "failed" else ""
    return line + more


def _summary(findings: Sequence[Finding], seconds: float, path: Path) -> str:
    counts = {status: sum(each.status == status for each in findings) for status in ("passed", "failed", "skipped")}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    following = (
        "correct the first failure, then check again: later ones may follow from it"
        if counts["failed"]
        else f"trimaran train {path}"
    )
    return f"checks   {told} in {format_seconds(seconds)}\nnext     {following}"


def _refuse_several_processes() -> None:
    environment = discover()
    if environment is not None and environment.world_size > 1:
        raise UsageError(
            f"{environment.launcher} started {environment.world_size} processes of {_PROGRAM}.",
            "A check runs on one device, in one process.",
            f"Write {_PROGRAM} JOB.py without a launcher.",
        )
