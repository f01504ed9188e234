"""One save: whole or absent, told to every rank, nothing overwritten, nobody's memory overdrawn."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from checkpoint_files import RUN_ID, flip_bit, make_checkpoint
from trimaran.checkpoint import saving
from trimaran.checkpoint.finding import Lineage, checkpoint_folder, find_checkpoint, list_steps
from trimaran.checkpoint.reading import open_checkpoint
from trimaran.checkpoint.saving import Owner, Saver
from trimaran.checkpoint.state import NamedState
from trimaran.errors import CheckpointError, RunError
from trimaran.layout import Layout
from trimaran.phases import WRITE_POINTS, Moment, Phases
from trimaran.records import MANIFEST_FILE, STATE_FILE, StateRecord, name_checkpoint
from trimaran.world.groups import World, join_default_group, open_world

ALONE = open_world(None, Layout().resolve(world_size=1, global_batch=1), device="cpu")
Observe = Callable[[Moment], None]


def nothing(*_: object) -> None:
    pass


def make_saver(
    run: Path, *observers: Observe, world: World = ALONE, confirm: Callable[[], None] = nothing, **more: Any
) -> Saver:
    run.mkdir(exist_ok=True)
    return Saver(
        run / "checkpoints",
        world=world,
        phases=Phases(observers=observers),
        owner=Owner(RUN_ID, 1, confirm),
        **more,
    )


def save(saver: Saver, step: int, tensors: dict[str, torch.Tensor], **more: Any) -> str:
    """Saves these tensors as the state of a step; returns the warning."""

    def describe(state: NamedState) -> StateRecord:
        optimizer = {"kind": "sgd", "parameters": {}, "shared": {}, "groups": []}
        return StateRecord(step, 8 * step, step, None, optimizer, state.model, (), "dp=1", "now")

    return saver.save(lambda: NamedState(tensors=tensors), describe, **more)


def save_and_wait(saver: Saver, step: int, tensors: dict[str, torch.Tensor], *, blocking: bool) -> None:
    save(saver, step, tensors, blocking=blocking)
    saver.wait()


def load(run: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The newest checkpoint as a resume finds it: its step and tensors."""
    found, _ = find_checkpoint(run, Lineage(RUN_ID, {}), list_steps(run))
    assert found is not None
    with open_checkpoint(found.folder, found.manifest) as reader:
        return found.step, {name: reader.read(name) for name in found.manifest.tensors}


def weights(value: float, size: int = 6) -> dict[str, torch.Tensor]:
    return {"model.w": torch.full((size, 2), value), "model.b": torch.full((3,), -value)}


@pytest.mark.parametrize("blocking", [False, True])
def test_what_is_saved_is_found_whole(tmp_path: Path, blocking: bool) -> None:
    saver = make_saver(tmp_path)
    live = weights(1.0)
    assert save(saver, 20, live, blocking=blocking) == ""
    saver.wait()
    step, back = load(tmp_path)
    assert step == 20
    assert {name: each.tolist() for name, each in back.items()} == {name: each.tolist() for name, each in live.items()}
    (saved,) = saver.take_finished()
    assert (saved.step, saved.folder) == (20, checkpoint_folder(tmp_path, 20))
    on_disk = sum(each.stat().st_size for each in saved.folder.iterdir() if each.name != MANIFEST_FILE)
    assert saved.num_bytes == on_disk
    assert saver.take_finished() == []


def test_training_may_go_on_while_it_is_written(tmp_path: Path) -> None:
    live = weights(1.0)
    saver = make_saver(tmp_path, lambda moment: live["model.w"].zero_())
    save(saver, 20, live)
    live["model.b"].fill_(9.0)
    saver.wait()
    assert load(tmp_path)[1]["model.w"].unique().tolist() == [1.0]
    assert load(tmp_path)[1]["model.b"].unique().tolist() == [-1.0]


def test_every_save_is_told_even_where_the_next_waited_for_it(tmp_path: Path) -> None:
    saver = make_saver(tmp_path)
    for step in (10, 20, 30):
        save(saver, step, weights(step))
    saver.wait()
    assert [each.step for each in saver.take_finished()] == [10, 20, 30]


def test_files_are_the_owners_alone_and_say_what_they_are(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save(make_saver(tmp_path), 20, weights(1.0), blocking=True)
    finally:
        os.umask(before)
    folder = checkpoint_folder(tmp_path, 20)
    for path in (folder.parent, folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    names = {MANIFEST_FILE, STATE_FILE, "rank-00000-of-00001.safetensors"}
    assert {each.name for each in folder.iterdir()} == names
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in folder.iterdir())
    with safe_open(folder / "rank-00000-of-00001.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_nothing_exists_before_the_rename(tmp_path: Path) -> None:
    seen: list[str] = []

    def look(moment: Moment) -> None:
        names = os.listdir(tmp_path / "checkpoints") if (tmp_path / "checkpoints").exists() else []
        has_manifest = [name for name in names if (tmp_path / "checkpoints" / name / MANIFEST_FILE).exists()]
        seen.append(moment.point)
        assert (list_steps(tmp_path) == [20]) == (moment.point == "save:after-rename")
        assert all(name.startswith("step-00000020.tmp-1") for name in names) or moment.point == "save:after-rename"
        assert bool(has_manifest) == (moment.point in WRITE_POINTS[4:])
        assert moment.step == 20

    save(make_saver(tmp_path, look), 20, weights(1.0), blocking=True)
    assert seen == list(WRITE_POINTS[:-1])
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000020"]


def test_what_lies_under_the_name_is_replaced_and_not_written_into(tmp_path: Path) -> None:
    old = make_checkpoint(tmp_path, 20)
    kept_open = (old / MANIFEST_FILE).open()
    text = kept_open.read()
    save(make_saver(tmp_path), 20, weights(2.0), blocking=True)
    kept_open.seek(0)
    assert kept_open.read() == text
    kept_open.close()
    assert load(tmp_path)[1]["model.w"].unique().tolist() == [2.0]
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000020"]


@pytest.mark.parametrize("kind", ["link", "broken link", "file", "empty folder"])
def test_what_else_has_the_name_is_replaced_and_nothing_outside(tmp_path: Path, kind: str) -> None:
    outside = make_checkpoint(tmp_path / "other", 20)
    target = checkpoint_folder(tmp_path / "run", 20)
    target.parent.mkdir(parents=True)
    if kind == "file":
        target.write_text("a file")
    elif kind == "empty folder":
        target.mkdir()
    else:
        target.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    save(make_saver(tmp_path / "run"), 20, weights(2.0), blocking=True)
    assert load(tmp_path / "run")[0] == 20
    assert len(os.listdir(outside)) == 2
    assert os.listdir(target.parent) == [target.name]


# ── Several files ─────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(0, 10**9), max_size=60))
def test_parts_are_shared_out_in_order(sizes: list[int]) -> None:
    shares = saving.share_out(sizes)
    assert [index for share in shares for index in share] == list(range(len(sizes)))
    assert all(shares)
    assert len(shares) <= saving._MOST_FILES
    assert len(shares) <= max(1, -(-sum(sizes) // saving._FILE_BYTES))
    ideal = sum(sizes) / max(1, len(shares))
    assert all(sum(sizes[index] for index in share) <= 2 * ideal + max(sizes) for share in shares)


def test_a_large_state_lies_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_FILE_BYTES", 1000)
    live = {f"model.{index}": torch.full((100,), float(index)) for index in range(9)}
    saver = make_saver(tmp_path)
    for blocking in (False, True):
        save_and_wait(saver, 20, live, blocking=blocking)
        names = sorted(each.name for each in checkpoint_folder(tmp_path, 20).glob("*.safetensors"))
        more = [f"rank-00000-of-00001-{number:03d}.safetensors" for number in (1, 2, 3)]
        assert names == [*more, "rank-00000-of-00001.safetensors"]
        assert {name: each.tolist() for name, each in load(tmp_path)[1].items()} == {
            name: each.tolist() for name, each in live.items()
        }
    one = checkpoint_folder(tmp_path, 20) / "rank-00000-of-00001-002.safetensors"
    flip_bit(one, byte=-1)
    _, (why,) = find_checkpoint(tmp_path, Lineage(RUN_ID, {}), [20])
    assert f"{one} has SHA-256" in why


def test_an_error_in_one_of_several_files_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_FILE_BYTES", 1000)
    live = {f"model.{index}": torch.ones(100) for index in range(9)}

    def fail(moment: Moment) -> None:
        if moment.point == "save:before-flush" and str(moment.path).endswith("-002.safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"step-00000020 cannot be written: No space left on device\."):
        save(make_saver(tmp_path, fail), 20, live, blocking=True)
    assert os.listdir(tmp_path / "checkpoints") == []


# ── What goes wrong ─────────────────────────────────────────────────────────────────────────────────────────────────


def failing_at(point: str, error: Exception, step: int = 20) -> Observe:
    def observe(moment: Moment) -> None:
        if moment.point == point and moment.step == step:
            raise error

    return observe


@pytest.mark.parametrize("point", WRITE_POINTS[:6])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_save_that_fails_leaves_the_older_and_deletes_nothing(tmp_path: Path, point: str, blocking: bool) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    tidied: list[int] = []
    saver = make_saver(tmp_path, failing_at(point, full), tidy=tidied.append)
    save(saver, 10, weights(1.0), blocking=True)
    with pytest.raises(CheckpointError) as caught:
        save_and_wait(saver, 20, weights(2.0), blocking=blocking)
    assert caught.value.value == f"{checkpoint_folder(tmp_path, 20)} cannot be written: No space left on device."
    assert "Make room on that disk" in caught.value.remedy
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000010"]
    assert load(tmp_path)[0] == 10
    assert tidied == [10]
    assert not saver.has_failed  # it was told
    save(saver, 30, weights(3.0), blocking=True)  # and the next one is none the worse
    assert load(tmp_path)[0] == 30
    assert tidied == [10, 30]


def test_an_error_in_the_background_is_told_by_the_next_save(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, failing_at("save:before-flush", RuntimeError("a drill"), step=10))
    save(saver, 10, weights(1.0))
    while saver.is_writing:
        pass
    assert saver.has_failed
    with pytest.raises(CheckpointError, match=r"step-00000010 cannot be written: RuntimeError: a drill\."):
        save(saver, 20, weights(2.0))
    assert list_steps(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"step-00000010 cannot be written: (File exists|Not a directory)"):
        save(make_saver(tmp_path), 10, weights(1.0), blocking=True)
    assert (tmp_path / "checkpoints").read_text() == "a file where the folder should be"


def test_who_was_replaced_in_his_sleep_commits_nothing(tmp_path: Path) -> None:
    """The last question comes after the last point at which a process may have been stopped."""
    make_checkpoint(tmp_path, 20)  # of the new owner
    before = (checkpoint_folder(tmp_path, 20) / MANIFEST_FILE).read_text()
    replaced: list[bool] = []

    def sleep(moment: Moment) -> None:
        if moment.point == "save:before-rename":
            replaced.append(True)

    def confirm() -> None:
        if replaced:
            raise RunError("the run was taken over.", "A run has one writer.", "Let the newer one go on.")

    tidied: list[int] = []
    saver = make_saver(tmp_path, sleep, confirm=confirm, tidy=tidied.append)
    with pytest.raises(CheckpointError, match=r"^the run was taken over\."):
        save(saver, 20, weights(9.0), blocking=True)
    assert (checkpoint_folder(tmp_path, 20) / MANIFEST_FILE).read_text() == before
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000020"]
    assert tidied == []


def test_a_deletion_that_fails_is_told_as_such(tmp_path: Path) -> None:
    def tidy(step: int) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    saver = make_saver(tmp_path, tidy=tidy)
    with pytest.raises(CheckpointError, match="step-00000010 is saved, and an older checkpoint cannot be deleted"):
        save(saver, 10, weights(1.0), blocking=True)
    assert load(tmp_path)[0] == 10


def test_what_cannot_be_written_is_told_before_anything_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^model\.w is a tensor of torch\.float8_e8m0fnu\."):
        save(make_saver(tmp_path), 10, {"model.w": torch.zeros(2, dtype=torch.uint8).view(torch.float8_e8m0fnu)})
    assert not (tmp_path / "checkpoints").exists()


# ── Memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_copy_that_would_not_fit_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = weights(1.0)
    need = sum(each.nbytes for each in live.values())
    saver = make_saver(tmp_path, lambda moment: None)
    monkeypatch.setattr(saving, "available_host_bytes", lambda: need)  # training would have nothing left
    warning = save(saver, 10, live)
    assert warning.startswith(f"a copy to save from needs {need} B of host memory on ")
    assert f", where {need} B are free: training waits until the checkpoint is written" in warning
    assert not saver.is_writing
    (saved,) = saver.take_finished()
    assert saved.stall_seconds >= saved.write_seconds
    assert load(tmp_path)[0] == 10
    monkeypatch.setattr(saving, "available_host_bytes", lambda: 2 * need)
    assert save(saver, 20, live) == ""
    saver.wait()
    monkeypatch.setattr(saving, "available_host_bytes", lambda: 0)  # the buffers are there
    assert save(saver, 30, live) == ""
    saver.wait()
    assert load(tmp_path)[0] == 30


# ── Two ranks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def two_ranks() -> World:
    return join_default_group(Layout().resolve(world_size=2, global_batch=8), torch.device("cpu"))


def save_on_two(run: Path, point: str) -> tuple[list[str], list[int]]:
    """Saves step 10; then rank 1 fails at `point` of step 20's save; then step 30. What each rank was told."""
    world = two_ranks()
    watch = [failing_at(point, OSError(errno.EFBIG, "File too large"))] if world.rank == 1 else []
    tidied: list[int] = []
    saver = make_saver(run, *watch, world=world, tidy=tidied.append)
    told = []
    for step in (10, 20, 30):
        try:
            save(saver, step, weights(step, size=101))
            saver.wait()
            told.append("")
        except CheckpointError as error:
            told.append(error.value)
    return told, tidied


def test_an_error_of_one_rank_reaches_all(pool: Any, tmp_path: Path) -> None:
    of_ranks = pool.run(save_on_two, 2, tmp_path, "save:before-flush")
    said = f"rank 1: {checkpoint_folder(tmp_path, 20)} cannot be written: File too large."
    assert [told for told, _ in of_ranks] == [["", said, ""]] * 2
    assert [tidied for _, tidied in of_ranks] == [[10, 30], []]
    assert list_steps(tmp_path) == [30, 10]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [name_checkpoint(10), name_checkpoint(30)]
    step, back = load(tmp_path)
    assert step == 30
    assert torch.equal(back["model.w"], torch.full((101, 2), 30.0))
    files = {each.name for each in checkpoint_folder(tmp_path, 30).glob("*.safetensors")}
    assert files == {"rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"}


def short_of_memory_on_one(run: Path) -> tuple[str, bool]:
    world = two_ranks()
    saver = make_saver(run, world=world)
    before = saving.available_host_bytes
    saving.available_host_bytes = lambda: 2**40 if world.rank == 0 else 100  # type: ignore[assignment]
    try:
        return save(saver, 10, weights(1.0, size=101)), saver.is_writing
    finally:
        saving.available_host_bytes = before


def test_ranks_of_a_host_are_short_of_memory_together(pool: Any, tmp_path: Path) -> None:
    of_ranks = pool.run(short_of_memory_on_one, 2, tmp_path)
    assert of_ranks[0] == of_ranks[1]
    assert f"needs {101 * 2 * 4 + 3 * 4} B of host memory" in of_ranks[0][0]  # of both
    assert load(tmp_path)[0] == 10


def unsavable_on_one(run: Path) -> str:
    world = two_ranks()
    saver = make_saver(run, world=world)

    def collect() -> NamedState:
        if world.rank == 1:
            raise CheckpointError("w is a function.", "A checkpoint holds numbers.", "Keep it out of the state.")
        return NamedState(tensors=weights(1.0))

    try:
        saver.save(collect, lambda state: StateRecord(10, 80, 10, None, {}, {}, (), "dp=2", "now"))
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_one_rank_cannot_save_no_rank_begins(pool: Any, tmp_path: Path) -> None:
    said = "rank 1: w is a function.\nA checkpoint holds numbers. Keep it out of the state."
    assert pool.run(unsavable_on_one, 2, tmp_path) == [said, said]
    assert not (tmp_path / "checkpoints").exists()
