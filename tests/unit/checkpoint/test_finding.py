"""Which checkpoint a run continues from, and what is said of those it passes over."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from checkpoint_files import RUN_ID, SHARD, flip_bit, make_checkpoint, some_tensors
from trimaran.checkpoint import finding
from trimaran.checkpoint.finding import Lineage, checkpoint_folder, find_checkpoint, list_steps
from trimaran.errors import RunError

OWN = Lineage(RUN_ID, {})


def find(run: Path, lineage: Lineage = OWN) -> tuple[int | None, list[str]]:
    """The step found, and why others were passed over."""
    found, refused = find_checkpoint(run, lineage, list_steps(run))
    return None if found is None else found.step, refused


def test_steps_are_those_of_the_names(tmp_path: Path) -> None:
    assert list_steps(tmp_path) == []
    for name in ["step-00000030", "step-00000004", "step-123456789"]:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for name in ["step-30", "step-000000030", "step-00000005.tmp-1", "step-0000003x", "notes", "step-00000007.bak"]:
        (tmp_path / "checkpoints" / name).mkdir()
    os.utime(tmp_path / "checkpoints" / "step-00000004", (2**31, 2**31))  # the future, as a clock may have it
    assert list_steps(tmp_path) == [123456789, 30, 4]
    assert checkpoint_folder(tmp_path, 30) == tmp_path / "checkpoints" / "step-00000030"


def test_checkpoints_out_of_reach_are_not_none(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "elsewhere", 1)
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere/checkpoints")
    with pytest.raises(RunError, match=r"checkpoints is a link\."):
        list_steps(tmp_path)
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "checkpoints").symlink_to("not-mounted")
    with pytest.raises(RunError, match=r"checkpoints is a link\."):
        list_steps(tmp_path)
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(RunError, match=r"checkpoints cannot be read: Not a directory\."):
        list_steps(tmp_path)


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make_checkpoint(tmp_path, step, some_tensors())
    assert find(tmp_path) == (30, [])
    flip_bit(checkpoint_folder(tmp_path, 30) / SHARD, byte=-1)
    (checkpoint_folder(tmp_path, 20) / "manifest.json").unlink()
    step, (first, second) = find(tmp_path)
    assert step == 10
    assert "step-00000030" in first
    assert "has SHA-256" in first
    assert "step-00000020/manifest.json is missing." in second
    (checkpoint_folder(tmp_path, 10) / SHARD).unlink()
    step, refused = find(tmp_path)
    assert (step, len(refused)) == (None, 3)


def test_anothers_checkpoint_is_none_of_this_run(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 10)
    make_checkpoint(tmp_path, 20, run_id="fedcba9876543210")
    step, (why,) = find(tmp_path)
    assert step == 10
    assert why.endswith("step-00000020 is passed over: it belongs to another run (id fedcba9876543210).")


def test_a_checkpoint_under_another_name_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 10).rename(tmp_path / "checkpoints/step-00000099")
    assert find(tmp_path) == (None, [f"{tmp_path}/checkpoints/step-00000099 holds a checkpoint of step 10."])


def test_what_an_earlier_owner_wrote_beyond_the_resume_is_not_the_past(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 10, epoch=1)
    make_checkpoint(tmp_path, 20, epoch=2)
    make_checkpoint(tmp_path, 30, epoch=1)
    lineage = Lineage(RUN_ID, {2: 10})
    step, (why,) = find(tmp_path, lineage)
    assert step == 20
    assert "owner 1 wrote it, and owner 2 had gone on from step 10" in why
    assert find(tmp_path, Lineage(RUN_ID, {2: 30}))[0] == 30
    assert find(tmp_path, Lineage(RUN_ID, {2: 10, 3: 5}))[0] is None


def test_ranks_share_the_reading_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        make_checkpoint(tmp_path, step, some_tensors())
    flip_bit(checkpoint_folder(tmp_path, 20) / SHARD, byte=-1)  # which the rank that reads this file alone can see
    read: dict[str, int] = {}
    digest = finding.verify_files

    def count(folder: Path, manifest: object, names: list[str]) -> None:
        for name in names:
            read[f"{folder.name}/{name}"] = read.get(f"{folder.name}/{name}", 0) + 1
        digest(folder, manifest, names)  # type: ignore[arg-type]

    monkeypatch.setattr(finding, "verify_files", count)
    met, told, results = threading.Barrier(3), ["", "", ""], {}

    def rank(index: int) -> None:
        def agree(fault: str) -> str:
            told[index] = fault
            met.wait(10)
            first = next((each for each in told if each), "")
            met.wait(10)
            return first

        results[index] = find_checkpoint(tmp_path, OWN, list_steps(tmp_path), share=(index, 3), agree=agree)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(results) == 3
    for found, refused in results.values():
        assert found is not None
        assert found.step == 10
        assert len(refused) == 1
    assert set(read.values()) == {1}  # each file by one rank
    assert len(read) == 4
