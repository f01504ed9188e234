"""One process of one side of `trimaran verify`: python -m trimaran.cli.verify_worker FOLDER LAYOUT WORDS..."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from trimaran.cli.main import run_safely
from trimaran.cli.verify import read_command
from trimaran.layout import Layout
from trimaran.world.environment import discover


def main(words: Sequence[str]) -> int:
    """Runs this rank's part of the layout; rank 0 leaves what came of it in the folder. `words` are the command's."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it even where it waits for the others in compiled code
    folder, layout, *rest = words
    return run_safely(lambda: _run(Path(folder), Layout.parse(layout), rest), show_traceback="--traceback" in rest)


def _run(folder: Path, layout: Layout, words: Sequence[str]) -> int:
    command, job = read_command(words)
    from trimaran.prove.verify import run_on_ranks
    from trimaran.prove.verify_layouts import choose_steps, resolve_alone
    from trimaran.prove.verify_side import save_side

    environment = discover()
    resolved = resolve_alone(layout, job, num_ranks=environment.world_size if environment else 1)
    steps = choose_steps(job, command.steps)
    side = run_on_ranks(job, resolved, environment, steps=steps, device=command.device)
    if environment is None or environment.rank == 0:
        save_side(side, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
