"""Every limit of the service, with its default."""

from __future__ import annotations

from dataclasses import dataclass

from engram_kernels import _core
from engram_server.lookup import BLOCK_BYTES

MESSAGE_OVERHEAD_BYTES = 1 << 20
"""Room in a message for all that is not payload or mask."""


@dataclass(frozen=True)
class Limits:
    """What one server accepts, holds and sends. `Describe` advertises what a client can run into."""

    message_bytes: int = 64 << 20
    """Largest message in either direction."""
    unary_reply_bytes: int = 8 << 20
    """Largest payload of a unary reply, held whole in memory; larger answers are streamed."""
    chunk_bytes: int = 1 << 20
    """Payload of one message of a stream; about 1 MiB is the fastest for gRPC in Python."""
    request_rows: int = 65_536 * 48 * 2
    """Rows one request may ask for: 131,072 tokens of both layers."""
    pending_rows: int = 16 * 65_536 * 48
    """Rows that all requests being worked on may ask for together, over gRPC and through shared memory; each holds 8
    bytes of row id. The last eighth is for the decode lane alone."""
    queue_s: float = 1.0
    """How long a new request may have to wait for others, as estimated from what these have still to read and how fast
    rows were read of late; one that would wait longer, or past its own deadline, is refused at once. A forward that
    waits a second for rows has failed its user already, and what was let in is read a second after a rush has ended."""
    client_rows: int | None = None
    """Of pending_rows, those that one client may have, beside its first request; None: all."""
    client_rows_per_s: float | None = None
    """Rows that one client may ask for; after a pause it may use up to a second of them at once. None: any number."""
    decode_rows: int = 128 * 48
    """A request of at most so many rows that names no lane goes to the decode lane: 128 tokens of both layers."""
    prefetch_rows: int = 4 * 65_536 * 48
    """Rows that Prefetch may have queued, all clients together; ids alone, 8 bytes a row."""
    prefetches: int = 256
    """Prefetches queued, all clients together."""
    block_bytes: int = BLOCK_BYTES
    """Packed rows of a request that are fetched as one batch."""
    stream_requests: int = 4
    """Requests of one stream that are worked on ahead of its replies."""
    concurrent_rpcs: int = 1_024
    """Calls worked on at once, all clients together; a long-lived stream counts as one."""
    budget_wait_s: float = 30.0
    """How long a request that has begun waits for room in the engine's budget."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}: a limit must be positive")
        if self.unary_reply_bytes + MESSAGE_OVERHEAD_BYTES > self.message_bytes:
            raise ValueError(
                f"unary_reply_bytes ({self.unary_reply_bytes}) does not fit message_bytes "
                f"({self.message_bytes}) with {MESSAGE_OVERHEAD_BYTES} to spare for what is not payload"
            )
        if self.chunk_bytes > self.unary_reply_bytes:
            raise ValueError(
                f"chunk_bytes ({self.chunk_bytes}) is over unary_reply_bytes ({self.unary_reply_bytes})"
            )
        if self.pending_rows - self.decode_reserve_rows < self.request_rows:
            raise ValueError(
                f"pending_rows ({self.pending_rows}), an eighth of which is for the decode lane, leaves less "
                f"than request_rows ({self.request_rows})"
            )
        if self.prefetch_rows < self.request_rows:
            raise ValueError(
                f"prefetch_rows ({self.prefetch_rows}) is under request_rows ({self.request_rows})"
            )

    @property
    def admission(self) -> _core.AdmissionLimits:
        """What requests are let in by, over gRPC and through shared memory."""
        return _core.AdmissionLimits(
            rows=self.pending_rows,
            queue_s=self.queue_s,
            client_rows=self.client_rows or 0,
            client_rows_per_s=self.client_rows_per_s or 0.0,
        )

    @property
    def decode_reserve_rows(self) -> int:
        """Of pending_rows, what no bulk request may take."""
        return self.pending_rows // 8
