"""`python -m trimaran` is the command `trimaran`."""

import sys

from trimaran.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
