"""Block quantisation by its definition, one value at a time, in exact fractions.

Shares no code with the product.
"""

import bisect
from fractions import Fraction

import numpy as np

E2M1 = [Fraction(x) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
"""Magnitude of FP4 codes 0..7."""

E4M3 = [
    (Fraction(m, 8) if e == 0 else 1 + Fraction(m, 8)) * Fraction(2) ** (max(e, 1) - 7)
    for e in range(16)
    for m in range(8)
][:127]
"""Magnitude of FP8 codes 0..126; 127 is NaN."""


def smallest_scale(amax: float, code_max: int) -> int:
    """The E8M0 byte of the smallest power of two that keeps a block within the code's range."""
    if amax == 0:
        return 0
    return next((b for b in range(1, 254) if 2.0 ** (b - 127) * code_max >= amax), 254)


def nearest_code(value: Fraction, magnitudes: list[Fraction], ties_to_even: bool) -> int:
    """Code of the nearest magnitude; a tie goes to the even code, or toward zero."""
    above = bisect.bisect_left(magnitudes, abs(value))  # first code not below the value
    if above == len(magnitudes):
        return above - 1
    if above == 0 or magnitudes[above] == abs(value):
        return above
    down, up = abs(value) - magnitudes[above - 1], magnitudes[above] - abs(value)
    if down == up:
        return above if ties_to_even and above % 2 == 0 else above - 1
    return above if up < down else above - 1


def quantised(values: np.ndarray, fmt: str) -> tuple[list[int], list[int]]:
    """One row of values [256] -> code and scale bytes, as lists. Negative zeros are kept."""
    codes, scales = [], []
    for block in np.asarray(values, dtype=np.float64).reshape(-1, 32):
        scale = smallest_scale(float(np.abs(block).max()), 6 if fmt == "fp4" else 448)
        scales.append(scale)
        for value, sign in zip(block.tolist(), np.signbit(block).tolist(), strict=True):
            if scale == 0:
                codes.append(0)
                continue
            scaled = Fraction(value) / Fraction(2) ** (scale - 127)
            if fmt == "fp4":
                codes.append(nearest_code(scaled, E2M1, ties_to_even=False) | sign << 3)
            else:
                codes.append(nearest_code(scaled, E4M3, ties_to_even=True) | sign << 7)
    if fmt == "fp4":
        codes = [low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)]
    return codes, scales


def values_of(packed: np.ndarray) -> np.ndarray:
    """Packed rows uint8[n, 136 or 264] -> float64[n, 256], by table look-up."""
    codes, scales = packed[:, :-8], packed[:, -8:].astype(np.float64)
    if packed.shape[1] == 136:
        codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(packed), 256)
        table = [float(x) for x in E2M1]
    else:
        table = [*(float(x) for x in E4M3), np.nan]
    signed = np.array([*table, *(-x for x in table)])
    return signed[codes] * np.repeat(2.0 ** (scales - 127), 32, axis=1)
