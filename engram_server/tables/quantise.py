"""Block quantisation of rows, as DeepSeek stores them (FP8) and as the public re-pack does (FP4).

A block of 32 values shares one E8M0 scale byte b, meaning 2^(b - 127). Both formats take the smallest power
of two that keeps the block's largest magnitude inside the code's range, so nothing clips. FP8 rounds to
nearest, ties to even; FP4 rounds to nearest, ties toward zero (about 18 % of FP8 values are exact FP4 ties,
so the rule shows). A block of zeros has b = 0 and codes 0; any other b lies in 1..254.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engram_server.tables.layout import BLOCK_VALUES

E4M3_MAX = 448.0
E2M1_MAX = 6.0

E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""By the low three bits of a nibble; bit 3 is the sign."""

E4M3_MAGNITUDES = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127]
)
"""By the low seven bits of a byte, the NaN 0x7F left out; bit 7 is the sign."""


def _midpoints(magnitudes: NDArray[np.float64]) -> NDArray[np.float64]:
    return (magnitudes[:-1] + magnitudes[1:]) / 2


# A value above bound i rounds to code i + 1 or higher. A tie therefore rounds down, which is toward zero; to
# send the ties above odd codes up (to even), those bounds move just below their midpoint.
_E2M1_BOUNDS = _midpoints(E2M1_MAGNITUDES)
_E4M3_BOUNDS = np.where(
    np.arange(126) % 2 == 1, np.nextafter(_midpoints(E4M3_MAGNITUDES), 0.0), _midpoints(E4M3_MAGNITUDES)
)


def quantise_fp8(values: NDArray[np.floating]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Finite values [n, 256] -> E4M3 codes uint8[n, 256] and scale bytes uint8[n, 8]."""
    scaled, scales = _scale_blocks(values, E4M3_MAX)
    codes = np.searchsorted(_E4M3_BOUNDS, np.abs(scaled), side="left").astype(np.uint8)
    codes |= np.signbit(scaled).astype(np.uint8) << 7
    return codes, scales


def quantise_fp4(values: NDArray[np.floating]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Finite values [n, 256] -> E2M1 nibbles uint8[n, 128], low nibble first, and scales uint8[n, 8]."""
    scaled, scales = _scale_blocks(values, E2M1_MAX)
    codes = np.searchsorted(_E2M1_BOUNDS, np.abs(scaled), side="left").astype(np.uint8)
    codes |= np.signbit(scaled).astype(np.uint8) << 3
    packed: NDArray[np.uint8] = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    return packed, scales


def dequantise_fp8(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float64]:
    """E4M3 codes [n, 256] without NaNs and scale bytes [n, 8] in 1..254 -> float64[n, 256]."""
    magnitudes = E4M3_MAGNITUDES[codes & 0x7F]
    values = np.where(codes & 0x80, -magnitudes, magnitudes)
    exponents = scales.astype(np.int32) - 127
    result: NDArray[np.float64] = np.ldexp(values, np.repeat(exponents, BLOCK_VALUES, axis=1))
    return result


def _scale_blocks(
    values: NDArray[np.floating], code_max: float
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Values divided by their block's scale, and the scale bytes."""
    wide = values.astype(np.float64)
    amax = np.abs(wide).reshape(len(wide), -1, BLOCK_VALUES).max(axis=2)
    # frexp: x = fraction * 2^exponent, fraction in [0.5, 1): an exact power of two has fraction 0.5.
    fraction, exponent = np.frexp(amax / code_max)
    exponent -= fraction == 0.5
    scales = np.where(amax == 0, 0, np.clip(exponent + 127, 1, 254)).astype(np.uint8)
    wide[np.repeat(amax == 0, BLOCK_VALUES, axis=1)] = 0.0  # -0.0 too: a block of zeros has codes 0
    scaled = np.ldexp(wide, 127 - np.repeat(scales.astype(np.int32), BLOCK_VALUES, axis=1))
    return scaled, scales
