"""Between the messages of engram.proto and the server's own types: nothing here reads a row or waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

import engram_server
from engram_client._proto import engram_pb2 as pb
from engram_kernels import _core
from engram_server import lookup
from engram_server.limits import Limits
from engram_server.lookup import InvalidRequestError, MismatchError, Plan, Request
from engram_server.memory import Memory
from engram_server.terms import Terms, lane_by_size

PROTOCOL_VERSION = 1

FORMAT_NUMBERS: dict[_core.Format, pb.Format] = {
    _core.Format.PACKED: pb.FORMAT_PACKED,
    _core.Format.PACKED_FP8: pb.FORMAT_PACKED_FP8,
    _core.Format.BF16: pb.FORMAT_BF16,
    _core.Format.FP32: pb.FORMAT_FP32,
}
_FORMATS: dict[int, _core.Format] = {
    pb.FORMAT_UNSPECIFIED: _core.Format.PACKED,
    **{number: format for format, number in FORMAT_NUMBERS.items()},
}
_LANES = {
    pb.LANE_DECODE: _core.Lane.DECODE,
    pb.LANE_PREFILL: _core.Lane.PREFILL,
    pb.LANE_PREFETCH: _core.Lane.PREFETCH,
}
_PINS_MAX = 1_024
"""Tables a request may pin: more than any model has, few enough to look at between two other requests."""
_SCALES = {"memory": pb.SCALE_PLACEMENT_MEMORY, "disk": pb.SCALE_PLACEMENT_DISK}
_ROW_KINDS = {_core.RowKind.FP4: pb.ROW_KIND_FP4, _core.RowKind.FP8: pb.ROW_KIND_FP8}


# ------------------------------------------------------------------------------------------------ requests


@dataclass(frozen=True)
class Malformed:
    """What came instead of a LookupRequest."""

    reason: str
    request_id: int = 0
    """Of a request that cannot be read; nobody chose it."""


Received: TypeAlias = pb.LookupRequest | Malformed


def parse_request(data: bytes) -> Received:
    """For gRPC, which answers a deserialiser's exception with UNKNOWN and a traceback in the log."""
    try:
        return pb.LookupRequest.FromString(data)
    except DecodeError as error:
        return Malformed(f"the message of {len(data)} bytes is not a LookupRequest: {error}")


def well_formed(received: Received) -> pb.LookupRequest:
    """The request. Raises InvalidRequestError when something else came."""
    if isinstance(received, Malformed):
        raise InvalidRequestError(received.reason)
    return received


def rows_of(message: pb.LookupRequest, memory: Memory, at_most: int) -> int:
    """Rows a request asks for by the size of its keys (see Limits.request_rows), before any work is done.

    A sequence counts as one token at least: empty ones take time, too. What has more than `at_most` may be
    counted short of its end, since looking at each of millions of parts is what must not happen.
    """
    match message.WhichOneof("keys"):
        case "tokens":
            token_rows = len(memory.spec.layers) * memory.spec.columns
            sequences = message.tokens.sequences
            if len(sequences) * token_rows > at_most:
                return len(sequences) * token_rows
            return sum(max(1, len(sequence.tokens) // 4) for sequence in sequences) * token_rows
        case "blocks":
            blocks = message.blocks.layers
            if len(blocks) > len(memory.tables):
                raise InvalidRequestError(
                    f"the request has {len(blocks)} blocks of row ids for {len(memory.tables)} layers: give "
                    "each layer one"
                )
            return sum(len(block.ids) // max(4, block.id_bytes) for block in blocks)
        case "rows":
            return len(message.rows.ids) // max(4, message.rows.id_bytes)
    raise InvalidRequestError("the request names no rows: set tokens, blocks or rows")


def terms_of(
    message: pb.LookupRequest, rows: int, decode_rows: int, call_left_s: float | None = None
) -> Terms:
    """The terms of a request read now, of so many rows. Raises InvalidRequestError for a lane that is none."""
    if message.lane != pb.LANE_UNSPECIFIED and message.lane not in _LANES:
        raise InvalidRequestError(f"lane {message.lane} is not one of {pb.Lane.keys()[1:]}")
    lane = _LANES[message.lane] if message.lane in _LANES else lane_by_size(rows, decode_rows)
    limits_s = [] if call_left_s is None else [call_left_s]
    if message.timeout_ms:
        limits_s.append(message.timeout_ms / 1000)
    return Terms(lane, time.monotonic() + min(limits_s) if limits_s else None)


def request_from(message: pb.LookupRequest, memory: Memory) -> Request:
    """Check and hash one request. Takes time in proportion to `rows_of`; safe in any thread.

    Raises InvalidRequestError and MismatchError.
    """
    if message.protocol_version not in (0, PROTOCOL_VERSION):
        raise MismatchError(
            f"the client speaks version {message.protocol_version} of engram.proto; this server "
            f"(engram-server {engram_server.__version__}) speaks version {PROTOCOL_VERSION}"
        )
    if message.HasField("pins"):
        if len(message.pins.tables) > _PINS_MAX:
            raise InvalidRequestError(
                f"the request pins {len(message.pins.tables)} tables, over the limit of {_PINS_MAX}"
            )
        tables = {pin.layer: pin.digest for pin in message.pins.tables}
        lookup.check_pins(memory, tables, message.pins.token_map, message.pins.hash)
    if message.format not in _FORMATS:
        raise InvalidRequestError(f"format {message.format} is not one of {pb.Format.keys()[1:]}")
    format = _FORMATS[message.format]
    columns = (message.columns.begin, message.columns.end) if message.HasField("columns") else None
    keys = message.WhichOneof("keys")
    if keys != "tokens" and message.layers:
        raise InvalidRequestError(f"`layers` goes with `tokens`; `{keys}` names its layers itself")
    if keys == "tokens":
        sequences = [
            (
                _int32(sequence.tokens, f"sequence {index}, tokens"),
                _int32(sequence.history, f"sequence {index}, history"),
            )
            for index, sequence in enumerate(message.tokens.sequences)
        ]
        return lookup.from_tokens(
            memory, sequences, layers=message.layers, columns=columns, format=format, unique=message.unique
        )
    if keys == "blocks":
        blocks = [
            (block.layer, _block(block.ids, block.id_bytes, block.layer, memory.spec.columns))
            for block in message.blocks.layers
        ]
        return lookup.from_blocks(memory, blocks, columns=columns, format=format, unique=message.unique)
    if columns is not None:
        raise InvalidRequestError("`columns` goes with `tokens` and `blocks`; a list of rows has no columns")
    ids = _ids(message.rows.ids, message.rows.id_bytes, f"layer {message.rows.layer}")
    return lookup.from_rows(memory, message.rows.layer, ids, format=format, unique=message.unique)


def _int32(data: bytes, where: str) -> NDArray[np.int32]:
    if len(data) % 4:
        raise InvalidRequestError(f"{where}: {len(data)} bytes are not a whole number of int32")
    return np.frombuffer(data, dtype="<i4")


def _ids(data: bytes, id_bytes: int, where: str) -> NDArray[np.int32] | NDArray[np.int64]:
    if id_bytes not in (4, 8):
        raise InvalidRequestError(f"{where}: id_bytes is {id_bytes}; expected 4 (int32) or 8 (int64)")
    if len(data) % id_bytes:
        raise InvalidRequestError(f"{where}: {len(data)} bytes are not a whole number of {id_bytes}-byte ids")
    return np.frombuffer(data, dtype="<i4" if id_bytes == 4 else "<i8")


def _block(data: bytes, id_bytes: int, layer: int, columns: int) -> NDArray[np.int32] | NDArray[np.int64]:
    ids = _ids(data, id_bytes, f"layer {layer}")
    if len(ids) % columns:
        raise InvalidRequestError(
            f"layer {layer}: {len(ids)} row ids are not a whole number of blocks of {columns} "
            "(every column of every position)"
        )
    return ids.reshape(-1, columns)


# ------------------------------------------------------------------------------------------------- replies


def shape_message(plan: Plan) -> pb.ReplyShape:
    """What the payload of an answer holds."""
    shape = plan.shape
    return pb.ReplyShape(
        tokens=shape.tokens,
        layers=shape.layers,
        columns=shape.columns,
        row_bytes=shape.row_bytes,
        format=FORMAT_NUMBERS[shape.format],
        unique_rows=shape.unique_rows,
        payload_bytes=shape.payload_bytes,
    )


def mask_bytes(request: Request) -> bytes:
    """uint8[T], 1 = image position; empty for row ids."""
    return b"" if request.mask is None else request.mask.tobytes()


def inverse_bytes(plan: Plan) -> Iterator[bytes]:
    """The inverse of each layer, int32[T, C] little-endian."""
    for inverse in plan.inverse:
        yield inverse.astype("<i4", copy=False).tobytes()


def stats_message(plan: Plan, totals: lookup.BatchStats) -> pb.LookupStats:
    """`totals` sums Batch.stats over the batches of one request.

    `rows` counts the keys of the request, also where only its distinct rows were submitted.
    """
    _, distinct, cached, joined, reads, read_bytes, groups = totals
    return pb.LookupStats(
        rows=plan.request.rows,
        distinct=sum(plan.shape.unique_rows) if plan.request.unique else distinct,
        cached=cached,
        joined=joined,
        reads=reads,
        read_bytes=read_bytes,
        groups=groups,
    )


# ------------------------------------------------------------------------------------------------ Describe


def describe(
    memory: Memory, limits: Limits, server_id: str, shared_memory: pb.SharedMemoryInfo | None = None
) -> pb.DescribeReply:
    """What is served, as of now."""
    spec = memory.spec
    token_map = memory.token_map
    return pb.DescribeReply(
        protocol_version=PROTOCOL_VERSION,
        server_version=engram_server.__version__,
        server_id=server_id,
        spec=pb.ModelSpec(
            model_type=spec.model_type,
            layers=spec.layers,
            max_ngram_size=spec.max_ngram_size,
            heads=spec.heads,
            columns=spec.columns,
            head_dim=spec.head_dim,
            engram_vocab_size=spec.engram_vocab_size,
            token_vocab_size=len(token_map.ids) if token_map else 0,
            compressed_vocab_size=spec.compressed_vocab_size,
            pad_token_id=spec.pad_token_id,
            image_token_id=spec.image_token_id,
        ),
        digests=pb.Digests(token_map=token_map.sha256 if token_map else b"", hash=memory.hash_digest),
        tables=[_table(memory, layer) for layer in memory.tables],
        formats=list(FORMAT_NUMBERS.values()),
        limits=pb.Limits(
            message_bytes=limits.message_bytes,
            unary_reply_bytes=limits.unary_reply_bytes,
            chunk_bytes=limits.chunk_bytes,
            request_rows=limits.request_rows,
            stream_requests=limits.stream_requests,
            concurrent_rpcs=limits.concurrent_rpcs,
            decode_rows=limits.decode_rows,
            prefetch_rows=limits.prefetch_rows,
            pending_rows=limits.pending_rows,
            queue_seconds=limits.queue_s,
            client_rows=limits.client_rows or 0,
            client_rows_per_s=limits.client_rows_per_s or 0.0,
        ),
        backend=pb.BackendInfo(
            name=memory.reader.backend, reason=memory.reader.reason, fallback=memory.reader.fallback
        ),
        scales_reason=memory.scale_decision.reason,
        cache=pb.CacheInfo(**vars(memory.cache_state())),
        shared_memory=shared_memory,
        machine=memory.machine,
    )


def _table(memory: Memory, layer: int) -> pb.TableInfo:
    table = memory.tables[layer]
    loaded, _, error = memory.engine.scale_progress(layer)
    return pb.TableInfo(
        layer=layer,
        rows=table.rows,
        kind=_ROW_KINDS[table.kind],
        row_bytes=table.row_bytes,
        digest=table.digest,
        scales=_SCALES[memory.scale_decision.mode],
        scale_rows_loaded=loaded,
        scales_error=error,
    )
