"""Rows of a checkpoint the plain way: one's own few lines of header reading, and os.pread.

Shares no code with the product. Slow and obvious on purpose.
"""

import json
import os
import struct
from pathlib import Path

import numpy as np


class RowOracle:
    """Packed rows (codes, then 8 scale bytes) of every Engram table in a directory of safetensors files."""

    def __init__(self, path: Path) -> None:
        self._planes = {}  # (layer, "weight" or "scale") -> (file, first byte, bytes per row, rows)
        for file in sorted(Path(path).glob("*.safetensors")):
            raw = file.open("rb")
            (length,) = struct.unpack("<Q", raw.read(8))
            header = json.loads(raw.read(length))
            raw.close()
            for name, entry in header.items():
                words = name.split(".")
                if words[0] == "layers" and words[2:4] == ["engram", "embed"]:
                    rows, width = entry["shape"]
                    begin = 8 + length + entry["data_offsets"][0]
                    self._planes[int(words[1]), words[4]] = (file, begin, width, rows)

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self._planes})

    def rows(self, layer: int) -> int:
        return self._planes[layer, "weight"][3]

    def row_bytes(self, layer: int) -> int:
        return self._planes[layer, "weight"][2] + self._planes[layer, "scale"][2]

    def packed(self, layer: int, ids: object) -> np.ndarray:
        """Ids of any shape -> uint8[..., row_bytes]; id -1 is a row of zero bytes."""
        wanted = np.asarray(ids, dtype=np.int64)
        distinct, inverse = np.unique(wanted, return_inverse=True)
        parts = []
        for part in ("weight", "scale"):
            file, begin, width, rows = self._planes[layer, part]
            fd = os.open(file, os.O_RDONLY)
            found = []
            for row in distinct.tolist():
                assert -1 <= row < rows, f"layer {layer} has {rows} rows; asked for {row}"
                data = os.pread(fd, width, begin + row * width) if row >= 0 else bytes(width)
                assert len(data) == width
                found.append(np.frombuffer(data, dtype=np.uint8))
            os.close(fd)
            parts.append(np.array(found, dtype=np.uint8).reshape(len(distinct), width))
        return np.concatenate(parts, axis=1)[inverse.reshape(-1)].reshape(*wanted.shape, -1)
