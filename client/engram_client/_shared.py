"""Lookups through the shared memory of a server on this host; docs/shared-memory.md specifies the channel.

An answer that is larger than a piece comes piece by piece, cut between positions: one is copied out while the server
writes the next. What the channel does not carry (`unique`, prefetches) goes over gRPC.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engram_client._codec import Expected, build_result
from engram_client._config import SharedMemory
from engram_client._description import Description
from engram_client._errors import DeadlineError, ProtocolError, UnavailableError, from_number
from engram_client._query import BlockKeys, Query, RowKeys, TokenKeys
from engram_client._result import Lookup, Stats
from engram_client._targets import is_local

if TYPE_CHECKING:
    from engram_kernels import _core

log = logging.getLogger("engram_client")

_VERSION = 1
_TOKENS, _BLOCKS, _ROWS = 1, 2, 3
_LANES = {"auto": 0, "decode": 1, "prefill": 2, "prefetch": 3}
_PIN_TOKEN_MAP, _PIN_HASH = 2**32 - 1, 2**32 - 2
_DIGEST_BYTES = 32
_PIECE_BYTES = 4 << 20
"""Copied out while the next is written: small enough to begin soon, large enough to be few."""
_PIECES_AHEAD = 3
_ATTACH_S = 5.0
_AGAIN_S = 10.0
"""Between two tries to attach to a server that would not have this client."""
_ROOM_S = 0.25
"""Rows in use may fill all of the data area for long: then gRPC is the faster way."""


class NoRoomError(Exception):
    """The data area is full of answers that are in use."""


class Server(Protocol):
    """The server behind a channel, as gRPC reaches it."""

    silence_s: float
    """How long a lookup waits before it asks."""

    def lives(self, at_most_s: float) -> bool:
        """Whether it says so within that time: one that hangs keeps its socket open."""

    def forget(self) -> None:
        """Ask it what it serves before the next lookup."""


class Attachment:
    """The shared memory of one target, for as long as it is the same server. Safe to share between threads."""

    def __init__(self, options: SharedMemory, target: str, server: Server) -> None:
        self._options = options
        self._target = target
        self._server = server
        self._lock = threading.Lock()
        self._channel: SharedChannel | None = None
        self._refused_by = self._refusal = ""
        self._again = 0.0
        self._told = False

    def channel(self, description: Description, at_most_s: float | None) -> SharedChannel | None:
        """The channel to the server described; None when its lookups go over gRPC. Takes so long at most.

        Raises UnavailableError when there is none and it is required.
        """
        channel = self._channel
        if channel is not None and channel.server_id == description.server_id:
            return channel
        if self._options.use == "off":
            return None
        at_most_s = _least(at_most_s, _ATTACH_S)
        if not self._lock.acquire(timeout=at_most_s):
            self._without("another thread has been attaching all the while")
            return None
        try:
            return self._attached(description, at_most_s)
        finally:
            self._lock.release()

    def _attached(self, description: Description, at_most_s: float) -> SharedChannel | None:
        channel = self._channel
        if channel is not None and channel.server_id == description.server_id:
            return channel
        if self._refused_by == description.server_id and time.monotonic() < self._again:
            self._without(self._refusal)
            return None
        try:
            attached = SharedChannel(self._options, description, self._target, self._server, at_most_s)
        except _NoChannelError as error:
            self._refused_by, self._refusal = description.server_id, str(error)
            self._again = time.monotonic() + _AGAIN_S
            # gRPC reconnects without a word: the server there may be another one by now.
            self._server.forget()
            if channel is not None and not channel.alive:
                self.drop(channel)
            self._without(str(error))
            return None
        self.drop(channel)
        self._channel = attached
        log.debug("%s: lookups go through shared memory", self._target)
        return attached

    def _without(self, why: str) -> None:
        if self._options.use == "require":
            raise UnavailableError(f"there is no shared memory: {why}", target=self._target)
        if not self._told:
            self._told = True
            # A server elsewhere has no memory to share; one on this host may be missing out on it.
            level = logging.WARNING if is_local(self._target) else logging.INFO
            log.log(level, "%s: no shared memory, so lookups go over gRPC: %s", self._target, why)

    def drop(self, channel: SharedChannel | None) -> None:
        """Attach anew next time."""
        if channel is not None:
            channel.close()
            if self._channel is channel:
                self._channel = None

    def close(self) -> None:
        """Detach, once rows in use are released."""
        self.drop(self._channel)


class _NoChannelError(Exception):
    """Why there is no shared memory."""


class SharedChannel:
    """A client attached to one server. Rows used in place keep it, whatever becomes of the server."""

    def __init__(
        self,
        options: SharedMemory,
        description: Description,
        target: str,
        server: Server,
        at_most_s: float,
    ) -> None:
        """Raises _NoChannelError."""
        self.server_id = description.server_id
        self.target = target
        self.spin_us = options.spin_us
        self.server = server
        self._native, self.lost = _attach(options, description, at_most_s)
        self._pins = {False: _pins(description, None, False), True: _pins(description, None, True)}
        self._description = description
        self._piece_bytes = min(_PIECE_BYTES, len(self._native.data) // 4)
        self.buffer: NDArray[np.uint8] = self._native.data
        """The whole data area, uint8[bytes]: what rows in place are part of."""

    def carries(self, expected: Expected) -> bool:
        """Whether the channel has what the query needs, as far as it can be told beforehand."""
        query = expected.query
        digests = (query.pin or {}).values()
        return (
            not query.unique
            and expected.keys <= self._description.limits.request_rows
            and all(len(digest) == _DIGEST_BYTES for digest in digests)
            # Else there is no one number of positions; gRPC says so.
            and not (
                isinstance(query.keys, BlockKeys)
                and any(len(ids) != expected.tokens for ids in query.keys.layers.values())
            )
        )

    def lookup(self, expected: Expected, timeout_s: float | None) -> Lookup:
        """Rows in memory of the caller's own.

        Raises what the server reports, UnavailableError when it has ended, DeadlineError, NoRoomError.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        payload = np.empty(expected.payload_bytes_max, dtype=np.uint8)
        mask = np.empty(expected.tokens, dtype=np.bool_) if _has_mask(expected) else None
        position_bytes = len(payload) // expected.tokens if expected.tokens else 0
        stats: list[tuple[int, ...]] = []
        ahead: deque[SharedLookup] = deque()
        try:
            for piece in self._pieces(expected, position_bytes):
                # Room is waited for with nothing in hand, lest two threads wait for each other's.
                while len(ahead) == _PIECES_AHEAD or not (started := self._start(piece, deadline, not ahead)):
                    if not ahead:
                        raise NoRoomError
                    stats.append(ahead.popleft().copy_out(payload, mask, position_bytes, deadline))
                ahead.append(started)
            while ahead:
                stats.append(ahead.popleft().copy_out(payload, mask, position_bytes, deadline))
        finally:
            # The traceback of an error keeps them for as long as its caller keeps the error.
            for piece_ahead in ahead:
                piece_ahead.release()
        return build_result(expected, payload, (), mask, _sum(stats))

    @property
    def alive(self) -> bool:
        """Whether the server has its end of the socket open."""
        return self._native.alive

    def start(self, expected: Expected, timeout_s: float | None) -> SharedLookup:
        """Begin a lookup whose rows stay where the server writes them.

        Raises NoRoomError, ValueError for an answer that no data area of this size holds, UnavailableError.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        started = self._start(_Piece(expected, 0, expected.query.keys), deadline, True)
        if started is None:
            raise NoRoomError
        return started

    def close(self) -> None:
        """Detach, once rows in use are released."""
        self._native.close()

    def _pieces(self, expected: Expected, position_bytes: int) -> Iterator[_Piece]:
        count = max(1, self._piece_bytes // position_bytes) if position_bytes else 1
        if expected.tokens <= count:
            yield _Piece(expected, 0, expected.query.keys)
            return
        # The lane follows from the size of the whole.
        lane = expected.query.lane
        if lane == "auto":
            lane = "decode" if expected.keys <= self._description.limits.decode_rows else "prefill"
        whole = replace(expected, query=replace(expected.query, lane=lane))
        look_back = self._description.model.max_ngram_size - 1
        for first in range(0, expected.tokens, count):
            part = min(count, expected.tokens - first)
            keys = _cut(expected.query.keys, first, part, look_back)
            yield _Piece(replace(whole, tokens=part), first, keys)

    def _start(self, piece: _Piece, deadline: float | None, wait: bool) -> SharedLookup | None:
        """None: there is no room."""
        expected, keys = piece.expected, piece.keys
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise DeadlineError("no answer in the time allowed", target=self.target)
        wait_s = (_ROOM_S if left_s is None else min(_ROOM_S, left_s)) if wait else 0.0
        query = expected.query
        tokens = isinstance(keys, TokenKeys)
        pins = _pins(self._description, query, tokens) if query.pin else self._pins[tokens]
        begin, end = query.columns or (0, 0)
        fields: dict[str, Any] = {
            "positions": expected.tokens,
            "pins": len(pins) // (4 + _DIGEST_BYTES),
            "column_begin": begin,
            "column_end": end,
            "format": _format(query),
            "lane": _LANES[query.lane],
            "timeout_ns": 0 if left_s is None else max(1, int(left_s * 1e9)),
            "payload_bytes": expected.payload_bytes_max,
        }
        match keys:
            case TokenKeys(sequences):
                names = query.layers or ()
                fields |= _token_fields(sequences)
                fields["mask_bytes"] = expected.tokens
            case BlockKeys(layers):
                names = tuple(layers)
                fields |= {"kind": _BLOCKS, "keys": _same_width(list(layers.values()))}
            case RowKeys(layer, ids):
                names = (layer,)
                fields |= {"kind": _ROWS, "keys": [np.ascontiguousarray(ids)]}
        if not tokens:
            fields["id_bytes"] = fields["keys"][0].itemsize
        fields["layers"] = len(names)
        fields["keys"] += [np.asarray(names, dtype="<u4"), pins]
        try:
            ticket = self._native.submit(wait_s=wait_s, **fields)
        except self.lost as error:
            raise UnavailableError(str(error), target=self.target) from error
        return None if ticket is None else SharedLookup(self, ticket, piece)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Some positions of a query."""

    expected: Expected
    """Of these positions alone."""
    first: int
    keys: TokenKeys | BlockKeys | RowKeys


class SharedLookup:
    """A lookup under way, and the part of the data area that its answer takes until it is released."""

    def __init__(self, channel: SharedChannel, ticket: _core.ShmTicket, piece: _Piece) -> None:
        self._channel = channel
        self._ticket = ticket
        self._piece = piece

    def wait(self, deadline: float | None) -> tuple[int, ...]:
        """Wait for the answer; its statistics. Raises what the server reports, DeadlineError, UnavailableError."""
        channel, expected = self._channel, self._piece.expected
        try:
            while not self._ticket.wait(_least(_left_s(deadline), channel.server.silence_s), channel.spin_us):
                if (left_s := _left_s(deadline)) == 0.0:
                    raise DeadlineError("no answer in the time allowed", target=channel.target)
                if (
                    not channel.server.lives(_least(left_s, channel.server.silence_s))
                    and _left_s(deadline) != 0.0
                ):
                    raise UnavailableError(
                        "the server hangs: it does not say that it lives", target=channel.target
                    )
        except channel.lost as error:
            raise UnavailableError(str(error), target=channel.target) from error
        status, message, payload_bytes, row_bytes, stats, retry_after_ms = self._ticket.answer
        if status != 0:
            raise from_number(status, message, channel.target, retry_after_ms)
        if payload_bytes != expected.payload_bytes_max or row_bytes != expected.row_bytes:
            raise ProtocolError(
                f"{payload_bytes} bytes in rows of {row_bytes} do not answer the request",
                target=channel.target,
            )
        return stats

    def answered(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ticket.wait(0.0)

    def copy_out(
        self,
        payload: NDArray[np.uint8],
        mask: NDArray[np.bool_] | None,
        position_bytes: int,
        deadline: float | None,
    ) -> tuple[int, ...]:
        """Wait, put the rows where they belong in the whole, and release; the statistics."""
        try:
            stats = self.wait(deadline)
            first, tokens = self._piece.first, self._piece.expected.tokens
            payload[first * position_bytes : (first + tokens) * position_bytes] = self._ticket.rows
            if mask is not None:
                mask[first : first + tokens] = self._ticket.mask.view(np.bool_)
        finally:
            self._ticket.release()
        return stats

    def in_place(self, deadline: float | None) -> Lookup:
        """Wait; arrays that share the data area, good until `release`."""
        expected = self._piece.expected
        stats = self.wait(deadline)
        mask = self._ticket.mask.view(np.bool_) if _has_mask(expected) else None
        return build_result(expected, self._ticket.rows, (), mask, _sum([stats]))

    def release(self) -> None:
        """Give the memory back; a lookup without an answer is cancelled."""
        self._ticket.release()


# --------------------------------------------------------------------------------------------------- requests


def _attach(
    options: SharedMemory, description: Description, at_most_s: float
) -> tuple[_core.ShmClient, type[Exception]]:
    """The client, and what its calls raise when the server has ended."""
    facts = description.shared_memory
    if facts is None:
        raise _NoChannelError("the server has none")
    if facts.version != _VERSION:
        raise _NoChannelError(f"the server's is of version {facts.version}, this client knows {_VERSION}")
    try:
        from engram_kernels import _core
    except ImportError as error:
        raise _NoChannelError(f"the native part of this package cannot be loaded: {error}") from error
    try:
        native = _core.ShmClient(facts.socket, options.data_bytes, at_most_s)
    except OSError as error:
        raise _NoChannelError(
            f"{error.args[-1]} (is the server on this host, and the path seen here?)"
        ) from error
    except (_core.ShmRefusedError, RuntimeError) as error:
        raise _NoChannelError(str(error)) from error
    if native.server_id.hex() != description.server_id:
        raise _NoChannelError(f"another server listens at {facts.socket}: this one is on another host")
    return native, _core.ShmLostError


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _least(left_s: float | None, at_most_s: float) -> float:
    return at_most_s if left_s is None else min(left_s, at_most_s)


def _format(query: Query) -> _core.Format:
    from engram_kernels import _core

    return _core.Format[query.format.upper().replace("-", "_")]


def _pins(description: Description, query: Query | None, tokens: bool) -> bytes:
    """(u32 of what, 32 bytes of digest) each: as the requests of gRPC pin them."""
    tables = {layer: table.digest for layer, table in description.tables.items()}
    tables |= (query.pin if query is not None else None) or {}
    if tokens and description.token_map_digest:
        tables |= {_PIN_TOKEN_MAP: description.token_map_digest, _PIN_HASH: description.hash_digest}
    return b"".join(struct.pack("<I32s", of, digest) for of, digest in tables.items())


def _has_mask(expected: Expected) -> bool:
    return isinstance(expected.query.keys, TokenKeys)


def _token_fields(sequences: tuple[tuple[NDArray[np.int32], NDArray[np.int32]], ...]) -> dict[str, Any]:
    counts = np.asarray(
        [[len(tokens) for tokens, _ in sequences], [len(history) for _, history in sequences]], dtype="<u4"
    )
    parts = [tokens for tokens, _ in sequences] + [history for _, history in sequences]
    return {
        "kind": _TOKENS,
        "keys": [*(np.ascontiguousarray(part, dtype="<i4") for part in parts), counts],
        "sequences": len(sequences),
        "history": int(counts[1].sum()),
    }


def _same_width(blocks: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Contiguous, and of one dtype: that of the widest."""
    dtype = "<i4" if all(block.itemsize == 4 for block in blocks) else "<i8"
    return [np.ascontiguousarray(block, dtype=dtype) for block in blocks]


def _cut(
    keys: TokenKeys | BlockKeys | RowKeys, first: int, count: int, look_back: int
) -> TokenKeys | BlockKeys | RowKeys:
    """The keys of positions first .. first + count - 1; tokens with the look-back that they have there."""
    match keys:
        case BlockKeys(layers):
            return BlockKeys({layer: ids[first : first + count] for layer, ids in layers.items()})
        case RowKeys(layer, ids):
            return RowKeys(layer, ids[first : first + count])
    parts, at = [], 0
    for tokens, history in keys.sequences:
        begin, end = max(first - at, 0), min(first + count - at, len(tokens))
        at += len(tokens)
        if begin < end:
            before = np.concatenate([history, tokens[:begin][-look_back:]])[-look_back:] if begin else history
            parts.append((tokens[begin:end], before))
    return TokenKeys(tuple(parts))


def _sum(stats: list[tuple[int, ...]]) -> Stats:
    """Of the pieces of one request; a request without positions has none."""
    return Stats(*(sum(column) for column in zip(*stats, strict=True)))
