"""The exceptions of engram_client, and how gRPC statuses become them.

EngramError
├── UnavailableError      no server answers at any target (after the retries allowed)
├── OverloadedError       the server has no room for the request now (after the retries allowed)
├── DeadlineError         the time allowed ran out; also a TimeoutError
├── InvalidRequestError   the request is malformed, out of range or too large; also a ValueError
├── MismatchError         the server serves another table, token map or protocol version than relied on
├── DataLossError         a row could not be read: damaged or truncated table
├── AuthenticationError   the server wants a token, and the one it got, if any, is not one it knows
├── UnsupportedError      the server is too old for it, or set up without it (no row cache, say)
├── ProtocolError         a reply that contradicts the request or itself; none of it was used
└── ServerError           anything else the server failed with; `code` says what
"""

from __future__ import annotations

import grpc


class EngramError(Exception):
    """Anything that went wrong with a lookup. The text carries the facts; never a partial result."""

    def __init__(self, text: str, *, target: str | None = None, code: str | None = None) -> None:
        super().__init__(f"{target}: {text}" if target else text)
        self.target = target
        """The server it came from, if one was involved."""
        self.code = code
        """Name of the gRPC status, if there was one."""


class UnavailableError(EngramError):
    """No server answers at any target."""


class OverloadedError(EngramError):
    """The server has no room for the request now."""

    retry_after_s: float = 0.0
    """When it may have, as the server sees it; 0 = it does not say."""


class DeadlineError(EngramError, TimeoutError):
    """The time allowed for the request ran out."""


class InvalidRequestError(EngramError, ValueError):
    """The request is malformed, out of range or too large: the same request will fail again."""


class MismatchError(EngramError):
    """The server serves another table, token map or protocol version than the request relies on."""


class DataLossError(EngramError):
    """A row could not be read. Other rows may be fine."""


class AuthenticationError(EngramError):
    """The server does not let this client in: it brought no token, or one that does not count there."""


class UnsupportedError(EngramError):
    """The server does not offer this: an older version, or a part that is switched off."""


class ProtocolError(EngramError):
    """A reply that contradicts the request or itself."""


class ServerError(EngramError):
    """The server failed in a way that has no name here; see `code`."""


_BY_STATUS: dict[grpc.StatusCode, type[EngramError]] = {
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    # A call that this side did not cancel was by a server that shuts down.
    grpc.StatusCode.CANCELLED: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: MismatchError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
}
_WRITE_FAILED = "Internal error from Core"
"""What grpc.aio says, in place of the status, when a stream ends while it writes: github.com/grpc/grpc/issues/36066"""
_NOT_CONNECTED = "failed to connect"
_HUNG_UP = ("Socket closed", "FD Shutdown", "before receiving SETTINGS frame", "Handshake read failed")
"""How what gRPC says of a server that ends the handshake ends, by who noticed first; it has no more to say."""
_PUSHBACK = "grpc-retry-pushback-ms"
_BY_NUMBER: dict[int, grpc.StatusCode] = {status.value[0]: status for status in grpc.StatusCode}


def from_status(status: grpc.StatusCode, text: str, target: str, retry_after_ms: int = 0) -> EngramError:
    """The exception for a gRPC status."""
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        text = "no answer in the time allowed"
    error = _BY_STATUS.get(status, ServerError)(text or status.name, target=target, code=status.name)
    if isinstance(error, OverloadedError):
        error.retry_after_s = retry_after_ms / 1000
    return error


def from_number(number: int, text: str, target: str, retry_after_ms: int = 0) -> EngramError:
    """The exception for a status sent as a number, as in the `Error` of a stream."""
    return from_status(_BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN), text, target, retry_after_ms)


def from_rpc(error: grpc.RpcError, target: str) -> EngramError:
    """The exception for what a gRPC call raised."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    if isinstance(error, grpc.aio.AioRpcError) and error.details() == _WRITE_FAILED:
        return UnavailableError(
            "the connection broke while a request was sent", target=target, code="INTERNAL"
        )
    text = error.details() or ""
    if text.startswith(_NOT_CONNECTED) and text.endswith(_HUNG_UP):
        text += " (no handshake: does it want TLS, or a certificate of this client that it knows?)"
    return from_status(error.code(), text, target, _pushback_ms(error))


def _pushback_ms(error: grpc.Call | grpc.aio.AioRpcError) -> int:
    """What a server asks for with https://github.com/grpc/proposal/blob/master/A6-client-retries.md#pushback."""
    for key, value in error.trailing_metadata() or ():
        if key == _PUSHBACK and str(value).isdecimal():
            return int(value)
    return 0
