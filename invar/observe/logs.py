"""One logging set-up: everything of Invar goes through the logger ``invar``."""

from __future__ import annotations

import logging
import sys

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

access_logger = logging.getLogger("invar.access")


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


def log_access(
    client: str, method: str, path: str, status: int, seconds: float, request_id: str
) -> None:
    """The one line of a request. It carries no text of the request: prompts stay out of logs."""
    access_logger.info("%s %s %s %d %.3fs %s", client, method, path, status, seconds, request_id)
