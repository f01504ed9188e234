from __future__ import annotations

from collections.abc import Callable

import pytest

from trimaran.phases import PHASES, Phases


def clock_of(*times: float) -> Callable[[], float]:
    left = list(times)
    return lambda: left.pop(0)


def test_seconds_add_up_per_phase_and_start_anew() -> None:
    phases = Phases(clock=clock_of(0, 1, 10, 12, 20, 23))
    for name in ("forward", "forward", "backward"):
        with phases(name):  # type: ignore[arg-type]
            pass
    taken = phases.take()
    assert (taken["forward"], taken["backward"], taken["data"]) == (3, 3, 0)
    assert set(taken) == set(PHASES)
    assert not any(phases.take().values())


def test_observers_hear_of_a_phase_before_it_runs() -> None:
    heard: list[str] = []
    phases = Phases(
        observers=(lambda moment: heard.append(moment.point), lambda moment: heard.append(f"also {moment.point}"))
    )
    with phases("update"):
        heard.append("inside")
    assert heard == ["update", "also update", "inside"]


def test_a_phase_that_raises_is_timed_too() -> None:
    phases = Phases(clock=clock_of(0, 2))
    with pytest.raises(ZeroDivisionError), phases("data"):
        raise ZeroDivisionError
    assert phases.take()["data"] == 2
