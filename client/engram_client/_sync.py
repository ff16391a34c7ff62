"""The client for threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from engram_client._config import NO_RETRY, Limits, Retry, SharedMemory, Timeouts, Tls, Token
from engram_client._credentials import Credentials
from engram_client._description import Description
from engram_client._in_place import InPlaceLookups
from engram_client._pool import Pool
from engram_client._query import LookupMethods, PrefetchMethods, Query
from engram_client._result import Lookup, Prefetched
from engram_client._shared import SharedChannel, SharedLookup
from engram_client._sync_stream import LookupStream
from engram_client._targets import DEFAULT_TARGET, parse_targets


class EngramClient(LookupMethods[Lookup], PrefetchMethods[Prefetched]):
    """Looks rows up at a server. Safe to share between threads; not usable in a forked child.

    With several targets the first that answers is used until it fails, then the next in order. All must serve
    the same tables. A context manager.

    A server on the same host is asked through shared memory, by itself, where it can be had; the client says once
    when it cannot. `stream()`, `unique` and prefetches go over gRPC.

        with EngramClient("127.0.0.1:50051") as client:
            rows = client.lookup([0, 3, 17]).values  # uint16[3, 2, 24, 256], bf16 bit patterns
    """

    def __init__(
        self,
        targets: str | Sequence[str] = DEFAULT_TARGET,
        *,
        timeouts: Timeouts | None = None,
        retry: Retry | None = None,
        limits: Limits | None = None,
        shared_memory: SharedMemory | Literal["auto", "off", "require"] = "auto",
        tls: Tls | None = None,
        token: Token | str | None = None,
    ) -> None:
        """Connects with the first call. tls and token are for targets over TCP.

        Raises ValueError for a target that is not one, and for a token that would cross a network without TLS; OSError
        for files of `tls` and `token` that cannot be read.
        """
        if not isinstance(shared_memory, SharedMemory):
            shared_memory = SharedMemory(shared_memory)
        self._limits = limits or Limits()
        parsed = parse_targets(targets)
        self._pool = Pool(
            parsed,
            timeouts or Timeouts(),
            retry or Retry(),
            self._limits,
            shared_memory,
            Credentials.of(parsed, tls, token),
        )

    def describe(self, *, timeout: float | None = None) -> Description:
        """Ask the server what it serves, now."""
        attempts = self._pool.attempts(timeout)
        return self._pool.run(lambda connection: connection.describe(attempts), attempts)

    def stream(self) -> LookupStream:
        """Open a stream that stays open for many lookups, several of them under way at once.

        What a decode loop wants: no call is set up for each step, and steps may overlap.
        """
        return LookupStream(self._pool, self._limits)

    def in_place(self) -> InPlaceLookups:
        """Lookups that return at once, and whose rows stay in shared memory until they are released."""
        return InPlaceLookups(self)

    def close(self) -> None:
        """End calls under way and disconnect."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, query: Query, timeout: float | None) -> Lookup:
        attempts, request_id = self._pool.attempts(timeout), self._pool.next_id()
        return self._pool.run(lambda connection: connection.lookup(query, request_id, attempts), attempts)

    def _begin_shared(self, query: Query, timeout: float | None) -> tuple[SharedChannel, SharedLookup] | None:
        """For RowsInPlace: None when there is no shared memory for it. One try, so that it returns at once."""
        attempts = self._pool.attempts(timeout, NO_RETRY)
        return self._pool.run(lambda connection: connection.begin_in_place(query, attempts), attempts)

    def _queue(self, query: Query, give_up_s: float | None, timeout: float | None) -> Prefetched:
        attempts, request_id = self._pool.attempts(timeout), self._pool.next_id()
        return self._pool.run(
            lambda connection: connection.prefetch(query, request_id, give_up_s, attempts), attempts
        )
