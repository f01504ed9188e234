"""A rerun meets damaged, foreign and forged checkpoints: named, passed over for the next good one, or refused whole."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_files import SHARD, entry, flip_bit, forge_manifest, forge_state, make_checkpoint
from tiny_job import events_of, finish_command, lines_of, start_command, write_job
from trimaran.checkpoint.finding import checkpoint_folder, list_steps
from trimaran.checkpoint.reading import read_whole_manifest, verify_files
from trimaran.checkpoint.shard_file import write_shard
from trimaran.cli.main import main
from trimaran.records import MANIFEST_FILE, STATE_FILE

Train = Callable[..., tuple[int, str, str]]
A, NEWEST, BEFORE = Path("a"), checkpoint_folder(Path("a"), 6), checkpoint_folder(Path("a"), 4)
WORDS = ("--run", "a", "--save-every", "2steps", "--keep-last", "all")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny job and a run of it: 6 steps, checkpoints of 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    write_job(folder)
    before = os.getcwd()
    os.chdir(folder)
    try:
        assert main(["train", "tiny.py", *WORDS]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def train(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Train]:
    """Gives the command again in a copy of that folder: exit code, output and errors."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copytree(finished, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["train", "tiny.py", *(words or WORDS)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    yield run
    assert not (tmp_path / "mark").exists(), "something of a checkpoint ran"
    assert [each.name for each in tmp_path.iterdir() if each.name not in ("here", "outside")] == []


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def bring_anothers(folder: Path) -> None:
    """A whole checkpoint of another run of the same job in place of one."""
    shutil.rmtree(folder)
    assert main(["train", "tiny.py", "--run", "b", *WORDS[2:]]) == 0
    shutil.copytree(checkpoint_folder(Path("b"), 6), folder)


def link_away(path: Path) -> None:
    outside = Path("../outside")
    outside.mkdir()
    path.rename(outside / path.name)
    path.symlink_to(Path.cwd() / outside / path.name)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bit of a shard": (lambda folder: flip_bit(folder / SHARD, byte=-1), f"{SHARD} has SHA-256"),
    "bit of a shard's header": (lambda folder: flip_bit(folder / SHARD, byte=20), f"{SHARD} has SHA-256"),
    "bit of the state": (lambda folder: flip_bit(folder / STATE_FILE, byte=10), "state.json"),
    "bit of the manifest": (lambda folder: flip_bit(folder / MANIFEST_FILE, byte=200), "manifest.json is damaged"),
    "shard cut": (lambda folder: os.truncate(folder / SHARD, 100), f"{SHARD} has 100 bytes; it was written with"),
    "state cut": (lambda folder: os.truncate(folder / STATE_FILE, 100), "state.json has 100 bytes"),
    "manifest cut": (lambda folder: os.truncate(folder / MANIFEST_FILE, 100), "manifest.json is damaged"),
    "manifest empty": (lambda folder: os.truncate(folder / MANIFEST_FILE, 0), "manifest.json is damaged"),
    "no shard": (lambda folder: (folder / SHARD).unlink(), f"{SHARD} is missing."),
    "no state": (lambda folder: (folder / STATE_FILE).unlink(), "state.json is missing."),
    "no manifest": (lambda folder: (folder / MANIFEST_FILE).unlink(), "manifest.json is missing."),
    "nothing": (lambda folder: [each.unlink() for each in folder.iterdir()], "manifest.json is missing."),
    "another's checkpoint": (bring_anothers, "it belongs to another run (id "),
    "another's manifest": (
        lambda folder: shutil.copy(make_checkpoint(Path("c"), 6) / MANIFEST_FILE, folder),
        "state.json has",
    ),
    "an older one's manifest": (
        lambda folder: shutil.copy(BEFORE / MANIFEST_FILE, folder),
        "step-00000006",
    ),
    "an older one": (
        lambda folder: (shutil.rmtree(folder), shutil.copytree(BEFORE, folder)),
        "step-00000006 holds a checkpoint of step 4.",
    ),
    "later format of the manifest": (
        lambda folder: edit(folder / MANIFEST_FILE, format=2, news=[1]),
        "manifest.json has format 2; this version reads format 1.",
    ),
    "later format of the state": (
        lambda folder: forge_state(folder, lambda state: state.update(format=2)),
        "state.json has format 2; this version reads format 1.",
    ),
    "shard a link": (lambda folder: link_away(folder / SHARD), f"{SHARD} is a link."),
    "manifest a link": (lambda folder: link_away(folder / MANIFEST_FILE), "it is a link"),
    "folder a link": (link_away, "step-00000006 is a link."),
    "a file in its place": (lambda folder: (shutil.rmtree(folder), folder.write_text("")), "manifest.json is damaged"),
    "path that leads out": (
        lambda folder: forge_manifest(
            folder, lambda manifest: manifest["files"].update({"../../../outside": manifest["files"][SHARD]})
        ),
        "is no plain file name",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_it_taken(train: Train, damage: str) -> None:
    undisturbed = (A / "metrics.jsonl").read_bytes()
    do, said = DAMAGES[damage]
    do(NEWEST)
    code, out, err = train()
    assert (code, err) == (0, "")
    assert "continues after step 4" in out
    assert f"begins   from {BEFORE}\n" in out
    passed = [line for line in out.splitlines() if line.startswith("passed   ")]
    assert len(passed) == 1
    assert str(NEWEST) in passed[0]
    assert said in passed[0]
    resumed = next(each for each in lines_of(A / "events.jsonl") if each["event"] == "resumed")
    assert resumed["step"] == 4
    assert " ".join(passed[0].split()) in resumed["detail"]
    assert (A / "metrics.jsonl").read_bytes() == undisturbed
    manifest, _ = read_whole_manifest(NEWEST)  # saved again, in place of the damaged one
    verify_files(NEWEST, manifest, list(manifest.files))
    assert list_steps(A) == [6, 4, 2]


def test_the_last_good_one_is_taken_however_old(train: Train) -> None:
    undisturbed = (A / "metrics.jsonl").read_bytes()
    flip_bit(NEWEST / SHARD, byte=-1)
    (BEFORE / MANIFEST_FILE).unlink()
    code, out, _ = train()
    assert code == 0
    assert "continues after step 2" in out
    assert out.count("passed   ") == 2
    assert (A / "metrics.jsonl").read_bytes() == undisturbed


def test_where_none_is_good_nothing_begins_anew(train: Train) -> None:
    flip_bit(NEWEST / SHARD, byte=-1)
    (BEFORE / MANIFEST_FILE).unlink()
    os.truncate(checkpoint_folder(A, 2) / SHARD, 7)
    before = {path: path.read_bytes() for path in A.rglob("*") if path.is_file() and path.name != "owner.json"}
    code, out, err = train()
    assert (code, out) == (1, "")
    assert err.startswith("RunError: no checkpoint of a can be used: ")
    for why in (f"{NEWEST / SHARD} has SHA-256", f"{BEFORE / MANIFEST_FILE} is missing.", "has 7 bytes; it was"):
        assert why in err
    assert "never from the start unasked" in err
    assert "remove a/checkpoints to begin again" in err
    assert {path: path.read_bytes() for path in before} == before


def test_checkpoints_out_of_reach_begin_nothing_anew(train: Train) -> None:
    (A / "checkpoints").rename("../outside")
    metrics = (A / "metrics.jsonl").read_bytes()
    for target in (Path.cwd() / "../outside", Path("not-mounted")):
        (A / "checkpoints").symlink_to(target)
        code, out, err = train()
        assert (code, out) == (1, "")
        assert err.startswith("RunError: a/checkpoints is a link.")
        (A / "checkpoints").unlink()
    (A / "checkpoints").write_text("")
    code, out, err = train()
    assert (code, out) == (1, "")
    assert err.startswith("RunError: a/checkpoints cannot be read: Not a directory.")
    assert (A / "metrics.jsonl").read_bytes() == metrics
    assert len(list(Path("../outside").iterdir())) == 3


def test_a_higher_step_that_was_left_behind_is_not_the_past(train: Train) -> None:
    undisturbed = (A / "metrics.jsonl").read_bytes()
    NEWEST.rename("stale")
    assert train(*WORDS, "--steps", "6")[0] == 0  # goes on from 4 and saves 6 anew
    shutil.rmtree(NEWEST)
    Path("stale").rename(NEWEST)
    code, out, _ = train()
    assert code == 0
    assert "owner 1 wrote it, and owner 2 had gone on from step 4" in out
    assert "continues after step 4" in out
    assert (A / "metrics.jsonl").read_bytes() == undisturbed


# ── Malice: what is whole by its digests, and means harm ────────────────────────────────────────────────────────────


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("../mark"),)


def refused(train: Train) -> str:
    """The error that ends the rerun."""
    code, out, err = train()
    assert (code, out) == (1, "")
    assert err.startswith("CheckpointError: ")
    return err


def test_a_pickle_does_not_run(train: Train) -> None:
    data = pickle.dumps(Bomb())
    (NEWEST / SHARD).write_bytes(data + b"\0" * 2000)
    (NEWEST / "data.pkl").write_bytes(data)
    forge_manifest(NEWEST, lambda manifest: None)
    assert f"{NEWEST / SHARD} cannot be read" in refused(train)


@pytest.mark.parametrize("kind", ["os.system", "antigravity.Optimizer", "torch.optim.sgd.SGD"])
def test_an_optimizer_by_name_is_not_imported(train: Train, kind: str) -> None:
    forge_state(NEWEST, lambda state: state["optimizer"].update(kind=kind))
    assert f"the checkpoint's optimizer is '{kind}'; this job has torch.optim.adamw.AdamW." in refused(train)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": ["torch.optim.adamw.AdamW"]}, "is not of the form"),
        ({"parameters": []}, "is not of the form"),
        ({"parameters": {"up.weight": {"list": []}}}, "is not of the form"),
        ({"shared": None}, "is not of the form"),
        ({"groups": [{"params": "up.weight", "values": {}}]}, "is not of the form"),
        ({"groups": [{"params": [1], "values": {}}]}, "is not of the form"),
        ({"parameters": {"up.weight": {"dict": [["step", {"tensor": "nobody"}]]}}}, "has no tensor 'optimizer.nobody'"),
        (
            {"parameters": {"up.weight": {"dict": [["step", {"call": "os.abort"}]]}}},
            "a value of the checkpoint's state",
        ),
        ({"groups": [{"params": ["up.weight"], "values": {"betas": {"tuple": [["0"]]}}}]}, "a value of the checkpoint"),
    ],
)
def test_forged_optimizer_state_is_refused(train: Train, change: dict[str, Any], said: str) -> None:
    forge_state(NEWEST, lambda state: state["optimizer"].update(change))
    assert said in refused(train)


def test_options_that_are_the_jobs_are_not_taken_from_a_checkpoint(train: Train) -> None:
    """Nor the parameters that a group holds."""
    undisturbed = (A / "metrics.jsonl").read_bytes()
    shutil.rmtree(NEWEST)
    values = {"params": {"list": []}, "lr": 99.0, "base_lr": 99.0}
    names = ["up.weight", "up.bias", "down.weight", "down.bias"]
    groups = [{"params": names, "values": values}]
    forge_state(BEFORE, lambda state: state["optimizer"].update(groups=groups))
    assert train()[0] == 0
    assert (A / "metrics.jsonl").read_bytes() == undisturbed


def test_state_of_another_shape_never_reaches_a_fused_kernel(train: Train) -> None:
    """It would be written beyond its end."""
    tensors = load_file(NEWEST / SHARD)
    tensors["optimizer.up.weight.exp_avg"] = torch.zeros(1)
    (NEWEST / SHARD).unlink()
    write_shard(NEWEST / SHARD, [entry(name, each) for name, each in tensors.items()], tensors.values())

    def change(manifest: dict[str, Any]) -> None:
        part = {"file": SHARD, "key": "optimizer.up.weight.exp_avg", "offset": [0], "shape": [1]}
        record = {"dtype": "F32", "shape": [1], "parts": [part], "is_complex": False}
        manifest["tensors"]["optimizer.up.weight.exp_avg"] = record

    forge_manifest(NEWEST, change)
    assert "'up.weight.exp_avg' is 1, beside a parameter that is 8×4." in refused(train)


# ── Disks ───────────────────────────────────────────────────────────────────────────────────────────────────────────

FILL_UP = '''
    if what == "full":
        import resource
        if not os.path.exists("went_wrong"):
            open("went_wrong", "w").close()
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        return
    with open("went_wrong"'''


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("no_process_left")
def test_a_full_disk_of_one_rank_ends_all_and_the_rerun_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path, ('\n    with open("went_wrong"', FILL_UP))
    words = ("train", "tiny.py", "--run", "a", "--save-every", "2steps", "--width", "20000")
    # The save of step 2 has ended before that of step 4 began; one of the later ones meets the limit.
    fault = ("--fault", "full@5", "--fault-rank", "1")
    code, out, err = finish_command(start_command(*words, *fault, "--procs", "2", cwd=tmp_path))
    assert code == 1
    said = re.search(r"rank 1: a/checkpoints/step-0000000([46]) cannot be written: File too large\.", err)
    assert said is not None, err
    intact = int(said[1]) - 2
    assert "saved    step 2  " in out
    assert err.count("CheckpointError: ") == 1
    assert "Make room on that disk" in err
    assert list_steps(tmp_path / "a") == list(range(intact, 0, -2))
    assert len(os.listdir(tmp_path / "a/checkpoints")) == intact // 2
    assert events_of(tmp_path / "a")[-1][0] == "failed"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main([*words, *fault]) == 0  # with room, and on one process
    assert f"continues after step {intact}" in capsys.readouterr().out
    assert list_steps(tmp_path / "a") == [6, 4]
    assert [each["step"] for each in lines_of(tmp_path / "a/metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_vanishes_under_the_run_ends_it(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("trimaran.checkpoint.saving.make_folder", gone)
    code, _, err = train("--run", "new", "--save-every", "2steps")
    assert code == 1
    assert "CheckpointError: new/checkpoints/step-00000002 cannot be written: Read-only file system." in err
    assert not Path("new/checkpoints").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only_is_named(train: Train) -> None:
    shutil.rmtree(NEWEST)
    (A / "checkpoints").chmod(0o500)
    try:
        code, _, err = train()
    finally:
        (A / "checkpoints").chmod(0o700)
    assert code == 1
    assert f"CheckpointError: {NEWEST} cannot be written: Permission denied." in err
    assert list_steps(A) == [4, 2]
