"""Block quantisation against its definition in exact fractions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.quantise import E4M3, quantised, values_of

from engram_server.tables.quantise import dequantise_fp8, quantise_fp4, quantise_fp8

QUANTISE = {"fp4": quantise_fp4, "fp8": quantise_fp8}


def assert_as_defined(rows: np.ndarray, fmt: str) -> None:
    codes, scales = QUANTISE[fmt](rows)
    for row, row_codes, row_scales in zip(rows, codes, scales, strict=True):
        assert (row_codes.tolist(), row_scales.tolist()) == quantised(row, fmt)


@pytest.mark.parametrize("fmt", ["fp4", "fp8"])
def test_gaussian_rows(fmt: str) -> None:
    rng = np.random.default_rng(0)
    assert_as_defined(rng.standard_normal((3, 256)) * np.exp2(rng.uniform(-20, 20, (3, 1))), fmt)


@pytest.mark.parametrize("fmt", ["fp4", "fp8"])
def test_ties_and_their_neighbours(fmt: str) -> None:
    codes = [0, 0.5, 1, 1.5, 2, 3, 4, 6] if fmt == "fp4" else [float(x) for x in E4M3]
    ties = (np.array(codes[:-1]) + np.array(codes[1:])) / 2
    around = np.concatenate([codes, ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf)])
    around = np.concatenate([around, -around])
    blocks = np.resize(around, (-(-len(around) // 31), 31))
    blocks = np.concatenate([blocks, np.full((len(blocks), 1), codes[-1])], axis=1)  # fixes the scale to 1
    rows = np.resize(blocks, (-(-len(blocks) // 8), 8, 32)).reshape(-1, 256)
    assert_as_defined(rows, fmt)


@pytest.mark.parametrize("fmt", ["fp4", "fp8"])
@settings(max_examples=20)
@given(
    st.lists(
        st.one_of(
            st.just(0.0),
            st.just(-0.0),
            st.floats(-448, 448, width=16),
            st.floats(width=32, allow_nan=False, allow_infinity=False),
        ),
        min_size=8,
        max_size=64,
    )
)
def test_any_finite_values(fmt: str, values: list[float]) -> None:
    assert_as_defined(np.resize(np.array(values), (1, 256)), fmt)


def test_powers_of_two_at_the_edge_of_the_range() -> None:
    for amax in (6.0, np.nextafter(6.0, 7), np.nextafter(6.0, 5), 3.0, 2.0**-140, 2.0**-149, 3e38):
        assert_as_defined(np.resize([amax, -amax / 2, amax / 4, 0.0], (1, 256)), "fp4")


def test_zeros_have_scale_zero_and_codes_zero() -> None:
    for quantise in QUANTISE.values():
        codes, scales = quantise(np.full((2, 256), -0.0))
        assert not codes.any()
        assert not scales.any()


def test_dequantised_fp8() -> None:
    codes, scales = quantise_fp8(np.random.default_rng(1).standard_normal((16, 256)))
    assert (dequantise_fp8(codes, scales) == values_of(np.concatenate([codes, scales], axis=1))).all()
