"""Which gRPC status an error becomes, for unary calls and for the `Error` of a stream alike."""

from __future__ import annotations

import logging
import math

import grpc

from engram_kernels import _core
from engram_server.lookup import InvalidRequestError, MismatchError
from engram_server.tables.errors import TableChangedError
from engram_server.terms import DeadlinePassedError, UnsupportedError

log = logging.getLogger("engram_server")

_TEXT_CHARS = 1_000
"""gRPC sends the text in a header, and refuses headers of a few kilobytes."""


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The status that tells a caller what to do, and the facts in words.

    INVALID_ARGUMENT     change the request
    FAILED_PRECONDITION  this is not the server the request is for
    DATA_LOSS            a row cannot be read; other rows can
    RESOURCE_EXHAUSTED   come back a little later
    DEADLINE_EXCEEDED    the time the caller allowed is over
    UNIMPLEMENTED        this server is set up without it
    INTERNAL             a fault of ours, logged with its traceback
    """
    code, text = _code_and_text(error)
    return code, text[:_TEXT_CHARS]


def retry_after_ms(error: Exception) -> int:
    """Milliseconds until the same request may be let in, 0 = nobody knows."""
    return (
        math.ceil(1000 * getattr(error, "retry_after_s", 0.0))
        if isinstance(error, _core.OverloadedError)
        else 0
    )


def trailers_of(error: Exception) -> tuple[tuple[str, str], ...]:
    """The same as gRPC has it: https://github.com/grpc/proposal/blob/master/A6-client-retries.md#pushback."""
    after_ms = retry_after_ms(error)
    return (("grpc-retry-pushback-ms", str(after_ms)),) if after_ms else ()


def _code_and_text(error: Exception) -> tuple[grpc.StatusCode, str]:
    match error:
        case InvalidRequestError():
            return grpc.StatusCode.INVALID_ARGUMENT, str(error)
        case MismatchError():
            return grpc.StatusCode.FAILED_PRECONDITION, str(error)
        case _core.RowError() | TableChangedError():
            log.error("lookup failed: %s", error)
            return grpc.StatusCode.DATA_LOSS, str(error)
        case _core.OverloadedError():
            return grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        case UnsupportedError():
            return grpc.StatusCode.UNIMPLEMENTED, str(error)
        case DeadlinePassedError():
            return grpc.StatusCode.DEADLINE_EXCEEDED, str(error)
    log.error("lookup failed by a fault of the server", exc_info=error)
    return grpc.StatusCode.INTERNAL, f"a fault of the server, see its log: {type(error).__name__}: {error}"
