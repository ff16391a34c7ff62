"""The same lookups in process, without a server. Imported on first use: it brings the native core along."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from engram_client._codec import build_result, expect, stats_from
from engram_client._config import Limits
from engram_client._description import Description, description_from
from engram_client._errors import (
    DataLossError,
    DeadlineError,
    EngramError,
    InvalidRequestError,
    MismatchError,
    OverloadedError,
    UnsupportedError,
)
from engram_client._query import BlockKeys, LookupMethods, PrefetchMethods, Query, RowKeys, TokenKeys
from engram_client._result import Lookup, Prefetched, Stats
from engram_kernels import _core
from engram_server import limits as server_limits
from engram_server import lookup, prefetch, wire
from engram_server.hotset_keeper import HotSetKeeper
from engram_server.memory import Memory, MemoryOptions
from engram_server.prefetch import Prefetcher
from engram_server.tables.errors import TableChangedError
from engram_server.terms import DeadlinePassedError, Terms, lane_by_size

_FORMATS = {name: format for format, name in lookup.FORMAT_NAMES.items()}
_LANES = {"decode": _core.Lane.DECODE, "prefill": _core.Lane.PREFILL, "prefetch": _core.Lane.PREFETCH}
_LIMITS = server_limits.Limits()
_BUDGET_POLL_S = 0.005


class EngramMemory(LookupMethods[Lookup], PrefetchMethods[Prefetched]):
    """Looks rows up in a checkpoint on this machine; every method of `EngramClient`, without a server.

    Safe to share between threads; not usable in a forked child. Without `timeout=` a lookup takes the time it
    takes. A context manager.

        with EngramMemory.open("/models/DeepSeek-V4.1-Flash") as memory:
            rows = memory.lookup([0, 3, 17]).values  # uint16[3, 2, 24, 256], bf16 bit patterns
    """

    def __init__(self, memory: Memory, limits: Limits | None = None) -> None:
        """Takes `memory` over: closing this closes it."""
        self._memory = memory
        self._limits = limits or Limits()
        self._id = secrets.token_hex(16)
        self._prefetcher = Prefetcher(memory.engine, _LIMITS.prefetch_rows, _LIMITS.prefetches)
        hot_set = memory.options.hot_set
        self._hot_set = None if hot_set is None else HotSetKeeper(memory, hot_set)
        if self._hot_set is not None:
            self._hot_set.start()
        self._description = self.describe()

    @classmethod
    def open(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Open a checkpoint directory or one shard.

        options: those of `engram-server serve` that concern reading, by the names and defaults of
        engram_server.memory.MemoryOptions: backend, scales, tokenizer, io_depth, io_threads, bulk_depth,
        budget_bytes, cache_bytes, resident, replicas, hot_set.

        Raises what Memory.open raises: ValueError for files that cannot be served, OSError, RuntimeError.
        """
        memory = Memory.open(Path(path), MemoryOptions(**options))
        try:
            return cls(memory)
        except BaseException:
            memory.close()
            raise

    def describe(self) -> Description:
        """What is open, now; as EngramClient.describe."""
        reply = wire.describe(self._memory, _LIMITS, self._id)
        return description_from(reply, "this process")

    def close(self) -> None:
        """Wait for reads in flight, save the hot set, if there is to be one, and close the tables."""
        if self._hot_set is not None:
            self._hot_set.close()
        self._prefetcher.close()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, query: Query, timeout: float | None) -> Lookup:
        deadline = None if timeout is None else time.monotonic() + timeout
        expected = expect(query, self._description, self._limits)
        with _client_errors():
            lookup.check_pins(self._memory, query.pin or {})
            plan = lookup.plan(self._memory, _request(self._memory, query))
            terms = Terms(_lane(query, plan.request.rows), deadline)
            payload = np.empty(plan.shape.payload_bytes, dtype=np.uint8)
            stats = self._fill(payload, plan, terms)
        return build_result(expected, payload, plan.shape.unique_rows, plan.request.mask, stats)

    def _queue(self, query: Query, give_up_s: float | None, timeout: float | None) -> Prefetched:
        expect(query, self._description, self._limits)
        if not self._memory.has_cache:
            raise UnsupportedError("there is no row cache to fetch rows into: open with cache_bytes")
        with _client_errors():
            request = _request(self._memory, query)
            blocks = lookup.prefetch_blocks(self._memory, request, prefetch.BLOCK_BYTES)
            self._prefetcher.start(blocks, None if give_up_s is None else time.monotonic() + give_up_s)
        return Prefetched(request.rows, request.groups, self._prefetcher.queued_rows)

    def _fill(self, payload: NDArray[np.uint8], plan: lookup.Plan, terms: Terms) -> Stats:
        """Rows straight into their final place, block by block, the next one read meanwhile."""
        filled = 0
        totals = lookup.NO_STATS
        ahead: _core.Batch | None = None
        for index, block in enumerate(plan.blocks):
            end = filled + block.payload_bytes
            batch = ahead
            ahead = None
            if batch is None:
                stats = block.copy_hits(self._memory.engine, terms, plan.shape.format, payload[filled:end])
                if stats is not None:
                    self._memory.ensure_unwritten()
                    totals = lookup.add_stats(totals, stats)
                    filled = end
                    continue
                batch = self._submit(block, terms)
            if index + 1 < len(plan.blocks):
                # If there is no room for it now, there will be when this block's rows are out of the engine.
                with suppress(_core.OverloadedError):
                    ahead = plan.blocks[index + 1].submit(self._memory.engine, terms)
            if not batch.wait(terms.left_s()):
                raise DeadlinePassedError("the rows were not read in the time allowed")
            self._memory.ensure_unwritten()
            try:
                block.payload_into(batch, plan.shape.format, payload[filled:end])
            except _core.RowError as error:
                terms.explain(error)
                raise
            totals = lookup.add_stats(totals, batch.stats)
            filled = end
            del batch
        for inverse in plan.inverse:
            end = filled + inverse.nbytes
            payload[filled:end] = inverse.view(np.uint8)
            filled = end
        return stats_from(wire.stats_message(plan, totals))

    def _submit(self, block: lookup.Block, terms: Terms) -> _core.Batch:
        """Submit, waiting for room that other threads' lookups take."""
        while True:
            with suppress(_core.OverloadedError):
                return block.submit(self._memory.engine, terms)
            time.sleep(_BUDGET_POLL_S)


def _request(memory: Memory, query: Query) -> lookup.Request:
    format, unique, columns = _FORMATS[query.format], query.unique, query.columns
    match query.keys:
        case TokenKeys(sequences):
            return lookup.from_tokens(
                memory,
                sequences,
                layers=query.layers or (),
                columns=columns,
                format=format,
                unique=unique,
            )
        case BlockKeys(layers):
            blocks = list(layers.items())
            return lookup.from_blocks(memory, blocks, columns=columns, format=format, unique=unique)
        case RowKeys(layer, ids):
            return lookup.from_rows(memory, layer, ids, format=format, unique=unique)


def _lane(query: Query, rows: int) -> _core.Lane:
    return lane_by_size(rows, _LIMITS.decode_rows) if query.lane == "auto" else _LANES[query.lane]


@contextmanager
def _client_errors() -> Iterator[None]:
    """The exceptions a server's statuses would have become."""
    try:
        yield
    except lookup.InvalidRequestError as error:
        raise InvalidRequestError(str(error)) from error
    except lookup.MismatchError as error:
        raise MismatchError(str(error)) from error
    except DeadlinePassedError as error:
        raise DeadlineError(str(error)) from error
    except (_core.RowError, TableChangedError) as error:
        raise DataLossError(str(error)) from error
    except _core.OverloadedError as error:
        raise OverloadedError(str(error)) from error
    except RuntimeError as error:  # closed, or in a forked child
        raise EngramError(str(error)) from error
