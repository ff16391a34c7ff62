"""Packed stores by the letter of docs/format.md: plain Python integers and struct, one byte at a time.

Shares no code with the product.
"""

import hashlib
import json
import struct
from typing import Any
from uuid import UUID

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


MAGIC = b"\x89ENGRAM\n"
PER_PAGE = {"fp4": 29, "fp8": 15}


def header(file: bytes) -> dict[str, Any]:
    """The JSON of a store's header page, after every check that the format asks for."""
    page = file[:PAGE]
    magic, version, length = struct.unpack_from("<8sII", page)
    assert (magic, version) == (MAGIC, 1)
    assert length <= 4076
    assert not any(page[16 + length : 4092])
    assert struct.unpack_from("<I", page, 4092) == (crc32c(page[:4092]),)
    return json.loads(page[16 : 16 + length])


def read(file: bytes) -> dict[int, list[bytes]]:
    """Layer -> all packed rows of a whole store, every byte of it checked."""
    facts = header(file)
    uuid, width, per_page = UUID(facts["uuid"]).bytes, ROW_BYTES[facts["kind"]], PER_PAGE[facts["kind"]]
    tables: dict[int, list[bytes]] = {}
    at = PAGE
    for table in facts["tables"]:
        assert table["first_page"] * PAGE == at
        rows = []
        for first in range(0, table["rows"], per_page):
            page, place = file[at : at + PAGE], 0
            assert len(page) == PAGE
            for row in range(first, min(first + per_page, table["rows"])):
                packed = page[place : place + width]
                assert struct.unpack_from("<I", page, place + width) == (
                    seal(uuid, table["layer"], row, packed),
                )
                rows.append(packed)
                place += width + 4
            assert not any(page[place:])
            at += PAGE
        tables[table["layer"]] = rows
    assert at == len(file)
    return tables


def pages(uuid: bytes, layer: int, kind: str, rows: list[bytes], first: int = 0) -> bytes:
    """The pages of packed rows first ..., the first of a page."""
    per_page = PER_PAGE[kind]
    result = b""
    for begin in range(0, len(rows), per_page):
        page = b""
        for row, packed in enumerate(rows[begin : begin + per_page], first + begin):
            page += packed + struct.pack("<I", seal(uuid, layer, row, packed))
        result += page.ljust(PAGE, b"\0")
    return result


def header_page(facts: dict[str, Any], version: int = 1, magic: bytes = MAGIC) -> bytes:
    """A header page of any JSON, with a checksum that fits."""
    text = json.dumps(facts).encode()
    body = (struct.pack("<8sII", magic, version, len(text)) + text).ljust(4092, b"\0")
    return body + struct.pack("<I", crc32c(body))


def table_digest(layer: int, rows: list[bytes]) -> str:
    """The digest of a table's rows."""
    sampled = b"".join(rows[i * len(rows) // 4096] for i in range(4096))
    return hashlib.sha256(struct.pack("<IQI", layer, len(rows), len(rows[0])) + sampled).hexdigest()
