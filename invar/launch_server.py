"""`python -m invar.launch_server` is `invar serve`, on the port that SGLang's clients ask."""

from __future__ import annotations

import sys

from invar.cli.main import main

SGLANG_PORT = 30000

if __name__ == "__main__":
    sys.exit(main(["serve", f"--port={SGLANG_PORT}", *sys.argv[1:]]))
