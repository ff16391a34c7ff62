"""Sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "512 MiB" or "0". Raises ValueError."""
    match = re.fullmatch(r"(\d{1,15}) ?([KMGT]iB|)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 2GiB, 512MiB or 0")
    return int(match[1]) * _UNITS[match[2]]


def size_text(size: int) -> str:
    """Bytes in the largest unit that leaves a number of 1 or more."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:,.6g} {unit}"
    return f"{size} B"
