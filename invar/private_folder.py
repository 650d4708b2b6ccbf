"""Folders for what users wrote: prompts, answers."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path


def make_private(folder: Path, ours: re.Pattern[str], what: str) -> None:
    """A folder that is this user's alone, mode 0700.

    ``ours``: names of files that may be in it, of ``what`` is kept there. Raises OSError, and
    ValueError for a folder that is somebody else's, or open to others and holds more than that.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ValueError(f"{folder}: not a folder of this user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        if not all(ours.fullmatch(path.name) for path in folder.iterdir()):
            raise ValueError(
                f"{folder}: others may look into it and it holds more than {what}; give it a "
                f"folder of its own"
            )
        folder.chmod(0o700)
