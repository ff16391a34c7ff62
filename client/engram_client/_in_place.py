"""Lookups whose rows stay in shared memory, for callers that copy them on at once: to a GPU, say."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engram_client._errors import OverloadedError, UnavailableError
from engram_client._query import LookupMethods, Query
from engram_client._result import Lookup
from engram_client._shared import NoRoomError, SharedChannel, SharedLookup

if TYPE_CHECKING:
    from engram_client._sync import EngramClient


class RowsInPlace:
    """A lookup under way. `result` waits for it; its arrays are good until `release`.

    A context manager over its result:

        with client.in_place().lookup(tokens, format="packed") as found:
            gpu.copy_(torch.from_numpy(found.values))
    """

    def __init__(self, client: EngramClient, query: Query, timeout: float | None) -> None:
        self._client = client
        self._query = query
        self._attempts = client._pool.attempts(timeout)
        self._channel: SharedChannel | None = None
        self._pending: SharedLookup | None = None
        self._result: Lookup | None = None
        self.over_grpc = False
        """Whether shared memory is not for this lookup, or not to be had: nothing is under way before `result`."""
        self._start(timeout)

    def _start(self, timeout: float | None) -> None:
        try:
            begun = self._client._begin_shared(self._query, timeout)
        except (UnavailableError, OverloadedError, NoRoomError):
            return  # tried again, with what patience the client has, when the rows are wanted
        self.over_grpc = begun is None
        if begun is not None:
            self._channel, self._pending = begun

    @property
    def buffer(self) -> NDArray[np.uint8] | None:
        """The memory that the rows are part of, uint8[bytes]: the same for all lookups until the server restarts, so
        that a GPU's driver may be told of it once. None: these rows come over gRPC, into memory of their own."""
        return None if self._channel is None else self._channel.buffer

    def done(self) -> bool:
        """Whether `result` would return at once."""
        if self._result is not None:
            return True
        return self._pending is not None and self._pending.answered()

    def result(self) -> Lookup:
        """Wait for the rows. Raises what the lookup failed with; DeadlineError when its time ran out."""
        if self._result is None:
            self._result = self._wait()
        return self._result

    def _wait(self) -> Lookup:
        if self._pending is not None:
            left_s = self._attempts.remaining_s()
            try:
                return self._pending.in_place(None if left_s is None else time.monotonic() + left_s)
            except (UnavailableError, OverloadedError):
                self.release()
        return self._client._run(self._query, self._attempts.remaining_s())

    def release(self) -> None:
        """Give the rows back: arrays of the result are not to be used any more. A lookup under way is cancelled."""
        if self._pending is not None:
            self._pending.release()
            self._pending = self._channel = None
        self._result = None

    def __enter__(self) -> Lookup:
        return self.result()

    def __exit__(self, *exception: object) -> None:
        self.release()


class InPlaceLookups(LookupMethods[RowsInPlace]):
    """Lookups that are begun at once, several at a time, and answered in the client's shared memory.

    Each answer must fit `SharedMemory.data_bytes`, and those that were not released yet together. Without shared
    memory, and for `unique`, rows come over gRPC when `result` asks for them.
    """

    def __init__(self, client: EngramClient) -> None:
        self._client = client

    def _run(self, query: Query, timeout: float | None) -> RowsInPlace:
        return RowsInPlace(self._client, query, timeout)
