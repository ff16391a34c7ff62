"""Between the event loop and the native engine: plan requests, submit their blocks, await and gather rows.

Nothing here blocks the loop for longer than a small request takes; the rest goes to a worker thread, where
the native calls run without the GIL.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from engram_client._proto import engram_pb2 as pb
from engram_kernels import _core
from engram_server import lookup, prefetch, wire
from engram_server.device import DeviceConverter
from engram_server.limits import Limits
from engram_server.lookup import Block, InvalidRequestError, Plan, Request
from engram_server.memory import Memory
from engram_server.recorder import Recorder
from engram_server.terms import DeadlinePassedError, Terms

_SMALL_ROWS = 16 * 1024
"""Hashing or submitting so many rows takes about a millisecond: no longer than other requests may wait for it."""
_SMALL_BYTES = 1 << 20
"""The same for gathering."""
_BUDGET_POLL_S = 0.01
_ROOM_POLL_MAX_S = 0.1
_CLIENTS_MAX = 10_000
"""Clients whose limits are remembered; each takes some hundred bytes."""


@dataclass(frozen=True, eq=False)
class Admission:
    """A request that is being worked on."""

    rows: int
    """Counted against Limits.pending_rows."""
    terms: Terms


@dataclass(frozen=True, eq=False)
class Hits:
    """A block that the cache had all rows of."""

    payload: memoryview
    stats: lookup.BatchStats


class Fetcher:
    """Fetches rows for the service, within its limits. Belongs to the event loop it was made on."""

    def __init__(
        self,
        memory: Memory,
        limits: Limits,
        on_damage: Callable[[str], None],
        converter: DeviceConverter | None = None,
    ) -> None:
        """on_damage is told, in words, that a table's file ends before its rows do, or holds other bytes.
        converter makes bf16 of packed rows; None = the native core does."""
        self._memory = memory
        self._converter = converter
        self._limits = limits
        self._admission_limits = limits.admission
        self._quotas: OrderedDict[str, _core.Quota] = OrderedDict()
        """Of clients by name; who was silent for longest comes first."""
        self._on_damage = on_damage
        self._completions = Completions(memory.engine)
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.recorder: Recorder | None = None
        """Notes every lookup that was planned."""

    async def admit(
        self,
        message: pb.LookupRequest,
        client: str,
        call_left_s: float | None = None,
        *,
        patient: Callable[[], bool] = lambda: False,
    ) -> Admission:
        """Count a request in before any work is done for it; `release` what is returned.

        client: its name. call_left_s: seconds until the deadline of the call it came with, None = there is none.
        Raises InvalidRequestError when it alone asks for too much, OverloadedError when there is no room for it: at
        once, or when it is `patient` no more. Raises DeadlinePassedError.
        """
        rows = wire.rows_of(message, self._memory, self._limits.request_rows)
        if rows > self._limits.request_rows:
            raise InvalidRequestError(
                f"the request asks for {rows} rows, over the limit of {self._limits.request_rows}: split it"
            )
        terms = wire.terms_of(message, rows, self._limits.decode_rows, call_left_s)
        quota = self._quota(client)
        self._begun()
        try:
            while True:
                try:
                    admission = self._memory.engine.admit(
                        rows, terms.lane, self._admission_limits, left_s=terms.left_s(), client=quota
                    )
                    return Admission(rows, replace(terms, admission=admission))
                except _core.OverloadedError as error:
                    if not patient():
                        self._memory.engine.count_overload(error.limit)
                        raise
                    wait_s = min(error.retry_after_s, _ROOM_POLL_MAX_S)
                await asyncio.sleep(wait_s)
        except BaseException:
            self._over()
            raise

    def _quota(self, client: str) -> _core.Quota | None:
        if self._limits.client_rows is None and self._limits.client_rows_per_s is None:
            return None
        quota = self._quotas.setdefault(client, _core.Quota())
        self._quotas.move_to_end(client)
        if len(self._quotas) > _CLIENTS_MAX:
            self._quotas.popitem(last=False)
        return quota

    def release(self, admission: Admission) -> None:
        """A request that was admitted is over."""
        assert admission.terms.admission is not None
        admission.terms.admission.release()
        self._over()

    def _begun(self) -> None:
        self._under_way += 1
        self._idle.clear()

    def _over(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()

    async def plan(self, message: pb.LookupRequest, admission: Admission) -> Plan:
        """Check, hash and cut an admitted request. Raises InvalidRequestError, MismatchError."""
        came_ns = time.monotonic_ns()
        plan = partial(_plan, message, self._memory, self._limits.block_bytes)
        planned = plan() if admission.rows <= _SMALL_ROWS else await asyncio.to_thread(plan)
        if self.recorder is not None:
            self.recorder.note(message, planned.request, admission.terms.lane, came_ns)
        return planned

    async def plan_prefetch(
        self, message: pb.LookupRequest, admission: Admission
    ) -> tuple[Request, tuple[Block, ...]]:
        """The same for a request whose rows are only to be read."""
        plan = partial(_plan_prefetch, message, self._memory)
        return plan() if admission.rows <= _SMALL_ROWS else await asyncio.to_thread(plan)

    def hits(self, block: Block, format: _core.Format, terms: Terms) -> Hits | None:
        """The payload of a small block whose rows are all in the cache; None: submit it.

        It counts against no budget, and is at most one chunk. Raises DeadlinePassedError, and TableChangedError as
        Memory.ensure_unwritten.
        """
        if block.payload_bytes > min(_SMALL_BYTES, self._limits.chunk_bytes) or self._converter is not None:
            return None
        payload = np.empty(block.payload_bytes, dtype=np.uint8)
        stats = block.copy_hits(self._memory.engine, terms, format, payload)
        if stats is None:
            return None
        self._memory.ensure_unwritten()
        return Hits(payload.data, stats)

    async def submit(self, block: Block, terms: Terms, *, patient: bool) -> _core.Batch:
        """Start reading a block.

        A full engine is an OverloadedError: at once, or when `patient` after Limits.budget_wait_s, since a
        request that has begun is worth finishing. Raises DeadlinePassedError.
        """
        give_up = time.monotonic() + (self._limits.budget_wait_s if patient else 0.0)
        while True:
            try:
                submit = partial(block.submit, self._memory.engine, terms, notify=True)
                return submit() if block.rows <= _SMALL_ROWS else await asyncio.to_thread(submit)
            except _core.OverloadedError as error:
                if time.monotonic() >= give_up:
                    self._memory.engine.count_overload(error.limit)
                    raise
            await asyncio.sleep(_BUDGET_POLL_S)

    async def rows_read(self, batch: _core.Batch, terms: Terms) -> None:
        """Wait until every read of a batch has ended, well or badly.

        Raises DeadlinePassedError, and TableChangedError as Memory.ensure_unwritten.
        """
        if not batch.done:
            try:
                async with asyncio.timeout(terms.left_s()):
                    await self._completions.wait(batch)
            except TimeoutError:
                raise DeadlinePassedError("the rows were not read in the time allowed") from None
        self._memory.ensure_unwritten()

    async def gather(
        self, batch: _core.Batch, block: Block, first: int, count: int, format: _core.Format, terms: Terms
    ) -> bytes:
        """Payload of some items of a block whose reads have ended. Raises RowError if one failed,
        DeadlinePassedError if it was given up."""
        try:
            gather = partial(self._payload, batch, block, first, count, format)
            # A device is waited for, however few the rows.
            small = count * block.item_bytes <= _SMALL_BYTES and self._converter is None
            return gather() if small else await asyncio.to_thread(gather)
        except _core.RowError as error:
            if error.error in (_core.ERROR_TRUNCATED, _core.ERROR_CHECKSUM):
                self._on_damage(str(error))
            terms.explain(error)
            raise

    def _payload(
        self, batch: _core.Batch, block: Block, first: int, count: int, format: _core.Format
    ) -> bytes:
        kinds = {self._memory.tables[layer].kind for layer, _ in block.keys}
        if self._converter is None or format is not _core.Format.BF16 or len(kinds) > 1:
            return block.payload(batch, first, count, format)
        return self._converter.payload(batch, block, kinds.pop(), first, count)

    async def idle(self) -> None:
        """Wait until every request that was admitted is over."""
        await self._idle.wait()

    def close(self) -> None:
        """Stop watching the engine; no call may be under way."""
        self._completions.close()


class Completions:
    """Wakes coroutines when their batch ends, through the engine's event_fd."""

    def __init__(self, engine: _core.Engine) -> None:
        """Call on the running loop that will wait."""
        self._engine = engine
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(engine.event_fd, self._wake)

    async def wait(self, batch: _core.Batch) -> None:
        """Return when every read of a batch submitted with notify=True has ended, well or badly."""
        # A batch that ends before its future is in the table has its tag dropped by _wake, which runs on
        # this loop: so look at `done` again once the future is there.
        future = self._waiting[batch.tag] = self._loop.create_future()
        try:
            if not batch.done:
                await future
        finally:
            self._waiting.pop(batch.tag, None)

    def _wake(self) -> None:
        for tag in self._engine.completions():
            future = self._waiting.pop(tag, None)
            if future is not None and not future.done():
                future.set_result(None)

    def close(self) -> None:
        """Stop watching the engine."""
        self._loop.remove_reader(self._engine.event_fd)


def _plan(message: pb.LookupRequest, memory: Memory, block_bytes: int) -> Plan:
    return lookup.plan(memory, wire.request_from(message, memory), block_bytes)


def _plan_prefetch(message: pb.LookupRequest, memory: Memory) -> tuple[Request, tuple[Block, ...]]:
    request = wire.request_from(message, memory)
    return request, lookup.prefetch_blocks(memory, request, prefetch.BLOCK_BYTES)
