"""Which tensors of a checkpoint are Engram tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_TABLES = (".engram.embed.", ".engram.embed_tokens.")
"""In their names, upstream's and vLLM's, and in no others."""


def is_table(name: str) -> bool:
    """Whether a tensor holds a table's codes or scales."""
    return any(part in name for part in _TABLES)


def without_tables(shards: Sequence[str]) -> list[str]:
    """The safetensors files that hold anything but tables: some loaders read every file whole.

    A file that cannot be read is among them, for the engine to say so.
    """
    return [shard for shard in shards if not _only_tables(shard)]


def _only_tables(shard: str) -> bool:
    from engram_server.tables.safetensors import read_header

    try:
        names = read_header(Path(shard)).tensors
    except ValueError:
        return False
    return bool(names) and all(map(is_table, names))
