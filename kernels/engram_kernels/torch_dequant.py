"""The twin of triton_dequant.py in torch operators: the same rows on any device torch has, at the cost of temporaries.

Checked and called by `engram_kernels.device`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_BLOCK_VALUES = 32
_SCALE_BYTES = 8
_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_AS_FP8 = (0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C)
_BF16_NAN = 0x7FC0
_FP32_NAN = 0x7FC00000
_FP8_NAN = 0x7F


def convert_rows(
    packed: Tensor,
    index: Tensor | None,
    out: Tensor,
    *,
    fp4: bool,
    zero_is_subnormal: bool,
    max_is_nan: bool,
) -> None:
    """As triton_dequant.convert_rows_kernel: packed uint8[n, W], index int[...] or None, out [..., V].

    Without an index, rows of `packed` come in order. Where they run out along the first dimension of `out`, there is
    padding.
    """
    asked = len(packed) // (out.shape[1] if out.ndim == 3 else 1) if index is None else len(index)
    if index is None:
        index = torch.arange(len(packed), device=packed.device).view(asked, *out.shape[1:-1])
    known = (index >= 0) & (index < len(packed))
    astray = ((index != -1) & ~known)[..., None]
    # A row of zeros at the end, which numbers that are no row take.
    rows = torch.cat([packed, packed.new_zeros(1, packed.shape[1])])[torch.where(known, index, -1)]
    codes, scales = rows[..., :-_SCALE_BYTES], rows[..., -_SCALE_BYTES:]
    if fp4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    if out.dtype == torch.uint8:
        if fp4:
            codes = _fp4_as_fp8(out.device)[codes.int()]
        converted = torch.cat([codes.masked_fill(astray, _FP8_NAN), scales], dim=-1)
    else:
        scale = _scales(scales, zero_is_subnormal, max_is_nan).repeat_interleave(_BLOCK_VALUES, dim=-1)
        product = _code_values(fp4, out.device)[codes.int()] * scale
        bits = product.to(torch.bfloat16).view(torch.int16)
        converted = bits.masked_fill(product.isnan() | astray, _BF16_NAN).view(torch.bfloat16)
    out[:asked] = converted
    out[asked:] = 0


def _scales(codes: Tensor, zero_is_subnormal: bool, max_is_nan: bool) -> Tensor:
    bits = codes.int() << 23
    if zero_is_subnormal:
        bits = bits.masked_fill(codes == 0, 1 << 22)
    if max_is_nan:
        bits = bits.masked_fill(codes == 255, _FP32_NAN)
    return bits.view(torch.float32)


@cache
def _code_values(fp4: bool, device: torch.device) -> Tensor:
    """float32 of every code."""
    if fp4:
        return torch.tensor([*_FP4_MAGNITUDES, *(-value for value in _FP4_MAGNITUDES)], device=device)
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return codes.view(torch.float8_e4m3fn).float()


@cache
def _fp4_as_fp8(device: torch.device) -> Tensor:
    codes = [*_FP4_AS_FP8, *(code | 0x80 for code in _FP4_AS_FP8)]
    return torch.tensor(codes, dtype=torch.uint8, device=device)
