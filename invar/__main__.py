"""`python -m invar` is `invar`."""

from __future__ import annotations

import sys

from invar.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
