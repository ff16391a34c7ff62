"""Dequantisation by the book: what every code under every scale byte is, computed in float64.

A product of a 4-bit significand and a power of two between 2^-136 and 2^136 is exact in float64, far from
its subnormals. Rounding to bf16 is a search in the list of all bf16 values. Shares nothing with the product;
kinds and formats are plain strings.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CODE_BYTES = {"fp4": 128, "fp8": 256}
PACKED_BYTES = {"fp4": 136, "fp8": 264}
BF16_NAN = 0x7FC0
FP32_NAN = 0x7FC00000

_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_AS_FP8 = (0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C)


def convert(kind: str, fmt: str, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Packed rows [n, 136 or 264] -> rows in `fmt` as bytes [n, bytes of a row], little-endian."""
    if fmt == "packed" or (kind, fmt) == ("fp8", "packed_fp8"):
        return packed.copy()
    codes, scales = split(kind, packed)
    if fmt == "packed_fp8":
        fp8 = [code >> 3 << 7 | _FP4_AS_FP8[code & 7] for code in range(16)]
        return np.concatenate([np.array(fp8, dtype=np.uint8)[codes], scales], axis=1)
    bits = bit_table(kind, fmt)[np.repeat(scales, 32, axis=1), codes]
    return bits.view(np.uint8)


def split(kind: str, packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Packed rows [n, 136 or 264] -> codes [n, 256], one a byte in row order, and scale bytes [n, 8]."""
    codes, scales = packed[:, : CODE_BYTES[kind]], packed[:, CODE_BYTES[kind] :]
    if kind == "fp4":
        codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(packed), 256)
    return codes, scales


@lru_cache
def bit_table(kind: str, fmt: str) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """[scale byte, code]: bits of code * scale in "bf16" (uint16) or "fp32" (uint32)."""
    values = _code_values(kind)
    with np.errstate(invalid="ignore"):
        products = _scale_values()[:, None] * values[None, :]
    return _bf16_bits(products) if fmt == "bf16" else _fp32_bits(products)


def bf16_of_codes(kind: str, scale: float) -> NDArray[np.uint16]:
    """[code]: bits of code * scale in bf16, for a scale that no byte stands for by our rule."""
    return _bf16_bits(_code_values(kind) * scale)


def _scale_values() -> NDArray[np.float64]:
    return np.array([0.0] + [2.0 ** (byte - 127) for byte in range(1, 255)] + [np.inf])


def _code_values(kind: str) -> NDArray[np.float64]:
    if kind == "fp4":
        return np.array([*_FP4_MAGNITUDES, *(-value for value in _FP4_MAGNITUDES)])
    magnitudes = [_e4m3_magnitude(code >> 3, code & 7) for code in range(128)]
    return np.array([*magnitudes, *(-value for value in magnitudes)])


def _e4m3_magnitude(exponent: int, mantissa: int) -> float:
    if (exponent, mantissa) == (15, 7):
        return np.nan
    if exponent == 0:
        return mantissa / 8 * 2.0**-6
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def _bf16_bits(products: NDArray[np.float64]) -> NDArray[np.uint16]:
    # Bit patterns 0x0000..0x7F7F ascend with their values; 0x7F80, infinity, stands where the next
    # finite value would be, so that "nearest, ties to even" also decides overflow.
    finite = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    grid = np.append(finite, 2.0**128)
    magnitudes = np.minimum(np.abs(products), grid[-1])
    above = np.clip(np.searchsorted(grid, magnitudes), 1, len(grid) - 1)
    below = above - 1
    to_above, to_below = grid[above] - magnitudes, magnitudes - grid[below]
    tie_up = (to_above == to_below) & (above % 2 == 0)
    bits = np.where((to_above < to_below) | tie_up, above, below) | np.signbit(products) << 15
    return np.where(np.isnan(products), BF16_NAN, bits).astype(np.uint16)


def _fp32_bits(products: NDArray[np.float64]) -> NDArray[np.uint32]:
    with np.errstate(over="ignore", invalid="ignore"):
        bits = products.astype(np.float32).view(np.uint32)
    return np.where(np.isnan(products), FP32_NAN, bits).astype(np.uint32)
