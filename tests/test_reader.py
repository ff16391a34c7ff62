"""The native reader: every backend returns the file's bytes, or an error per item."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from engram_kernels import _core

BACKENDS = ("io_uring", "pread", "mmap")
SIZE = 1_000_003  # no multiple of any alignment


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    """A file of random bytes that ends in the middle of a sector."""
    path = tmp_path / "table.bin"
    path.write_bytes(np.random.default_rng(1).bytes(SIZE))
    return path


def read(
    reader: _core.Reader, offsets: list[int], lengths: list[int], file: int = 0
) -> tuple[list[bytes], list[int]]:
    """Read (offset, length) pairs of one file; the bytes and the error of each."""
    out = np.full((len(offsets), max(lengths)), 0xEE, dtype=np.uint8)
    errors = reader.read(
        np.full(len(offsets), file, dtype=np.uint32),
        np.asarray(offsets, dtype=np.uint64),
        np.asarray(lengths, dtype=np.uint32),
        out,
    )
    return [out[i, :length].tobytes() for i, length in enumerate(lengths)], errors.tolist()


def expected(path: Path, offsets: list[int], lengths: list[int]) -> list[bytes]:
    """The same by os.pread."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return [os.pread(fd, length, offset) for offset, length in zip(offsets, lengths, strict=True)]
    finally:
        os.close(fd)


@pytest.mark.parametrize("depth", [1, 3, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reads_equal_pread_at_any_offset_and_length(data_file: Path, backend: str, depth: int) -> None:
    rng = np.random.default_rng(depth)
    lengths = rng.integers(1, 4097, size=500).tolist()
    offsets = [int(rng.integers(0, SIZE - length + 1)) for length in lengths]
    # The ends of the file, and every way to sit at a sector boundary.
    edges = [(0, 1), (0, 4096), (SIZE - 1, 1), (SIZE - 4096, 4096), (511, 2), (512, 512), (4095, 4096)]
    offsets += [offset for offset, _ in edges]
    lengths += [length for _, length in edges]
    reader = _core.Reader([str(data_file)], backend=backend, depth=depth)
    got, errors = read(reader, offsets, lengths)
    assert errors == [0] * len(offsets)
    assert got == expected(data_file, offsets, lengths)
    reader.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_items_name_their_file(tmp_path: Path, backend: str) -> None:
    paths = [tmp_path / f"{i}.bin" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * 10_000)
    reader = _core.Reader([str(path) for path in paths], backend=backend)
    out = np.zeros((3, 8), dtype=np.uint8)
    numbers = np.asarray([2, 0, 1], dtype=np.uint32)
    offsets = np.full(3, 5000, dtype=np.uint64)
    errors = reader.read(numbers, offsets, np.full(3, 8, dtype=np.uint32), out)
    assert errors.tolist() == [0, 0, 0]
    assert out[:, 0].tolist() == [2, 0, 1]
    reader.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_items_that_pass_the_end_of_the_file_fail(data_file: Path, backend: str) -> None:
    reader = _core.Reader([str(data_file)], backend=backend)
    offsets, lengths = [SIZE - 100, SIZE - 99, SIZE, SIZE + 10_000, 0], [100, 100, 1, 128, 128]
    got, errors = read(reader, offsets, lengths)
    truncated = _core.ERROR_TRUNCATED
    assert errors == [0, truncated, truncated, truncated, 0]
    assert got[0] == expected(data_file, [SIZE - 100], [100])[0]
    assert got[4] == expected(data_file, [0], [128])[0]
    assert "truncated" in _core.error_text(truncated)
    reader.close()


@pytest.mark.parametrize("new_size", [500_000, 499_712, 8192])  # inside a sector, at a page boundary
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_truncated_while_open_gives_errors_never_zeros(
    data_file: Path, backend: str, new_size: int
) -> None:
    reader = _core.Reader([str(data_file)], backend=backend)
    offsets = [0, new_size - 128, new_size - 127, new_size, new_size + 300, SIZE - 128]
    lengths = [128] * len(offsets)
    before, errors = read(reader, offsets, lengths)
    assert errors == [0] * len(offsets)
    os.truncate(data_file, new_size)
    after, errors = read(reader, offsets, lengths)
    truncated = _core.ERROR_TRUNCATED
    assert errors == [0, 0, truncated, truncated, truncated, truncated]
    assert after[:2] == before[:2]
    reader.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_and_an_empty_file_are_no_errors(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "empty"
    path.touch()
    reader = _core.Reader([str(path)], backend=backend)
    none = np.zeros(0, dtype=np.uint32)
    assert reader.read(none, none.astype(np.uint64), none, np.zeros((0, 1), np.uint8)).size == 0
    assert read(reader, [0], [1])[1] == [_core.ERROR_TRUNCATED]
    reader.close()


def test_what_a_reader_refuses(data_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown backend 'libaio'; known: auto, io_uring, pread, mmap"):
        _core.Reader([str(data_file)], backend="libaio")
    with pytest.raises(FileNotFoundError, match=r"cannot open .*absent"):
        _core.Reader([str(tmp_path / "absent")])
    with pytest.raises(IsADirectoryError, match="not a regular file"):
        _core.Reader([str(tmp_path)])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"pipe is not a regular file"):
        _core.Reader([str(tmp_path / "pipe")])
    with pytest.raises(ValueError, match="depth"):
        _core.Reader([str(data_file)], depth=0)
    reader = _core.Reader([str(data_file)])
    with pytest.raises(ValueError, match="item 0: file 1, length 8, offset 0 is out of range"):
        read(reader, [0], [8], file=1)
    with pytest.raises(ValueError, match="lengths are 1 to 4096"):
        read(reader, [0], [4097])
    alignment = reader.files[0].alignment_bytes
    for offset in (2**63 - 1, 2**63, 2**64 - 1):
        with pytest.raises(ValueError, match=f"offset {offset} is out of range"):
            read(reader, [offset], [1])
    assert read(reader, [2**63 - 2**15], [8])[1] == [_core.ERROR_TRUNCATED]
    assert reader.files[0].alignment_bytes == alignment, "an offset no file has says nothing of alignment"
    reader.close()
    with pytest.raises(RuntimeError, match="closed"):
        read(reader, [0], [8])


@pytest.mark.parametrize("backend", BACKENDS)
def test_closing_while_threads_read_leaves_none_waiting(data_file: Path, backend: str) -> None:
    for _ in range(5):
        reader = _core.Reader([str(data_file)], backend=backend, depth=4)

        refused: list[str] = []

        def work(reader: _core.Reader = reader, refused: list[str] = refused) -> None:
            try:
                while read(reader, [700], [8])[1] == [0]:
                    pass
            except RuntimeError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(12)]
        for thread in threads:
            thread.start()
        reader.close()
        for thread in threads:
            thread.join(30)
        assert refused == ["the reader is closed"] * 12


def test_a_reader_says_how_it_reads(data_file: Path) -> None:
    reader = _core.Reader([str(data_file)], backend="auto", depth=7)
    assert (reader.backend, reader.fallback, reader.depth) == ("io_uring", False, 7)
    assert reader.registered == "files+buffers"
    (info,) = reader.files
    memory, offset = _core.statx_dioalign(str(data_file))
    assert info.direct
    assert info.alignment_bytes == max(memory, offset)
    assert (info.path, info.size_bytes) == (str(data_file), SIZE)
    read(reader, [0, 600], [10, 20])
    counters = reader.counters()
    assert counters["needed_bytes"] == 30 + 1  # and the byte that proved the ring
    assert counters["reads"] == 3
    assert counters["errors"] == 0
    reader.close()


def test_a_reader_notices_when_a_file_changes_under_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.write_bytes(bytes(10_000))
    reader = _core.Reader([str(first), str(second)])
    assert reader.change() == ""
    # Replaced by name: the file that was opened is still as it was.
    (tmp_path / "new").write_bytes(b"x" * 10_000)
    (tmp_path / "new").rename(first)
    assert reader.change() == ""
    with second.open("r+b") as file:
        file.write(b"y")
    assert reader.change() == f"{second} was written to since it was opened"
    os.truncate(second, 9_999)
    assert reader.change() == f"{second} had 10000 bytes when it was opened and has 9999 now"
    reader.close()
