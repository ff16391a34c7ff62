"""What `engram_kernels.device.convert_rows` must do, on whatever device and by whatever backend: one oracle for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracles import dequant as oracle

from engram_kernels.device import Backend, convert_rows

Rows = NDArray[np.uint8]
GUARD = 0xA5


@dataclass(frozen=True)
class Way:
    """Where and by what rows are converted."""

    device: str
    backend: Backend

    def convert(self, fmt: str, packed: torch.Tensor, out: torch.Tensor, **options: Any) -> Rows:
        """Convert into `out`, which the way's device has; its bytes [..., bytes of a row]."""
        convert_rows(packed, out, backend=self.backend, **options)
        return as_bytes(out)

    def empty(self, fmt: str, *lead: int) -> torch.Tensor:
        """Rows of guard bytes."""
        width, dtype = (512, torch.bfloat16) if fmt == "bf16" else (264, torch.uint8)
        guard = torch.full((*lead, width), GUARD, dtype=torch.uint8)
        return guard.view(dtype).to(self.device)

    def tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self.device)


def as_bytes(rows: torch.Tensor) -> Rows:
    found: Rows = rows.cpu().contiguous().view(torch.uint8).numpy()
    return found


def random_rows(kind: str, count: int, seed: int = 7) -> Rows:
    shape = (count, oracle.PACKED_BYTES[kind])
    return np.random.default_rng(seed).integers(0, 256, size=shape, dtype=np.uint8)


def rows_of_every_code(kind: str) -> Rows:
    """All 256 code bytes under each of the 256 scale bytes."""
    codes = np.arange(256, dtype=np.uint8).reshape(-1, oracle.CODE_BYTES[kind])
    rows = [np.concatenate([part, np.full(8, scale, np.uint8)]) for scale in range(256) for part in codes]
    return np.stack(rows)


def expected_at(kind: str, fmt: str, packed: Rows, index: NDArray[Any]) -> Rows:
    """Converted rows by number, -1 = zeros: bytes [..., bytes of a row]."""
    converted = oracle.convert(kind, fmt, packed)
    zero = np.zeros((1, converted.shape[1]), dtype=np.uint8)
    found: Rows = np.concatenate([converted, zero])[index]  # -1 takes the last row
    return found


# ------------------------------------------------------------------------------------------------- the statements

every_format = pytest.mark.parametrize(
    ("kind", "fmt"), [("fp4", "bf16"), ("fp8", "bf16"), ("fp4", "packed_fp8"), ("fp8", "packed_fp8")]
)


class ConvertRowsTests:
    """Every backend of a device; the file that inherits them names it."""

    device: str

    @pytest.fixture(params=["triton", "torch", "auto"])
    def way(self, request: pytest.FixtureRequest) -> Way:
        return Way(self.device, request.param)

    @every_format
    def test_every_code_under_every_scale(self, way: Way, kind: str, fmt: str) -> None:
        packed = rows_of_every_code(kind)
        found = way.convert(fmt, way.tensor(packed), way.empty(fmt, len(packed)))
        np.testing.assert_array_equal(found, oracle.convert(kind, fmt, packed))

    @every_format
    def test_each_block_takes_its_own_scale(self, way: Way, kind: str, fmt: str) -> None:
        packed = random_rows(kind, 67)
        found = way.convert(fmt, way.tensor(packed), way.empty(fmt, 67))
        np.testing.assert_array_equal(found, oracle.convert(kind, fmt, packed))

    @every_format
    @pytest.mark.parametrize("dtype", [np.int32, np.int64])
    def test_rows_by_number_and_padding(self, way: Way, kind: str, fmt: str, dtype: type) -> None:
        """Rows by number, repeated and missing ones; then padding."""
        packed = random_rows(kind, 13)
        index = np.random.default_rng(3).integers(-1, 13, size=(9, 24)).astype(dtype)
        found = way.convert(fmt, way.tensor(packed), way.empty(fmt, 11, 24), index=way.tensor(index))
        np.testing.assert_array_equal(found[:9], expected_at(kind, fmt, packed, index))
        assert not found[9:].any()
        flat = index.reshape(-1)
        found = way.convert(fmt, way.tensor(packed), way.empty(fmt, 220), index=way.tensor(flat))
        np.testing.assert_array_equal(found[:216], expected_at(kind, fmt, packed, flat))
        assert not found[216:].any()

    @every_format
    def test_padding_without_an_index(self, way: Way, kind: str, fmt: str) -> None:
        packed = random_rows(kind, 6)
        found = way.convert(fmt, way.tensor(packed.reshape(2, 3, -1)), way.empty(fmt, 5, 3))
        np.testing.assert_array_equal(found[:2].reshape(6, -1), oracle.convert(kind, fmt, packed))
        assert not found[2:].any()

    @every_format
    def test_a_number_that_is_no_row_gives_nan(self, way: Way, kind: str, fmt: str) -> None:
        """Never another row, nor zeros: an index from a bug must not look like a row."""
        index = np.array([0, 3, -2, 2, 2**31 - 1, -1], dtype=np.int64)
        packed = random_rows(kind, 3)
        packed[:, -8:] = 127
        found = way.convert(fmt, way.tensor(packed), way.empty(fmt, 6), index=way.tensor(index))
        for row in (1, 2, 4):
            if fmt == "bf16":
                assert set(found[row].view("<u2")) == {0x7FC0}
            else:
                assert set(found[row, :256]) == {0x7F}
        good = np.where(np.isin(index, (3, -2, 2**31 - 1)), -1, index)
        keep = [0, 3, 5]
        np.testing.assert_array_equal(found[keep], expected_at(kind, fmt, packed, good)[keep])

    @every_format
    @pytest.mark.parametrize("shift", [24, 5])
    def test_strided_views(self, way: Way, kind: str, fmt: str, shift: int) -> None:
        """Rows inside wider rows, a slice of the columns, a transposed index: not a byte outside is touched.

        shift: bytes before the first row, 24 keeps rows at multiples of 8 bytes and 5 does not.
        """
        width, end = oracle.PACKED_BYTES[kind], shift + oracle.PACKED_BYTES[kind]
        wide = np.zeros((5, 6, width + 40), dtype=np.uint8)
        wide[:, 1:5, shift:end] = random_rows(kind, 20).reshape(5, 4, width)
        packed = way.tensor(wide)[:, 1:5, shift:end]
        memory = way.empty(fmt, 9, 30)
        out = memory[::2, 3:27]
        index = np.random.default_rng(5).integers(-1, 20, size=(24, 5))
        rows = wide[:, 1:5, shift:end].reshape(20, width)
        found = way.convert(fmt, packed, out, index=way.tensor(index).t())
        np.testing.assert_array_equal(found, expected_at(kind, fmt, rows, index.T))
        untouched = as_bytes(memory).copy()
        untouched[::2, 3:27] = GUARD
        assert set(untouched.flat) == {GUARD}
        straight = way.empty(fmt, 5, 8)[:, 2:6]
        found = way.convert(fmt, packed, straight)
        np.testing.assert_array_equal(found.reshape(20, -1), oracle.convert(kind, fmt, rows))

    @pytest.mark.parametrize("kind", ["fp4", "fp8"])
    def test_scale_bytes_by_the_rules_of_others(self, way: Way, kind: str) -> None:
        """SGLang takes byte 0 for 2^-127, and byte 255 for NaN on the CPU; the others mean the same to everybody."""
        packed = rows_of_every_code(kind)
        codes, scales = oracle.split(kind, packed)
        ordinary = oracle.convert(kind, "bf16", packed).view("<u2")
        at_zero = oracle.bf16_of_codes(kind, 2.0**-127)[codes]
        for rule, at_255 in (("sglang", ordinary), ("sglang-cpu", np.full_like(ordinary, oracle.BF16_NAN))):
            expected = np.where(scales[:, :1] == 0, at_zero, np.where(scales[:, :1] == 255, at_255, ordinary))
            out = way.empty("bf16", len(packed))
            found = way.convert("bf16", way.tensor(packed), out, scale_rule=rule).view("<u2")
            np.testing.assert_array_equal(found, expected)

    @every_format
    def test_nothing_to_do(self, way: Way, kind: str, fmt: str) -> None:
        empty = np.zeros((0, oracle.PACKED_BYTES[kind]), dtype=np.uint8)
        assert way.convert(fmt, way.tensor(empty), way.empty(fmt, 0)).size == 0
        missing = way.tensor(np.full((2, 3), -1, dtype=np.int32))
        found = way.convert(fmt, way.tensor(empty), way.empty(fmt, 4, 3), index=missing)
        assert found.shape[:2] == (4, 3)
        assert not found.any()
