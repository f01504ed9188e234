"""Flags from typed signatures: those of a verb and those of a job's function on one command line."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from trimaran.errors import JobError, UsageError

Verb = TypeVar("Verb")


def parse_verb(verb: type[Verb], words: Sequence[str], *, program: str) -> Verb:
    """The verb's own flags; what it does not know is left to the job. Prints help and exits where asked."""
    parsed, _ = _parse(verb, words, program=program, unknown_allowed=True)
    return parsed  # type: ignore[no-any-return]


def parse_with_job(
    verb: type[Verb], function: Callable[..., Any], words: Sequence[str], *, program: str
) -> tuple[Verb, dict[str, Any]]:
    """The verb's flags and the job's arguments. After a bare `--` every flag is the job's.

    Raises UsageError for an unknown flag (with the nearest name), a wrong value, or a flag that both know.
    """
    arguments = job_arguments(function)
    of_verb, of_job = _flag_names(verb), {each.name for each in fields(arguments)}
    if "--" in words:
        at = list(words).index("--")
        _refuse_unknown(words[:at], of_verb, program)
        _refuse_unknown(words[at + 1 :], of_job, "job()")
        ours, _ = _parse(verb, words[:at], program=program, unknown_allowed=False)
        theirs, _ = _parse(arguments, words[at + 1 :], program=f"{program} --", unknown_allowed=False)
        return ours, _as_dict(theirs)
    clashing = of_verb & of_job
    _refuse_clash(words, clashing)
    _refuse_unknown(words, of_verb | of_job, program)
    arguments = job_arguments(function, without=clashing)
    both = make_dataclass(
        "Command",
        [
            ("verb", Annotated[verb, tyro.conf.OmitArgPrefixes]),
            ("arguments", Annotated[arguments, tyro.conf.OmitArgPrefixes]),
        ],
    )
    both.__doc__ = inspect.getdoc(function) or ""
    parsed, _ = _parse(both, words, program=program, unknown_allowed=False)
    return parsed.verb, _as_dict(parsed.arguments)


def job_arguments(function: Callable[..., Any], *, without: set[str] = frozenset()) -> type[Any]:  # type: ignore[assignment]
    """A dataclass with one field for each argument of the function, its type and default.

    Raises JobError for an argument that cannot be a flag: no annotation and no default, *args or **kwargs.
    """
    hints = get_type_hints(function, include_extras=True)
    found: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise JobError(
                f"job() takes {parameter}.", "Each of its arguments becomes a flag by name.", "Name its arguments."
            )
        default = parameter.default
        if name not in hints and (default is parameter.empty or default is None):
            raise JobError(
                f"job()'s argument {name} has no type.",
                "A flag is read by its type.",
                f"Annotate it, such as {name}: int = 1.",
            )
        if name in without:
            if default is parameter.empty:
                raise JobError(
                    f"job()'s argument {name} has the name of a flag of this command, and no default.",
                    "Such an argument is given after a bare --.",
                    f"Rename it, or write ... -- --{_dashed(name)} VALUE.",
                )
            continue
        kind = hints.get(name, type(default))
        found.append((name, kind, field(default=MISSING if default is parameter.empty else default, kw_only=True)))
    arguments = make_dataclass("JobArguments", found, frozen=True)
    arguments.__doc__ = ""
    return arguments


def _parse(kind: Any, words: Sequence[str], *, program: str, unknown_allowed: bool) -> tuple[Any, list[str]]:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            if unknown_allowed:
                return tyro.cli(kind, args=list(words), prog=program, return_unknown_args=True)
            return tyro.cli(kind, args=list(words), prog=program), []
    except SystemExit as end:
        if end.code in (0, None):
            sys.stderr.write(told.getvalue())
            raise
        text = " ".join(line.strip("│╭╰─╮╯ \t") for line in told.getvalue().splitlines())
        raise UsageError(
            " ".join(text.split()) or "The command line cannot be read.",
            "Flags have the types their help shows.",
            f"See {program} --help.",
        ) from None


def _refuse_unknown(words: Sequence[str], known: set[str], program: str) -> None:
    for word in words:
        name = word.split("=", 1)[0]
        if not name.startswith("--") or name in ("--", "--help"):
            continue
        plain = name[2:].replace("-", "_")
        if plain in known or plain.removeprefix("no_") in known:
            continue
        close = difflib.get_close_matches(plain, known, n=1, cutoff=0.5)
        raise UsageError(
            f"{name} is no flag of {program}.",
            f"Flags: {', '.join('--' + _dashed(each) for each in sorted(known))}.",
            f"Did you mean --{_dashed(close[0])}?" if close else "Drop it.",
        )


def _refuse_clash(words: Sequence[str], clashing: set[str]) -> None:
    for word in words:
        plain = word.split("=", 1)[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and plain in clashing:
            flag = _dashed(plain)
            raise UsageError(
                f"--{flag} is a flag of this command and an argument of job().",
                "A flag has one meaning; a bare -- separates the command's flags from the job's.",
                f"Write --{flag} VALUE -- for the command's, or -- --{flag} VALUE for the job's.",
            )


def _flag_names(kind: type[Any]) -> set[str]:
    """Names of a command's flags, those of dataclasses inside it included; its positional words are no flags."""
    names: set[str] = set()
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        hint = hints[each.name]
        inner = getattr(hint, "__origin__", hint)
        if is_dataclass(inner):
            names |= _flag_names(inner)  # type: ignore[arg-type]
        elif tyro.conf.Positional not in getattr(hint, "__metadata__", ()):
            names.add(each.name)
    return names


def _as_dict(arguments: Any) -> dict[str, Any]:
    return {each.name: getattr(arguments, each.name) for each in fields(arguments)}


def _dashed(name: str) -> str:
    return name.replace("_", "-")
