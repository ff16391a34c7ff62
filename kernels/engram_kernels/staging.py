"""Bytes between the host and a device: pinned memory made once or memory told to the driver, a stream beside the
model's. Needs torch.

On the CPU the same calls copy plainly, and are done when they return; so all that uses them runs without a GPU.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
"""Of one pinned buffer: a copy of this size takes PCIe 4.0 0.2 ms and hides what it costs to start."""
_CHUNKS = 2
"""One is filled while the other is copied from."""


def host_buffer(size: int, device: torch.device) -> Tensor:
    """uint8[size] on the host, pinned if `device` is a GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


class SideStream:
    """A CUDA stream of its own; on the CPU, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def current(self) -> Iterator[None]:
        """In a `with`, the work of this thread goes to the stream."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def mark(self) -> Any:
        """An event behind all work given to the stream so far; None on the CPU."""
        if self._stream is None:
            return None
        # Waited for by sleeping, not spinning: the core belongs to the model's own thread.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def finish(self) -> None:
        """Wait, without the GIL, until all work given to the stream is done."""
        if (event := self.mark()) is not None:
            event.synchronize()


class Uploader:
    """Host memory to a device, piece by piece through pinned buffers. For one thread at a time."""

    def __init__(self, device: torch.device, stream: SideStream, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._stream = stream
        self._chunk_bytes = chunk_bytes
        pinned = device.type == "cuda"
        self._buffers = [host_buffer(chunk_bytes, device) for _ in range(_CHUNKS)] if pinned else []
        self._copied: list[Any] = [None] * len(self._buffers)
        self._turn = 0

    def upload(self, source: NDArray[np.uint8], target: Tensor) -> None:
        """Copy uint8[n] into `target`, uint8[n] on the device, in the order of the stream.

        `source` is free again on return; `target` has the bytes when the stream has come so far.
        """
        if not self._buffers:
            target.copy_(torch.from_numpy(source))
            return
        with self._stream.current():
            for first in range(0, len(source), self._chunk_bytes):
                piece = source[first : first + self._chunk_bytes]
                buffer = self._free_buffer()[: len(piece)]
                buffer.numpy()[:] = piece
                target[first : first + len(piece)].copy_(buffer, non_blocking=True)
                self._copied[self._turn] = self._stream.mark()
                self._turn = (self._turn + 1) % len(self._buffers)

    def _free_buffer(self) -> Tensor:
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()
        return self._buffers[self._turn]


_HOST_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: known to every device's context."""


class Registration:
    """Host memory that the GPU's driver knows while this lives: copies from it need no pinned buffer between."""

    def __init__(self, memory: NDArray[np.uint8], device: torch.device) -> None:
        self.memory = memory
        register = torch.cuda.cudart().cudaHostRegister
        code = int(register(memory.ctypes.data, memory.nbytes, _HOST_REGISTER_PORTABLE))
        self.known = code == 0
        """Whether the driver took it; if not, copy from it as from any other memory."""
        if self.known:
            # It holds the memory, which is therefore mapped until the driver has forgotten it.
            weakref.finalize(self, _unregister, memory).atexit = False
            return
        _log.warning(
            "CUDA does not take %d bytes of shared memory (cudaHostRegister: error %d): rows go to the GPU through "
            "pinned buffers, one more copy",
            memory.nbytes,
            code,
        )
        # The driver keeps an error for the thread's next launch to report: this one, so that no other has to.
        with suppress(RuntimeError):
            torch.zeros(1, device=device)


_registrations: weakref.WeakValueDictionary[int, Registration] = weakref.WeakValueDictionary()
"""By address: the driver takes the same memory only once."""
_registrations_lock = threading.Lock()


def registered(memory: NDArray[np.uint8], device: torch.device) -> Registration:
    """The registration of `memory`, for as long as somebody keeps it. device: the current one, which copies from it."""
    address = memory.ctypes.data
    with _registrations_lock:
        if (known := _registrations.get(address)) is None:
            known = _registrations[address] = Registration(memory, device)
        return known


def _unregister(memory: NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
