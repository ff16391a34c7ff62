"""Recorded lookups as jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_client import Description, Lane
from engram_client._description import description_from
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
    """The lookups of a trace, in the order they were planned. Raises TraceError, LoadError."""
    recorded = description_from(trace.description, str(trace.path))
    first_ns: int | None = None
    for entry in trace.entries():
        first_ns = entry.ns if first_ns is None else first_ns
        yield Job(
            [request_of(entry.request, entry.lane, recorded, trace.path)], max(0, entry.ns - first_ns) / 1e9
        )


def request_of(message: pb.LookupRequest, lane: int, recorded: Description, path: Path) -> Request:
    """A recorded lookup as a request. Raises LoadError for one that the server which was recorded cannot have taken."""
    try:
        request = _request(message, lane, recorded.model.columns)
        _check(request, recorded)
    except ValueError as error:
        raise LoadError(f"{path}: a lookup in it is damaged: {error}") from error
    return request


def _request(message: pb.LookupRequest, lane: int, model_columns: int) -> Request:
    columns = (message.columns.begin, message.columns.end) if message.HasField("columns") else None
    common = {"lane": _LANES.get(lane, "auto"), "columns": columns, "unique": message.unique}
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
    raise ValueError("it names no rows")


def _check(request: Request, recorded: Description) -> None:
    """Raise ValueError unless layers, columns and ids are those of the tables and the model."""
    model = recorded.model
    if request.columns is not None and not 0 <= request.columns[0] < request.columns[1] <= model.columns:
        raise ValueError(f"columns {request.columns[0]} to {request.columns[1]} of {model.columns}")
    rows: dict[int, NDArray[Any]] = {}
    match request.keys:
        case TokenKeys(sequences):
            rows = dict.fromkeys(request.layers or (), np.empty(0))
            for tokens, history in sequences:
                _check_ids("tokens", tokens, 0, model.token_vocab_size)
                _check_ids("tokens of a history", history, -1, model.token_vocab_size)
                if len(history) >= model.max_ngram_size:
                    raise ValueError(f"a history of {len(history)} tokens")
        case BlockKeys(layers):
            # Ids outside the columns only tell row groups apart: they may be anything.
            rows = {layer: ids[:, slice(*(request.columns or (None,)))] for layer, ids in layers.items()}
            if len({len(ids) for ids in layers.values()}) != 1:
                raise ValueError("its blocks are none, or differ in length")
        case RowKeys(layer, ids):
            rows = {layer: ids}
    for layer, ids in rows.items():
        if (table := recorded.tables.get(layer)) is None:
            raise ValueError(f"there is no table of layer {layer}")
        _check_ids(f"rows of layer {layer}", ids, -1, table.rows)


def _check_ids(what: str, ids: NDArray[Any], low: int, end: int) -> None:
    if ids.size and not low <= ids.min() <= ids.max() < end:
        raise ValueError(f"{what} from {ids.min()} to {ids.max()}, and they are {low} to {end - 1}")


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
