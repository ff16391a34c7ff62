"""Checksums and places of a store's records, against a byte-at-a-time CRC and known values."""

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import store as oracle

from engram_kernels import _core
from engram_kernels._core import RowKind

# RFC 3720, B.4, and the check value every catalogue of CRCs gives.
KNOWN = {
    b"123456789": 0xE3069283,
    b"": 0,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(reversed(range(32))): 0x113FDB5C,
}


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("data", KNOWN, ids=repr)
def test_crc32c_is_the_published_one(data: bytes, portable: bool) -> None:
    assert _core.crc32c(data, portable=portable) == KNOWN[data] == oracle.crc32c(data)
    assert data == b"" or zlib.crc32(data) != KNOWN[data], "not the other CRC-32"


@given(data=st.binary(max_size=400), cut=st.integers(0, 400), portable=st.booleans())
def test_crc32c_goes_on_from_any_byte(data: bytes, cut: int, portable: bool) -> None:
    crc = _core.crc32c(data[:cut], portable=portable)
    assert _core.crc32c(data[cut:], crc, portable) == oracle.crc32c(data)


@pytest.mark.parametrize("row_bytes", [136, 264])
def test_a_seal_depends_on_every_byte_it_covers(row_bytes: int) -> None:
    rng = random.Random(row_bytes)
    uuid, packed = rng.randbytes(16), rng.randbytes(row_bytes)
    layer, row = 14, 384_016_681
    good = _core.record_seal(uuid, layer, row, packed)
    assert good == oracle.seal(uuid, layer, row, packed)
    for data, again in ((uuid, lambda b: (b, layer, row, packed)), (packed, lambda b: (uuid, layer, row, b))):
        for at in range(len(data)):
            flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            assert _core.record_seal(*again(flipped)) != good
    for bit in range(64):
        assert _core.record_seal(uuid, layer, row ^ 1 << bit, packed) != good
        assert bit >= 32 or _core.record_seal(uuid, layer ^ 1 << bit, row, packed) != good


def test_a_uuid_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes, not 15"):
        _core.record_seal(bytes(15), 1, 0, bytes(136))


@pytest.mark.parametrize(("kind", "per_page", "record"), [(RowKind.FP4, 29, 140), (RowKind.FP8, 15, 268)])
def test_records_fill_pages_and_never_straddle_one(kind: RowKind, per_page: int, record: int) -> None:
    for row in (0, 1, per_page - 1, per_page, per_page + 1, 384_016_681):
        offset = _core.record_offset(kind, row)
        assert divmod(offset, 4096) == (row // per_page, row % per_page * record)
        assert offset // 4096 == (offset + record - 1) // 4096
