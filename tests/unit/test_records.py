from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from trimaran.errors import RunError
from trimaran.records import (
    Derived,
    EventRecord,
    RunRecord,
    StepRecord,
    TimingRecord,
    read_events,
    read_run,
    read_steps,
    to_line,
    write_run,
)

STEPS = [
    StepRecord(step=1, loss=1.5, weight=8, grad_norm=0.25, lr=1e-3),
    StepRecord(step=2, loss=math.nan, weight=8, grad_norm=math.inf, lr=1e-3, skipped=True),
    StepRecord(
        step=3, loss=-math.inf, weight=0, grad_norm=0.1 + 0.2, lr=1 / 3, validation={"loss": math.nan, "a": 0.5}
    ),
]


def write(path: Path, records: list[StepRecord] | list[EventRecord]) -> Path:
    path.write_text("".join(to_line(each) + "\n" for each in records))
    return path


def test_steps_come_back_as_they_were(tmp_path: Path) -> None:
    back = list(read_steps(write(tmp_path / "metrics.jsonl", STEPS)))
    assert repr(back) == repr(STEPS).replace("weight=8,", "weight=8.0,").replace("weight=0,", "weight=0.0,")
    assert back[2].grad_norm == 0.1 + 0.2


def test_every_line_is_json_that_any_reader_takes(tmp_path: Path) -> None:
    for line in map(to_line, STEPS):
        assert "NaN" not in line
        assert "Infinity" not in line
        assert json.loads(line)
    assert json.loads(to_line(STEPS[1]))["grad_norm"] == "inf"
    assert "validation" not in json.loads(to_line(STEPS[0]))


def test_a_torn_last_line_ends_the_records(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", STEPS[:2])
    path.write_text(path.read_text() + to_line(STEPS[2])[:20])
    assert [each.step for each in read_steps(path)] == [1, 2]
    path.write_text("")
    assert list(read_steps(path)) == []


def test_events_come_back_as_they_were(tmp_path: Path) -> None:
    events = [EventRecord("2026-01-01T00:00:00+00:00", "started", 0), EventRecord("later", "failed", 3, 'a "b"\nc')]
    assert list(read_events(write(tmp_path / "events.jsonl", events))) == events
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


def test_timing_is_one_line() -> None:
    line = to_line(TimingRecord(3, 0.5, 16.0, {"forward": 0.2}))
    assert json.loads(line) == {"step": 3, "seconds": 0.5, "samples_per_second": 16.0, "phases": {"forward": 0.2}}


def record() -> RunRecord:
    return RunRecord(
        name="a",
        id="0f",
        identity={"seed": 1, "parameters": {"w": "2×3"}},
        layout="dp=2",
        options={"track": (), "rate": math.inf},
        derived={"lr": Derived(1e-3, "at batch 8")},
        machine={},
        versions={"torch": "2"},
    )


def test_run_json_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_run(path, record())
    back = read_run(path)
    assert (back.name, back.identity, back.derived, back.layout) == ("a", record().identity, record().derived, "dp=2")
    assert "2×3" in path.read_text(encoding="utf-8")
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 2}', '{"format": 2, "derived": {}, "surprise": 2}'])
def test_a_damaged_run_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(RunError, match=r"run\.json cannot be read"):
        read_run(path)


def test_a_run_json_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"format": 99}')
    with pytest.raises(RunError, match="has format 99; this version reads format 2"):
        read_run(path)
