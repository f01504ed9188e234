"""Which of several failures is named: the first cause, not what it set off in others."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from trimaran.errors import JobError, UsageError, WorkerError
from trimaran.world.agent_failures import Failure, WorkerEnd, explain, read_failure, write_failure

ECHO = RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:4242")


def end(
    rank: int, *, code: int = 1, at: float = 0.0, stopped: bool = False, failure: Failure | None = None
) -> WorkerEnd:
    return WorkerEnd(rank=rank, pid=100 + rank, exit_code=code, time_seconds=at, stopped=stopped, failure=failure)


@pytest.fixture
def recorded(tmp_path: Path):
    def record(error: BaseException, at: float) -> Failure:
        file = tmp_path / f"{at}.json"
        assert write_failure(file, error)
        found = read_failure(file)
        assert found is not None
        return Failure(**{**vars(found), "time_seconds": at})

    return record


def shown(*ends: WorkerEnd) -> str:
    error = explain(ends)
    assert type(error) is WorkerError
    return error.value


def test_nothing_failed() -> None:
    assert explain([end(0, code=0), end(1, code=0)]) is None
    assert explain([end(0, code=75), end(1, code=75)]) is None
    assert explain([end(0, code=75), end(1, code=-2, stopped=True)]) is None


def test_the_earliest_is_named(recorded) -> None:
    first, second = recorded(RuntimeError("late"), 2.0), recorded(RuntimeError("early"), 1.0)
    assert shown(end(0, failure=first), end(1, failure=second)) == "rank 1 (pid 101) failed: RuntimeError: early"


def test_an_echo_is_passed_over_even_when_it_was_written_first(recorded) -> None:
    ends = end(0, failure=recorded(ECHO, 1.0)), end(1, failure=recorded(KeyError("tokens"), 1.1))
    assert shown(*ends) == "rank 1 (pid 101) failed: KeyError: 'tokens'"


def test_an_echo_alone_is_still_told(recorded) -> None:
    assert "rank 0 (pid 100) failed: RuntimeError" in shown(end(0, failure=recorded(ECHO, 1.0)), end(1, stopped=True))


def test_a_signal_comes_before_what_it_set_off(recorded) -> None:
    ends = end(0, at=1.0, failure=recorded(RuntimeError("lost"), 1.02)), end(1, code=-signal.SIGKILL, at=1.0)
    assert shown(*ends) == "rank 1 (pid 101) was killed by SIGKILL."


def test_an_abort_comes_after(recorded) -> None:
    ends = end(0, at=1.0, failure=recorded(RuntimeError("cause"), 1.02)), end(1, code=-signal.SIGABRT, at=1.0)
    assert "cause" in shown(*ends)


def test_workers_that_were_stopped_are_not_the_cause(recorded) -> None:
    assert "rank 2" in shown(end(0, code=-15, at=0.5, stopped=True), end(2, code=3, at=1.0))


def test_an_early_end_is_told_with_its_echo(recorded) -> None:
    value = shown(end(0, failure=recorded(ECHO, 1.0)), end(1, code=0, at=0.5))
    assert value.startswith("rank 1 (pid 101) ended early, with code 0; then rank 0 (pid 100) failed")


def test_an_error_that_all_share_stays_itself(recorded) -> None:
    error = UsageError("--stepz is unknown.", "Flags have names.", "Did you mean --steps?")
    shared = explain([end(rank, failure=recorded(error, rank)) for rank in range(3)])
    assert type(shared) is UsageError
    assert (str(shared), shared.exit_code) == (str(error), 2)


def test_errors_that_differ_are_not_shared(recorded) -> None:
    ends = [end(rank, failure=recorded(JobError(f"{rank}.", "Rule.", "Remedy."), rank)) for rank in range(2)]
    assert shown(*ends) == "rank 0 (pid 100) failed: JobError: 0."


def test_ends_that_disagree() -> None:
    assert shown(end(0, code=75), end(1, code=0)) == "The workers ended differently: rank 0 with 75, rank 1 with 0."


def test_the_line_of_the_job_is_told(recorded) -> None:
    try:
        raise RuntimeError("no such shape")
    except RuntimeError as error:
        failure = recorded(error, 1.0)
    error = explain([end(0, failure=failure), end(1, stopped=True)])
    assert error is not None
    assert f"{__file__}:" in error.remedy
    assert 'raise RuntimeError("no such shape")' in error.remedy
