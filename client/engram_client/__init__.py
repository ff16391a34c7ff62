"""Client of engram-server: rows of the Engram tables as NumPy arrays or torch tensors.

    from engram_client import EngramClient

    with EngramClient("127.0.0.1:50051") as client:
        found = client.lookup([0, 3, 17])
        found.values   # uint16[3, 2, 24, 256]: tokens, layers, columns, bf16 bit patterns
        found.torch()  # the same as torch.bfloat16

`EngramClient` is for threads, `AsyncEngramClient` for asyncio, `EngramMemory` reads a checkpoint in this
process without a server. All have the same methods and raise the same exceptions, see `EngramError`.
"""

from typing import TYPE_CHECKING

from engram_client._aio import AsyncEngramClient
from engram_client._aio_stream import AsyncLookupStream
from engram_client._config import NO_RETRY, Limits, Retry, SharedMemory, Timeouts, Tls, Token
from engram_client._description import (
    CacheFacts,
    Description,
    FileFacts,
    MachineFacts,
    ModelFacts,
    ServerLimits,
    SharedMemoryFacts,
    TableFacts,
)
from engram_client._errors import (
    AuthenticationError,
    DataLossError,
    DeadlineError,
    EngramError,
    InvalidRequestError,
    MismatchError,
    OverloadedError,
    ProtocolError,
    ServerError,
    UnavailableError,
    UnsupportedError,
)
from engram_client._in_place import InPlaceLookups, RowsInPlace
from engram_client._result import Format, Lane, Lookup, Prefetched, Stats, to_torch
from engram_client._sync import EngramClient
from engram_client._sync_stream import LookupStream, PendingLookup

if TYPE_CHECKING:
    from engram_client._embedded import EngramMemory

__all__ = [
    "NO_RETRY",
    "AsyncEngramClient",
    "AsyncLookupStream",
    "AuthenticationError",
    "CacheFacts",
    "DataLossError",
    "DeadlineError",
    "Description",
    "EngramClient",
    "EngramError",
    "EngramMemory",
    "FileFacts",
    "Format",
    "InPlaceLookups",
    "InvalidRequestError",
    "Lane",
    "Limits",
    "Lookup",
    "LookupStream",
    "MachineFacts",
    "MismatchError",
    "ModelFacts",
    "OverloadedError",
    "PendingLookup",
    "Prefetched",
    "ProtocolError",
    "Retry",
    "RowsInPlace",
    "ServerError",
    "ServerLimits",
    "SharedMemory",
    "SharedMemoryFacts",
    "Stats",
    "TableFacts",
    "Timeouts",
    "Tls",
    "Token",
    "UnavailableError",
    "UnsupportedError",
    "to_torch",
]


def __getattr__(name: str) -> object:
    # EngramMemory brings the native core and the tokenizer library: only for those who use it.
    if name == "EngramMemory":
        from engram_client._embedded import EngramMemory

        return EngramMemory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
