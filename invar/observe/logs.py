"""One logging set-up: everything of Invar goes through the logger ``invar``."""

from __future__ import annotations

import logging
import sys

access_logger = logging.getLogger("invar.access")


def set_up_logging(level: str = "info") -> None:
    """Lines on stderr, so that an answer on stdout can be piped."""
    logger = logging.getLogger("invar")
    logger.setLevel(level.upper())
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
        )
        logger.addHandler(handler)
    logger.propagate = False


def log_access(
    client: str, method: str, path: str, status: int, seconds: float, request_id: str
) -> None:
    """The one line of a request. It carries no text of the request: prompts stay out of logs."""
    access_logger.info("%s %s %s %d %.3fs %s", client, method, path, status, seconds, request_id)
