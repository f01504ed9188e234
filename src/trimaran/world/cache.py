"""Files that this machine's user keeps between runs, none of which a run depends on."""

from __future__ import annotations

import os
from pathlib import Path


def cache_file(name: str) -> Path:
    """Where a file of this name lies in the user's cache; its folder may not exist yet. Name may hold slashes."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "trimaran" / name
