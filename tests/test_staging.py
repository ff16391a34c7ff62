"""Between the host and a device: turns of pinned buffers and memory told to CUDA, seen without a GPU. tests/gpu/ has
them on one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from engram_kernels import staging
from engram_kernels.staging import SideStream, Uploader

CPU = torch.device("cpu")


class LazyStream:
    """A stream that copies nothing before somebody waits for it, as a GPU that is far behind."""

    def __init__(self) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def mark(self) -> Event:
        return Event(self, len(self.waiting))


class Event:
    def __init__(self, stream: LazyStream, behind: int) -> None:
        self._stream, self._behind = stream, behind

    def synchronize(self) -> None:
        for target, source in self._stream.waiting[: self._behind]:
            torch.Tensor.copy_(target, source)
        # What was copied stays in the list, so that events keep their places; copying again must change nothing.
        self._stream.waiting[: self._behind] = [(torch.empty(0), torch.empty(0))] * self._behind


class Target(torch.Tensor):
    """A tensor on that device."""

    stream: LazyStream

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # type: ignore[override]
        assert non_blocking
        self.stream.waiting.append((self.as_subclass(torch.Tensor), source))
        return self


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 2001, 7_321])
def test_a_buffer_is_filled_again_only_after_its_copy(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "host_buffer", lambda size, device: torch.zeros(size, dtype=torch.uint8))
    stream = LazyStream()
    Target.stream = stream
    uploader = Uploader(torch.device("cuda"), stream, chunk_bytes=1000)  # type: ignore[arg-type]
    for seed in range(3):  # the next upload must not write over what this one has not copied yet
        source = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        memory = torch.zeros(size, dtype=torch.uint8)
        uploader.upload(source.copy(), memory.as_subclass(Target))
        last = stream.mark()
        following = torch.zeros(2500, dtype=torch.uint8)
        uploader.upload(np.full(2500, 7, dtype=np.uint8), following.as_subclass(Target))
        last.synchronize()
        np.testing.assert_array_equal(memory.numpy(), source)


def test_on_the_cpu_a_copy_is_done_when_it_returns() -> None:
    stream = SideStream(CPU)
    source, target = np.arange(200, dtype=np.uint8), torch.zeros(200, dtype=torch.uint8)
    with stream.current():
        Uploader(CPU, stream).upload(source, target)
    np.testing.assert_array_equal(target.numpy(), source)
    assert stream.mark() is None
    stream.finish()
    assert not staging.host_buffer(16, CPU).is_pinned()


# ------------------------------------------------------------------------------------------- memory told to CUDA


class Runtime:
    """What `torch.cuda.cudart()` gives, and what was told to it."""

    def __init__(self) -> None:
        self.answer = 0
        self.known: set[int] = set()
        self.tried = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.tried += 1
        if self.answer == 0:
            assert (size, flags) == (1 << 20, 1)
            assert address not in self.known, "the driver refuses what it knows already"
            self.known.add(address)
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.known.remove(address)
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    stand_in = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stand_in)
    yield stand_in
    assert not stand_in.known


def test_memory_is_told_once_and_taken_back_before_it_goes(runtime: Runtime) -> None:
    memory = np.zeros(1 << 20, dtype=np.uint8)
    users = [staging.registered(memory, CPU) for _ in range(3)]
    assert all(user.known for user in users)
    assert runtime.known == {memory.ctypes.data}
    released: list[bool] = []
    weakref.finalize(memory, lambda: released.append(not runtime.known))
    del memory
    assert not released
    users.clear()
    assert released == [True], "the driver had forgotten it by then"


def test_memory_that_cuda_does_not_take_is_said_once_and_its_error_is_consumed(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched: list[Any] = []

    def launch(*arguments: Any, **options: Any) -> None:
        launched.append(options)
        raise RuntimeError("CUDA error: the one that cudaHostRegister left behind")

    monkeypatch.setattr(torch, "zeros", launch)
    runtime.answer = 2
    memory = np.zeros(1 << 20, dtype=np.uint8)
    kept = [staging.registered(memory, CPU) for _ in range(3)]
    assert not any(user.known for user in kept)
    assert (runtime.tried, len(launched)) == (1, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA does not take 1048576 bytes of shared memory (cudaHostRegister: error 2): rows go to the GPU through "
        "pinned buffers, one more copy"
    ]
