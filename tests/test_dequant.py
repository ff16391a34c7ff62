"""Every code under every scale byte, at every SIMD level, against the float64 oracle."""

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracles import dequant as oracle

from engram_kernels._core import (
    Format,
    RowKind,
    convert_rows,
    output_row_bytes,
    packed_row_bytes,
    simd_levels,
)

Rows = NDArray[np.uint8]
PAIRS = list(itertools.product(RowKind, Format))
GUARD = 0xA5


@pytest.fixture(params=simd_levels())
def simd(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def converted(kind: RowKind, fmt: Format, packed: Rows, simd: str | None = None) -> Rows:
    out = np.full((len(packed), output_row_bytes(kind, fmt)), GUARD, dtype=np.uint8)
    convert_rows(kind, fmt, packed, out, simd)
    return out


def expected(kind: RowKind, fmt: Format, packed: Rows) -> Rows:
    return oracle.convert(kind.name.lower(), fmt.name.lower(), packed)


def random_rows(kind: RowKind, count: int, seed: int = 7) -> Rows:
    shape = (count, packed_row_bytes(kind))
    return np.random.default_rng(seed).integers(0, 256, size=shape, dtype=np.uint8)


def rows_of_every_code(kind: RowKind) -> Rows:
    """All 256 code bytes under each of the 256 scale bytes."""
    code_bytes = oracle.CODE_BYTES[kind.name.lower()]
    codes = np.arange(256, dtype=np.uint8).reshape(-1, code_bytes)
    rows = [
        np.concatenate([part, np.full(8, scale, dtype=np.uint8)]) for scale in range(256) for part in codes
    ]
    return np.stack(rows)


def test_row_sizes() -> None:
    assert [packed_row_bytes(kind) for kind in RowKind] == [136, 264]
    assert [output_row_bytes(RowKind.FP4, fmt) for fmt in Format] == [136, 264, 512, 1024]
    assert [output_row_bytes(RowKind.FP8, fmt) for fmt in Format] == [264, 264, 512, 1024]


def test_levels_end_with_scalar() -> None:
    assert simd_levels()[-1] == "scalar"
    assert len(set(simd_levels())) == len(simd_levels())


@pytest.mark.parametrize(("kind", "fmt"), PAIRS)
def test_every_code_under_every_scale(kind: RowKind, fmt: Format, simd: str) -> None:
    packed = rows_of_every_code(kind)
    np.testing.assert_array_equal(converted(kind, fmt, packed, simd), expected(kind, fmt, packed))


@pytest.mark.parametrize(("kind", "fmt"), PAIRS)
def test_each_block_takes_its_own_scale(kind: RowKind, fmt: Format, simd: str) -> None:
    packed = random_rows(kind, 4_001)
    np.testing.assert_array_equal(converted(kind, fmt, packed, simd), expected(kind, fmt, packed))


@pytest.mark.parametrize(("kind", "fmt"), PAIRS)
def test_one_extreme_scale_among_ordinary_ones(kind: RowKind, fmt: Format, simd: str) -> None:
    packed = np.repeat(random_rows(kind, 256), 8, axis=0)
    packed[:, -8:] = 120
    for row, (scale, block) in enumerate(itertools.product(range(256), range(8))):
        packed[row, packed.shape[1] - 8 + block] = scale
    np.testing.assert_array_equal(converted(kind, fmt, packed, simd), expected(kind, fmt, packed))


@pytest.mark.parametrize(
    ("kind", "code", "scale", "bf16", "fp32"),
    [
        (RowKind.FP4, 0x7, 127, 0x40C0, 0x40C00000),  # 6
        (RowKind.FP4, 0x9, 0, 0x8000, 0x80000000),  # -0.5 * 0 = -0
        (RowKind.FP4, 0x1, 1, 0x0040, 0x00400000),  # 2^-127, subnormal
        (RowKind.FP4, 0xC, 254, 0xFF80, 0xFF800000),  # -2 * 2^127 overflows
        (RowKind.FP4, 0x3, 254, 0x7F40, 0x7F400000),  # 1.5 * 2^127 does not
        (RowKind.FP4, 0x8, 255, 0x7FC0, 0x7FC00000),  # -0 * infinity
        (RowKind.FP8, 0xFF, 127, 0x7FC0, 0x7FC00000),  # NaN, whatever its sign
        (RowKind.FP8, 0xFF, 0, 0x7FC0, 0x7FC00000),
        (RowKind.FP8, 0xFE, 255, 0xFF80, 0xFF800000),  # -448 * infinity
        (RowKind.FP8, 0x81, 127, 0xBB00, 0xBB000000),  # -2^-9
        (RowKind.FP8, 0x03, 1, 0x0001, 0x0000C000),  # 0.75 of bf16's last bit: up
        (RowKind.FP8, 0x02, 1, 0x0000, 0x00008000),  # half of it: a tie, to even
        (RowKind.FP8, 0x06, 1, 0x0002, 0x00018000),  # one and a half: a tie, to even
        (RowKind.FP8, 0x7E, 246, 0x7F60, 0x7F600000),  # 1.75 * 2^127
        (RowKind.FP8, 0x7E, 247, 0x7F80, 0x7F800000),
    ],
)
def test_known_bits(kind: RowKind, code: int, scale: int, bf16: int, fp32: int, simd: str) -> None:
    packed = np.full((1, packed_row_bytes(kind)), scale, dtype=np.uint8)
    packed[:, :-8] = code * 0x11 if kind is RowKind.FP4 else code
    assert set(converted(kind, Format.BF16, packed, simd).view("<u2").flat) == {bf16}
    assert set(converted(kind, Format.FP32, packed, simd).view("<u4").flat) == {fp32}


@pytest.mark.parametrize(("kind", "fmt"), PAIRS)
def test_packed_fp8_has_the_values_of_its_source(kind: RowKind, fmt: Format, simd: str) -> None:
    packed = rows_of_every_code(kind)
    as_fp8 = converted(kind, Format.PACKED_FP8, packed, simd)
    if fmt is not Format.PACKED:
        direct = converted(kind, fmt, packed, simd)
        np.testing.assert_array_equal(converted(RowKind.FP8, fmt, as_fp8, simd), direct)


@pytest.mark.parametrize(("kind", "fmt"), PAIRS)
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_any_alignment_and_not_a_byte_outside(kind: RowKind, fmt: Format, count: int, simd: str) -> None:
    width, out_width = packed_row_bytes(kind), output_row_bytes(kind, fmt)
    rows = random_rows(kind, count)
    for shift in range(33):
        source = np.zeros(64 + rows.size, dtype=np.uint8)
        packed = source[shift : shift + rows.size].reshape(count, width)
        packed[:] = rows
        target = np.full(128 + count * out_width, GUARD, dtype=np.uint8)
        first = 64 - shift
        out = target[first : first + count * out_width].reshape(count, out_width)
        convert_rows(kind, fmt, packed, out, simd)
        np.testing.assert_array_equal(out, expected(kind, fmt, rows))
        assert set(target[:first]) == {GUARD}
        assert set(target[first + out.size :]) == {GUARD}


def test_the_best_level_is_the_default() -> None:
    packed = random_rows(RowKind.FP4, 64)
    best = converted(RowKind.FP4, Format.BF16, packed, simd_levels()[0])
    np.testing.assert_array_equal(converted(RowKind.FP4, Format.BF16, packed), best)


@pytest.mark.parametrize(
    ("packed_shape", "out_shape", "sentence"),
    [
        ((3, 264), (3, 512), r"packed has shape \[3, 264\]; these rows need \[n, 136\]"),
        ((136,), (1, 512), r"packed has shape \[136\]; these rows need \[n, 136\]"),
        ((1, 1, 136), (1, 512), r"packed has shape \[1, 1, 136\]"),
        ((3, 136), (3, 1024), r"out has shape \[3, 1024\]; these rows need \[n, 512\]"),
        ((3, 136), (1536,), r"out has shape \[1536\]"),
        ((3, 136), (2, 512), "packed has 3 rows but out has 2"),
        ((3, 136), (4, 512), "packed has 3 rows but out has 4"),
        ((0, 136), (1, 512), "packed has 0 rows but out has 1"),
    ],
)
def test_wrong_shapes_are_refused(
    packed_shape: tuple[int, ...], out_shape: tuple[int, ...], sentence: str
) -> None:
    out = np.full(out_shape, GUARD, dtype=np.uint8)
    with pytest.raises(ValueError, match=sentence):
        convert_rows(RowKind.FP4, Format.BF16, np.zeros(packed_shape, dtype=np.uint8), out)
    assert set(out.flat) == {GUARD}


def test_arrays_that_would_need_a_copy_are_refused() -> None:
    packed, out = np.zeros((2, 136), dtype=np.uint8), np.zeros((2, 512), dtype=np.uint8)
    frozen = out.copy()
    frozen.flags.writeable = False
    strided = np.zeros((4, 512), dtype=np.uint8)[::2]
    refused: list[tuple[NDArray[Any], NDArray[Any]]] = [
        (packed, frozen),
        (packed, strided),
        (packed, out.astype(np.int8)),
        (packed.astype(np.uint16), out),
        (np.zeros((4, 136), dtype=np.uint8)[::2], out),
    ]
    for wrong_packed, wrong_out in refused:
        with pytest.raises(TypeError):
            convert_rows(RowKind.FP4, Format.BF16, wrong_packed, wrong_out)


def test_overlapping_memory_is_refused() -> None:
    memory = np.zeros(1000, dtype=np.uint8)
    out = memory[100:612].reshape(1, 512)
    for first in (0, 100, 611):
        with pytest.raises(ValueError, match="share memory"):
            convert_rows(RowKind.FP4, Format.BF16, memory[first : first + 136].reshape(1, 136), out)
    convert_rows(RowKind.FP4, Format.BF16, memory[612:748].reshape(1, 136), out)


def test_an_unknown_level_is_refused_with_those_there_are() -> None:
    packed, out = np.zeros((1, 136), dtype=np.uint8), np.zeros((1, 512), dtype=np.uint8)
    with pytest.raises(ValueError, match=r'"sse9" cannot run on this CPU; it has .*scalar'):
        convert_rows(RowKind.FP4, Format.BF16, packed, out, "sse9")


def test_read_only_packed_rows_are_welcome() -> None:
    packed = np.frombuffer(random_rows(RowKind.FP8, 5).tobytes(), dtype=np.uint8).reshape(5, 264)
    np.testing.assert_array_equal(
        converted(RowKind.FP8, Format.BF16, packed), expected(RowKind.FP8, Format.BF16, packed)
    )
