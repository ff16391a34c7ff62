"""Packed stores by the letter of docs/format.md: plain Python integers and struct, one byte at a time.

Shares no code with the product.
"""

import struct

PAGE = 4096
ROW_BYTES = {"fp4": 136, "fp8": 264}


def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), reflected, initial value and final xor 0xFFFFFFFF."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def seal(uuid: bytes, layer: int, row: int, packed: bytes) -> int:
    """The checksum of one record."""
    return crc32c(uuid + struct.pack("<IQ", layer, row) + packed)
