"""What a client is told once: how long to wait, how often to try, how much to hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Timeouts:
    """How long to wait, in seconds; None waits for ever."""

    connect_s: float = 5.0
    """For a target to accept a connection and describe itself, before the next target is tried."""
    request_s: float | None = 120.0
    """For one lookup, retries included; `timeout=` of a call overrides it."""
    keepalive_s: float = 20.0
    """A server that is silent for so long while lookups wait is asked whether it lives, and has as long again
    to say so; else it counts as unavailable."""


@dataclass(frozen=True)
class Retry:
    """When a lookup is tried again: only when a server was unavailable, or overloaded.

    Lookups change nothing, so trying again is always safe.
    """

    attempts: int = 4
    """Rounds over the targets before an unavailable server is given up; tries of an overloaded one."""
    backoff_s: float = 0.05
    """Before the second round; doubles each time, and varies by ±50 % lest clients march in step."""
    backoff_max_s: float = 1.0
    """The longest wait between two rounds, whatever an overloaded server asks for."""
    wait_for_server_s: float = 5.0
    """How long to go on trying, whatever `attempts` says, when no target answers: a restart takes seconds."""
    wait_for_room_s: float = 30.0
    """The same, when an overloaded server says when to come back."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; at least one is needed")
        if min(self.backoff_s, self.backoff_max_s, self.wait_for_server_s, self.wait_for_room_s) < 0:
            raise ValueError("a wait cannot be negative")


@dataclass(frozen=True)
class Limits:
    """What a client accepts and holds."""

    message_bytes: int = 64 << 20
    """Largest message in either direction; the server's own limit counts too."""
    result_bytes: int = 8 << 30
    """Largest result that is asked for. 65,536 tokens in float32 are 3.2 GB."""
    stream_requests: int = 16
    """Requests of one `stream()` that wait for their reply; one more waits to be sent."""


NO_RETRY = Retry(attempts=1, wait_for_server_s=0.0, wait_for_room_s=0.0)
"""Fail at the first error, after every target was tried."""


@dataclass(frozen=True)
class SharedMemory:
    """How a client uses the shared memory of a server on its own host."""

    use: Literal["auto", "off", "require"] = "auto"
    """auto: where a server offers it and it can be had, and gRPC else. require: lookups fail without it."""
    data_bytes: int = 64 << 20
    """Room for answers under way, and for rows that are used in place; the server may grant less. It counts as memory
    of the server."""
    spin_us: int = 0
    """How long a lookup looks for its answer before it sleeps: latency for CPU time."""

    def __post_init__(self) -> None:
        if self.use not in ("auto", "off", "require"):
            raise ValueError(f"shared memory is {self.use!r}; expected auto, off or require")
        if self.data_bytes <= 0 or self.spin_us < 0:
            raise ValueError("shared memory needs room, and cannot spin for a negative time")


@dataclass(frozen=True)
class Tls:
    """TLS for targets over TCP; files in PEM, read when a connection is set up for the first time."""

    ca: Path | None = None
    """CAs of servers to trust; None: those that gRPC brings."""
    cert: Path | None = None
    """Certificate of this client, for a server that asks for one."""
    key: Path | None = None
    """Its private key."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("a client's certificate needs its key, and a key its certificate: give both")


@dataclass(frozen=True)
class Token:
    """What tells a server who calls. Sent to targets over TCP alone: who may open a UNIX socket needs none."""

    text: str | None = field(default=None, repr=False)
    """The token itself."""
    file: Path | None = None
    """Or a file that holds nothing else; it is read again after it was replaced."""
    plaintext: bool = False
    """Send it without TLS to another host as well, readable for whoever listens in between."""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.file is None):
            raise ValueError("a token is given as its text or as a file: one of the two")
