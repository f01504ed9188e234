"""The schema of owner.json: who may write to a run's directory, and from where each owner went on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OWNER_FILE = "owner.json"


@dataclass(frozen=True)
class OwnerRecord:
    """The present owner of a run directory. `epoch` counts owners from 1; 0 stands for none.

    `resumed` has, for each owner that began or continued the run, the step from which it went on.
    """

    epoch: int = 0
    pid: int | None = None
    host: str | None = None
    resumed: Mapping[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid and self.host else "another process"


def read_owner(run: Path) -> OwnerRecord:
    """The owner of a run directory; what is missing or cannot be read counts as none."""
    try:
        values = json.loads((run / OWNER_FILE).read_text(encoding="utf-8"))
        resumed = {int(epoch): _count(step) for epoch, step in values.get("resumed", {}).items()}
        pid, host = values.get("pid"), values.get("host")
        return OwnerRecord(_count(values["epoch"]), pid, host, resumed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return OwnerRecord()


def write_owner(run: Path, owner: OwnerRecord) -> None:
    """Writes owner.json whole or not at all."""
    temporary = run / f"{OWNER_FILE}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(owner)))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(run / OWNER_FILE)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value
