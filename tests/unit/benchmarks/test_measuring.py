"""What benchmarks conclude from their figures: intervals that hold the median as often as they say."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


measuring = load("benchmarks/common/measuring.py")


@pytest.mark.parametrize(("num_values", "depth"), [(6, 1), (8, 1), (9, 2), (15, 4), (25, 8), (40, 14), (100, 40)])
def test_the_interval_is_that_of_the_tables_of_the_sign_test(num_values: int, depth: int) -> None:
    values = list(range(num_values, 0, -1))
    assert measuring.median_interval(values) == (depth, num_values + 1 - depth)


@pytest.mark.parametrize("num_values", range(6, 60))
def test_no_narrower_interval_would_do(num_values: int) -> None:
    low, _high = measuring.median_interval(list(range(1, num_values + 1)))

    def missed(depth: int) -> float:
        return 2 * sum(math.comb(num_values, each) for each in range(depth)) / 2**num_values

    assert missed(low) <= 0.05 < missed(low + 1)


def test_few_values_give_their_extremes() -> None:
    assert measuring.median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert measuring.median_interval([1.0]) == (1.0, 1.0)


def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "MALLOC_MMAP_THRESHOLD_"
    monkeypatch.setenv(name, "7")
    with measuring.freed_memory_returned():
        assert os.environ[name] == "65536"
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    with measuring.freed_memory_returned():
        pass
    assert name not in os.environ
