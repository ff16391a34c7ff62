"""What a lookup returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Lane: TypeAlias = Literal["auto", "decode", "prefill", "prefetch"]
"""Whose reads go first when the server has more to do than it can: decode before prefill before prefetch. auto:
decode for small requests (`ServerLimits.decode_rows`), else prefill."""

Format: TypeAlias = Literal["packed", "packed-fp8", "bf16", "fp32"]
"""packed: the table's own bytes, 136 (FP4) or 264 (FP8) a row, uint8. packed-fp8: 256 E4M3FN codes and 8 E8M0
scales, uint8[264]. bf16: bit patterns, uint16[256], since NumPy has no bfloat16. fp32: float32[256]."""

_DTYPES: dict[str, str] = {"packed": "u1", "packed-fp8": "u1", "bf16": "<u2", "fp32": "<f4"}


@dataclass(frozen=True)
class Stats:
    """What one request cost the server."""

    rows: int
    """Asked for, zero rows included."""
    distinct: int
    """After deduplication: with unique=True over the whole request, else within each of its blocks."""
    cached: int
    """Distinct rows that came from the row cache."""
    joined: int
    """Distinct rows that another request was already reading."""
    reads: int
    """Reads submitted to the table files: two for a row whose scales are not in memory (yet), else one."""
    read_bytes: int
    """Bytes those reads asked for, alignment included."""
    groups: int
    """Distinct row groups (the 8 rows of one n-gram in one layer), counted as `distinct` is; a lone row is one."""


@dataclass(frozen=True)
class Prefetched:
    """What one prefetch queued for the row cache."""

    rows: int
    """Its rows, duplicates and what is in the cache already included."""
    groups: int
    """Row groups they belong to, duplicates included."""
    queued_rows: int
    """Rows in the queue now, those of earlier prefetches included."""


@dataclass(frozen=True, eq=False)
class Lookup:
    """The rows of one request.

    W is the row's width in the format: 256 for bf16 (uint16 bit patterns) and fp32 (float32), the row's bytes
    for the packed forms (uint8). Arrays are writable and the caller's own.
    """

    layers: tuple[int, ...]
    """L layer ids, in the order of the arrays' layer axis."""
    columns: tuple[int, int]
    """First and one past the last column: C of them."""
    format: Format
    mask: NDArray[np.bool_] | None = field(repr=False)
    """bool[T], true at image positions, whose rows the model gates with 0. None for row ids."""
    stats: Stats
    unique: Mapping[int, NDArray[Any]] | None = field(repr=False)
    """With unique=True: per layer the distinct rows [u, W], in order of first appearance."""
    inverse: Mapping[int, NDArray[np.int32]] | None = field(repr=False)
    """With unique=True: per layer int32[T, C] (or [n]), the place of each row in `unique`; -1 = zero row."""
    _rows: NDArray[Any] | None = field(repr=False)

    @cached_property
    def values(self) -> NDArray[Any]:
        """Rows [T, L, C, W], or [n, W] for a list of row ids. With unique=True, put together on first use."""
        if self._rows is not None:
            return self._rows
        assert self.unique is not None
        assert self.inverse is not None
        layers = []
        for layer in self.layers:
            rows, inverse = self.unique[layer], self.inverse[layer]
            zero = np.zeros((1, rows.shape[1]), dtype=rows.dtype)
            layers.append(np.concatenate([rows, zero])[inverse])  # -1 takes the last row
        return layers[0] if layers[0].ndim == 2 else np.stack(layers, axis=1)

    def torch(self) -> torch.Tensor:
        """`values` as a torch tensor that shares their memory; bf16 as torch.bfloat16. Needs torch."""
        return to_torch(self.values, self.format)


def to_torch(array: NDArray[Any], format: Format) -> torch.Tensor:
    """An array of a `Lookup` as a torch tensor that shares its memory; bf16 bits as torch.bfloat16."""
    import torch

    if format == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def view_rows(payload: NDArray[np.uint8], format: Format, row_bytes: int) -> NDArray[Any]:
    """A flat run of payload bytes as rows [n, W]."""
    dtype = np.dtype(_DTYPES[format])
    return payload.view(dtype).reshape(-1, row_bytes // dtype.itemsize)
