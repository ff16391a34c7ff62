"""Reads refused or broken below the reader: an error, or a loud fallback; never a wrong row."""

import errno
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faulty_fs import Faults, faulty_fs

from engram_kernels import _core

ROWS = 40_000
PLANE_OFFSET = 64  # some rows straddle two pages
SCALES_OFFSET = PLANE_OFFSET + ROWS * 128
BAD = (1_000_000, 1_000_500)  # bytes of the file that faults are set on
BAD_ROWS = range((BAD[0] - PLANE_OFFSET) // 128, (BAD[1] - PLANE_OFFSET) // 128 + 1)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of FP4 codes [ROWS, 128], then scales [ROWS, 8], behind a few bytes of something else."""
    path = tmp_path_factory.mktemp("table") / "table.bin"
    path.write_bytes(np.random.default_rng(3).bytes(SCALES_OFFSET + ROWS * 8))
    return path


@pytest.fixture
def faulty(table: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, Faults]]:
    """The same file through a file system whose reads can be broken."""
    mapped = "mmap" in request.node.name
    with faulty_fs(table.parent, tmp_path / "mnt", tmp_path / "control.json", page_cache=mapped) as faults:
        yield tmp_path / "mnt" / table.name, faults


def engine_over(path: Path, backend: str) -> tuple[_core.Reader, _core.Engine]:
    """A reader, and an engine with the one table as layer 1."""
    reader = _core.Reader([str(path)], backend=backend, depth=16)
    planes = _core.Plane(0, PLANE_OFFSET, 128), _core.Plane(0, SCALES_OFFSET, 8)
    return reader, _core.Engine(reader, [_core.Table(1, ROWS, _core.RowKind.FP4, [_core.Planes(*planes)])])


def rows(engine: _core.Engine, ids: list[int]) -> bytes:
    """Packed rows by the engine."""
    batch = engine.submit([(1, np.asarray(ids, dtype=np.int64).reshape(-1, 1))])
    assert batch.wait(60)
    return batch.gather(0, len(ids), _core.Format.PACKED)


def expected(table: Path, ids: list[int]) -> bytes:
    """Packed rows by os.pread of the real file."""
    fd = os.open(table, os.O_RDONLY)
    try:
        return b"".join(
            os.pread(fd, 128, PLANE_OFFSET + i * 128) + os.pread(fd, 8, SCALES_OFFSET + i * 8) for i in ids
        )
    finally:
        os.close(fd)


@pytest.mark.parametrize("backend", ["io_uring", "pread", "mmap"])
def test_an_io_error_fails_the_requests_that_needed_the_row(
    table: Path, faulty: tuple[Path, Faults], backend: str
) -> None:
    path, faults = faulty
    reader, engine = engine_over(path, backend)
    faults.set("eio", *BAD)
    good = [0, 1, 100, ROWS - 1, *range(20_000, 20_100)]
    for bad in BAD_ROWS:
        with pytest.raises(_core.RowError, match=f"layer 1, row {bad} could not be read") as raised:
            rows(engine, [*good[:3], bad, *good[3:]])
        assert raised.value.error == errno.EIO
        assert rows(engine, good) == expected(table, good)
    faults.clear()
    ids = list(BAD_ROWS)
    assert rows(engine, ids) == expected(table, ids), "an error must not be remembered"
    assert reader.counters()["errors"] >= len(ids)
    assert not reader.fallback
    engine.close()


@pytest.mark.parametrize("backend", ["io_uring", "pread"])
def test_short_reads_are_continued(table: Path, faulty: tuple[Path, Faults], backend: str) -> None:
    # Not through mmap: for the page cache a short answer means the end of the file, whoever reads it.
    path, faults = faulty
    reader, engine = engine_over(path, backend)
    assert reader.files[0].alignment_bytes == 4096
    faults.set("short", keep=4096)
    straddling = [i for i in range(ROWS) if (PLANE_OFFSET + i * 128) % 4096 > 4096 - 128]
    assert len(straddling) > 1000
    assert rows(engine, straddling) == expected(table, straddling)
    assert reader.counters()["short_reads"] >= len(straddling)
    engine.close()


@pytest.mark.parametrize("backend", ["io_uring", "pread"])
def test_short_reads_without_progress_are_errors(
    table: Path, faulty: tuple[Path, Faults], backend: str
) -> None:
    path, faults = faulty
    _, engine = engine_over(path, backend)
    # 512 bytes at a time from an offset aligned to 4096 never get past byte 512.
    faults.set("short", keep=512)
    with pytest.raises(_core.RowError, match="row 5 could not be read") as raised:
        rows(engine, [5])
    assert raised.value.error == _core.ERROR_TRUNCATED
    faults.clear()
    assert rows(engine, [5]) == expected(table, [5])
    engine.close()


def test_a_file_system_without_direct_io_is_read_buffered(table: Path, faulty: tuple[Path, Faults]) -> None:
    path, faults = faulty
    faults.set("none", refuse_direct=True)
    reader, engine = engine_over(path, "auto")
    (info,) = reader.files
    assert not info.direct
    assert "O_DIRECT refused at open" in info.reason
    ids = np.random.default_rng(6).integers(0, ROWS, 500).tolist()
    assert rows(engine, ids) == expected(table, ids)
    engine.close()


def test_short_buffered_reads_are_continued_to_the_end(table: Path, faulty: tuple[Path, Faults]) -> None:
    path, faults = faulty
    faults.set("none", refuse_direct=True)
    _, engine = engine_over(path, "pread")
    ids = np.random.default_rng(7).integers(0, ROWS, 500).tolist()
    assert rows(engine, ids) == expected(table, ids)
    faults.set("eio", *BAD, refuse_direct=True)
    with pytest.raises(_core.RowError) as raised:
        rows(engine, [BAD_ROWS[1]])
    assert raised.value.error == errno.EIO
    engine.close()


CHILD = """
    import json, sys
    import numpy as np
    from engram_kernels import _core
    from support.seccomp import forbid_io_uring, forbid_threads
    from test_faults import ROWS, engine_over, expected
    from pathlib import Path

    table, backend, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    report = {}
    ids = np.random.default_rng(8).integers(0, ROWS, 3000).tolist()

    def attempt(engine):
        batch = engine.submit([(1, np.asarray(ids).reshape(-1, 1))])
        if not batch.wait(60):
            return "hung"
        try:
            exact = batch.gather(0, len(ids), _core.Format.PACKED) == expected(table, ids)
        except _core.RowError as error:
            return [error.error, str(error)]
        return "exact" if exact else "wrong"

    if when == "before":
        forbid_io_uring()
    try:
        reader, engine = engine_over(table, backend)
        if when.startswith("while"):
            report["healthy"] = attempt(engine)
            racing = engine.submit([(1, np.arange(ROWS).reshape(-1, 1))])
            if when == "while, without threads":
                forbid_threads()
            forbid_io_uring()
            report["racing_ended"] = racing.wait(60)
        report["first"], report["second"] = attempt(engine), attempt(engine)
        report |= {"backend": reader.backend, "fallback": reader.fallback, "reason": reader.reason}
        report["broken"] = reader.broken
        engine.close()
        reader.close()
    except RuntimeError as error:
        report["refused"] = str(error)
    print(json.dumps(report))
"""


def in_child(table: Path, backend: str, when: str) -> dict[str, Any]:
    """Run lookups in a process that may not use io_uring, from the start or from the middle on."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(table), backend, when],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).parent,
    )
    return json.loads(done.stdout)


def test_auto_falls_back_loudly_where_io_uring_is_forbidden(table: Path) -> None:
    report = in_child(table, "auto", "before")
    assert (report["first"], report["second"]) == ("exact", "exact")
    assert (report["backend"], report["fallback"]) == ("pread", True)
    assert "io_uring refused" in report["reason"]
    assert "seccomp" in report["reason"]


def test_io_uring_asked_for_by_name_never_falls_back(table: Path) -> None:
    report = in_child(table, "io_uring", "before")
    assert report["refused"].startswith("backend io_uring cannot run here: io_uring_setup failed")


def test_auto_survives_a_ring_that_breaks_while_serving(table: Path) -> None:
    report = in_child(table, "auto", "while")
    assert report["healthy"] == "exact"
    assert report["racing_ended"]
    assert (report["first"], report["second"]) == ("exact", "exact")
    assert (report["backend"], report["fallback"]) == ("pread", True)
    assert "io_uring broke while serving" in report["reason"]
    assert not report["broken"]


def test_a_ring_that_breaks_where_no_pool_can_take_over_fails_every_request(table: Path) -> None:
    report = in_child(table, "auto", "while, without threads")
    assert report["healthy"] == "exact"
    assert report["racing_ended"]
    for outcome in (report["first"], report["second"]):
        assert outcome[0] == errno.EPERM
    assert report["reason"].startswith("BROKEN: io_uring_enter failed")
    assert "pread could not take over" in report["reason"]
    assert report["broken"]


def test_a_broken_ring_asked_for_by_name_fails_every_request_with_its_cause(table: Path) -> None:
    report = in_child(table, "io_uring", "while")
    assert report["healthy"] == "exact"
    assert report["racing_ended"]
    for outcome in (report["first"], report["second"]):
        assert outcome[0] == errno.EPERM
        assert "could not be read" in outcome[1]
    assert (report["backend"], report["fallback"], report["broken"]) == ("io_uring", False, True)
    assert report["reason"].startswith("BROKEN: io_uring_enter failed")


WITHOUT_LOCKED_MEMORY = """
    import os, resource, sys
    import numpy as np
    from engram_kernels import _core

    resource.setrlimit(resource.RLIMIT_MEMLOCK, (128 << 10, 128 << 10))  # the ring fits, its buffers do not
    if os.geteuid() == 0:  # root may lock what it likes
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    reader = _core.Reader([sys.argv[1]], backend="io_uring")
    out = np.zeros((1, 100), np.uint8)
    item = [np.asarray([value], dtype) for value, dtype in ((0, "u4"), (777, "u8"), (100, "u4"))]
    errors = reader.read(*item, out)
    print(reader.registered, errors.tolist(), out.tobytes() == open(sys.argv[1], "rb").read()[777:877])
"""


def test_io_uring_runs_without_registered_buffers_where_locked_memory_is_limited() -> None:
    # Not in tmp_path, which nobody but its owner may enter.
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(os.urandom(10_000))
        Path(file.name).chmod(0o644)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(WITHOUT_LOCKED_MEMORY), file.name],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert done.stdout.split(maxsplit=1) == ["files", "[0] True\n"]


REFUSED_RINGS = """
    import os, sys
    from engram_kernels import _core
    from support.seccomp import forbid_io_uring

    forbid_io_uring((426,))  # io_uring_enter: rings are set up, and refuse to read
    for _ in range(5):
        reader = _core.Reader([sys.argv[1]], backend="auto", depth=4)
        print(reader.backend, len(os.listdir("/proc/self/fd")))
        reader.close()
        del reader
"""


def test_a_ring_that_cannot_read_leaves_no_descriptor_behind(table: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REFUSED_RINGS), str(table)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parent,
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("pread ")
    assert lines == [lines[0]] * 5


WITHOUT_LOADER = """
    import sys
    import numpy as np
    from support.seccomp import forbid_threads
    from test_faults import ROWS, engine_over

    reader, engine = engine_over(sys.argv[1], "io_uring")
    forbid_threads()
    for _ in range(2):
        try:
            engine.load_scales(1)
        except PermissionError:
            print("refused", *engine.scale_progress(1))
    engine.close()
"""


def test_scales_that_no_thread_can_load_are_an_error_each_time(table: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_LOADER), str(table)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parent,
    )
    assert done.stdout.splitlines() == [f"refused 0 {ROWS} "] * 2
