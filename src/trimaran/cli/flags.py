"""Flags from typed signatures: those of a verb and those of a job's function on one command line."""

from __future__ import annotations

import contextlib
import copy
import difflib
import inspect
import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields, is_dataclass, make_dataclass
from functools import partial
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from trimaran.errors import JobError, UsageError

Verb = TypeVar("Verb")


def parse_verb(verb: type[Verb], words: Sequence[str], *, program: str) -> Verb:
    """The verb's own flags; what it does not know is left to the job. Prints help and exits where asked."""
    parsed, _ = _parse(Annotated[verb, tyro.conf.DisallowNone], words, program=program)
    return parsed  # type: ignore[no-any-return]


def parse_whole_verb(verb: type[Verb], words: Sequence[str], *, program: str) -> Verb:
    """The flags of a verb that takes no job. Raises UsageError for a word it does not know."""
    return _parse_all(Annotated[verb, tyro.conf.DisallowNone], words, _flag_names(verb), program)  # type: ignore[no-any-return]


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
        ours = parse_whole_verb(verb, words[:at], program=program)
        theirs = _parse_all(arguments, words[at + 1 :], of_job, f"{program} --")
        return ours, _as_dict(theirs)
    clashing = of_verb & of_job
    _refuse_clash(words, clashing)
    arguments = job_arguments(function, without=clashing)
    both = make_dataclass(
        "Command",
        [
            ("verb", Annotated[verb, tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone, tyro.conf.arg(name="")]),
            # The name is not in the flags: it is the title of their box in the help.
            ("arguments", Annotated[arguments, tyro.conf.arg(name="job()")]),
        ],
    )
    both.__doc__ = _describe(function, clashing)
    parsed = _parse_all(both, words, of_verb | of_job, program)
    return parsed.verb, _as_dict(parsed.arguments)


def job_arguments(function: Callable[..., Any], *, without: set[str] = frozenset()) -> type[Any]:  # type: ignore[assignment]
    """A dataclass with one field for each argument of the function, its type and default.

    Raises JobError for an argument that cannot be a flag: no annotation and no default, *args or **kwargs.
    """
    hints = _type_hints(function)
    found: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise JobError(
                f"job() takes {parameter}.", "Each of its arguments becomes a flag by name.", "Name its arguments."
            )
        if name == "help":
            raise JobError("job() takes help.", "--help shows all flags.", "Give the argument another name.")
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
        flag = (name, Annotated[kind, tyro.conf.arg(prefix_name=False)], _field(default, parameter.empty))
        found.append(flag)
    arguments = make_dataclass("JobArguments", found, frozen=True)
    arguments.__doc__ = ""
    return arguments


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        inspect.signature(function)
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError, ValueError, SyntaxError, AttributeError) as problem:
        raise JobError(
            f"the arguments of job cannot be read: {type(problem).__name__}: {problem}.",
            "A flag is read by its argument's type, which is looked up in the job file.",
            "Write def job(...), with types that the file imports when it runs.",
        ) from problem


def _field(default: Any, absent: Any) -> Field[Any]:
    if default is absent:
        return field(kw_only=True)  # type: ignore[no-any-return]
    if type(default).__hash__ is None:  # a list, a dict: each call has its own
        return field(default_factory=partial(copy.deepcopy, default), kw_only=True)
    return field(default=default, kw_only=True)  # type: ignore[no-any-return]


def _describe(function: Callable[..., Any], clashing: set[str]) -> str:
    """What the help says above the flags: the function's own words, and its flags that the command has, too."""
    own = [inspect.getdoc(function) or ""]
    if clashing:
        flags = ", ".join(f"--{_dashed(name)}" for name in sorted(clashing))
        own.append(f"job() has {flags}, too: a bare -- separates the command's flags from the job's.")
    return "\n\n".join(part for part in own if part)


def _parse_all(kind: Any, words: Sequence[str], known: set[str], program: str) -> Any:
    """All words read as `kind`. Raises UsageError naming the first that is left over, and the nearest flag."""
    _refuse_unknown(words, known, program)
    _refuse_repeated(words)
    parsed, unknown = _parse(kind, words, program=program)
    if unknown:
        first = unknown[0]
        raise UsageError(
            f"{first} is no flag of {program}."
            if first.startswith("-")
            else f"{first!r} was given to {program}, and follows no flag that takes it.",
            "Flags are written --name VALUE or --name=VALUE; a switch is --name or --no-name.",
            f"See {program} --help.",
        )
    return parsed


def _parse(kind: Any, words: Sequence[str], *, program: str) -> tuple[Any, list[str]]:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(kind, args=list(words), prog=program, return_unknown_args=True)
    except SystemExit as end:
        if end.code in (0, None):
            sys.stderr.write(told.getvalue())
            raise
        raise UsageError(
            _sentence_in(told.getvalue()),
            "Flags have the types their help shows.",
            f"See {program} --help.",
        ) from None


def _sentence_in(box: str) -> str:
    """The first paragraph inside the box that the parser draws (in ASCII where the output is not UTF-8)."""
    lines: list[str] = []
    for line in box.strip().splitlines()[1:]:  # the first is the title
        text = line.strip("│╰╯─ \t").strip("-" if set(line.strip()) == {"-"} else "")
        if lines and (not text or text.startswith(("Got errors", "For full helptext"))):
            break
        lines += [text] if text else []
    sentence = re.sub(r"^Error parsing (\S+): ", r"\1: ", " ".join(" ".join(lines).split()))
    return f"{sentence.rstrip('.')}." if sentence else "The command line cannot be read."


def _refuse_unknown(words: Sequence[str], known: set[str], program: str) -> None:
    for word in words:
        name = word.split("=", 1)[0]
        if not name.startswith("--") or name in ("--", "--help"):
            continue
        plain = name[2:].replace("-", "_")
        # A dot leads into an argument that has parts, which the parser knows.
        if {plain, plain.removeprefix("no_"), plain.split(".")[0]} & known:
            continue
        close = difflib.get_close_matches(plain, known, n=1, cutoff=0.5)
        raise UsageError(
            f"{name} is no flag of {program}.",
            f"Flags: {', '.join('--' + _dashed(each) for each in sorted(known))}.",
            f"Did you mean --{_dashed(close[0])}?" if close else "Drop it.",
        )


def _refuse_repeated(words: Sequence[str]) -> None:
    """A flag that stands twice would count once, and the other be dropped without a word."""
    seen: set[str] = set()
    for word in words:
        name = word.split("=", 1)[0].replace("_", "-")
        if name.startswith("--") and name in seen:
            raise UsageError(
                f"{name} is given twice.",
                "A flag stands once on a line; one that takes several values takes them all there.",
                f"Give it once: {name} VALUE, or {name} FIRST SECOND.",
            )
        seen.add(name)


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
            names.add(each.name.removesuffix("_"))  # from_ is --from
    return names


def _as_dict(arguments: Any) -> dict[str, Any]:
    return {each.name: getattr(arguments, each.name) for each in fields(arguments)}


def _dashed(name: str) -> str:
    return name.replace("_", "-")
