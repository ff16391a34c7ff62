"""Tables as they are served: in place, or from a packed store. What both can say has the same names."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from engram_server.tables.checkpoint import Checkpoint, open_checkpoint
from engram_server.tables.errors import TableError
from engram_server.tables.store import Store, is_store, open_store

OpenedTables: TypeAlias = Checkpoint | Store


def open_tables(path: Path) -> OpenedTables:
    """Open a packed store, a checkpoint directory or one shard. Nothing is scanned or copied.

    Raises TableError or SpecError (both ValueError).
    """
    opened = open_store(path) if is_store(path) else open_checkpoint(path)
    for file in opened.files:
        if not has_text_name(file):
            raise TableError(f"{file}: the name is not UTF-8; rename it, or open it by a link")
    return opened


def has_text_name(path: Path) -> bool:
    """Whether a path is UTF-8. Another one the native reader takes for no string at all."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True
