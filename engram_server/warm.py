"""Which row groups a corpus asks for most: what `engram-server warm` does.

A position asks for one n-gram of each order; the same n-gram asks for one row group in every layer. So n-grams
are counted, by a fingerprint of their group in one layer, and each is remembered by the tokens it was first
met with. In the end those tokens, hashed again, give the groups of all layers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from engram_server.corpus import corpus_bytes, corpus_files, token_pieces
from engram_server.hotset import HotGroups, check_place, write_hot_set
from engram_server.lookup import GROUP_ROWS
from engram_server.memory import Memory
from engram_server.tokens import Encoder, TokenMapError
from engram_server.trace import Trace, is_trace

log = logging.getLogger("engram_server")

NGRAMS_MAX = 4_000_000
"""N-grams counted at a time: 0.15 GB, and half a GB while they are merged. When there are more, the rarest are
forgotten, so that counts of rare ones may come out low."""

_NO_TOKEN = -2
"""Before the start of a sequence; no token id, and not -1, which is an unknown one."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_HASH_TOKENS = 1 << 16
"""Tokens hashed at a time: 25 MB of row ids."""


@dataclass(frozen=True)
class WarmReport:
    """What was counted and what was kept."""

    files: int
    tokens: int
    ngrams: int
    """Distinct, of those not forgotten."""
    forgotten_below: int
    """N-grams met fewer times than this, in some part of the corpus, may have been forgotten; 1 = none were."""
    groups: int
    """In the hot set, all layers together."""
    share: float
    """Of the corpus' n-grams, those whose groups are in the hot set."""


def warm(
    memory: Memory, tokenizer: Path, corpus: Sequence[Path], output: Path, limit_bytes: int
) -> WarmReport:
    """Count a corpus and write the hot set of its most frequent groups, as many as `limit_bytes` of rows hold.

    Raises CorpusError, HotSetError, TokenMapError, ValueError naming the file for ids that are no tokens, OSError.
    """
    check_place(output)
    if memory.hash is None or memory.spec.heads != GROUP_ROWS:
        raise TokenMapError(
            "this checkpoint cannot be warmed by tokens: it has no tokenizer, or no row groups"
        )
    files = corpus_files(corpus)
    encoder = Encoder(tokenizer)
    counter = NgramCounter(memory)
    with tqdm(total=corpus_bytes(files), unit="B", unit_scale=True, desc="counting", disable=None) as bar:
        for file in files:
            for tokens, history, size in _pieces(file, encoder):
                if history is not None:
                    counter.start_sequence(history)
                try:
                    counter.add(tokens)
                except ValueError as error:
                    raise ValueError(f"{file}: {error}") from error
                bar.update(size)
    group_bytes = sum(table.row_bytes for table in memory.tables.values()) * GROUP_ROWS
    hot, kept = counter.hottest(limit_bytes // group_bytes)
    write_hot_set(output, memory.tables, hot)
    return WarmReport(
        files=len(files),
        tokens=counter.tokens,
        ngrams=len(counter),
        forgotten_below=counter.forgotten_below,
        groups=sum(len(groups) for groups in hot),
        share=kept / max(1, counter.tokens * counter.orders),
    )


def _pieces(
    file: Path, encoder: Encoder
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32] | None, int]]:
    """(tokens, what is before them where a sequence begins, bytes of the file) of a text, an array or a trace."""
    if is_trace(file):
        for tokens, before in Trace(file).sequences():
            yield tokens, before, tokens.nbytes + before.nbytes
        return
    history: NDArray[np.int32] | None = np.empty(0, dtype=np.int32)
    for tokens, size in token_pieces(file, encoder):
        yield tokens, history, size
        history = None


class NgramCounter:
    """Counts n-grams of all orders in bounded memory."""

    def __init__(self, memory: Memory, ngrams_max: int = NGRAMS_MAX) -> None:
        self._memory = memory
        self._ngrams_max = ngrams_max
        self._look_back = memory.spec.max_ngram_size - 1
        self.orders = self._look_back
        self.tokens = 0
        self.forgotten_below = 1
        self._history = np.empty(0, dtype=np.int32)
        self._pending: list[_Counts] = []
        self._pending_ngrams = 0
        self._counts = _no_counts(self._look_back)

    def __len__(self) -> int:
        self._merge()
        return len(self._counts.fingerprints)

    def start_sequence(self, history: NDArray[np.int32]) -> None:
        """What is added next has these token ids before it, up to 3, oldest first."""
        self._history = history

    def add(self, tokens: NDArray[np.int32]) -> None:
        """Count int32[n] token ids that continue the sequence. Raises ValueError for ids that are none."""
        for first in range(0, len(tokens), _HASH_TOKENS):
            self._add(tokens[first : first + _HASH_TOKENS])

    def _add(self, tokens: NDArray[np.int32]) -> None:
        ids = _rows(self._memory, tokens, [len(tokens)], self._history, [len(self._history)])
        padding = np.full(self._look_back - len(self._history), _NO_TOKEN, dtype=np.int32)
        line = np.concatenate([padding, self._history, tokens])
        context = np.lib.stride_tricks.sliding_window_view(line, self._look_back + 1)
        for order in range(self.orders):
            fingerprints = _fingerprints(ids[:, 0, order * GROUP_ROWS : (order + 1) * GROUP_ROWS])
            distinct, where, times = np.unique(fingerprints, return_index=True, return_counts=True)
            orders = np.full(len(distinct), order, dtype=np.uint8)
            self._pending.append(_Counts(distinct, times, orders, context[where]))
            self._pending_ngrams += len(distinct)
        self.tokens += len(tokens)
        self._history = line[max(len(padding), len(line) - self._look_back) :]
        # Merging costs as much as what is counted already: not for every piece.
        if self._pending_ngrams > self._ngrams_max // 4:
            self._merge()

    def _merge(self) -> None:
        if self._pending:
            self._counts = _merged([self._counts, *self._pending])
            self._pending, self._pending_ngrams = [], 0
        least = 1
        while len(self._counts.fingerprints) > self._ngrams_max:
            least += 1
            self._counts = self._counts.where(self._counts.times >= least)
        self.forgotten_below = max(self.forgotten_below, least)

    def hottest(self, ngrams: int) -> tuple[list[HotGroups], int]:
        """Groups of every layer for the most frequent n-grams, and how often these were met."""
        self._merge()
        order = np.argsort(-self._counts.times, kind="stable")[:ngrams]
        chosen = self._counts.where(order)
        layers = list(self._memory.tables)
        ids = {layer: np.empty((len(order), GROUP_ROWS), dtype=np.int64) for layer in layers}
        for first in range(0, len(order), _HASH_TOKENS):
            part = slice(first, first + _HASH_TOKENS)
            rows = self._rows_of(chosen.context[part], chosen.orders[part])
            for layer in layers:
                ids[layer][part] = rows[:, self._memory.spec.layers.index(layer)]
        rows_each = np.full(len(order), GROUP_ROWS, dtype=np.uint8)
        masks = np.full(len(order), 2**GROUP_ROWS - 1, dtype=np.uint8)
        return [HotGroups(layer, rows_each, masks, ids[layer]) for layer in layers], int(chosen.times.sum())

    def _rows_of(self, context: NDArray[np.int32], orders: NDArray[np.uint8]) -> NDArray[np.int64]:
        """[n, layers, 8] row ids of n-grams: each context is a sequence of one token and its history."""
        history = context[:, :-1]
        known = history != _NO_TOKEN
        rows = _rows(
            self._memory, context[:, -1], [1] * len(context), history[known], known.sum(axis=1).tolist()
        )
        by_order = rows.reshape(len(rows), rows.shape[1], self.orders, GROUP_ROWS)
        return by_order[np.arange(len(rows)), :, orders]


@dataclass(frozen=True, eq=False)
class _Counts:
    """N-grams and how often they were met."""

    fingerprints: NDArray[np.uint64]
    times: NDArray[np.int64]
    orders: NDArray[np.uint8]
    """Order - 2."""
    context: NDArray[np.int32]
    """[n, max n-gram size]: the tokens before, oldest first, and the token itself."""

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> _Counts:
        return _Counts(
            self.fingerprints[chosen], self.times[chosen], self.orders[chosen], self.context[chosen]
        )


def _no_counts(look_back: int) -> _Counts:
    return _Counts(
        np.empty(0, np.uint64),
        np.empty(0, np.int64),
        np.empty(0, np.uint8),
        np.empty((0, look_back + 1), np.int32),
    )


def _merged(parts: Sequence[_Counts]) -> _Counts:
    """Each fingerprint once, ascending."""
    fingerprints = np.concatenate([part.fingerprints for part in parts])
    distinct, where, inverse = np.unique(fingerprints, return_index=True, return_inverse=True)
    times = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(times, inverse, np.concatenate([part.times for part in parts]))
    return _Counts(
        distinct,
        times,
        np.concatenate([part.orders for part in parts])[where],
        np.concatenate([part.context for part in parts])[where],
    )


def _fingerprints(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 bits for each group [n, 8]. Should two groups share them, one of them is left out; no harm is done."""
    mixed = np.zeros(len(ids), dtype=np.uint64)
    for column in range(ids.shape[1]):
        mixed = (mixed ^ ids[:, column].astype(np.uint64)) * _MIX
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _rows(
    memory: Memory,
    tokens: NDArray[np.int32],
    lengths: Sequence[int],
    history: NDArray[np.int32],
    history_lengths: Sequence[int],
) -> NDArray[np.int64]:
    assert memory.hash is not None
    rows, _ = memory.hash.rows(
        tokens=np.ascontiguousarray(tokens),
        lengths=np.asarray(lengths, dtype=np.int64),
        history=np.ascontiguousarray(history),
        history_lengths=np.asarray(history_lengths, dtype=np.int64),
    )
    return rows
