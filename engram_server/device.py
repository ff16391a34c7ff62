"""Rows converted on a GPU instead of by the native core: `serve --device cuda`.

    batch -> packed rows, gathered into pinned memory -> device -> kernel -> pinned memory -> payload

All of it in buffers made at the start, on streams of its own. torch is imported when this is used and at no other
time. Rows are the same bit for bit, which is checked at the start on rows of every code and scale byte.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engram_kernels import _core
from engram_server.lookup import Block

if TYPE_CHECKING:
    import torch

    from engram_kernels.staging import SideStream

DEVICES = "cpu, cuda or cuda:N"

SLOT_ROWS = 8192
"""Of one pass: 4 MiB of bf16, a unary reply or four chunks of a stream."""
_SLOTS = 2
"""Passes at a time: one gathers or is sent while the other is on the device."""
_VALUES = 256
_BF16_BYTES = 2 * _VALUES
_PACKED_BYTES_MAX = 264


class DeviceError(ValueError):
    """The device asked for cannot convert rows; the text is a sentence for the operator."""


def check_name(device: str) -> str:
    """`device` if it is cpu, cuda or cuda:N. Raises DeviceError."""
    kind, colon, number = device.partition(":")
    if device != "cpu" and (kind != "cuda" or (colon and not number.isdecimal())):
        raise DeviceError(f"the device is {device!r}; expected {DEVICES}")
    return device


def open_converter(device: str, kinds: Collection[_core.RowKind]) -> DeviceConverter | None:
    """What converts rows of these kinds on the device; None for "cpu", where the native core does.

    Raises DeviceError when there is no such device, or it gives other rows than the native core.
    """
    if check_name(device) == "cpu":
        return None
    try:
        import torch
    except ImportError as error:
        raise DeviceError(
            f"--device {device} needs torch: install engram-server[gpu], or serve with --device cpu"
        ) from error
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = torch.device(device)
    if (wanted.index or 0) >= found:
        raise DeviceError(
            f"--device {device}: torch {torch.__version__} finds {found or 'no'} GPU(s) here; look at `nvidia-smi` and "
            "whether torch is a CUDA build, or serve with --device cpu"
        )
    return DeviceConverter(wanted, kinds)


class DeviceConverter:
    """Turns packed rows into bf16 on a device. Safe to share between threads.

    On the CPU, as tests have it, the same steps run without streams and pinned memory.
    """

    def __init__(
        self, device: torch.device, kinds: Collection[_core.RowKind], slot_rows: int = SLOT_ROWS
    ) -> None:
        """Raises DeviceError when the device gives other rows than the native core."""
        self._slot_rows = slot_rows
        self._counting = threading.Lock()
        self._spent_s = 0.0
        self._written_bytes = 0
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(_SLOTS):
            self._slots.put(_Slot.on(device, slot_rows))
        for kind in kinds:
            self._prove(device, kind)

    def payload(self, batch: _core.Batch, block: Block, kind: _core.RowKind, first: int, count: int) -> bytes:
        """As block.payload in bf16, of a block whose rows are all of one kind. Raises RowError."""
        rows_per_item = block.item_bytes // _BF16_BYTES
        step = max(1, self._slot_rows // rows_per_item)
        parts = []
        for begin in range(first, first + count, step):
            items = min(step, first + count - begin)
            with self._slot() as slot:
                packed = slot.packed(kind, items * rows_per_item)
                if block.picks is None:
                    batch.gather_into(begin, items, _core.Format.PACKED, packed)
                else:
                    picked = block.payload(batch, begin, items, _core.Format.PACKED)
                    packed[:] = np.frombuffer(picked, dtype=np.uint8).reshape(packed.shape)
                began = time.perf_counter()
                converted = slot.convert(kind, items * rows_per_item)
                self._count(time.perf_counter() - began, converted.nbytes)
                parts.append(converted.tobytes())
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def converted(self) -> tuple[float, int]:
        """Seconds that passes took, transfers to and from the device included, and the bytes of bf16 they made."""
        with self._counting:
            return self._spent_s, self._written_bytes

    def _count(self, seconds: float, written: int) -> None:
        with self._counting:
            self._spent_s += seconds
            self._written_bytes += written

    @contextmanager
    def _slot(self) -> Iterator[_Slot]:
        slot = self._slots.get()
        try:
            yield slot
        finally:
            self._slots.put(slot)

    def _prove(self, device: torch.device, kind: _core.RowKind) -> None:
        rows = _rows_of_every_code(kind)
        expected = np.empty((len(rows), _BF16_BYTES), dtype=np.uint8)
        _core.convert_rows(kind, _core.Format.BF16, rows, expected)
        found = []
        for first in range(0, len(rows), self._slot_rows):
            part = rows[first : first + self._slot_rows]
            with self._slot() as slot:
                slot.packed(kind, len(part))[:] = part
                found.append(slot.convert(kind, len(part)).copy())
        if np.concatenate(found).tobytes() != expected.tobytes():
            raise DeviceError(
                f"{device} converts {kind.name} rows to other bits than this CPU does: serve with --device cpu, and "
                "report the device and the versions of its driver, torch and Triton"
            )


@dataclass(frozen=True, eq=False)
class _Slot:
    """Buffers for one pass over a device."""

    stream: SideStream
    host_packed: torch.Tensor
    device_packed: torch.Tensor
    device_rows: torch.Tensor
    """bfloat16[rows, 256]"""
    host_rows: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, rows: int) -> _Slot:
        import torch

        from engram_kernels.staging import SideStream, host_buffer

        return cls(
            stream=SideStream(device),
            host_packed=host_buffer(rows * _PACKED_BYTES_MAX, device),
            device_packed=torch.empty(rows * _PACKED_BYTES_MAX, dtype=torch.uint8, device=device),
            device_rows=torch.empty(rows, _VALUES, dtype=torch.bfloat16, device=device),
            host_rows=host_buffer(rows * _BF16_BYTES, device),
        )

    def packed(self, kind: _core.RowKind, rows: int) -> NDArray[np.uint8]:
        """Where to put packed rows: uint8[rows, bytes of one]."""
        width = _core.packed_row_bytes(kind)
        into: NDArray[np.uint8] = self.host_packed.numpy()[: rows * width]
        return into.reshape(rows, width)

    def convert(self, kind: _core.RowKind, rows: int) -> NDArray[np.uint8]:
        """Those rows as bf16, uint8[rows * 512]; a view, good until the slot is used again."""
        from engram_kernels.device import convert_rows

        width = _core.packed_row_bytes(kind)
        packed, converted = self.device_packed[: rows * width], self.device_rows[:rows]
        result = self.host_rows[: rows * _BF16_BYTES]
        with self.stream.current():
            packed.copy_(self.host_packed[: rows * width], non_blocking=True)
            convert_rows(packed.view(rows, width), converted)
            result.copy_(converted.view(packed.dtype).flatten(), non_blocking=True)
        self.stream.finish()
        view: NDArray[np.uint8] = result.numpy()
        return view


def _rows_of_every_code(kind: _core.RowKind) -> NDArray[np.uint8]:
    """Packed rows that have every code byte under every scale byte."""
    code_bytes = _core.packed_row_bytes(kind) - 8
    codes = np.arange(256, dtype=np.uint8).reshape(-1, code_bytes)
    scales = np.arange(256, dtype=np.uint8).repeat(len(codes))
    rows = np.empty((len(scales), code_bytes + 8), dtype=np.uint8)
    rows[:, :code_bytes] = np.tile(codes, (256, 1))
    rows[:, code_bytes:] = scales[:, None]
    return rows
