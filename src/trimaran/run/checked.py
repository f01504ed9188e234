"""Whether `trimaran check` has passed a job: an empty file in the user's cache, named by what the job is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimaran.run.describe import Origin
from trimaran.world.cache import cache_file

# A check says nothing of them, or, as shapes, follows from the rest.
_OF_NO_MATTER = ("steps", "samples", "seed", "schedule", "parameters")


def was_checked(identity: Mapping[str, Any], origin: Origin) -> bool:
    """Whether this job, in this state of its file, has passed a check of this user."""
    return _mark(identity, origin).exists()


def describe_unchecked(identity: Mapping[str, Any], origin: Origin, num_nodes: int) -> list[str]:
    """What a run on several nodes says of a job file that was never checked; nothing in all other cases."""
    if num_nodes == 1 or origin.job_file is None or was_checked(identity, origin):
        return []
    told = f"this job has not passed trimaran check {origin.job_file}: minutes on one device, before {num_nodes} nodes"
    return [f"check    {told}", ""]


def mark_checked(identity: Mapping[str, Any], origin: Origin) -> None:
    """Remembers that this job has passed. Does nothing where the user has no writable cache."""
    mark = _mark(identity, origin)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError:
        pass  # the next large run will say that the job was never checked


def _mark(identity: Mapping[str, Any], origin: Origin) -> Path:
    kept = {name: value for name, value in identity.items() if name not in _OF_NO_MATTER}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
    if origin.job_file is not None:
        digest.update(origin.job_file.read_bytes())
    return cache_file(f"checked/{digest.hexdigest()}")
