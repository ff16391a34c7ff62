"""One synthetic table as a shard: where its planes lie, and writing them full or sparse."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_server.tables.layout import (
    CODES,
    SCALE_DTYPE,
    SCALES_PER_ROW,
    TableFormat,
    scale_name,
    weight_name,
)
from engram_server.tables.safetensors import TensorInfo, build_header
from engram_server.tables.synth_rows import RowGenerator

_CHUNK_ROWS = 65_536
"""Rows a thread writes at once: 8 MiB of FP4 codes."""
_THREADS_MAX = 4
_BOUNDARY_BYTES = 1 << 31
"""Rows on both sides of every multiple are planted: where 32-bit offsets, signed or not, go wrong."""
_RANDOM_PLANTED = 64


@dataclass(frozen=True)
class SynthTable:
    """A table to write: `path` will hold its codes and scales and nothing else."""

    path: Path
    fmt: TableFormat
    seed: int
    layer: int
    rows: int
    scales_first: bool
    """Scales before codes in the file: the format promises no order, so both occur."""
    residue: int
    """Where the data begins, modulo 8. The format promises no alignment, so an odd one occurs too."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, codes and scales."""
        return CODES[self.fmt][1] + SCALES_PER_ROW

    @property
    def tensor_names(self) -> tuple[str, str]:
        """Tensors of the shard: weight and scale."""
        return weight_name(self.layer), scale_name(self.layer)

    def header(self) -> tuple[bytes, TensorInfo, TensorInfo]:
        """Head of the file, and where the codes and the scales lie."""
        dtype, width = CODES[self.fmt]
        tensors = [
            (weight_name(self.layer), dtype, (self.rows, width)),
            (scale_name(self.layer), SCALE_DTYPE, (self.rows, SCALES_PER_ROW)),
        ]
        if self.scales_first:
            tensors.reverse()
        head, located = build_header(tensors, {"format": "pt"}, self.residue)
        codes, scales = reversed(located) if self.scales_first else located
        return head, codes, scales

    def file_bytes(self) -> int:
        """Size of the finished file."""
        _, codes, scales = self.header()
        return max(codes.end, scales.end)

    def is_written(self) -> bool:
        """The finished file is there: it gets its name only when it is whole."""
        return self.path.is_file() and self.path.stat().st_size == self.file_bytes()

    def write(self, advance: Callable[[int], None]) -> None:
        """Write every row, on a few threads; `advance` is told the bytes written as they are."""
        generator = RowGenerator(self.fmt, self.seed, self.layer)
        head, codes, scales = self.header()
        chunks = range(0, self.rows, _CHUNK_ROWS)
        threads = max(1, min(_THREADS_MAX, os.cpu_count() or 1, len(chunks)))
        stop = threading.Event()

        def work(fd: int, thread: int) -> None:
            code_rows = np.empty((_CHUNK_ROWS, CODES[self.fmt][1]), dtype=np.uint8)
            scale_rows = np.empty((_CHUNK_ROWS, SCALES_PER_ROW), dtype=np.uint8)
            for first in chunks[thread::threads]:
                if stop.is_set():
                    return
                count = min(_CHUNK_ROWS, self.rows - first)
                generator.fill(first, code_rows[:count], scale_rows[:count])
                _write_rows(fd, codes, first, code_rows[:count])
                _write_rows(fd, scales, first, scale_rows[:count])
                advance(count * self.row_bytes)

        with whole_file(self.path) as fd, ThreadPoolExecutor(threads) as pool:
            pwrite_all(fd, head, 0)
            futures = [pool.submit(work, fd, thread) for thread in range(threads)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()  # after an error or Ctrl-C the others end at their next chunk
            for future in futures:
                future.result()

    def plant(self) -> dict[str, list[int] | list[str]]:
        """Write a sparse file of the full size with only some rows in it.

        Returns {"ids": [...], "packed_hex": [codes then scales, ...]}, ids ascending.
        """
        head, codes, scales = self.header()
        ids = self._planted_ids(codes, scales)
        code_rows, scale_rows = RowGenerator(self.fmt, self.seed, self.layer).rows(ids)
        with whole_file(self.path) as fd:
            pwrite_all(fd, head, 0)
            os.ftruncate(fd, self.file_bytes())
            for i, row in enumerate(ids.tolist()):
                _write_rows(fd, codes, row, code_rows[i : i + 1])
                _write_rows(fd, scales, row, scale_rows[i : i + 1])
        packed = np.concatenate([code_rows, scale_rows], axis=1)
        return {"ids": ids.tolist(), "packed_hex": [row.tobytes().hex() for row in packed]}

    def _planted_ids(self, codes: TensorInfo, scales: TensorInfo) -> NDArray[np.int64]:
        """First, last and random rows, and those around every 2^31-byte boundary of file and plane."""
        ids = {0, 1, self.rows // 2, self.rows - 2, self.rows - 1}
        for plane in (codes, scales):
            stride = (plane.end - plane.begin) // self.rows
            for boundary in range(_BOUNDARY_BYTES, self.file_bytes() + 1, _BOUNDARY_BYTES):
                for row in ((boundary - plane.begin) // stride, boundary // stride):
                    ids.update((row - 1, row, row + 1))
        rng = np.random.default_rng([self.seed, self.layer])
        ids.update(rng.integers(0, self.rows, _RANDOM_PLANTED).tolist())
        return np.array(sorted(row for row in ids if 0 <= row < self.rows), dtype=np.int64)


@contextmanager
def whole_file(path: Path) -> Iterator[int]:
    """A descriptor to write a file that appears under its name only when it is complete and on disk."""
    partial = path.with_name(f".{path.name}.partial")
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        yield fd
        os.fsync(fd)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    partial.replace(path)


def pwrite_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`; one pwrite may write less (2 GiB at most, or what a full disk takes)."""
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _write_rows(fd: int, plane: TensorInfo, first: int, rows: NDArray[np.uint8]) -> None:
    offset = plane.begin + first * rows.shape[1]
    pwrite_all(fd, rows.data, offset)
    # Starts write-back at once. Left to the kernel it would begin gigabytes later, and the disk would idle
    # while rows are made.
    os.posix_fadvise(fd, offset, rows.nbytes, os.POSIX_FADV_DONTNEED)
