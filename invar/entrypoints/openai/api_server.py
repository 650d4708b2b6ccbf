"""`python -m invar.entrypoints.openai.api_server` is `invar serve`, as vLLM's scripts start it."""

from __future__ import annotations

import sys

from invar.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
