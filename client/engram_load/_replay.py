"""Recorded lookups as jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engram_client import Description, Lane
from engram_client._proto import engram_pb2 as pb
from engram_client._query import BlockKeys, RowKeys, TokenKeys
from engram_load._errors import LoadError
from engram_load._patterns import Job, Request
from engram_server.trace import Trace

_LANES: dict[int, Lane] = {
    pb.LANE_UNSPECIFIED: "auto",
    pb.LANE_DECODE: "decode",
    pb.LANE_PREFILL: "prefill",
    pb.LANE_PREFETCH: "prefetch",
}


def replayed(trace: Trace) -> Iterator[Job]:
    """The lookups of a trace, in the order they were planned. Raises TraceError."""
    columns = trace.description.spec.columns
    first_ns: int | None = None
    for entry in trace.entries():
        first_ns = entry.ns if first_ns is None else first_ns
        yield Job(
            [request_of(entry.request, entry.lane, columns, trace.path)], max(0, entry.ns - first_ns) / 1e9
        )


def request_of(message: pb.LookupRequest, lane: int, model_columns: int, path: Path) -> Request:
    """A recorded lookup as a request. Raises LoadError for one that no server would have taken."""
    columns = (message.columns.begin, message.columns.end) if message.HasField("columns") else None
    common = {"lane": _LANES.get(lane, "auto"), "columns": columns, "unique": message.unique}
    try:
        match message.WhichOneof("keys"):
            case "tokens":
                sequences = tuple(
                    (np.frombuffer(part.tokens, dtype="<i4"), np.frombuffer(part.history, dtype="<i4"))
                    for part in message.tokens.sequences
                )
                return Request(TokenKeys(sequences), layers=tuple(message.layers) or None, **common)  # type: ignore[arg-type]
            case "blocks":
                blocks = {
                    part.layer: np.frombuffer(part.ids, dtype=_ids(part.id_bytes)).reshape(-1, model_columns)
                    for part in message.blocks.layers
                }
                return Request(BlockKeys(blocks), **common)  # type: ignore[arg-type]
            case "rows":
                ids = np.frombuffer(message.rows.ids, dtype=_ids(message.rows.id_bytes))
                return Request(RowKeys(message.rows.layer, ids), **common)  # type: ignore[arg-type]
    except ValueError as error:
        raise LoadError(f"{path}: a lookup in it is damaged: {error}") from error
    raise LoadError(f"{path}: a lookup in it names no rows")


def _ids(id_bytes: int) -> str:
    return "<i4" if id_bytes == 4 else "<i8"


def check_tables(recorded: Description, served: Description, path: Path) -> None:
    """Raise LoadError unless recorded lookups mean rows of the tables served; rows themselves may be other ones."""
    ours = {layer: table.rows for layer, table in served.tables.items()}
    for layer, table in recorded.tables.items():
        if ours.get(layer) != table.rows:
            raise LoadError(
                f"{path} was recorded from a table of layer {layer} with {table.rows:,} rows; here it has "
                f"{ours.get(layer, 0):,}: replay it where tables of the same size are served"
            )
