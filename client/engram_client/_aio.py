"""The client for asyncio."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Self

from engram_client._aio_pool import AsyncPool
from engram_client._aio_stream import AsyncLookupStream
from engram_client._config import Limits, Retry, Timeouts, Tls, Token
from engram_client._credentials import Credentials
from engram_client._description import Description
from engram_client._query import LookupMethods, PrefetchMethods, Query
from engram_client._result import Lookup, Prefetched
from engram_client._targets import DEFAULT_TARGET, parse_targets


class AsyncEngramClient(
    LookupMethods[Coroutine[Any, Any, Lookup]], PrefetchMethods[Coroutine[Any, Any, Prefetched]]
):
    """Looks rows up at a server; every method of `EngramClient`, awaited.

    Belongs to the loop it is first used on. An asynchronous context manager.

        async with AsyncEngramClient("127.0.0.1:50051") as client:
            rows = (await client.lookup([0, 3, 17])).values  # uint16[3, 2, 24, 256], bf16 bit patterns
    """

    def __init__(
        self,
        targets: str | Sequence[str] = DEFAULT_TARGET,
        *,
        timeouts: Timeouts | None = None,
        retry: Retry | None = None,
        limits: Limits | None = None,
        tls: Tls | None = None,
        token: Token | str | None = None,
    ) -> None:
        """Connects with the first call. Arguments and errors are those of EngramClient."""
        self._limits = limits or Limits()
        parsed = parse_targets(targets)
        self._pool = AsyncPool(
            parsed,
            timeouts or Timeouts(),
            retry or Retry(),
            self._limits,
            Credentials.of(parsed, tls, token),
        )

    async def describe(self, *, timeout: float | None = None) -> Description:
        """Ask the server what it serves, now."""
        attempts = self._pool.attempts(timeout)
        return await self._pool.run(lambda connection: connection.describe(attempts), attempts)

    def stream(self) -> AsyncLookupStream:
        """A stream that stays open for many lookups, several of them under way at once.

        What a decode loop wants: no call is set up for each step, and steps may overlap.
        """
        return AsyncLookupStream(self._pool, self._limits)

    async def close(self) -> None:
        """End calls under way and disconnect."""
        await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _run(self, query: Query, timeout: float | None) -> Lookup:
        attempts, request_id = self._pool.attempts(timeout), self._pool.next_id()
        return await self._pool.run(
            lambda connection: connection.lookup(query, request_id, attempts), attempts
        )

    async def _queue(self, query: Query, give_up_s: float | None, timeout: float | None) -> Prefetched:
        attempts, request_id = self._pool.attempts(timeout), self._pool.next_id()
        return await self._pool.run(
            lambda connection: connection.prefetch(query, request_id, give_up_s, attempts), attempts
        )
