"""A lookup or prefetch as the caller words it, and the checked `Query` that each of the methods makes."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engram_client._errors import InvalidRequestError
from engram_client._result import Format, Lane

R = TypeVar("R")
P = TypeVar("P")

_FORMATS: tuple[str, ...] = get_args(Format)
_LANES: tuple[str, ...] = get_args(Lane)


@dataclass(frozen=True, eq=False)
class TokenKeys:
    """Token ids to hash."""

    sequences: tuple[tuple[NDArray[np.int32], NDArray[np.int32]], ...]
    """(tokens int32[n], history int32[0..3] oldest first) of each sequence."""


@dataclass(frozen=True, eq=False)
class BlockKeys:
    """Whole blocks of row ids."""

    layers: Mapping[int, NDArray[Any]]
    """int32 or int64[T, all columns], by layer, in reply order."""


@dataclass(frozen=True, eq=False)
class RowKeys:
    """A flat list of row ids."""

    layer: int
    ids: NDArray[Any]
    """int32 or int64[n]."""


@dataclass(frozen=True, eq=False)
class Query:
    """One lookup. Types and dtypes are right; whether layers and ids exist is the server's to say."""

    keys: TokenKeys | BlockKeys | RowKeys
    layers: tuple[int, ...] | None
    columns: tuple[int, int] | None
    format: Format
    unique: bool
    pin: Mapping[int, bytes] | None
    lane: Lane


class LookupMethods(ABC, Generic[R]):
    """What everything that can look rows up has in common; R is how it hands over a `Lookup`.

    Ids are lists, arrays or CPU tensors. Copy a tensor from its device first; rows come back on the CPU.

    Keywords:

    columns
        (begin, end): only these columns of a layer, as a tensor-parallel rank wants; None = all 24. Column
        `(order - 2) * heads + head` is the row of one n-gram order and head.
    format
        See `Format`.
    unique
        Answer each distinct row of a layer once, with an index; see `Lookup.unique`.
    pin
        Table digests by layer: MismatchError unless the tables have them.
    lane
        Whose reads go first, see `Lane`.
    timeout
        Seconds, retries included; None = `Timeouts.request_s`.

    Raises the exceptions of `EngramError`.
    """

    @abstractmethod
    def _run(self, query: Query, timeout: float | None) -> R:
        """Look it up."""

    def lookup(
        self,
        tokens: ArrayLike,
        *,
        history: ArrayLike = (),
        layers: Sequence[int] | None = None,
        columns: tuple[int, int] | None = None,
        format: Format = "bf16",
        unique: bool = False,
        pin: Mapping[int, bytes] | None = None,
        lane: Lane = "auto",
        timeout: float | None = None,
    ) -> R:
        """Rows of the token ids [T] of one sequence: values [T, L, C, W].

        history: up to 3 ids before tokens[0], oldest first; fewer = the sequence starts there, -1 = unknown.
        layers: in reply order; None = all.
        """
        return self.lookup_batch(
            [tokens],
            histories=[history],
            layers=layers,
            columns=columns,
            format=format,
            unique=unique,
            pin=pin,
            lane=lane,
            timeout=timeout,
        )

    def lookup_batch(
        self,
        sequences: Sequence[ArrayLike],
        *,
        histories: Sequence[ArrayLike] | None = None,
        layers: Sequence[int] | None = None,
        columns: tuple[int, int] | None = None,
        format: Format = "bf16",
        unique: bool = False,
        pin: Mapping[int, bytes] | None = None,
        lane: Lane = "auto",
        timeout: float | None = None,
    ) -> R:
        """Rows of several sequences of token ids, one after another along T; `histories` has one for each."""
        keys = _token_keys(sequences, histories)
        wanted = None if layers is None else _layers(layers)
        return self._run(
            Query(keys, wanted, _columns(columns), _format(format), unique, _pin(pin), _lane(lane)), timeout
        )

    def lookup_blocks(
        self,
        blocks: Mapping[int, ArrayLike],
        *,
        columns: tuple[int, int] | None = None,
        format: Format = "bf16",
        unique: bool = False,
        pin: Mapping[int, bytes] | None = None,
        lane: Lane = "auto",
        timeout: float | None = None,
    ) -> R:
        """Rows by id, as an engine's own hash gave them: {layer: ids [T, 24]} -> values [T, L, C, W].

        Ids are int32 or int64, -1 = zero row; layers answer in the mapping's order, all with the same T. Those
        outside `columns` are not looked up, but tell row groups apart: leave them as they are.
        """
        keys = _block_keys(blocks)
        return self._run(
            Query(keys, _layers(blocks), _columns(columns), _format(format), unique, _pin(pin), _lane(lane)),
            timeout,
        )

    def lookup_rows(
        self,
        layer: int,
        ids: ArrayLike,
        *,
        format: Format = "bf16",
        unique: bool = False,
        pin: Mapping[int, bytes] | None = None,
        lane: Lane = "auto",
        timeout: float | None = None,
    ) -> R:
        """Rows of one layer by id: ids [n] int32 or int64, -1 = zero row -> values [n, W]."""
        keys = RowKeys(_layers([layer])[0], _ids(ids, f"row ids of layer {layer}", 1))
        return self._run(Query(keys, None, None, _format(format), unique, _pin(pin), _lane(lane)), timeout)


class PrefetchMethods(ABC, Generic[P]):
    """How rows are brought into the row cache before they are asked for; P is how it hands over a `Prefetched`.

    Answers as soon as the rows are queued; they are read behind all lookups, and a lookup that comes meanwhile
    joins those reads. Arguments are those of the lookup of the same name, and:

    give_up_s
        Seconds after which reading what was not read yet is worth nothing; None = for ever.

    Raises the exceptions of `EngramError`: OverloadedError when too much is queued, UnsupportedError without a
    row cache. A prefetch that fails costs time and nothing else: the lookup reads what it needs.
    """

    @abstractmethod
    def _queue(self, query: Query, give_up_s: float | None, timeout: float | None) -> P:
        """Queue its rows."""

    def prefetch(
        self,
        tokens: ArrayLike,
        *,
        history: ArrayLike = (),
        layers: Sequence[int] | None = None,
        columns: tuple[int, int] | None = None,
        give_up_s: float | None = None,
        timeout: float | None = None,
    ) -> P:
        """What `lookup` of the same arguments will read, as of a coming prompt."""
        return self.prefetch_batch(
            [tokens],
            histories=[history],
            layers=layers,
            columns=columns,
            give_up_s=give_up_s,
            timeout=timeout,
        )

    def prefetch_batch(
        self,
        sequences: Sequence[ArrayLike],
        *,
        histories: Sequence[ArrayLike] | None = None,
        layers: Sequence[int] | None = None,
        columns: tuple[int, int] | None = None,
        give_up_s: float | None = None,
        timeout: float | None = None,
    ) -> P:
        """What `lookup_batch` of the same arguments will read."""
        wanted = None if layers is None else _layers(layers)
        keys = _token_keys(sequences, histories)
        return self._queue(_prefetch_query(keys, wanted, columns), give_up_s, timeout)

    def prefetch_blocks(
        self,
        blocks: Mapping[int, ArrayLike],
        *,
        columns: tuple[int, int] | None = None,
        give_up_s: float | None = None,
        timeout: float | None = None,
    ) -> P:
        """What `lookup_blocks` of the same arguments will read."""
        query = _prefetch_query(_block_keys(blocks), _layers(blocks), columns)
        return self._queue(query, give_up_s, timeout)


def _prefetch_query(
    keys: TokenKeys | BlockKeys, layers: tuple[int, ...] | None, columns: tuple[int, int] | None
) -> Query:
    return Query(keys, layers, _columns(columns), "bf16", False, None, "prefetch")


def _token_keys(sequences: Sequence[ArrayLike], histories: Sequence[ArrayLike] | None) -> TokenKeys:
    if histories is None:
        histories = [()] * len(sequences)
    if len(histories) != len(sequences):
        raise InvalidRequestError(f"there are {len(sequences)} sequences, but {len(histories)} histories")
    return TokenKeys(
        tuple(
            (_tokens(tokens, f"tokens of sequence {i}"), _tokens(history, f"history of sequence {i}"))
            for i, (tokens, history) in enumerate(zip(sequences, histories, strict=True))
        )
    )


def _block_keys(blocks: Mapping[int, ArrayLike]) -> BlockKeys:
    return BlockKeys({layer: _ids(ids, f"row ids of layer {layer}", 2) for layer, ids in blocks.items()})


def _format(format: str) -> Format:
    if format not in _FORMATS:
        raise InvalidRequestError(f"format is {format!r}; expected one of {', '.join(_FORMATS)}")
    return format  # type: ignore[return-value]


def _lane(lane: str) -> Lane:
    if lane not in _LANES:
        raise InvalidRequestError(f"lane is {lane!r}; expected one of {', '.join(_LANES)}")
    return lane  # type: ignore[return-value]


def _layers(layers: Sequence[int] | Mapping[int, Any]) -> tuple[int, ...]:
    for layer in layers:
        if not 0 <= layer < 2**32:
            raise InvalidRequestError(f"layer {layer} is not a layer id")
    return tuple(layers)


def _columns(columns: tuple[int, int] | None) -> tuple[int, int] | None:
    if columns is None:
        return None
    try:
        begin, end = (operator.index(column) for column in columns)
    except (TypeError, ValueError):
        raise InvalidRequestError(f"columns is {columns!r}; expected (begin, end)") from None
    if not 0 <= begin < end < 2**32:
        raise InvalidRequestError(f"columns {begin} to {end} (end excluded) are not a range of columns")
    return begin, end


def _pin(pin: Mapping[int, bytes] | None) -> Mapping[int, bytes] | None:
    if pin is not None:
        _layers(pin)
        for layer, digest in pin.items():
            if not isinstance(digest, bytes):
                raise InvalidRequestError(
                    f"the pin of layer {layer} is {type(digest).__name__}; expected a digest, bytes"
                )
    return pin


def _integers(values: ArrayLike, name: str, ndim: int) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:  # a ragged list
        raise InvalidRequestError(f"{name} are no array: {error}") from error
    if array.size == 0 and array.ndim <= ndim and array.dtype.kind == "f":
        # What an empty list becomes; NumPy has no integer in it to see.
        array = array.reshape((0,) * ndim).astype(np.int32)
    if array.dtype.kind not in "iu":
        raise InvalidRequestError(f"{name} are {array.dtype}; expected integers")
    if array.ndim != ndim:
        raise InvalidRequestError(f"{name} have shape {list(array.shape)}; expected {ndim} dimension(s)")
    return array


def _tokens(values: ArrayLike, name: str) -> NDArray[np.int32]:
    array = _integers(values, name, ndim=1)
    if array.dtype != np.int32:
        outside = (array > 2**31 - 1) | (array < -(2**31))
        if outside.any():
            position = int(outside.argmax())
            raise InvalidRequestError(f"{name}: {array[position]} at position {position} is not an int32")
    return array.astype("<i4", copy=False)


def _ids(values: ArrayLike, name: str, ndim: int) -> NDArray[Any]:
    array = _integers(values, name, ndim)
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise InvalidRequestError(f"{name}: {int(array.max())} is not an int64")
    return array.astype("<i4" if array.dtype == np.int32 else "<i8", copy=False)
