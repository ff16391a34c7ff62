"""fio, the ceiling: random reads of a file region, their rate and the CPU time each took."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_kernels import _core

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Region:
    """Bytes begin .. end - 1 of a file that is no sparse one."""

    path: Path
    begin: int
    end: int


@dataclass(frozen=True)
class FioRun:
    """What one run of fio saw, its ramp left out."""

    iops: float
    cpu_s_per_read: float
    """User and system time of its one job."""


def ceiling(region: Region, reader: _core.Reader, seconds: int) -> FioRun:
    """fio at the reader's own read size and depth, files and buffers registered.

    `norandommap`, since keeping account of blocks read would cost it CPU time that the comparison is about.
    """
    return randread(
        region, seconds, ioengine="io_uring", direct=1, bs=read_bytes(reader),
        iodepth=reader.depth, fixedbufs=1, registerfiles=1,
    )  # fmt: skip


def read_bytes(reader: _core.Reader) -> int:
    """The smallest direct read of the reader's files; a page where they are read through the page cache."""
    alignment = reader.files[0].alignment_bytes
    return alignment if alignment > 1 else PAGE_BYTES


def described(reader: _core.Reader) -> str:
    """What `ceiling` runs, for the name of a reference."""
    return f"fio randread, io_uring, {read_bytes(reader)} B, depth {reader.depth}"


def randread(region: Region, seconds: int, **options: Any) -> FioRun:
    """Any random-read job over the region. Raises RuntimeError with fio's own words when it fails."""
    begin = -(-region.begin // PAGE_BYTES) * PAGE_BYTES
    job = {
        "name": "rival", "filename": region.path, "readonly": None, "rw": "randread", "norandommap": None,
        "randrepeat": 0, "offset": begin, "size": (region.end - begin) // PAGE_BYTES * PAGE_BYTES,
        "time_based": None, "runtime": seconds, "ramp_time": "200ms", "group_reporting": None,
        "output-format": "json", **options,
    }  # fmt: skip
    arguments = [f"--{key}" if value is None else f"--{key}={value}" for key, value in job.items()]
    done = subprocess.run(["fio", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"fio failed: {(done.stderr or done.stdout).strip()}")
    report = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    cpu_s = (report["usr_cpu"] + report["sys_cpu"]) / 100 * report["job_runtime"] / 1e3
    return FioRun(float(report["read"]["iops"]), cpu_s / max(1, report["read"]["total_ios"]))
