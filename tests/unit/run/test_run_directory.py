"""The run's directory: one living writer, and nothing of anybody else's touched."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from trimaran.errors import RunError
from trimaran.records import EventRecord, RunRecord, StepRecord, read_events, read_steps
from trimaran.run.directory import RunDirectory, find_difference, name_run


def record(identity: dict[str, Any]) -> RunRecord:
    return RunRecord(
        name="a", id="0f", identity=identity, layout="dp=1", options={}, derived={}, machine={}, versions={}
    )


def step(number: int) -> StepRecord:
    return StepRecord(step=number, loss=1.0, weight=8.0, grad_norm=0.5, lr=0.1)


def test_records_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "deep" / "a")
    directory.append(step(1))
    directory.note("started", 0, "dp=1")
    assert list(read_steps(directory.path / "metrics.jsonl")) == [step(1)]
    (event,) = read_events(directory.path / "events.jsonl")
    assert (event.event, event.step, event.detail) == ("started", 0, "dp=1")
    assert event.time.endswith("+00:00")
    directory.close()


def test_each_owner_has_a_higher_number(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        directory = RunDirectory.open(tmp_path / "a")
        epochs.append(directory.epoch)
        owner = json.loads((tmp_path / "a/owner.json").read_text())
        assert (owner["epoch"], owner["pid"]) == (directory.epoch, os.getpid())
        directory.close()
    assert epochs == [1, 2, 3]


def test_a_living_owner_is_named(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "a")
    with pytest.raises(RunError, match=f"is being written by process {os.getpid()} on "):
        RunDirectory.open(tmp_path / "a", wait_seconds=0.05)
    directory.append(step(1))  # the refused one took nothing over
    directory.close()


def test_a_living_owner_without_a_name_is_respected_too(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "a")
    (tmp_path / "a/owner.json").unlink()
    with pytest.raises(RunError, match="is being written by another process"):
        RunDirectory.open(tmp_path / "a", wait_seconds=0.05)
    directory.close()


def test_a_start_waits_for_an_owner_that_is_about_to_end(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "a")
    timer = threading.Timer(0.2, directory.close)
    timer.start()
    second = RunDirectory.open(tmp_path / "a", wait_seconds=30)
    assert second.epoch == 2
    second.close()
    timer.join()


@pytest.mark.parametrize("write", ["append", "note", "write_run", "owned_path"])
def test_who_lost_the_directory_may_not_write(tmp_path: Path, write: str) -> None:
    old = RunDirectory.open(tmp_path / "a")
    old.append(step(1))
    (tmp_path / "a/owner.json").write_text('{"epoch": 7, "pid": 1, "host": "elsewhere"}')
    writes: dict[str, Any] = {
        "append": lambda: old.append(step(2)),
        "note": lambda: old.note("finished", 2),
        "write_run": lambda: old.write_run(record({})),
        "owned_path": lambda: old.owned_path("model.safetensors"),
    }
    with pytest.raises(RunError, match=r"was taken over by another start \(owner 7; this process is owner 1\)"):
        writes[write]()
    assert list(read_steps(tmp_path / "a/metrics.jsonl")) == [step(1)]
    assert not (tmp_path / "a/run.json").exists()
    old.close()


def test_a_directory_that_vanished_is_told_as_such(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "a")
    for each in (tmp_path / "a").iterdir():
        each.unlink()
    (tmp_path / "a").rmdir()
    with pytest.raises(RunError, match="was removed or emptied while this process was writing to it"):
        directory.append(step(1))
    directory.close()


def test_another_jobs_directory_is_refused_with_the_difference(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "a")
    identity = {"arguments": {"width": 8}, "data": {"length": 3}}
    assert directory.read_started(identity) is None
    directory.write_run(record(identity))
    started = directory.read_started(identity)
    assert started is not None
    assert started.id == "0f"
    with pytest.raises(RunError, match=r"was started with width=8; this command has width=9\."):
        directory.read_started(identity | {"arguments": {"width": 9}})
    with pytest.raises(RunError, match=r"was started with data\.length=3; this command has data\.length=4\."):
        directory.read_started(identity | {"data": {"length": 4}})
    directory.close()


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json"])
@pytest.mark.parametrize("put_back", [False, True])
def test_records_that_were_removed_are_missed(tmp_path: Path, name: str, put_back: bool) -> None:
    directory = RunDirectory.open(tmp_path / "a")
    directory.write_run(record({}))
    directory.append(step(1))
    directory.confirm()
    text = (directory.path / name).read_text()
    (directory.path / name).rename(tmp_path / "away")
    if put_back:
        (directory.path / name).write_text(text)
    if put_back and name == "run.json":
        directory.confirm()  # it is closed between writes, so another of that name is as good
    else:
        with pytest.raises(RunError, match=f"{name} was removed or replaced while this process was writing to it"):
            directory.confirm()
    directory.close()


def test_what_a_killed_start_leaves_is_no_foreign_file(tmp_path: Path) -> None:
    for name in ("run.json.tmp", "owner.json.tmp"):
        (tmp_path / name).write_text("{")
    for name in ("tensorboard", "wandb", "drills"):
        (tmp_path / name).mkdir()
    RunDirectory.open(tmp_path).close()


def test_a_damaged_record_refuses_the_directory(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    directory = RunDirectory.open(tmp_path)
    with pytest.raises(RunError, match=r"run\.json cannot be read"):
        directory.read_started({}, "a")
    directory.close()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"is not empty and holds no run: notes\.txt\."):
        RunDirectory.open(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"epoch": "x"}', "null"])
def test_a_damaged_owner_file_is_nobodys(tmp_path: Path, text: str) -> None:
    (tmp_path / "owner.json").write_text(text)
    directory = RunDirectory.open(tmp_path)
    assert directory.epoch == 1
    directory.append(EventRecord("now", "started", 0))
    directory.close()


def test_only_an_unused_directory_is_discarded(tmp_path: Path) -> None:
    unused = RunDirectory.open(tmp_path / "a")
    unused.close()
    unused.discard_unused()
    assert not (tmp_path / "a").exists()
    used = RunDirectory.open(tmp_path / "b")
    used.write_run(record({}))
    used.close()
    used.discard_unused()
    assert (tmp_path / "b/run.json").exists()


@pytest.mark.parametrize(
    ("theirs", "ours", "difference"),
    [
        ({}, {}, None),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, None),
        ({"a": 1}, {"a": 2}, ("a", 1, 2)),
        ({"a": 1}, {}, ("a", 1, None)),
        ({}, {"a": 1}, ("a", None, 1)),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, ("a.b.c", 1, 2)),
        ({"a": {"b": 1}}, {"a": 1}, ("a", {"b": 1}, 1)),
        ({"a": 1.0}, {"a": 1}, None),
    ],
)
def test_the_first_difference(theirs: dict[str, Any], ours: dict[str, Any], difference: Any) -> None:
    assert find_difference(theirs, ours) == difference


def test_new_names_differ() -> None:
    names = {name_run("gpt") for _ in range(20)}
    assert len(names) > 10
    assert all(each.parent == Path("runs") and each.name.startswith("gpt-") for each in names)
    assert name_run("").name.startswith("run-")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be written: No space left"):
        directory.append(step(1))
    directory.close()
