"""Which tensors of a checkpoint are Engram tables."""

from __future__ import annotations

_TABLES = (".engram.embed.", ".engram.embed_tokens.")
"""In their names, upstream's and vLLM's, and in no others."""


def is_table(name: str) -> bool:
    """Whether a tensor holds a table's codes or scales."""
    return any(part in name for part in _TABLES)
