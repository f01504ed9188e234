from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trimaran.errors import ClusterError
from trimaran.world import device as module
from trimaran.world.device import choose_device, describe_device, find_local_chip, memory_bytes, set_numerics

CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "trimaran" / "cpu-rates.json"


@pytest.fixture(autouse=True)
def _numerics_as_before() -> Iterator[None]:
    yield
    set_numerics(precision="fp32", deterministic=False)


@pytest.mark.usefixtures("no_gpu")
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert choose_device("auto", local_rank=3, num_procs=4) == CPU
    with pytest.raises(ClusterError, match="local rank 0 finds 0 GPUs here"):
        choose_device("cuda", local_rank=0, num_procs=1)
    with pytest.raises(ClusterError, match="device=mps is not available here"):
        choose_device("mps", local_rank=0, num_procs=1)


def test_each_local_rank_drives_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device("auto", local_rank=1, num_procs=2) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    assert choose_device("cpu", local_rank=1, num_procs=2) == CPU
    with pytest.raises(ClusterError, match="local rank 2 finds 2 GPUs here") as caught:
        choose_device("auto", local_rank=2, num_procs=3)
    assert caught.value.remedy == "Use --procs 2."


def test_mps_takes_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("mps", local_rank=0, num_procs=1).type == "mps"
    with pytest.raises(ClusterError, match="device=mps with 2 processes"):
        choose_device("mps", local_rank=0, num_procs=2)


def test_numerics_are_exact_unless_asked_otherwise() -> None:
    set_numerics(precision="tf32", deterministic=True)
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.are_deterministic_algorithms_enabled()
    set_numerics(precision="fp32", deterministic=False)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_cpu_is_measured_once_and_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[torch.dtype] = []

    def measure(dtype: torch.dtype) -> float:
        measured.append(dtype)
        return 5e9

    monkeypatch.setattr(module, "_measure_matmul_rate", measure)
    for precision in ("fp32", "fp32", "bf16"):
        chip = find_local_chip(CPU, precision)  # type: ignore[arg-type]
        assert chip is not None
        assert chip.peak(precision) == 5e9
    assert measured == [torch.float32, torch.bfloat16]
    assert len(json.loads(cache.read_text())) == 2
    assert [each.name for each in cache.parent.iterdir()] == [cache.name]
    assert find_local_chip(CPU, "tf32") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": -1}'])
def test_a_damaged_cache_is_measured_anew(cache: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(module, "_measure_matmul_rate", lambda dtype: 5e9)
    cache.parent.mkdir()
    cache.write_text(text)
    chip = find_local_chip(CPU, "fp32")
    assert chip is not None
    assert chip.peak("fp32") == 5e9


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(module, "_measure_matmul_rate", lambda dtype: 5e9)
    assert find_local_chip(CPU, "fp32") is not None


def test_a_cpu_has_a_name_and_memory() -> None:
    assert describe_device(CPU)
    assert memory_bytes(CPU) > 10 * 2**20
