"""Synthetic rows at memory speed: every row of a table distinct, and known from its row id alone.

Rows are Gaussian with a random scale per row, quantised as DeepSeek's are; an FP4 table is the re-pack of
the FP8 table of the same seed. Quantising each row would be slower than any disk, so a pool of quantised rows
is mixed by a 64-bit hash of (seed, layer, row): the hash picks a pool row, shifts its scales by a power of
two and flips signs. All three leave the distribution what it was and make no NaN. The signs of the first 64
values *are* the hash, which is a bijection of the row id: two rows of a table never hold the same codes, so a
test that gets the wrong row always sees it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from engram_server.tables.layout import CODES, ROW_VALUES, SCALES_PER_ROW, TableFormat
from engram_server.tables.quantise import dequantise_fp8, quantise_fp4, quantise_fp8

_POOL_BITS = 12
"""4,096 rows: 0.5 MiB of FP4 codes, so that mixing stays inside a core's L2 cache."""
_SHIFT_BITS = 5
"""Scale bytes move by -16..15."""
_STEP_ROWS = 4096
"""Rows mixed at once, again for the L2 cache: larger steps were measured at half the speed."""
_GOLDEN = 0x9E3779B97F4A7C15
_U64 = (1 << 64) - 1


class RowGenerator:
    """Rows of one synthetic table. Stateless between calls; threads may share one."""

    def __init__(self, fmt: TableFormat, seed: int, layer: int) -> None:
        self.fmt = fmt
        self._pool_codes, self._pool_scales = _pool(fmt, seed)
        key = np.array([(seed * _GOLDEN + layer) & _U64], dtype=np.uint64)
        self._key = _mix(_mix(key) + np.uint64(layer))
        self._flips = _sign_flips(fmt)

    def fill(self, first: int, codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> None:
        """Write rows `first` .. into codes uint8[n, 128 or 256] and scales uint8[n, 8], both C-contiguous."""
        for start in range(0, len(codes), _STEP_ROWS):
            stop = min(start + _STEP_ROWS, len(codes))
            ids = np.arange(first + start, first + stop, dtype=np.uint64)
            self._mix_rows(ids, codes[start:stop], scales[start:stop].view("<u8"))

    def rows(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Rows of any ids [n]: codes uint8[n, 128 or 256] and scales uint8[n, 8]."""
        codes = np.empty((len(ids), CODES[self.fmt][1]), dtype=np.uint8)
        scales = np.empty((len(ids), SCALES_PER_ROW), dtype=np.uint8)
        self._mix_rows(ids.astype(np.uint64), codes, scales.view("<u8"))
        return codes, scales

    def _mix_rows(
        self, ids: NDArray[np.uint64], codes: NDArray[np.uint8], scales: NDArray[np.uint64]
    ) -> None:
        hashed = _mix(ids + self._key)
        picked = (hashed >> np.uint64(64 - _POOL_BITS)).astype(np.intp)
        np.take(self._pool_codes, picked, axis=0, out=codes, mode="clip")
        # Value v takes the sign in bit v mod 64: byte by byte, each the signs of 8 values.
        flips = np.take(self._flips, hashed.astype("<u8").view(np.uint8).reshape(-1, 8))
        words = codes.view(flips.dtype)
        # Tiled, because a broadcast over so short an axis costs NumPy four times as much.
        np.bitwise_xor(words, np.tile(flips, (1, ROW_VALUES // 64)), out=words)
        # Pool scales are lowered by 16 already; no byte can carry into its neighbour.
        shift = hashed & np.uint64((1 << _SHIFT_BITS) - 1)
        np.add(self._pool_scales[picked], shift * np.uint64(0x0101010101010101), out=scales[:, 0])


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: a bijection of 64-bit integers in which every bit depends on every other."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _sign_flips(fmt: TableFormat) -> NDArray[np.unsignedinteger]:
    """[256]: what to xor to the codes of 8 values to flip the signs that the bits of a byte name."""
    bits = 4 if fmt == "fp4" else 8  # of a code; its top bit is the sign
    masks = [
        sum(1 << (value * bits + bits - 1) for value in range(8) if byte >> value & 1) for byte in range(256)
    ]
    return np.array(masks, dtype="<u4" if fmt == "fp4" else "<u8")


@lru_cache(maxsize=2)
def _pool(fmt: TableFormat, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """Quantised Gaussian rows: codes uint8[4096, 128 or 256], and scales as little-endian words [4096]."""
    rng = np.random.default_rng([seed, 0x656E6772616D])
    values = rng.standard_normal((1 << _POOL_BITS, ROW_VALUES))
    values *= np.exp2(rng.uniform(0.0, 1.0, (len(values), 1)))
    np.abs(values[:, :64], out=values[:, :64])  # their signs are the hash
    codes, scales = quantise_fp8(values)
    if fmt == "fp4":
        codes, scales = quantise_fp4(dequantise_fp8(codes, scales))
    scales = scales - np.uint8(1 << (_SHIFT_BITS - 1))
    return codes, scales.view("<u8")[:, 0]
