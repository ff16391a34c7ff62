"""`doctor`: what it finds is there, what it says is so, and its exit status tells the three cases apart."""

import json
import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.files import CheckpointFiles
from support.faulty_fs import faulty_fs

from engram_kernels import _core
from engram_server.doctor import examine, format_report, run
from engram_server.doctor.reads import Target, find_target

QUICK: dict[str, Any] = {"depths": (1, 4), "seconds": 0.03}
"""Long enough for figures; none of them decides a test."""


def findings(report: dict[str, Any], topic: str) -> list[dict[str, str]]:
    """Everything a report says on a topic."""
    return [
        finding
        for section in report["sections"]
        for finding in section["findings"]
        if finding["topic"] == topic
    ]


def the(report: dict[str, Any], topic: str) -> dict[str, str]:
    """The one thing it says."""
    (finding,) = findings(report, topic)
    return finding


# ------------------------------------------------------------------------------ a machine in order


def test_a_good_checkpoint_on_a_good_machine(fp4_checkpoint: Path) -> None:
    report = examine(fp4_checkpoint, **QUICK)
    assert report["status"] == 0
    assert report["verdict"].startswith("Good: io_uring with direct reads")
    assert the(report, "tables")["text"].startswith("FP4, layers 1 and 14")
    assert the(report, "scales")["level"] == "ok"
    assert the(report, "auto")["text"].startswith("takes io_uring")
    reads = report["reads"]
    assert reads["backend_errors"] == {"io_uring": "", "pread": "", "mmap": ""}
    for file in reads["files"]:
        assert file["direct"]
        assert (file["statx_memory_align_bytes"], file["statx_offset_align_bytes"]) == _core.statx_dioalign(
            file["path"]
        )


def test_every_depth_is_measured_and_one_is_recommended(fp8_checkpoint: Path) -> None:
    report = examine(fp8_checkpoint, **QUICK)
    assert [point["depth"] for point in report["depths"]] == [1, 4]
    for point in report["depths"]:
        assert min(point["rates"]) <= point["reads_per_s"] <= max(point["rates"])
        assert point["latency_ms"] == pytest.approx(1000 * point["depth"] / point["reads_per_s"])
    assert report["io_depth"] in (1, 4)
    assert f"--io-depth {report['io_depth']}" in the(report, "knee")["advice"]
    assert "48 reads of a token" in the(report, "knee")["text"]
    assert the(report, "size")["level"] == "note", "tables of a few MB prove little"


def test_the_file_system_is_the_one_findmnt_names(fp4_checkpoint: Path) -> None:
    (place,) = examine(fp4_checkpoint, seconds=0)["storage"]
    command = ["findmnt", "--json", "--target", str(fp4_checkpoint), "--output", "TARGET,FSTYPE"]
    (mount,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["filesystems"]
    assert (place["mount"]["mount_point"], place["mount"]["type"]) == (mount["target"], mount["fstype"])


def test_without_a_path_the_machine_alone_is_examined() -> None:
    report = examine()
    assert report["status"] == 0
    assert [section["title"] for section in report["sections"]] == ["system", "reads"]
    assert the(report, "auto")["level"] == "ok"
    kernel = os.uname()
    assert f"Linux {kernel.release}, {kernel.machine}" in the(report, "kernel")["text"]
    assert "READ and READ_FIXED" in the(report, "operations")["text"]
    assert the(report, "io_uring")["level"] in ("ok", "note")


def test_any_regular_file_will_do(tmp_path: Path) -> None:
    file = tmp_path / "fio.bin"
    file.write_bytes(bytes(100_000))
    report = examine(file, **QUICK)
    assert report["status"] == 0
    assert "is no shard: read as any file" in the(report, "file")["text"]
    assert report["io_depth"] in (1, 4)
    assert "tokens" not in the(report, "knee")["text"]


def test_json_and_text_tell_the_same(fp4_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fp4_checkpoint, as_json=True, seconds=0) == 0
    report = json.loads(capsys.readouterr().out)
    assert run(fp4_checkpoint, seconds=0) == 0
    words = capsys.readouterr().out.split()
    for section in report["sections"]:
        for finding in section["findings"]:
            text = finding["text"].split()
            if finding["topic"] not in ("memory", "scales"):  # free memory changes from call to call
                assert any(words[i : i + len(text)] == text for i in range(len(words))), finding
    assert words[-len(report["verdict"].split()) :] == report["verdict"].split()


def test_text_fits_a_terminal(fp4_checkpoint: Path) -> None:
    for line in format_report(examine(fp4_checkpoint, **QUICK)).splitlines():
        assert len(line) <= 100 or len(max(line.split(), key=len)) > 80, line


# ------------------------------------------------------------------------- degraded, broken, absent

CHILD = """
    import sys
    from pathlib import Path
    from engram_server.doctor import run
    from support.seccomp import forbid_io_uring

    forbid_io_uring(eval(sys.argv[2]))
    sys.exit(run(Path(sys.argv[1]), seconds=0.01))
"""
SETUP, ENTER, REGISTER = 425, 426, 427


def in_child(path: Path, *forbidden: int) -> subprocess.CompletedProcess[str]:
    """The command in a process where a seccomp filter forbids system calls."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(path), repr(forbidden)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parent,
    )


def test_a_seccomp_filter_is_named_with_the_remedy(fp4_checkpoint: Path) -> None:
    done = in_child(fp4_checkpoint, SETUP, ENTER, REGISTER)
    assert done.returncode == 2, done.stderr
    text = " ".join(done.stdout.split())
    assert "WARN io_uring refused, EPERM (Operation not permitted): the seccomp filter" in text
    assert "--security-opt seccomp=engram-server.json" in text
    assert "WARN auto takes pread, 64 threads: io_uring refused" in text
    assert "pread, mmap: 64 random rows" in text
    assert "Works, but degraded: see WARN above (io_uring, auto)." in text
    assert done.stderr == "", "no progress bar where there is no terminal"


def test_a_ring_that_can_be_had_but_not_used_is_found_by_reading(fp4_checkpoint: Path) -> None:
    done = in_child(fp4_checkpoint, ENTER)
    assert done.returncode == 2, done.stderr
    assert "io_uring_enter failed: Operation not permitted" in " ".join(done.stdout.split())


def test_unregistered_buffers_are_worth_a_note(fp4_checkpoint: Path) -> None:
    done = in_child(fp4_checkpoint, REGISTER)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "note registered none, where files+buffers" in text
    assert "note operations the liburing package's probe gave no answer" in text


def test_a_file_system_without_direct_reads_degrades_and_one_that_fails_is_an_error(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    with faulty_fs(fp4_checkpoint, tmp_path / "mount", tmp_path / "faults") as faults:
        faults.set("none", refuse_direct=True)
        report = examine(tmp_path / "mount", **QUICK)
        assert report["status"] == 2
        assert the(report, "access")["level"] == "degraded"
        assert "O_DIRECT refused at open" in the(report, "access")["text"]
        assert "FUSE" in the(report, "file system")["text"]
        assert findings(report, "device") == []
        assert the(report, "cache")["level"] == "note"

        faults.set("eio", begin=1 << 20)  # behind the header
        report = examine(tmp_path / "mount", **QUICK)
        assert report["status"] == 1
        assert the(report, "reads")["level"] == "error"
        assert "Input/output error" in the(report, "reads")["text"]


def test_a_backend_that_reads_other_bytes_is_an_error(
    fp4_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = _core.Reader

    class Lying:
        """Turns over a bit of the last row."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._reader = honest(*arguments, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._reader, name)

        def read(self, file: Any, offset: Any, length: Any, out: Any) -> Any:
            errors = self._reader.read(file, offset, length, out)
            out[-1, 5] ^= 1
            return errors

    monkeypatch.setattr(_core, "Reader", Lying)
    report = examine(fp4_checkpoint, seconds=0)
    assert report["status"] == 1
    assert all(
        "differ from what pread gives" in error for error in report["reads"]["backend_errors"].values()
    )
    assert [finding["level"] for finding in findings(report, "backends")] == ["error", "note", "note"]


@contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions hold for root as well, who else reads everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_paths_that_are_no_files_get_a_sentence(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reports = [examine(path) for path in (tmp_path / "absent", fifo)]
    assert [report["status"] for report in reports] == [1, 1]
    assert [the(report, "path")["text"] for report in reports] == [
        f"{tmp_path}/absent cannot be read: No such file or directory",
        f"{fifo} cannot be read: it is neither a directory nor a regular file",
    ]
    assert "FAIL  path" in format_report(reports[0])


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_paths_without_permission_get_a_sentence(tmp_path: Path, kind: str) -> None:
    closed = tmp_path / "closed"
    closed.mkdir() if kind == "directory" else closed.touch()
    closed.chmod(0)
    with unprivileged():
        report = examine(closed)
    closed.chmod(stat.S_IRWXU)  # for pytest's cleaning
    assert report["status"] == 1
    assert the(report, "path")["text"] == f"{closed} cannot be read: Permission denied"


@pytest.mark.parametrize("how", ["hole", "reserved", "mostly hole"])
def test_what_was_never_written_is_not_measured(tmp_path: Path, how: str) -> None:
    sparse = tmp_path / "sparse.bin"
    with sparse.open("wb") as file:
        if how == "reserved":
            os.posix_fallocate(file.fileno(), 0, 8 << 20)
        file.truncate(8 << 20)
        if how == "mostly hole":
            for i in range(7):
                os.pwrite(file.fileno(), os.urandom(500_000), i << 20)
    report = examine(sparse, **QUICK)
    assert report["status"] == 0
    assert report["io_depth"] is None
    assert "depths" not in report
    assert f"not measured: most of {sparse} was never written" in the(report, "holes")["text"]


def test_some_holes_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "dense.bin"
    file.write_bytes(os.urandom(1 << 20))
    os.truncate(file, 1_900_000)
    assert examine(file, **QUICK)["io_depth"] in (1, 4)


@pytest.mark.parametrize("name", ["empty.bin", "empty directory"])
def test_where_there_is_nothing_to_read_the_disk_is_still_described(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.touch() if name == "empty.bin" else path.mkdir()
    report = examine(path)
    assert "reads" not in report
    assert f"{path} holds nothing to read" in [finding["text"] for finding in findings(report, "file")]
    assert "file system" in format_report(report)
    assert report["status"] == (0 if name == "empty.bin" else 1), "a directory should be a checkpoint"


def test_a_checkpoint_that_cannot_be_served_says_why_and_its_disk_is_examined(tmp_path: Path) -> None:
    files = CheckpointFiles()
    root = files.write(tmp_path)
    (root / files.SHARD_1).unlink()
    report = examine(root, **QUICK)
    assert report["status"] == 1
    fault, rest = findings(report, "checkpoint")
    assert fault["level"] == "error"
    assert f"lists the shard '{files.SHARD_1}', which is not there" in fault["text"]
    assert str(root / files.SHARD_14) in rest["text"]
    assert report["reads"]["files"][0]["path"] == str(root / files.SHARD_14)
    assert report["io_depth"] in (1, 4)


def test_a_damaged_shard_is_no_ordinary_file(tmp_path: Path) -> None:
    files = CheckpointFiles()
    shard = files.write(tmp_path) / files.SHARD_1
    os.truncate(shard, shard.stat().st_size - 1)
    report = examine(shard, **QUICK)
    assert report["status"] == 1
    assert "cannot be served" in the(report, "checkpoint")["text"]


# --------------------------------------------------------------------- what is read, and the figures


def test_rows_are_drawn_from_the_codes_and_from_nothing_else(tmp_path: Path) -> None:
    files = CheckpointFiles("fp8")
    target, _ = find_target(files.write(tmp_path))
    assert target is not None
    number, offset, length = target.draw(np.random.default_rng(5), 2000)
    drawn = {(target.files[n].name, int(at)) for n, at in zip(number, offset, strict=True)}
    assert set(length.tolist()) == {256}
    expected = set()
    for name, rows in ((files.SHARD_1, 11), (files.SHARD_14, 13)):
        size = (tmp_path / name).stat().st_size
        begin = size - rows * (256 + 8)  # codes first, then scales
        expected |= {(name, begin + row * 256) for row in range(rows)}
    assert drawn == expected


def test_a_plain_file_is_read_to_its_end(tmp_path: Path) -> None:
    for size, expected in ((128 * 5 + 90, {0, 128, 256, 384, 512}), (1, {0})):
        file = tmp_path / f"{size}.bin"
        file.write_bytes(bytes(size))
        target, _ = find_target(file)
        assert isinstance(target, Target)
        _, offset, length = target.draw(np.random.default_rng(6), 200)
        assert set(offset.tolist()) == expected
        assert set(length.tolist()) == {min(size, 128)}
