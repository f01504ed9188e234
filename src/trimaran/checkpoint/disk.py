"""What saving, deleting and exporting do to a disk: new files and folders flushed, old ones gone in one rename."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from trimaran.records import FileRecord

TEMPORARY = ".tmp-"
"""In the name of a checkpoint's directory that is none yet, or none any more."""
_LEFTOVER = re.compile(r"step-[0-9]{8,12}\.tmp-(deleted-)?[0-9]+")


def discard(folder: Path, *, epoch: int, halfway: Callable[[], None] = lambda: None) -> None:
    """Deletes a checkpoint: in one rename it is none any more, then its files go.

    Files that cannot go, as those that somebody still reads on a network disk, are left to `discard_leftovers`.
    """
    doomed = folder.with_name(f"{folder.name}{TEMPORARY}deleted-{epoch}")
    _remove(doomed)
    folder.rename(doomed)
    halfway()
    _remove(doomed)


def discard_leftovers(folder: Path) -> list[str]:
    """Deletes what saves and deletions left under temporary names; returns these.

    Only for the owner, while it saves nothing.
    """
    names = sorted(name for name in os.listdir(folder) if _LEFTOVER.fullmatch(name))
    for name in names:
        _remove(folder / name)
    return names


def _remove(path: Path) -> None:
    """Deletes a folder, a file or a link, as far as it can be; what a link leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def make_folder(path: Path) -> None:
    """Makes a folder for its owner alone, where there is none."""
    path.mkdir(mode=0o700, exist_ok=True)


def write_text(path: Path, text: str) -> FileRecord:
    """Writes a new file, readable by its owner alone, and flushes it to disk."""
    data = text.encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def sync_folder(path: Path) -> None:
    """Flushes a folder's entries to disk: what was made, renamed or deleted in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
