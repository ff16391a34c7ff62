"""unique_ids: distinct ids of a batch in order of first appearance, with the way back."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engram_kernels._core import unique_ids


def oracle(ids: list[int]) -> tuple[list[int], list[int]]:
    numbers: dict[int, int] = {}
    inverse = [-1 if row == -1 else numbers.setdefault(row, len(numbers)) for row in ids]
    return list(numbers), inverse


def check(ids: list[int]) -> None:
    distinct, inverse = unique_ids(np.asarray(ids, dtype=np.int64))
    assert distinct.dtype == np.int64
    assert inverse.dtype == np.int32
    assert (distinct.tolist(), inverse.tolist()) == oracle(ids)


@given(st.lists(st.one_of(st.integers(-1, 20), st.integers(-(2**63), 2**63 - 1)), max_size=300))
@example([])
@example([-1, -1])
@example([0, -1, 0])
@example([-(2**63), 2**63 - 1, -2, -(2**63)])
def test_small_batches(ids: list[int]) -> None:
    check(ids)


@pytest.mark.parametrize("count", [31, 32, 33, 64, 65, 2047, 2048, 2049, 2050, 8192, 8193, 40_000])
def test_every_growth_of_the_table_keeps_what_was_found(count: int) -> None:
    ids = [row * 7919 for row in range(count)]
    check([*ids, -1, *reversed(ids)])


@pytest.mark.parametrize("stride", [1, 8, 4096, 2**32, 2**50])
def test_regular_ids(stride: int) -> None:
    check([(i % 5000) * stride for i in range(12_000)])


def test_random_duplicates() -> None:
    rng = np.random.default_rng(0)
    check(rng.integers(-1, 30_000, size=100_000).tolist())


def test_another_dtype_is_refused() -> None:
    with pytest.raises(TypeError):
        unique_ids(np.zeros(3, dtype=np.int32))


def test_only_a_flat_contiguous_array_is_taken() -> None:
    for ids in (np.zeros((3, 1), dtype=np.int64), np.zeros(6, dtype=np.int64)[::2]):
        with pytest.raises(TypeError):
            unique_ids(ids)
