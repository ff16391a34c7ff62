"""Rows packed, re-quantised and sealed in bulk, against exact fractions and the format's own words."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracles import dequant
from oracles import store as oracle
from oracles.quantise import quantised, values_of

from engram_kernels import _core
from engram_kernels._core import RowKind
from engram_server.tables.quantise import quantise_fp8

KINDS = {"fp4": RowKind.FP4, "fp8": RowKind.FP8}
UUID = bytes(range(16))


def random_rows(kind: str, count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Sound packed rows of any codes and scales."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (count, oracle.ROW_BYTES[kind]), dtype=np.uint8)
    rows[:, -8:] = rng.integers(1, 255, (count, 8))
    if kind == "fp8":
        codes = rows[:, :-8]
        codes[(codes & 0x7F) == 0x7F] = 0
    return rows


def pack(source: str, rows: NDArray[np.uint8], kind: str, first: int = 0) -> tuple[NDArray[np.uint8], Any]:
    out = np.full(len(rows) * oracle.ROW_BYTES[kind], 0xAA, dtype=np.uint8)
    noticed = _core.pack_rows(KINDS[source], rows[:, :-8], rows[:, -8:], first, KINDS[kind], out)
    return out.reshape(len(rows), -1), noticed


def as_fp4(rows: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], int]:
    """FP8 rows re-quantised by the native kernel, and the clipped blocks."""
    packed, (suspects, _, clipped) = pack("fp8", rows, "fp4")
    assert not len(suspects)
    return packed, clipped


def assert_as_defined(rows: NDArray[np.uint8]) -> None:
    packed, _ = as_fp4(rows)
    for row, values in zip(packed, values_of(rows), strict=True):
        codes, scales = quantised(values, "fp4")
        assert (row[:-8].tolist(), row[-8:].tolist()) == (codes, scales)


def fp8_rows(blocks: list[tuple[list[int], int]]) -> NDArray[np.uint8]:
    """Blocks of (up to 32 codes, scale byte) as rows, the last filled with copies of the first."""
    blocks = blocks + blocks[:1] * (-len(blocks) % 8)
    rows = np.zeros((len(blocks) // 8, 264), dtype=np.uint8)
    for i, (codes, scale) in enumerate(blocks):
        rows[i // 8, i % 8 * 32 :][: len(codes)] = codes
        rows[i // 8, 256 + i % 8] = scale
    return rows


def test_every_code_beside_every_largest_code() -> None:
    """All that a block's result depends on, but for the clamping of its scale: ties, zeros of both signs, extremes."""
    blocks = []
    for largest in range(1, 127):
        codes = [code | sign for code in range(largest + 1) for sign in (0, 0x80)]
        blocks += [([largest, *codes[at : at + 31]], 127) for at in range(0, len(codes), 31)]
    assert_as_defined(fp8_rows(blocks))


def test_scales_at_both_ends() -> None:
    some = [1, 2, 3, 7, 8, 9, 0x80, 0x85, 60, 61, 100, 120, 0x80 | 126, 126]
    blocks = [
        (some[:count], scale)
        for scale in (*range(1, 14), *range(240, 255))
        for count in range(1, len(some) + 1)
    ]
    rows = fp8_rows(blocks)
    assert_as_defined(rows)
    beyond = sum(
        float(np.abs(values_of(row[None])).reshape(8, 32)[block].max()) > 6 * 2.0**127
        for row in rows
        for block in range(8)
    )
    assert as_fp4(rows)[1] == beyond > 0


@settings(max_examples=30)
@given(
    codes=st.lists(st.integers(0, 255).filter(lambda code: code & 0x7F != 0x7F), min_size=1, max_size=256),
    scales=st.lists(st.integers(1, 254), min_size=8, max_size=8),
)
def test_any_row(codes: list[int], scales: list[int]) -> None:
    row = np.array([*np.resize(codes, 256), *scales], dtype=np.uint8)
    assert_as_defined(row[None])


def test_a_block_of_zeros_is_zeros_whatever_its_scale_and_signs() -> None:
    rows = fp8_rows([([0x80] * 32, 200), ([0] * 32, 1), ([100] * 32, 0), ([0x80, 3], 127)])
    packed, _ = as_fp4(rows)
    assert not packed[0, :48].any()
    assert packed[0, 128:131].tolist() == [0, 0, 0]
    assert packed[0, 48] == 0x78, "beside a value a negative zero keeps its sign"


def test_gaussian_rows_keep_the_published_fidelity() -> None:
    rng = np.random.default_rng(5)
    values = rng.standard_normal((20_000, 256)) * np.exp2(rng.uniform(0, 1, (20_000, 1)))
    rows = np.concatenate(quantise_fp8(values), axis=1)
    packed, clipped = as_fp4(rows)
    assert clipped == 0
    cosines = _core.row_cosines(rows[:, :-8], rows[:, -8:], packed)
    assert 0.9932 <= cosines.mean() <= 0.9936
    before, after = values_of(rows[:500]), values_of(packed[:500])
    lengths = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    np.testing.assert_allclose(cosines[:500], (before * after).sum(axis=1) / lengths, rtol=1e-12)


def test_cosines_of_rows_of_zeros() -> None:
    rows, packed = np.zeros((2, 264), dtype=np.uint8), np.zeros((2, 136), dtype=np.uint8)
    rows[1, 0], rows[1, 256] = 1, 127
    assert _core.row_cosines(rows[:, :256], rows[:, 256:], packed).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_kind_are_copied(kind: str) -> None:
    rows = random_rows(kind, 100)
    packed, (suspects, _, clipped) = pack(kind, rows, kind)
    assert (packed == rows).all()
    assert (len(suspects), clipped) == (0, 0)


def test_fp4_becomes_the_same_values_in_fp8() -> None:
    rows = random_rows("fp4", 100)
    assert (pack("fp4", rows, "fp8")[0] == dequant.convert("fp4", "packed_fp8", rows)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_suspect_rows_are_named(kind: str) -> None:
    rows = random_rows(kind, 300)
    expected = {}
    for block in range(8):
        rows[10 + block, -8 + block] = 255
        expected[1010 + block] = _core.SCALE_255
    if kind == "fp8":
        for i in range(256):
            rows[20 + i, i] = (0x7F, 0xFF)[i % 2]
            expected[1020 + i] = _core.NAN_CODE
        rows[290, 3], rows[290, 263] = 0x7F, 255
        expected[1290] = _core.NAN_CODE | _core.SCALE_255
    suspects, why, _ = pack(kind, rows, kind, first=1000)[1]
    assert dict(zip(suspects.tolist(), why.tolist(), strict=True)) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 14, 15, 16, 28, 29, 30, 58, 61])
def test_sealed_pages_are_those_of_the_format(kind: str, count: int) -> None:
    """Written in two pieces, cut anywhere, over whatever lay in the memory before."""
    rows, per_page = random_rows(kind, count), oracle.PER_PAGE[kind]
    origin = 7 * per_page
    expected = oracle.pages(UUID, 14, kind, [row.tobytes() for row in rows], origin)
    for cut in range(0, count, 7):
        pages = np.full(len(expected), 0xAA, dtype=np.uint8)
        for begin, end in ((0, cut), (cut, count)):
            piece = rows[begin:end]
            _core.seal_pages(
                KINDS[kind],
                piece[:, :-8],
                piece[:, -8:],
                origin + begin,
                KINDS[kind],
                UUID,
                14,
                origin,
                pages,
            )
        assert pages.tobytes() == expected
    bad_rows, bad_pages = _core.check_pages(pages, origin, count, KINDS[kind], UUID, 14)
    assert (len(bad_rows), len(bad_pages)) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_a_page_is_checked(kind: str) -> None:
    rows, per_page, width = random_rows(kind, 20), oracle.PER_PAGE[kind], oracle.ROW_BYTES[kind] + 4
    good = np.frombuffer(oracle.pages(UUID, 1, kind, [row.tobytes() for row in rows], 0), dtype=np.uint8)
    for at in range(len(good)):
        pages = good.copy()
        pages[at] ^= 1 << at % 8
        bad_rows, bad_pages = _core.check_pages(pages, 0, 20, KINDS[kind], UUID, 1)
        page, place = divmod(at, 4096)
        row = page * per_page + place // width
        is_row = place // width < per_page and row < 20
        assert (bad_rows.tolist(), bad_pages.tolist()) == (([row], []) if is_row else ([], [page]))


def test_arrays_that_do_not_fit_are_refused() -> None:
    rows = random_rows("fp4", 30)
    codes, scales, out = rows[:, :-8], rows[:, -8:], np.zeros(30 * 136, dtype=np.uint8)
    kind = RowKind.FP4
    with pytest.raises(ValueError, match="codes has 30 rows but scales has 29"):
        _core.pack_rows(kind, codes, scales[:29], 0, kind, out)
    with pytest.raises(ValueError, match=r"codes is not \[n, 256\]"):
        _core.pack_rows(RowKind.FP8, codes, scales, 0, kind, out)
    with pytest.raises(ValueError, match="out has 4079 bytes; these rows need 4080"):
        _core.pack_rows(kind, codes, scales, 0, kind, out[1:])
    with pytest.raises(ValueError, match="do not lie in these pages"):
        _core.seal_pages(kind, codes, scales, 0, kind, UUID, 1, 0, np.zeros(4096, dtype=np.uint8))
    with pytest.raises(ValueError, match="do not lie in these pages"):
        _core.seal_pages(kind, codes, scales, 0, kind, UUID, 1, 29, np.zeros(8192, dtype=np.uint8))
    with pytest.raises(ValueError, match="row 1 does not begin a page"):
        _core.check_pages(np.zeros(4096, dtype=np.uint8), 1, 1, kind, UUID, 1)
