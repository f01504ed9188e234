"""What is kept: by steps and figures, never by a clock; the newest valid one always; no reading of what stays."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_files import RUN_ID, SHARD, make_checkpoint, some_tensors
from trimaran.checkpoint import retention as module
from trimaran.checkpoint.finding import Lineage, checkpoint_folder, list_steps
from trimaran.checkpoint.retention import Keeper, Retention
from trimaran.errors import RunError

OWN = Lineage(RUN_ID, {})
Side = Literal["min", "max"]


def keeper(run: Path, retention: Retention, lineage: Lineage = OWN, confirm: Any = lambda: None) -> Keeper:
    return Keeper(run, lineage, retention, epoch=1, confirm=confirm)


def plain(*steps: int) -> dict[int, float | None]:
    """Checkpoints without figures."""
    return dict.fromkeys(steps)


@pytest.mark.parametrize(
    ("retention", "deleted"),
    [
        (Retention(last=1), [10, 20, 30, 40]),
        (Retention(last=2), [10, 20, 30]),
        (Retention(last=9), []),
        (Retention(last=None), []),
        (Retention(last=0), [10, 20, 30, 40]),  # which options refuse; the newest stays in any case
        (Retention(last=1, every=20), [10, 30]),
        (Retention(last=1, every=7), [10, 20, 30, 40]),
        (Retention(last=None, every=20, best=("loss", "min")), []),
    ],
)
def test_what_goes_by_steps(retention: Retention, deleted: list[int]) -> None:
    assert retention.to_delete(plain(30, 10, 50, 40, 20)) == deleted


@pytest.mark.parametrize(
    ("side", "figures", "best"),
    [
        ("min", {10: 3.0, 20: 1.0, 30: 2.0}, 20),
        ("max", {10: 3.0, 20: 1.0, 30: 2.0}, 10),
        ("min", {10: 1.0, 20: 1.0}, 10),
        ("max", {20: 1.0, 10: 1.0}, 10),
        ("min", {10: float("nan"), 20: 5.0}, 20),
        ("max", {10: float("inf"), 20: 5.0}, 20),
        ("min", {10: None, 20: None}, None),
        ("min", {}, None),
    ],
)
def test_the_best(side: Side, figures: dict[int, float | None], best: int | None) -> None:
    assert Retention(best=("loss", side)).find_best(figures) == best
    assert Retention().find_best(figures) is None


@given(
    st.dictionaries(st.integers(0, 60), st.none() | st.floats(), max_size=12),
    st.none() | st.integers(0, 5),
    st.none() | st.integers(1, 9),
    st.none() | st.sampled_from([("loss", "min"), ("loss", "max")]),
)
def test_the_newest_always_stays(
    figures: dict[int, float | None], last: int | None, every: int | None, best: tuple[str, Side] | None
) -> None:
    deleted = Retention(last, every, best).to_delete(figures)
    assert deleted == sorted(set(deleted))
    assert not figures or max(figures) not in deleted
    assert set(deleted) <= set(figures)
    if every:
        assert all(step % every for step in deleted)


# ── On disk ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_old_ones_are_deleted_and_others_untouched(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        make_checkpoint(tmp_path, step)
    folder = tmp_path / "checkpoints"
    make_checkpoint(tmp_path, 5, run_id="fedcba9876543210")
    (folder / "step-00000007").mkdir()  # holds nothing
    (folder / "step-00000008").write_text("a file")
    (folder / "step-00000009").symlink_to(folder / "step-00000040")
    (folder / "notes").mkdir()
    (folder / "step-00000020.tmp-mine").mkdir()  # no name that a save gives
    kept = sorted(os.listdir(folder))
    during = []
    assert keeper(tmp_path, Retention(last=2)).delete_old(during.append) == [10, 20]
    assert during == [folder / "step-00000010", folder / "step-00000020"]
    assert sorted(os.listdir(folder)) == [name for name in kept if name not in ("step-00000010", "step-00000020")]
    assert (folder / "step-00000040/manifest.json").exists()


def test_leftovers_go(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 10)
    folder = tmp_path / "checkpoints"
    outside = make_checkpoint(tmp_path / "other", 3)
    (folder / "step-00000010.tmp-1").mkdir()
    (folder / "step-00000010.tmp-1/manifest.json").write_text("half of it")
    (folder / "step-00000005.tmp-deleted-12").mkdir()
    (folder / "step-00000006.tmp-3").symlink_to(outside)
    (folder / "step-00000007.tmp-3").write_text("a file")
    keeper(tmp_path, Retention(last=None)).delete_old()
    assert os.listdir(folder) == ["step-00000010"]
    assert (outside / "manifest.json").exists()


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        make_checkpoint(tmp_path, step, some_tensors())
    (checkpoint_folder(tmp_path, 40) / SHARD).unlink()
    os.truncate(checkpoint_folder(tmp_path, 30) / "manifest.json", 50)
    assert keeper(tmp_path, Retention(last=1)).delete_old() == [10]
    assert list_steps(tmp_path) == [40, 30, 20]


def test_the_only_valid_one_stays_however_old(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 10)
    for step in (20, 30):
        make_checkpoint(tmp_path, step, run_id="fedcba9876543210")
    make_checkpoint(tmp_path, 40, epoch=1)
    assert keeper(tmp_path, Retention(last=1), Lineage(RUN_ID, {2: 10})).delete_old() == []
    assert list_steps(tmp_path) == [40, 30, 20, 10]


def test_a_newest_one_that_was_damaged_since_does_not_count(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make_checkpoint(tmp_path, step, some_tensors())
    kept = keeper(tmp_path, Retention(last=2))
    assert kept.delete_old() == [10]
    (checkpoint_folder(tmp_path, 30) / SHARD).unlink()
    make_checkpoint(tmp_path, 40, some_tensors())
    assert kept.delete_old() == []
    make_checkpoint(tmp_path, 50, some_tensors())
    assert kept.delete_old() == [20]
    assert list_steps(tmp_path) == [50, 40, 30]


def test_a_best_one_that_was_damaged_since_is_not_the_best(tmp_path: Path) -> None:
    for step, loss in ((10, 1.0), (20, 3.0), (30, 2.0)):
        make_checkpoint(tmp_path, step, some_tensors(), validation={"loss": loss})
    kept = keeper(tmp_path, Retention(last=1, best=("loss", "min")))
    assert kept.delete_old() == [20]
    (checkpoint_folder(tmp_path, 10) / SHARD).unlink()
    for step, loss in ((40, 5.0), (50, 6.0)):
        make_checkpoint(tmp_path, step, some_tensors(), validation={"loss": loss})
    assert kept.delete_old() == [40]
    assert list_steps(tmp_path) == [50, 30, 10]


@pytest.mark.parametrize(("side", "best"), [("min", 20), ("max", 10)])
def test_the_best_stays(tmp_path: Path, side: Side, best: int) -> None:
    for step, error in ((10, 5.0), (20, 1.0), (30, 3.0), (40, 3.0)):
        make_checkpoint(tmp_path, step, validation={"loss": -error, "error": error} if step != 30 else None)
    keeper(tmp_path, Retention(last=1, best=("error", side))).delete_old()
    assert list_steps(tmp_path) == [40, best]


def test_no_clock_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, step in enumerate((10, 20, 30, 40)):
        folder = make_checkpoint(tmp_path, step)
        at = [2**31, 5, 10**9, 0][index]
        for path in (*folder.iterdir(), folder):
            os.utime(path, (at, at))
    kept = keeper(tmp_path, Retention(last=2))
    for now in (0.0, 4e9, -5.0):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        kept.delete_old()
        assert list_steps(tmp_path) == [40, 30]


def test_who_was_replaced_deletes_nothing(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make_checkpoint(tmp_path, step)

    (tmp_path / "checkpoints/step-00000040.tmp-2").mkdir()  # which the new owner writes
    calls = iter([None, None, RunError("taken over.", "One writer.", "Stop.")])

    def confirm() -> None:
        if (error := next(calls)) is not None:
            raise error

    with pytest.raises(RunError):
        keeper(tmp_path, Retention(last=1), confirm=confirm).delete_old()
    assert list_steps(tmp_path) == [30, 20]  # after one deletion it was replaced
    calls = iter([RunError("taken over.", "One writer.", "Stop.")])
    (tmp_path / "checkpoints/step-00000040.tmp-2").mkdir()
    with pytest.raises(RunError):
        keeper(tmp_path, Retention(last=1), confirm=confirm).delete_old()
    assert list_steps(tmp_path) == [30, 20]
    assert (tmp_path / "checkpoints/step-00000040.tmp-2").exists()


def test_a_save_does_not_read_the_hundreds_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = module.read_checkpoint

    def count(folder: Path, lineage: Lineage) -> Any:
        read.append(int(folder.name[-8:]))
        return real(folder, lineage)

    monkeypatch.setattr(module, "read_checkpoint", count)
    for step in range(10, 310, 10):
        make_checkpoint(tmp_path, step, validation={"loss": abs(step - 55.0)})
    kept = keeper(tmp_path, Retention(last=2, every=10, best=("loss", "min")))
    kept.delete_old()
    assert set(read) == set(range(10, 310, 10))
    for step in (311, 312, 313, 314):
        make_checkpoint(tmp_path, step)
        read.clear()
        kept.delete_old()
        assert set(read) <= {step, step - 1, step - 2, 310 - 10, 50}  # the newest two, what goes, the best
        assert len(read) <= 6
    assert list_steps(tmp_path)[:3] == [314, 313, 300]
    everything = keeper(tmp_path, Retention(last=None, best=("loss", "min")))
    read.clear()
    assert everything.delete_old() == []
    assert read == []


def test_files_that_cannot_go_yet_go_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network disk, while somebody reads them."""
    for step in (10, 20):
        make_checkpoint(tmp_path, step)
    kept = keeper(tmp_path, Retention(last=1))
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda path, ignore_errors: None)
        assert kept.delete_old() == [10]
    assert list_steps(tmp_path) == [20]
    assert len(os.listdir(tmp_path / "checkpoints")) == 2
    make_checkpoint(tmp_path, 30)
    assert kept.delete_old() == [20]
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000030"]
