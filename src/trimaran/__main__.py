"""`python -m trimaran` is the command `trimaran`."""

import sys

if __name__ == "__main__":
    try:
        from trimaran.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(main())
