"""The GPU kernel: packed rows to bf16 or packed FP8, each row by number or in order.

One program converts ROWS rows, each read once and written once. `engram_kernels.device` checks what is passed in and
launches it; torch_dequant.py is its twin in torch operators. TRITON_INTERPRET=1, set before Triton is imported, runs
it on the CPU.

Every step is exact or rounds as the CPU kernels do (kernels/src/dequant_numbers.h): a code becomes a float32 that is
zero or normal, its product with the scale a float32 that may be subnormal (Triton flushes none), and integer arithmetic
rounds that to bf16, since the hardware's conversion has a NaN of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 8
"""Rows of one program: 64 tokens of one layer are 192 programs, enough for every GPU."""
ROWS_INTERPRETED = 64
"""The same where NumPy computes, and calls are what costs."""

_BLOCKS: tl.constexpr = tl.constexpr(8)
_VALUES: tl.constexpr = tl.constexpr(256)
_BF16_NAN: tl.constexpr = tl.constexpr(0x7FC0)
_FP8_NAN: tl.constexpr = tl.constexpr(0x7F)


@triton.jit
def _scale(byte, ZERO_IS_SUBNORMAL: tl.constexpr, MAX_IS_NAN: tl.constexpr):
    """E8M0 bytes as float32, by the bits `byte << 23` but for what a rule says of 0 and 255."""
    bits = byte.to(tl.int32) << 23
    if ZERO_IS_SUBNORMAL:
        bits = tl.where(bits == 0, 1 << 22, bits)
    if MAX_IS_NAN:
        bits = tl.where(bits == 255 << 23, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bf16_bits(code, scale, FP4: tl.constexpr):
    """Codes (int32: sign, exponent, mantissa) times scales, as the bits of a bf16."""
    if FP4:
        sign, magnitude = (code & 8) << 12, code & 7
        small, normal = magnitude.to(tl.float32) * 0.5, (magnitude << 22) + (126 << 23)
        is_small, is_nan = magnitude < 2, magnitude < 0
    else:
        sign, magnitude = (code & 0x80) << 8, code & 0x7F
        small, normal = magnitude.to(tl.float32) * 0.001953125, (magnitude << 20) + (120 << 23)
        is_small, is_nan = magnitude < 8, magnitude == 0x7F
    product = tl.where(is_small, small, normal.to(tl.float32, bitcast=True)) * scale
    bits = product.to(tl.int32, bitcast=True)
    is_nan = is_nan | ((bits & 0x7FFFFFFF) > 0x7F800000)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(is_nan, _BF16_NAN, rounded | sign)


@triton.jit
def _fp8_code(code):
    """E2M1 codes as the E4M3 codes of the same values."""
    magnitude = code & 7
    return ((code & 8) << 4) | tl.where(magnitude < 2, magnitude * 0x30, magnitude * 4 + 0x30)


@triton.jit
def _offset(row, inner, outer_stride, inner_stride):
    """Where rows begin, in elements: divided in 32 bits, which is a tenth of the work, and multiplied in 64."""
    outer = row // inner
    return outer.to(tl.int64) * outer_stride + (row - outer * inner).to(tl.int64) * inner_stride


@triton.jit(do_not_specialize=["packed_rows", "asked_rows", "out_rows"])
def convert_rows_kernel(
    packed,
    index,
    out,
    packed_rows,
    asked_rows,
    out_rows,
    packed_inner,
    packed_outer_stride,
    packed_inner_stride,
    index_inner,
    index_outer_stride,
    index_inner_stride,
    out_inner,
    out_outer_stride,
    out_inner_stride,
    FP4: tl.constexpr,
    TO_FP8: tl.constexpr,
    INDEXED: tl.constexpr,
    ZERO_IS_SUBNORMAL: tl.constexpr,
    MAX_IS_NAN: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Row r of `out` becomes row index[r] (or r) of `packed`, converted.

    -1, and rows of `out` at `asked_rows` and after, become zeros; any other number that is no row becomes NaN. Row n of
    each tensor begins at n // inner * outer_stride + n % inner * inner_stride, in elements; `out` is bits of bf16 as
    int16, or uint8. ALIGNED: every row begins at a multiple of 8 bytes. Numbers of rows fit int32.
    """
    CODE_BYTES: tl.constexpr = _VALUES // 2 if FP4 else _VALUES
    BLOCK_BYTES: tl.constexpr = CODE_BYTES // _BLOCKS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = tl.where(row < asked_rows, row, -1)
    if INDEXED:
        at = _offset(row, index_inner, index_outer_stride, index_inner_stride)
        source = tl.load(index + at, mask=row < asked_rows, other=-1)
    known = (source >= 0) & (source < packed_rows)
    astray = (source != -1) & (known == 0)

    source = tl.where(known, source, 0).to(tl.int32)
    begin = packed + _offset(source, packed_inner, packed_outer_stride, packed_inner_stride)
    target = out + _offset(row, out_inner, out_outer_stride, out_inner_stride)
    if ALIGNED:
        begin = tl.multiple_of(begin, 8)
        if TO_FP8:  # Triton sees by itself that bf16 rows are a multiple of 16 bytes, when they are
            target = tl.multiple_of(target, 8)
    block = tl.arange(0, _BLOCKS)
    codes_at = (
        begin[:, None, None] + block[None, :, None] * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, None, :]
    )
    codes = tl.load(codes_at, mask=known[:, None, None], other=0).to(tl.int32)
    scales_at = begin[:, None] + CODE_BYTES + block[None, :]
    scales = tl.load(scales_at, mask=known[:, None], other=0)

    values_at = target[:, None] + tl.arange(0, _VALUES)[None, :]
    inside = (row < out_rows)[:, None]
    if TO_FP8:
        if FP4:
            codes = tl.join(_fp8_code(codes & 15), _fp8_code(codes >> 4))
        codes = tl.where(astray[:, None], _FP8_NAN, tl.reshape(codes, (ROWS, _VALUES)))
        tl.store(values_at, codes.to(tl.uint8), mask=inside)
        tl.store(target[:, None] + _VALUES + block[None, :], scales, mask=inside)
    else:
        scale = _scale(scales, ZERO_IS_SUBNORMAL, MAX_IS_NAN)[:, :, None]
        if FP4:
            bits = tl.join(_bf16_bits(codes & 15, scale, FP4), _bf16_bits(codes >> 4, scale, FP4))
        else:
            bits = _bf16_bits(codes, scale, FP4)
        bits = tl.where(astray[:, None], _BF16_NAN, tl.reshape(bits, (ROWS, _VALUES)))
        tl.store(values_at, bits.to(tl.int16), mask=inside)
