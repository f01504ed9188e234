"""What launchers' variables mean, and which of them cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimaran.errors import DataError, UsageError
from trimaran.world.environment import ERROR_FILE, STORE_FD, discover, record_failure

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
    "SLURM_TASKS_PER_NODE": "4,3",
}


def test_started_alone() -> None:
    assert discover({}) is None
    assert discover({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}) is None


def test_torchrun() -> None:
    found = discover(TORCHRUN)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert (found.node_rank, found.num_nodes) == (1, 2)
    assert (found.master_addr, found.master_port) == ("10.0.0.7", 29500)
    assert (found.launcher, found.store_fd) == ("torchrun", None)


def test_torchrun_says_which_node() -> None:
    found = discover({**TORCHRUN, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "3"})
    assert found is not None
    assert (found.node_rank, found.num_nodes) == (0, 3)


def test_own_launcher() -> None:
    found = discover({**TORCHRUN, ERROR_FILE: "/nowhere", STORE_FD: "9"})
    assert found is not None
    assert (found.launcher, found.store_fd) == ("trimaran", 9)


@pytest.mark.parametrize("name", list(TORCHRUN))
def test_half_set_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"not {name}") as caught:
        discover({key: value for key, value in TORCHRUN.items() if key != name})
    assert "unset" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "8", "rank 8 of a world of 8"),
        ("LOCAL_RANK", "4", "local rank 4 among 4"),
        ("LOCAL_WORLD_SIZE", "9", "9 workers on this node of a world of 8"),
        ("LOCAL_WORLD_SIZE", "0", "local rank 1 among 0"),
        ("GROUP_RANK", "2", "node 2 of 2"),
        ("MASTER_PORT", "70000", "port 70000"),
        ("RANK", "-1", "RANK='-1'"),
        ("WORLD_SIZE", "two", "WORLD_SIZE='two'"),
        ("WORLD_SIZE", "", "WORLD_SIZE=''"),
    ],
)
def test_contradictions(name: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        discover({**TORCHRUN, name: value})


def test_slurm_step() -> None:
    found = discover(SLURM)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 7, 1, 3)
    assert (found.node_rank, found.num_nodes, found.launcher) == (1, 2, "slurm")
    assert found.master_addr == "gpu003"
    assert 10_000 <= found.master_port < 30_000


def test_slurm_ports_differ_by_job_and_step() -> None:
    cases = [("1234", "0"), ("1234", "1"), ("1235", "0")]
    found = [discover({**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}) for job, step in cases]
    assert len({place.master_port for place in found if place}) == 3


def test_slurm_keeps_a_given_master() -> None:
    found = discover({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "4000"})
    assert found is not None
    assert (found.master_addr, found.master_port) == ("head", 4000)


def test_slurm_variables_without_a_step_of_several_tasks_start_nothing() -> None:
    assert discover({key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}) is None
    assert discover({**SLURM, "SLURM_NTASKS": "1"}) is None
    assert discover({**SLURM, "SLURM_STEP_ID": "4294967290"}) is None  # a shell from salloc


def test_torchrun_inside_slurm_wins() -> None:
    found = discover({**SLURM, **TORCHRUN})
    assert found is not None
    assert found.launcher == "torchrun"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("gpu[003-006,009],login1", "gpu003"),
        ("a,b", "a"),
        ("rack[2-3]n[01-04]", "rack2n01"),
        ("c[5,7-9]-ib,d", "c5-ib"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    found = discover({**SLURM, "SLURM_JOB_NODELIST": nodes})
    assert found is not None
    assert found.master_addr == first


def test_tasks_per_node_are_expanded_and_the_steps_own_come_first() -> None:
    environ = {**SLURM, "SLURM_NTASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "3(x2),2,1", "SLURM_NODEID": "2"}
    found = discover({**environ, "SLURM_STEP_NODELIST": "x[1-4]"})
    assert found is not None
    assert (found.local_world_size, found.num_nodes, found.master_addr) == (2, 4, "x1")


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST"])
def test_half_a_slurm_step_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        discover({key: value for key, value in SLURM.items() if key != name})


def test_a_slurm_node_outside_its_step() -> None:
    with pytest.raises(UsageError, match="SLURM_NODEID=2"):
        discover({**SLURM, "SLURM_NODEID": "2"})


def test_a_failure_is_recorded_once_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "rank0.json"
    environ = {ERROR_FILE: str(file)}
    assert record_failure(DataError("Sample 7 is empty.", "Samples have tokens.", "Drop it."), environ)
    assert record_failure(RuntimeError("a consequence"), environ)
    written = json.loads(file.read_text())
    assert (written["type"], written["value"], written["remedy"]) == ("DataError", "Sample 7 is empty.", "Drop it.")
    assert written["exit_code"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json"]


def test_without_a_launcher_nothing_is_recorded(tmp_path: Path) -> None:
    assert not record_failure(RuntimeError("x"), {})
    assert not record_failure(RuntimeError("x"), {ERROR_FILE: str(tmp_path / "gone" / "rank0.json")})
