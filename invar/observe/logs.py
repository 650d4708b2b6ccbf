"""One logging set-up: everything of Invar goes through the logger ``invar``."""

from __future__ import annotations

import logging
import sys

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def set_up_logging(level: str = "info", *, plain: bool = False) -> None:
    """Lines on stderr, so that an answer on stdout can be piped. ``plain``: for a person's eyes.

    Raises ValueError for a level that is none.
    """
    if level.upper() not in LEVELS:
        raise ValueError(f"log level {level[:20]}: not one of {', '.join(LEVELS).lower()}")
    logger = logging.getLogger("invar")
    logger.setLevel(level.upper())
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        line = "invar: %(message)s" if plain else "%(asctime)s %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(line, "%H:%M:%S"))
        logger.addHandler(handler)
    logger.propagate = False
