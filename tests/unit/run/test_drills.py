"""Drills: what they say and refuse, that each strikes where it should and once, and what a nan does to all ranks."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import trimaran as tm
from pool import Pool, RankDied
from tiny_job import SOURCE
from trimaran.batch import RankBatch
from trimaran.data import Order, build_loader
from trimaran.engine import build_engine
from trimaran.errors import DrillError, RunError, UsageError
from trimaran.layout import Layout
from trimaran.phases import COMMIT_POINTS, PHASES, WRITE_POINTS, Moment, Phases
from trimaran.run.drills import Drill, Drills, build_drills, parse_drill
from trimaran.world.groups import join_default_group, open_world


def build(*texts: str, rank: int = 0, world_size: int = 2, marks: Path | None = None) -> Drills:
    drills = build_drills(texts, rank=rank, world_size=world_size, marks=marks)
    assert drills is not None
    return drills


@pytest.mark.parametrize(
    ("text", "drill"),
    [
        ("kill step=7", Drill("kill", 0, 7, "forward")),
        ("kill rank=1 step=7 phase=save:before-manifest", Drill("kill", 1, 7, "save:before-manifest")),
        (" stop  phase=data rank=all step=1", Drill("stop", None, 1, "data")),
        ("raise step=2 phase=save", Drill("raise", 0, 2, "save")),
        ("nan rank=3 step=2", Drill("nan", 3, 2, "backward")),
        ("slow step=2 seconds=0.5", Drill("slow", 0, 2, "forward", 0.5)),
        ("slow step=2", Drill("slow", 0, 2, "forward", 5.0)),
        ("disk-full step=2", Drill("disk-full", 0, 2, "save:mid-shard")),
        ("disk-full step=2 phase=save:during-deletion", Drill("disk-full", 0, 2, "save:during-deletion")),
        ("corrupt step=5", Drill("corrupt", 0, 5, "save:after-rename")),
    ],
)
def test_texts(text: str, drill: Drill) -> None:
    assert parse_drill(text) == drill
    assert parse_drill(str(drill)) == drill


@pytest.mark.parametrize(
    ("text", "wrong", "told"),
    [
        ("", '"" is no kind', "kill rank=1 step=7"),
        ("kil step=7", '"kil" is no kind', 'Did you mean "kill"?'),
        ("rank=1 step=7", '"rank=1" is no kind', "kill rank=1 step=7"),
        ("kill stop=7", '"stop" is no key of kill', 'Did you mean "step"?'),
        ("kill step=7 phase=before-manifest", '"before-manifest" is no phase', '"save:before-manifest"'),
        ("kill step=7 phase=fwd", '"fwd" is no phase', "kill rank=1 step=7"),
        ("kill step", '"step" is not of the form', "kill rank=1 step=7"),
        ("kill step=7 rank=", '"rank=" is not of the form', "kill rank=1 step=7"),
        ("kill step=7 step=8", "gives step twice", "Drop one step="),
        ("kill rank=1", "has no step=", "kill rank=1 step=7"),
        ("kill step=0", "has step=0", "kill rank=1 step=7"),
        ("kill step=2.5", "has step=2.5", "kill rank=1 step=7"),
        ("kill step=all", "has step=all", "kill rank=1 step=7"),
        ("kill step=7 rank=-1", "has rank=-1", "kill rank=1 step=7"),
        ("kill step=7 rank=2", "there is no rank 2", "rank=all"),
        ("kill step=7 seconds=2", '"seconds" is no key of kill', "kill rank=1 step=7"),
        ("slow step=7 seconds=0", "has seconds=0", "seconds=2.5"),
        ("slow step=7 seconds=nan", "has seconds=nan", "seconds=2.5"),
        ("slow step=7 seconds=inf", "has seconds=inf", "seconds=2.5"),
        ("slow step=7 seconds=5s", "has seconds=5s", "seconds=2.5"),
        ("nan step=7 phase=forward", "there is no nan in phase=forward", "which is backward."),
        ("disk-full step=7 phase=forward", "there is no disk-full in phase=forward", "give one of these"),
        ("disk-full step=7 phase=save", "there is no disk-full in phase=save", "which is save:mid-shard"),
        ("corrupt step=7 phase=save:before-rename", "there is no corrupt in", "which is save:after-rename."),
        ("kill rank=1 step=7 phase=save:after-manifest", "rank 1 never reaches", "Give rank=0"),
        ("corrupt rank=1 step=7", "rank 1 never reaches", "Give rank=0"),
    ],
)
def test_refusals(text: str, wrong: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_drills([text], rank=0, world_size=2, marks=None)
    assert caught.value.value.startswith(f'drill "{text}')
    assert wrong in caught.value.value
    assert caught.value.rule
    assert told in caught.value.remedy


def test_the_same_drill_twice_is_refused_and_similar_ones_are_not() -> None:
    with pytest.raises(UsageError, match="given twice"):
        build("kill step=7 rank=1", "kill step=7 rank=all")
    with pytest.raises(UsageError, match="given twice"):
        build("corrupt step=7", "corrupt rank=all step=7")
    build("kill step=7", "kill step=7 rank=1", "kill step=8", "stop step=7", "kill step=7 phase=data")
    assert build_drills([], rank=0, world_size=2, marks=None) is None


def where_it_raises(drills: Drills, *, steps: int = 3) -> list[tuple[int, str]]:
    """(step, moment) of each error, in a run of so many steps that saves after each, two micro-batches per step."""
    phases = Phases(observers=[drills])
    raised = []

    def tell(point: str, act: Callable[[], None]) -> None:
        try:
            act()
        except DrillError:
            raised.append((phases.step, point))

    def enter(name: Any) -> None:
        with phases(name):
            pass

    for step in range(steps + 1):  # 0 is what comes before the first step
        phases.step = step
        for name in (*PHASES[:3], *PHASES):
            tell(name, lambda name=name: enter(name))  # type: ignore[misc]
        for point in WRITE_POINTS:
            tell(point, lambda point=point, step=step: phases.reach(point, step=step, path=Path("x")))  # type: ignore[misc]
    return raised


@pytest.mark.parametrize("point", [*PHASES, *WRITE_POINTS])
def test_a_drill_strikes_at_its_moment_once_and_on_its_rank(point: str) -> None:
    text = f"raise step=2 phase={point}"
    assert where_it_raises(build(text)) == [(2, point)]
    assert where_it_raises(build(text, rank=1)) == []
    assert where_it_raises(build(f"{text} rank=all", rank=1)) == ([] if point in COMMIT_POINTS else [(2, point)])


def test_several_drills(tmp_path: Path) -> None:
    texts = ("raise step=3", "raise step=1 phase=save:mid-shard rank=all", "raise rank=1 step=1 phase=data")
    assert where_it_raises(build(*texts, marks=tmp_path)) == [(1, "save:mid-shard"), (3, "forward")]
    assert where_it_raises(build(*texts, rank=1, marks=tmp_path)) == [(1, "data"), (1, "save:mid-shard")]


def test_a_drill_fires_once_in_a_run(tmp_path: Path) -> None:
    marks = tmp_path / "run" / "drills"
    text = "raise rank=all step=2 phase=save:before-flush"
    assert build(text, marks=marks).describe_unfired() == [
        f"drill    {text} did not fire on rank 0, 1: the run never got there"
    ]
    assert not marks.exists()
    assert len(where_it_raises(build(text, marks=marks))) == 1
    assert where_it_raises(build(text, marks=marks)) == []
    assert build(text, marks=marks).describe_unfired() == [
        f"drill    {text} did not fire on rank 1: the run never got there"
    ]
    assert len(where_it_raises(build(text, rank=1, marks=marks))) == 1
    assert build(text, marks=marks).describe_unfired() == []
    mark = marks / "raise-step2-save-before-flush-rank0"
    assert sorted(marks.iterdir()) == [mark, mark.with_name(mark.name.replace("rank0", "rank1"))]
    assert mark.read_text() == f"{text}\n"
    assert (marks.stat().st_mode & 0o777, mark.stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_mark_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "drills").write_text("")
    drills = build("slow step=1 seconds=60", marks=tmp_path / "drills")
    with pytest.raises(RunError, match="cannot be marked") as caught:
        drills(Moment("forward", 1))
    assert "slow rank=0 step=1" in caught.value.value


def test_threads_that_reach_a_moment_together_fire_once(tmp_path: Path) -> None:
    drills = build("raise step=1 phase=save:mid-shard", marks=tmp_path)
    phases, together, raised = Phases(observers=[drills]), threading.Barrier(8), []

    def reach() -> None:
        together.wait()
        try:
            phases.reach("save:mid-shard", step=1, path=tmp_path)
        except DrillError as error:
            raised.append(error)

    threads = [threading.Thread(target=reach) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) == 1


def test_raise_names_the_drill(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DrillError) as caught:
        build("raise rank=all step=4 phase=update", rank=1)(Moment("update", 4))
    assert caught.value.value == 'the drill "raise rank=all step=4 phase=update" raised this.'  # alike on all ranks
    assert caught.value.rule
    assert caught.value.remedy
    fires = f"drill    raise rank=all step=4 phase=update fires on rank 1 (pid {os.getpid()})\n"
    assert capfd.readouterr() == ("", fires)


def test_slow_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    build("slow step=1 seconds=2.5")(Moment("forward", 1))
    assert slept == [2.5]


def test_disk_full_is_what_the_system_says(tmp_path: Path) -> None:
    phases = Phases(observers=[build("disk-full step=5")])
    with pytest.raises(OSError, match=r"No space left on device \(a drill\)") as caught:
        phases.reach("save:mid-shard", step=5, path=tmp_path)
    assert (caught.value.errno, caught.value.filename) == (28, str(tmp_path))


def test_corrupt_inverts_one_byte_of_the_largest_shard(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = {"a.safetensors": 50, "b.safetensors": 101, "c.safetensors": 101, "manifest.json": 500, "state.json": 300}
    for name, size in files.items():
        (tmp_path / name).write_bytes(bytes(range(size % 256)))
    before = {name: (tmp_path / name).read_bytes() for name in files}
    phases = Phases(observers=[build("corrupt step=5")])
    phases.reach("save:before-rename", step=5, path=tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in files} == before
    phases.reach("save:after-rename", step=5, path=tmp_path)
    after = {name: (tmp_path / name).read_bytes() for name in files}
    assert {name for name in files if after[name] != before[name]} == {"c.safetensors"}
    changed = [index for index in range(101) if after["c.safetensors"][index] != before["c.safetensors"][index]]
    assert changed == [50]
    assert f"byte 50 of {tmp_path / 'c.safetensors'} is inverted" in capfd.readouterr().err


def kill_in_thread(marks: Path) -> None:
    phases = Phases(observers=[build("kill step=1 phase=save:mid-shard", marks=marks)])
    thread = threading.Thread(target=lambda: phases.reach("save:mid-shard", step=1, path=marks))
    thread.start()
    thread.join()


def test_kill_ends_the_process_at_once_and_leaves_the_mark(pool: Pool, tmp_path: Path) -> None:
    (outcome,) = pool.outcomes(kill_in_thread, 1, tmp_path)
    assert isinstance(outcome.error, RankDied)
    assert f"exit code {-signal.SIGKILL}" in str(outcome.error)
    assert [mark.name for mark in tmp_path.iterdir()] == ["kill-step1-save-mid-shard-rank0"]
    assert pool.run(kill_in_thread, 1, tmp_path) == [None]  # the same again, which goes on


STOP_IN_A_THREAD = """
import threading
from pathlib import Path
from trimaran.phases import Phases
from trimaran.run.drills import build_drills

phases = Phases(observers=[build_drills(["stop step=1 phase=save:mid-shard"], rank=0, world_size=1, marks=None)])
def save():
    phases.reach("save:mid-shard", step=1, path=Path("x"))
    print("went on", flush=True)
thread = threading.Thread(target=save)
thread.start()
thread.join()
"""


@pytest.mark.usefixtures("no_process_left")
def test_stop_suspends_the_process_until_it_is_continued() -> None:
    environ = os.environ | {"PYTHONPATH": str(SOURCE)}
    child = subprocess.Popen([sys.executable, "-c", STOP_IN_A_THREAD], env=environ, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert os.WSTOPSIG(status) == signal.SIGSTOP
        assert select.select([child.stdout], [], [], 0)[0] == []  # it has said nothing yet
        child.send_signal(signal.SIGCONT)
        assert child.communicate(timeout=60)[0] == "went on\n"
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait()


class Net(nn.Module):
    """Its first parameter is used by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(2))
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).tanh())
        return y


def nan_run(texts: list[str], marks: Path | None) -> tuple[list[bool], list[bool], Tensor]:
    """For each of five steps, whether it was skipped, and whether it left the weights; at last the weights."""
    generator = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(3, generator=generator), "y": torch.randn(1, generator=generator)} for _ in range(20)]
    job = tm.Job(
        model=Net,
        data=rows,
        inputs=("x",),
        loss=tm.losses.mse(target="y"),
        optimizer=tm.optim.adamw(lr=0.01),
        global_batch=8,
        steps=5,
    )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    layout = Layout(micro_batch=2).resolve(world_size=ranks, global_batch=8)
    world = join_default_group(layout, torch.device("cpu")) if ranks > 1 else open_world(None, layout, device="cpu")
    drills = build_drills(texts, rank=world.rank, world_size=ranks, marks=marks)
    phases = Phases(observers=[drills] if drills else [])
    engine = build_engine(job, layout, world, phases)
    if drills is not None:
        drills.attach(engine.model)
    loader = build_loader(
        rows,
        collate=job.collate,
        order=Order(len(rows), job.seed),
        global_batch=8,
        total_samples=job.total_samples,
        dp=layout.dp,
        dp_rank=world.place.dp,
        micro_batch=layout.micro_batch,
    )

    def step(batch: RankBatch) -> tuple[bool, bool]:
        phases.step = batch.index + 1
        before = nn.utils.parameters_to_vector(engine.model.parameters()).detach().clone()
        skipped = engine.step(batch).skipped
        return skipped, torch.equal(before, nn.utils.parameters_to_vector(engine.model.parameters()))

    told = [step(batch) for batch in loader]
    weights = nn.utils.parameters_to_vector(engine.model.parameters()).detach().clone()
    return [skipped for skipped, _ in told], [kept for _, kept in told], weights


@pytest.mark.parametrize("world_size", [1, 2])
def test_nan_makes_every_rank_skip_that_step_alone(pool: Pool, tmp_path: Path, world_size: int) -> None:
    texts = [f"nan rank={world_size - 1} step=2", "nan rank=all step=4"]
    first = pool.run(nan_run, world_size, texts, tmp_path)
    for skipped, kept, weights in first:
        assert skipped == [False, True, False, True, False]
        assert kept == skipped
        assert torch.equal(weights, first[0][2])
    undisturbed = pool.run(nan_run, world_size, [], None)
    again = pool.run(nan_run, world_size, texts, tmp_path)  # marked by now: the hooks change no bit
    for (skipped, _, weights), (_, _, expected) in zip(again, undisturbed, strict=True):
        assert not any(skipped)
        assert torch.equal(weights, expected)
