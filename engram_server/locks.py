"""Files that one process at a time writes, and renames when they are whole."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path


def lock_unfinished(fd: int, path: Path) -> None:
    """Become the only writer of the open file at `path`, until it is closed.

    Raises BlockingIOError when another process is that, or was when the file was opened.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, "another process is writing it", str(path)) from None
    # Between our open and our lock its writer may have ended: then what we hold is whole, under its last name.
    try:
        ours = os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        ours = False
    if not ours:
        raise BlockingIOError(errno.EAGAIN, "another process was just finishing it", str(path))
