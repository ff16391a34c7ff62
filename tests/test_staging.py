"""Pinned buffers between the host and a device: their turns, seen without a GPU. tests/gpu/ has them on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from engram_kernels import staging
from engram_kernels.staging import SideStream, Uploader


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
    cpu = torch.device("cpu")
    stream = SideStream(cpu)
    source, target = np.arange(200, dtype=np.uint8), torch.zeros(200, dtype=torch.uint8)
    with stream.current():
        Uploader(cpu, stream).upload(source, target)
    np.testing.assert_array_equal(target.numpy(), source)
    assert stream.mark() is None
    stream.finish()
    assert not staging.host_buffer(16, cpu).is_pinned()
