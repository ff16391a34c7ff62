"""Two small tables of random rows for the native engine, and what it must return of them."""

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_kernels import _core

ROWS = {1: 5_003, 14: 4_001}
CODE_BYTES = {_core.RowKind.FP4: 128, _core.RowKind.FP8: 256}
PACKED = _core.Format.PACKED
BACKENDS = ("io_uring", "pread", "mmap")


class Tables:
    """Random planes of two layers in one file, and the rows they hold."""

    def __init__(self, path: Path, kind: _core.RowKind) -> None:
        rng = np.random.default_rng(7)
        self.path, self.kind = path, kind
        self.rows: dict[int, NDArray[np.uint8]] = {}
        self.native = []
        content, at = [rng.bytes(333)], 333
        for layer, count in ROWS.items():
            codes = rng.integers(0, 256, (count, CODE_BYTES[kind]), dtype=np.uint8)
            scales = rng.integers(0, 256, (count, 8), dtype=np.uint8)
            planes = []
            for plane in (codes, scales):
                planes.append(_core.Plane(0, at, plane.shape[1]))
                content.append(plane.tobytes())
                at += plane.size
            self.native.append(_core.Table(layer, count, kind, [_core.Planes(*planes)]))
            self.rows[layer] = np.concatenate([codes, scales], axis=1)
        path.write_bytes(b"".join(content))

    def expected(self, layer: int, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Rows of ids, zeros for -1."""
        rows = self.rows[layer][ids]
        rows[ids < 0] = 0
        return rows

    def open(self, backend: str = "auto", **options: int) -> _core.Engine:
        """An engine over these tables."""
        reading = {name: options.pop(name) for name in ("depth", "threads", "bulk_depth") if name in options}
        reader = _core.Reader([str(self.path)], backend=backend, **reading)
        return _core.Engine(reader, self.native, **options)


def random_ids(layer: int, shape: tuple[int, ...], seed: int = 0) -> NDArray[np.int64]:
    """Ids with duplicates, zero rows, and the table's first and last row."""
    ids = np.random.default_rng(seed).integers(-1, ROWS[layer], shape)
    flat = ids.reshape(-1)
    if flat.size > 4:
        flat[:4] = [0, ROWS[layer] - 1, -1, flat[4]]
    return ids


def drain(engine: _core.Engine) -> None:
    """Wait until the io threads have let go of the last batch."""
    deadline = time.monotonic() + 30
    while engine.in_flight_bytes() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert engine.in_flight_bytes() == 0
