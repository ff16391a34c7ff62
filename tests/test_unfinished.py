"""The last moment of a file that is being written: whatever happens in it, what is whole stays whole."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from oracles.rows import RowOracle

from engram_kernels import _core
from engram_server.convert import ConvertOptions, convert
from engram_server.convert import partial as partial_module
from engram_server.hotset import HotGroups, read_hot_set, write_hot_set
from engram_server.memory import TableState
from engram_server.tables.synth import synthesise

TABLES = {1: TableState(1, 1000, _core.RowKind.FP4, 136, b"\1" * 32)}
RESUME = ConvertOptions(resume=True)


def groups(count: int) -> HotGroups:
    return HotGroups(1, np.full(count, 8, np.uint8), np.full(count, 255, np.uint8), np.ones((count, 8), int))


@pytest.fixture
def finished_before_lock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Path], None]:
    """Makes another process rename `partial` to `path` between our open and our lock."""

    def prepare(partial: Path, path: Path) -> None:
        flock = fcntl.flock

        def late(fd: int, how: int) -> None:
            partial.replace(path)
            flock(fd, how)

        monkeypatch.setattr(fcntl, "flock", late)

    return prepare


def test_a_hot_set_that_another_process_has_just_finished_is_not_written_to(
    tmp_path: Path, finished_before_lock: Callable[[Path, Path], None]
) -> None:
    path, partial = tmp_path / "hot.set", tmp_path / "hot.set.partial"
    write_hot_set(partial, TABLES, [groups(7)])
    finished_before_lock(partial, path)
    with pytest.raises(BlockingIOError, match="another process was just finishing it"):
        write_hot_set(path, TABLES, [groups(3)])
    (found,) = read_hot_set(path, TABLES, 100)
    assert len(found) == 7


def test_a_hot_set_that_cannot_be_written_names_the_file_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, partial = tmp_path / "hot.set", tmp_path / "hot.set.partial"
    write_hot_set(path, TABLES, [groups(7)])
    with partial.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match=r"another process is writing it: '.*hot\.set\.partial'"):
            write_hot_set(path, TABLES, [groups(3)])

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*hot\.set\.partial'"):
        write_hot_set(path, TABLES, [groups(3)])
    (found,) = read_hot_set(path, TABLES, 100)
    assert len(found) == 7
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("options", [RESUME, ConvertOptions(force=True)], ids=["resume", "force"])
def test_a_store_that_another_process_has_just_finished_is_not_written_to(
    fp4_checkpoint: Path,
    tmp_path: Path,
    finished_before_lock: Callable[[Path, Path], None],
    options: ConvertOptions,
) -> None:
    path, partial = tmp_path / "a.store", tmp_path / "a.store.partial"
    convert(fp4_checkpoint, path)
    whole = path.read_bytes()
    path.rename(partial)
    finished_before_lock(partial, path)
    with pytest.raises(ValueError, match="is being written by another conversion"):
        convert(fp4_checkpoint, path, options)
    assert path.read_bytes() == whole


@pytest.fixture
def expected(fp4_checkpoint: Path, tmp_path: Path) -> bytes:
    """The store of the small checkpoint."""
    convert(fp4_checkpoint, tmp_path / "expected.store")
    return (tmp_path / "expected.store").read_bytes()


def test_ctrl_c_after_the_file_has_its_name_leaves_it_whole(
    fp4_checkpoint: Path, tmp_path: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        replace(self, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(fp4_checkpoint, tmp_path / "a.store")
    assert (tmp_path / "a.store").read_bytes() == expected
    assert not (tmp_path / "a.store.partial").exists()


def test_ctrl_c_before_the_file_has_its_name_is_resumed(
    fp4_checkpoint: Path, tmp_path: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(fp4_checkpoint, tmp_path / "a.store")
    assert not (tmp_path / "a.store").exists()
    (result,) = convert(fp4_checkpoint, tmp_path / "a.store", RESUME)
    assert result.written_bytes == 0
    assert (tmp_path / "a.store").read_bytes() == expected


def test_a_directory_that_cannot_be_synced_is_named(
    fp4_checkpoint: Path, tmp_path: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refusing(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refusing)
    with pytest.raises(OSError, match="Invalid argument") as caught:
        convert(fp4_checkpoint, tmp_path / "a.store")
    assert caught.value.filename == str(tmp_path)
    assert (tmp_path / "a.store").read_bytes() == expected


def test_a_disk_that_refuses_the_journal_does_not_hide_why_converting_ended(
    fp4_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(partial_module.os, "fdatasync", failing)
    monkeypatch.setattr(partial_module.os, "fsync", failing)
    with pytest.raises(
        ValueError, match=r"a\.store\.partial: Input/output error; what was converted is in .*--resume"
    ):
        convert(fp4_checkpoint, tmp_path / "a.store")


def test_a_finished_shard_of_another_table_is_not_taken_for_this_one(
    fp8_checkpoint: Path, tmp_path: Path
) -> None:
    """Its header would be the same."""
    out = tmp_path / "shards"
    other = synthesise(tmp_path / "other", 2000, "fp8", seed=9).path
    convert(other, out, ConvertOptions(to="dsv41", layers=(1,)))
    shard = out / "engram-layer-01.dsv41"
    shard.rename(out / "engram-layer-01.dsv41.partial")
    convert(fp8_checkpoint, out, ConvertOptions(to="dsv41", layers=(1,), resume=True, verify="none"))
    assert shard.read_bytes()[4096 : 4096 + 264] == RowOracle(fp8_checkpoint).packed(1, [0]).tobytes()


def test_a_folder_that_was_there_stays(
    fp8_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    (tmp_path / "mine").mkdir()
    for out in ("mine", "made"):
        with pytest.raises(ValueError, match="GB free"):
            convert(fp8_checkpoint, tmp_path / out, ConvertOptions(to="dsv41"))
    assert list((tmp_path / "mine").iterdir()) == []
    assert not (tmp_path / "made").exists()
