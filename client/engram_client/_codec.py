"""Between queries and the wire: requests out, replies in, every byte of them accounted for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_client._config import Limits
from engram_client._description import PROTOCOL_VERSION, Description, table_pins
from engram_client._errors import InvalidRequestError, ProtocolError, from_number
from engram_client._payload import Chunk, Reply
from engram_client._proto import engram_pb2 as pb
from engram_client._query import BlockKeys, Query, RowKeys, TokenKeys
from engram_client._result import Lookup, Prefetched, Stats, view_rows

_FORMATS = {
    "packed": pb.FORMAT_PACKED,
    "packed-fp8": pb.FORMAT_PACKED_FP8,
    "bf16": pb.FORMAT_BF16,
    "fp32": pb.FORMAT_FP32,
}
_LANES = {
    "auto": pb.LANE_UNSPECIFIED,
    "decode": pb.LANE_DECODE,
    "prefill": pb.LANE_PREFILL,
    "prefetch": pb.LANE_PREFETCH,
}
_TIMEOUT_MS_MAX = 2**32 - 1
_ROW_BYTES = {"packed-fp8": 264, "bf16": 512, "fp32": 1024}
_INDEX_BYTES = 4
_UNARY_BYTES = 4 << 20
"""gRPC in Python moves messages of 1 MiB at twice the speed of 16 MiB ones."""
_MESSAGE_OVERHEAD_BYTES = 1 << 20
"""Room for what is not payload in a unary reply."""


@dataclass(frozen=True, eq=False)
class Expected:
    """What the answer to a query must look like, as far as it is known beforehand."""

    query: Query
    tokens: int
    layers: tuple[int, ...]
    columns: tuple[int, int]
    row_bytes: int

    @property
    def keys(self) -> int:
        """T * L * C."""
        return self.tokens * len(self.layers) * (self.columns[1] - self.columns[0])

    @property
    def payload_bytes_max(self) -> int:
        """Exact, unless the query is unique."""
        return self.keys * (self.row_bytes + (_INDEX_BYTES if self.query.unique else 0))


def expect(query: Query, description: Description, limits: Limits) -> Expected:
    """What to expect from the server described. Raises InvalidRequestError for what it would refuse."""
    keys = query.keys
    match keys:
        case TokenKeys():
            tokens = sum(len(ids) for ids, _ in keys.sequences)
            layers = query.layers if query.layers is not None else tuple(description.tables)
        case BlockKeys():
            tokens = len(next(iter(keys.layers.values()), ()))
            layers = tuple(keys.layers)
            _check_blocks(keys, description.model.columns)
        case RowKeys():
            tokens = len(keys.ids)
            layers = (keys.layer,)
    columns = query.columns or (0, 1 if isinstance(keys, RowKeys) else description.model.columns)
    expected = Expected(query, tokens, layers, columns, _row_bytes(query, layers, description))
    if expected.payload_bytes_max > limits.result_bytes:
        raise InvalidRequestError(
            f"the result could have {expected.payload_bytes_max} bytes, over Limits.result_bytes "
            f"({limits.result_bytes}): split the request"
        )
    return expected


def _check_blocks(keys: BlockKeys, columns: int) -> None:
    for layer, ids in keys.layers.items():
        if ids.shape[1] != columns:
            raise InvalidRequestError(
                f"row ids of layer {layer} have shape {list(ids.shape)}; a block has {columns} columns"
            )


def _row_bytes(query: Query, layers: tuple[int, ...], description: Description) -> int:
    if not layers:
        raise InvalidRequestError("the request names no layer")
    for layer in layers:
        if layer not in description.tables:
            served = ", ".join(str(known) for known in description.tables)
            raise InvalidRequestError(f"layer {layer} has no table here; the layers served are {served}")
    return _ROW_BYTES.get(query.format) or description.tables[layers[0]].row_bytes


def must_stream(expected: Expected, description: Description, limits: Limits) -> bool:
    """Whether the reply may be too large for one message, or large enough to be faster in chunks."""
    one_message = min(
        _UNARY_BYTES,
        description.limits.unary_reply_bytes,
        limits.message_bytes - _MESSAGE_OVERHEAD_BYTES,
    )
    return expected.payload_bytes_max > one_message


# ------------------------------------------------------------------------------------------------ requests


def request_message(
    query: Query,
    request_id: int,
    description: Description,
    limits: Limits,
    timeout_s: float | None = None,
) -> pb.LookupRequest:
    """The query as a message. It pins the digests of `description`, so that another table never answers.

    timeout_s: when the server may give up, for requests whose call has no deadline.
    Raises InvalidRequestError when it is larger than a message may be.
    """
    message = pb.LookupRequest(
        request_id=request_id,
        layers=query.layers if isinstance(query.keys, TokenKeys) and query.layers else (),
        columns=pb.ColumnRange(begin=query.columns[0], end=query.columns[1]) if query.columns else None,
        format=_FORMATS[query.format],
        unique=query.unique,
        pins=_pins(query, description),
        protocol_version=PROTOCOL_VERSION,
        lane=_LANES[query.lane],
        timeout_ms=_timeout_ms(timeout_s),
    )
    match query.keys:
        case TokenKeys(sequences):
            message.tokens.SetInParent()
            for tokens, history in sequences:
                message.tokens.sequences.add(tokens=tokens.tobytes(), history=history.tobytes())
        case BlockKeys(layers):
            message.blocks.SetInParent()
            for layer, ids in layers.items():
                message.blocks.layers.add(layer=layer, ids=ids.tobytes(), id_bytes=ids.itemsize)
        case RowKeys(layer, ids):
            message.rows.layer, message.rows.ids, message.rows.id_bytes = layer, ids.tobytes(), ids.itemsize
    largest = min(limits.message_bytes, description.limits.message_bytes)
    if message.ByteSize() > largest:
        raise InvalidRequestError(
            f"the request has {message.ByteSize()} bytes, over the {largest} a message may have: split it"
        )
    return message


def _timeout_ms(timeout_s: float | None) -> int:
    """0 = none, which is near enough for what the field's 32 bits cannot hold: 49 days."""
    if timeout_s is None or timeout_s * 1000 > _TIMEOUT_MS_MAX:
        return 0
    return max(1, math.ceil(timeout_s * 1000))


def _pins(query: Query, description: Description) -> pb.Pins:
    if query.pin:
        digests = {layer: table.digest for layer, table in description.tables.items()} | dict(query.pin)
        pins = pb.Pins(tables=table_pins(digests))
    else:
        pins = pb.Pins(tables=description.pins)
    if isinstance(query.keys, TokenKeys):
        pins.token_map, pins.hash = description.token_map_digest, description.hash_digest
    return pins


# ------------------------------------------------------------------------------------------------- replies


class Assembler:
    """Puts one reply together: every byte straight to its place, nothing believed unchecked."""

    def __init__(self, expected: Expected, request_id: int, target: str) -> None:
        self._expected = expected
        self._request_id = request_id
        self._target = target
        self._shape: pb.ReplyShape | None = None
        self._payload = np.empty(0, dtype=np.uint8)
        self._filled = 0
        self._mask = b""

    def add(self, spliced: Chunk) -> Lookup | None:
        """Take the next chunk of a stream; the finished result with the last one.

        Raises what the server reports for this request, or ProtocolError.
        """
        chunk = spliced.message
        self._check_id(chunk.request_id)
        if chunk.HasField("error"):
            raise from_number(chunk.error.code, chunk.error.message, self._target, chunk.error.retry_after_ms)
        if (self._shape is None) != chunk.HasField("shape"):
            raise self._wrong("the shape of a reply belongs in its first chunk, and there alone")
        if self._shape is None:
            self._begin(chunk.shape, chunk.mask)
        self._fill(spliced.payload)
        return self._end(chunk.stats) if chunk.last else None

    def whole(self, spliced: Reply) -> Lookup:
        """Take a unary reply, which is all of it."""
        reply = spliced.message
        self._check_id(reply.request_id)
        self._begin(reply.shape, reply.mask)
        self._fill(spliced.payload)
        return self._end(reply.stats)

    def _check_id(self, request_id: int) -> None:
        if request_id != self._request_id:
            raise self._wrong(
                f"a reply to request {request_id} came, but that to {self._request_id} was next"
            )

    def _fill(self, payload: bytes | memoryview) -> None:
        end = self._filled + len(payload)
        if end > len(self._payload):
            raise self._wrong(f"{end} bytes of payload came, but {len(self._payload)} were announced")
        self._payload[self._filled : end] = np.frombuffer(payload, dtype=np.uint8)
        self._filled = end

    def _begin(self, shape: pb.ReplyShape, mask: bytes) -> None:
        expected, query = self._expected, self._expected.query
        unique = tuple(shape.unique_rows)
        sound = (
            shape.tokens == expected.tokens
            and tuple(shape.layers) == expected.layers
            and shape.columns == expected.columns[1] - expected.columns[0]
            and shape.row_bytes == expected.row_bytes
            and shape.format == _FORMATS[query.format]
            and len(unique) == (len(expected.layers) if query.unique else 0)
            and all(rows <= expected.tokens * shape.columns for rows in unique)
        )
        if query.unique:
            payload_bytes = sum(unique) * expected.row_bytes + expected.keys * _INDEX_BYTES
        else:
            payload_bytes = expected.payload_bytes_max
        if not sound or shape.payload_bytes != payload_bytes:
            described = " ".join(str(shape).split())
            raise self._wrong(f"the reply's shape does not answer the request: {described}")
        if len(mask) != (expected.tokens if isinstance(query.keys, TokenKeys) else 0):
            raise self._wrong(f"a mask of {len(mask)} positions came for {expected.tokens} tokens")
        self._shape = shape
        self._mask = mask
        self._payload = np.empty(payload_bytes, dtype=np.uint8)

    def _end(self, stats: pb.LookupStats) -> Lookup:
        if self._filled != len(self._payload):
            raise self._wrong(
                f"the reply ended after {self._filled} of {len(self._payload)} bytes of payload"
            )
        assert self._shape is not None
        mask = None
        if isinstance(self._expected.query.keys, TokenKeys):
            mask = np.frombuffer(self._mask, dtype=np.uint8).astype(np.bool_)
        try:
            return build_result(
                self._expected,
                self._payload,
                tuple(self._shape.unique_rows),
                mask,
                stats_from(stats),
            )
        except ValueError as error:
            raise self._wrong(str(error)) from error

    def _wrong(self, text: str) -> ProtocolError:
        return ProtocolError(text, target=self._target)


def stats_from(stats: pb.LookupStats) -> Stats:
    """As plain data."""
    return Stats(
        rows=stats.rows,
        distinct=stats.distinct,
        cached=stats.cached,
        joined=stats.joined,
        reads=stats.reads,
        read_bytes=stats.read_bytes,
        groups=stats.groups,
    )


def prefetched_from(reply: pb.PrefetchReply) -> Prefetched:
    """As plain data."""
    return Prefetched(reply.rows, reply.groups, reply.queued_rows)


def build_result(
    expected: Expected,
    payload: NDArray[np.uint8],
    unique_rows: tuple[int, ...],
    mask: NDArray[np.bool_] | None,
    stats: Stats,
) -> Lookup:
    """A payload laid out as engram.proto says, as arrays that share its memory.

    Raises ValueError when an inverse points outside its rows.
    """
    query, layers = expected.query, expected.layers
    flat = isinstance(query.keys, RowKeys)
    width = expected.columns[1] - expected.columns[0]
    grid: tuple[int, ...] = (expected.tokens,) if flat else (expected.tokens, width)
    rows: NDArray[Any] | None = None
    unique: dict[int, NDArray[Any]] | None = None
    inverse: dict[int, NDArray[np.int32]] | None = None
    if query.unique:
        ends = np.cumsum([0, *(count * expected.row_bytes for count in unique_rows)])
        unique = {
            layer: view_rows(payload[ends[i] : ends[i + 1]], query.format, expected.row_bytes)
            for i, layer in enumerate(layers)
        }
        index = payload[ends[-1] :].view("<i4").reshape(len(layers), *grid)
        inverse = dict(zip(layers, index, strict=True))
        for layer in layers:
            if index.size and not -1 <= inverse[layer].min() <= inverse[layer].max() < len(unique[layer]):
                raise ValueError(f"the inverse of layer {layer} points outside its {len(unique[layer])} rows")
    else:
        rows = view_rows(payload, query.format, expected.row_bytes)
        rows = rows if flat else rows.reshape(expected.tokens, len(layers), width, rows.shape[1])
    return Lookup(
        layers=layers,
        columns=expected.columns,
        format=query.format,
        mask=mask,
        stats=stats,
        unique=unique,
        inverse=inverse,
        _rows=rows,
    )
