"""The command `trimaran`: finds the verb, runs it, and turns errors into words and an exit code."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from trimaran.errors import TrimaranError, UsageError
from trimaran.world.environment import record_failure

VERBS = {"train": "train a job on one process or on many"}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 done, 1 failed, 2 wrong usage, 75 stopped after saving, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    own = words[: words.index("--")] if "--" in words else words
    show_traceback = "--traceback" in own
    try:
        return _run(words)
    except KeyboardInterrupt:
        _report(None, "interrupted before the first step")
        return INTERRUPTED
    except TrimaranError as error:
        _report(error, f"{type(error).__name__}: {error}", show_traceback=show_traceback)
        return error.exit_code
    except Exception as error:
        _report(error, f"{type(error).__name__}: {error}\n{_where(error)}", show_traceback=show_traceback)
        return 1


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"trimaran {version('trimaran')}")
        return 0
    if words[0] not in VERBS:
        close = difflib.get_close_matches(words[0], VERBS, n=1)
        raise UsageError(
            f"{words[0]!r} is no verb of trimaran.",
            f"Verbs: {', '.join(VERBS)}.",
            f"Did you mean {close[0]!r}?" if close else "See trimaran --help.",
        )
    verb = importlib.import_module(f"trimaran.cli.{words[0]}")
    code: int = verb.main(words[1:])
    return code


def _help() -> str:
    lines = ["usage: trimaran VERB ...", "", *(f"  {verb:<10} {what}" for verb, what in VERBS.items())]
    return "\n".join([*lines, "", "trimaran VERB --help tells more; with a job file, also the job's own arguments."])


def _report(error: BaseException | None, text: str, *, show_traceback: bool = False) -> None:
    """Prints once what went wrong: here, or, in a worker of our own launcher, there."""
    if error is not None and record_failure(error) and not show_traceback:
        return
    if error is not None and show_traceback:
        traceback.print_exception(error)
    print(text, file=sys.stderr)


def _where(error: BaseException) -> str:
    """The innermost line of the trace that is neither ours nor a library's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and Path(__file__).parents[1] not in Path(frame.filename).parents
    ]
    place = f"at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}. " if frames else ""
    return f"{place}--traceback shows it all."
