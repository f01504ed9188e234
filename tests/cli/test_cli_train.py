"""`trimaran train` in this process: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tiny_job import events_of, lines_of, losses_of, write_job
from trimaran.cli.main import main

Train = Callable[..., tuple[int, str, str]]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Train]:
    """Trains the tiny job in an empty folder with these flags; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_job(tmp_path)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["train", "tiny.py", *words])
        captured = capsys.readouterr()
        if "--traceback" not in words:
            assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    yield run
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_run_prints_its_head_steps_and_end(train: Train) -> None:
    code, out, err = train("--run", "a", "--log-every", "2")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "\r" not in out
    assert max(map(len, out.splitlines())) < 135
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert lines["tiny"] == "tiny · 49 parameters · tiny.py"
    assert "dp=1 micro_batch=8" in lines["layout"]
    assert "8 samples = 1 dp × 8 micro-batch × 1 accumulated" in lines["batch"]
    assert lines["length"].split(maxsplit=1)[1] == "6 steps = 2.4 epochs of 20 samples"
    assert "0.01" in lines["lr"]
    assert "optimizer 408 B (predicted 196 B + 196 B + 392 B); peak" in lines["memory"]
    assert lines["weights"] == "weights  a/model.safetensors"
    assert "trimaran export" in lines["next"]
    assert [line.split()[1] for line in out.splitlines() if "eta" in line] == ["1/6", "2/6", "4/6", "6/6"]
    assert out.splitlines().index("step 6  validation  " + lines["valid"].split(maxsplit=1)[1])


def test_a_run_leaves_its_records(train: Train) -> None:
    train("--run", "a", "--width", "9", "--seed", "3")
    run = Path("a")
    assert {each.name for each in run.iterdir()} == {
        *("run.json", "metrics.jsonl", "timing.jsonl", "events.jsonl", "model.safetensors", "lock", "owner.json"),
        "checkpoints",
    }
    assert [each["step"] for each in lines_of(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert set(lines_of(run / "metrics.jsonl")[0]) == {"step", "loss", "weight", "grad_norm", "lr", "skipped"}
    assert set(lines_of(run / "metrics.jsonl")[-1]["validation"]) == {"loss", "error"}
    assert [each["step"] for each in lines_of(run / "timing.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert events_of(run) == [("started", 0), ("saved", 6), ("finished", 6)]
    assert {name: tuple(each.shape) for name, each in load_file(run / "model.safetensors").items()} == {
        "up.weight": (9, 4),
        "up.bias": (9,),
        "down.weight": (1, 9),
        "down.bias": (1,),
    }


def test_run_json_has_everything_resolved_with_reasons(train: Train) -> None:
    train("--run", "a", "--seed", "3", "--layout", "micro_batch=3", "--num-workers", "0", "--width", "9")
    record = json.loads(Path("a/run.json").read_text())
    assert record["name"] == "tiny"
    assert record["layout"] == "dp=1 micro_batch=3"
    assert set(record["derived"]) >= {"dp", "micro_batch", "lr", "steps"}
    assert all(each["reason"] for each in record["derived"].values())
    assert record["derived"]["micro_batch"] == {
        "value": 3,
        "reason": "8 samples ≤ 1 dp × 3 micro-batch × 3 accumulated",
    }
    assert record["identity"]["seed"] == 3
    assert record["identity"]["arguments"]["width"] == 9
    assert record["identity"]["parameters"]["up.weight"] == "9×4"
    assert record["identity"]["data"]["length"] == 20
    assert set(record["versions"]) >= {"trimaran", "torch", "python"}
    assert record["machine"]["bit_reproducible"] is True
    assert "git_commit" in record
    assert len(record["job_file_sha256"]) == 64
    assert record["options"]["device"] == "auto"


@pytest.mark.parametrize("flags", [[], ["--evaluate-every", "2steps"], ["--epochs", "1.6"], ["--num-workers", "2"]])
def test_the_same_command_twice_writes_the_same_metrics(train: Train, flags: list[str]) -> None:
    assert train("--run", "a", *flags)[0] == train("--run", "b", *flags)[0] == 0
    assert Path("a/metrics.jsonl").read_bytes() == Path("b/metrics.jsonl").read_bytes()
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()


def test_loader_workers_change_nothing(train: Train) -> None:
    train("--run", "a", "--samples", "21")
    train("--run", "b", "--samples", "21", "--num-workers", "2")
    assert Path("a/metrics.jsonl").read_bytes() == Path("b/metrics.jsonl").read_bytes()


def test_another_cut_gives_the_same_losses(train: Train) -> None:
    train("--run", "a")
    train("--run", "b", "--layout", "micro_batch=3")
    assert losses_of(Path("a")) == pytest.approx(losses_of(Path("b")), rel=1e-5)


def test_overrides(train: Train) -> None:
    train("--run", "a", "--steps", "2", "--seed", "5", "--global-batch", "4")
    records = lines_of(Path("a/metrics.jsonl"))
    assert [each["weight"] for each in records] == [4.0, 4.0]
    train("--run", "b", "--steps", "2", "--global-batch", "4")
    assert losses_of(Path("a")) != losses_of(Path("b"))


def test_epochs_end_with_a_partial_batch(train: Train) -> None:
    train("--run", "a", "--epochs", "1.5", "--samples", "21")  # 31.5 rounds to 32; 4 batches of 8
    assert [each["weight"] for each in lines_of(Path("a/metrics.jsonl"))] == [8, 8, 8, 8]
    train("--run", "b", "--epochs", "1", "--samples", "21")
    assert [each["weight"] for each in lines_of(Path("b/metrics.jsonl"))] == [8, 8, 5]
    assert "3 steps = 1 epoch of 21 samples" in train("--run", "c", "--epochs", "1", "--samples", "21")[1]


def test_evaluate_every_records_where_it_is_due_and_at_the_end(train: Train) -> None:
    train("--run", "a", "--evaluate-every", "4steps")
    assert [each["step"] for each in lines_of(Path("a/metrics.jsonl")) if "validation" in each] == [4, 6]
    train("--run", "b")
    assert losses_of(Path("a")) == losses_of(Path("b"))


def test_a_new_directory_is_named_after_the_job(train: Train) -> None:
    code, out, _ = train()
    (made,) = Path("runs").iterdir()
    assert code == 0
    assert made.name.startswith("tiny-")
    assert str(made) in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--width", "9"], "a was started with width=8; this command has width=9."),
        (["--seed", "1"], "a was started with seed=0; this command has seed=1."),
        (["--steps", "7"], "a was started with steps=6; this command has steps=7."),
        (["--global-batch", "4"], "a was started with global_batch=8; this command has global_batch=4."),
    ],
)
def test_a_run_name_that_another_job_took(train: Train, flags: list[str], said: str) -> None:
    train("--run", "a")
    before = {each: each.read_bytes() for each in Path("a").rglob("*") if each.is_file() and each.name != "owner.json"}
    code, out, err = train("--run", "a", *flags)
    assert (code, out) == (1, "")
    assert f"RunError: {said}" in err
    assert {each: each.read_bytes() for each in before} == before


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "nn.Linear(4, width)",
            "nn.Linear(4, width, bias=False)",
            "with parameters.up.bias=8; this command has parame",
        ),
        ("self.x = torch.randn", "self.x = 2 * torch.randn", "a was started with data.fingerprint="),
        ("Rows(valid, seed=1)", "Rows(valid, seed=2)", "a was started with valid.fingerprint="),
        ("Rows(samples)", "Rows(samples + 1)", "a was started with data.length=20; this command has data.length=21."),
        (
            "optimizer=tm.optim.adamw(lr=lr)",
            "optimizer=tm.optim.adamw(lr=lr, weight_decay=0.5)",
            "a was started with opt",
        ),
    ],
)
def test_a_run_of_an_edited_job_names_the_difference(train: Train, old: str, new: str, said: str) -> None:
    train("--run", "a")
    write_job(Path(), (old, new))
    code, _, err = train("--run", "a")
    assert code == 1
    assert said in err


def test_directories_that_cannot_be_used(train: Train) -> None:
    Path("file").write_text("mine")
    Path("foreign").mkdir()
    Path("foreign/notes.txt").write_text("mine")
    for run, said in (
        ("file", "file cannot be written: File exists."),
        ("file/b", "file/b cannot be written: Not a directory."),
        ("foreign", "foreign is not empty and holds no run: notes.txt."),
    ):
        code, out, err = train("--run", run)
        assert (code, out) == (1, "")
        assert f"RunError: {said}" in err
    assert [each.name for each in Path("foreign").iterdir()] == ["notes.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_read_only(train: Train) -> None:
    Path("locked").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    code, _, err = train("--run", "locked/a")
    assert code == 1
    assert "locked/a cannot be written: Permission denied." in err


def test_a_failed_start_leaves_no_directory_of_its_own_making(train: Train) -> None:
    write_job(Path(), ('inputs=("x",)', 'inputs=("z",)'))
    code, _, err = train()
    assert code == 1
    assert "inputs names 'z'" in err
    assert list(Path("runs").iterdir()) == []
    train("--run", "named")
    write_job(Path())
    assert train("--run", "named")[0] == 0, "a start that failed does not use the name up"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("return len(self.x)", "return 0"), "DataError: data has no samples."),
        (("Rows(valid, seed=1)", "[]"), "DataError: valid has no samples."),
        (
            ('return {"x"', "if index == 13: raise OSError('bad file')\n        return {\"x\""),
            "DataError: Sample 13 of the data raised OSError: bad file",
        ),
        (
            (
                'loss=tm.losses.mse(target="y")',
                "loss=tm.losses.custom(total=lambda o, b: ((o - b['y']) ** 2).mean(), weight=lambda b: len(b['y']))",
            ),
            "total() returns a mean.",
        ),
        (("return self.down(", "return {'out': 1}, self.down("), "mse cannot read the model's output"),
        (("self.down(self.up(x).tanh())", "self.down(self.up(x).tanh()).squeeze()"), "mse got an output of shape [8]"),
        (("nn.Linear(4, width)", "nn.Linear(5, width)"), "mat1 and mat2 shapes cannot be multiplied"),
        (('batch["y"]).abs()', 'batch["why"]).abs()'), "KeyError: 'why'"),
        (
            ('(output - batch["y"]).abs().sum()', '(output - batch["y"]).abs()'),
            "total returned a tensor of shape [7, 1]",
        ),
        (
            ("super().__init__()\n        self.up", "super().__init__()\n        1 / 0\n        self.up"),
            "ZeroDivisionError",
        ),
        (('inputs=("x",)', 'inputs=("z",)'), "inputs names 'z', and a batch has the keys 'x', 'y'."),
    ],
)
def test_what_would_fail_later_fails_before_step_1(train: Train, change: tuple[str, str], said: str) -> None:
    write_job(Path(), change)
    code, out, err = train("--run", "a")
    assert (code, out) == (1, ""), err
    assert said in err
    assert err.count("\n") == 2, err


def test_a_sample_that_raises_in_a_loader_worker_is_named(train: Train) -> None:
    change = ('return {"x"', "if index == 11: raise OSError('bad file')\n        return {\"x\"")
    write_job(Path(), change)
    code, _, err = train("--run", "a", "--num-workers", "2")
    assert code == 1
    assert "DataError: Sample 11 of the data raised OSError: bad file in epoch 0." in err


def test_a_model_that_raises_while_it_trains(train: Train) -> None:
    code, out, err = train("--run", "a", "--fault", "raise@3", "--log-every", "1")
    assert code == 1
    assert "step 1/6" in out
    place = Path("tiny.py").resolve()
    assert err.startswith(f"JobError: RuntimeError: the forward broke, at {place}:")
    assert err.count("\n") == 2
    assert events_of(Path("a")) == [("started", 0), ("failed", 2)]
    assert "RuntimeError: the forward broke" in lines_of(Path("a/events.jsonl"))[-1]["detail"]
    assert len(lines_of(Path("a/metrics.jsonl"))) <= 2
    _, _, err = train("--run", "b", "--fault", "raise@3", "--traceback")
    assert "Traceback" in err
    assert "go_wrong" in err


@pytest.mark.parametrize(("fault", "reason"), [("interrupt@3", "SIGINT"), ("terminate@3", "SIGTERM")])
def test_a_request_to_stop_ends_the_run_at_a_steps_edge(train: Train, fault: str, reason: str) -> None:
    code, out, err = train("--run", "a", "--fault", fault)
    assert (code, err) == (75, "")
    # What was asked for under step 3 is agreed on with the batch after the next.
    stopped = len(losses_of(Path("a")))
    assert 3 <= stopped <= 4
    assert f"stopped on request after step {stopped}/6" in out
    assert events_of(Path("a")) == [("started", 0), ("saved", stopped), ("stopped", stopped)]
    assert lines_of(Path("a/events.jsonl"))[-1]["detail"] == reason
    assert Path("a/model.safetensors").exists()


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_and_shown(train: Train) -> None:
    change = (
        "return self.down(",
        "x = x * float('nan') if self.calls == 2 and self.training else x\n        return self.down(",
    )
    write_job(Path(), change)
    code, out, _ = train("--run", "a", "--log-every", "1")
    assert code == 0
    records = lines_of(Path("a/metrics.jsonl"))
    assert [each["skipped"] for each in records] == [False, True, False, False, False, False]
    assert records[1]["loss"] == records[1]["grad_norm"] == "nan"
    assert events_of(Path("a")) == [("started", 0), ("skipped", 2), ("saved", 6), ("finished", 6)]
    assert [line.split()[1] for line in out.splitlines() if "  skipped  " in line] == ["2/6"]


@pytest.mark.parametrize("what", ["sample=lambda model: 1 / 0", "baselines={'none': lambda: 1 / 0}"])
def test_what_fails_after_the_last_step_loses_nothing(train: Train, what: str) -> None:
    write_job(Path(), ("global_batch=8,", f"global_batch=8, {what},"))
    code, _, err = train("--run", "a")
    assert code == 1
    assert "ZeroDivisionError: division by zero" in err
    assert "the weights are in a/model.safetensors" in err
    assert events_of(Path("a"))[-1] == ("finished", 6)


def test_a_sample_and_baselines_are_shown(train: Train) -> None:
    more = "sample=lambda model: 'two\\nlines', baselines={'zero': lambda: {'loss': 100.0}}"
    write_job(Path(), ("global_batch=8,", f"global_batch=8, {more},"))
    out = train("--run", "a")[1]
    assert "sample\ntwo\nlines\n" in out
    assert "zero: loss 100.0000 (ours is 9" in out
    assert "% lower)" in out
