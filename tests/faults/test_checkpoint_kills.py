"""Kill -9 at every write point of a save: the next start finds the checkpoint before, or the new one, and goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pool import Pool, RankDied, RankHung
from resuming import Case, assert_same_run, build_job, read_newest, same_bits, train
from tiny_job import events_of
from trimaran.checkpoint import Lineage, find_checkpoint, list_steps
from trimaran.options import RunOptions
from trimaran.phases import COMMIT_POINTS, WRITE_POINTS
from trimaran.records import CHECKPOINTS_FOLDER, EVENTS_FILE, METRICS_FILE, TIMING_FILE

CASE = Case("adamw", steps=8, clip=0.5)
KILLS = [
    *((point, "0") for point in WRITE_POINTS),
    ("save:mid-shard", "1"),
    ("save:before-flush", "all"),
    *(
        pytest.param(point, rank, marks=pytest.mark.slow)
        for point in WRITE_POINTS
        for rank in ("1", "all")
        if point not in COMMIT_POINTS and (point, rank) not in (("save:mid-shard", "1"), ("save:before-flush", "all"))
    ),
]


def start(run: Path, save_every: str, *drills: str, keep_last: int | str = 1, until: int | None = None) -> None:
    options = RunOptions(save_every=save_every, keep_last=keep_last, drill=drills)  # type: ignore[arg-type]
    train(build_job(CASE), run=run, options=options, until=until)


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks without a stop, all of its checkpoints kept."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    pool.run(start, 2, run, "2steps", keep_last="all")
    return run


def newest_valid(run: Path) -> int:
    """The step from which the run would go on."""
    found, _ = find_checkpoint(run, Lineage.read(run), list_steps(run))
    assert found is not None
    return found.step


def assert_is_that_of(run: Path, undisturbed: Path, step: int) -> None:
    """The checkpoint is wholly that of its step, and of no other."""
    ours, theirs = read_newest(run, step), read_newest(undisturbed, step)
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(same_bits(ours.tensors[name], each) for name, each in theirs.tensors.items())
    assert (ours.state.position, ours.state.num_updates) == (theirs.state.position, theirs.state.num_updates)


def finish_and_compare(pool: Pool, run: Path, undisturbed: Path, *drills: str, resumes_at: int) -> None:
    """The same command again: it goes on from that step, and ends as if nothing had been."""
    pool.run(start, 2, run, "2steps", *drills)
    assert [each for each in events_of(run) if each[0] == "resumed"] == [("resumed", resumes_at)]
    assert_same_run(run, undisturbed)
    assert [each.name for each in (run / CHECKPOINTS_FOLDER).iterdir()] == ["step-00000008"]


@pytest.mark.parametrize(("point", "rank"), KILLS)
def test_kill_at_every_write_point(pool: Pool, tmp_path: Path, undisturbed: Path, point: str, rank: str) -> None:
    run, drill = tmp_path / "a", f"kill rank={rank} step=4 phase={point}"
    outcomes = pool.outcomes(start, 2, run, "2steps", drill, timeout=30)
    killed = [each.rank for each in outcomes if isinstance(each.error, RankDied)]
    assert killed == ([0, 1] if rank == "all" else [int(rank)])
    assert not any(isinstance(each.error, RankHung) for each in outcomes)
    assert all(each.error is not None for each in outcomes)
    step = 4 if point in ("save:after-rename", "save:during-deletion") else 2
    assert newest_valid(run) == step
    assert_is_that_of(run, undisturbed, step)
    finish_and_compare(pool, run, undisturbed, drill, resumes_at=step)


def test_kill_again_and_again_at_the_same_step(pool: Pool, tmp_path: Path, undisturbed: Path) -> None:
    """Each start finds what the one before it left of the same step."""
    run = tmp_path / "a"
    points = ("save:before-rename", "save:mid-shard", "save:after-manifest")
    drills = [f"kill rank=0 step=4 phase={point}" for point in points]
    for point in points:
        outcomes = pool.outcomes(start, 2, run, "2steps", *drills, timeout=30)
        assert isinstance(outcomes[0].error, RankDied), point
        assert newest_valid(run) == 2
    pool.run(start, 2, run, "2steps", *drills)
    assert [each for each in events_of(run) if each[0] == "resumed"] == [("resumed", 2)] * 3
    assert_same_run(run, undisturbed)
    assert [each.name for each in (run / CHECKPOINTS_FOLDER).iterdir()] == ["step-00000008"]


def test_killed_before_the_first_save_begins_again(pool: Pool, tmp_path: Path, undisturbed: Path) -> None:
    run, drill = tmp_path / "a", "kill rank=0 step=2 phase=save:before-rename"
    pool.outcomes(start, 2, run, "2steps", drill, timeout=30)
    assert not list_steps(run)
    pool.run(start, 2, run, "2steps", drill)
    assert [event for event, _ in events_of(run)][:2] == ["started", "started"]
    assert_same_run(run, undisturbed)


@pytest.mark.parametrize("leftover", ["temporary", "no manifest", "another's step", "half deleted", "torn records"])
def test_leftovers_of_the_same_step(pool: Pool, tmp_path: Path, undisturbed: Path, leftover: str) -> None:
    run = tmp_path / "a"
    pool.run(start, 2, run, "2steps", until=3)
    folder = run / CHECKPOINTS_FOLDER
    found = folder / "step-00000002"
    target = folder / "step-00000004"
    match leftover:
        case "temporary":  # as the next owner would name it, with the files that it will write
            shutil.copytree(found, folder / "step-00000004.tmp-2")
        case "no manifest":
            shutil.copytree(found, target)
            (target / "manifest.json").unlink()
        case "another's step":
            shutil.copytree(found, target)
        case "half deleted":
            shutil.copytree(found, folder / "step-00000004.tmp-deleted-2")
            shutil.copytree(found, folder / "step-00000002.tmp-deleted-2")
            (folder / "step-00000002.tmp-deleted-2/manifest.json").unlink()
        case "torn records":  # as a full disk leaves them
            for name in (METRICS_FILE, TIMING_FILE, EVENTS_FILE):
                with (run / name).open("a") as file:
                    file.write('{"time": "20')
    assert newest_valid(run) == 2
    finish_and_compare(pool, run, undisturbed, resumes_at=2)
