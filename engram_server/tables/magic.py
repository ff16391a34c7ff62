"""Telling table files apart by how they begin."""

from __future__ import annotations

import stat
from pathlib import Path


def begins_with(path: Path, magic: bytes) -> bool:
    """Whether a path is a regular file that begins with these bytes. False when it cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb", buffering=0) as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False
