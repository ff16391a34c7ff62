"""What reads the tables, as Describe tells it: the machine, and how and from what each file is read."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

from engram_client._proto import engram_pb2 as pb
from engram_kernels import _core


def examine_machine(reader: _core.Reader) -> pb.MachineInfo:
    """Facts about this machine, and the files of a reader."""
    mapped = reader.backend == "mmap"
    return pb.MachineInfo(
        kernel=f"{platform.system()} {platform.release()}",
        cpu=cpu_name(),
        cpus=len(os.sched_getaffinity(0)),
        files=[_file(file, mapped) for file in reader.files],
    )


def cpu_name(proc: Path = Path("/proc")) -> str:
    """The processor as /proc/cpuinfo names it, else the architecture."""
    try:
        for line in (proc / "cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass
    return platform.machine()


def _file(file: _core.FileInfo, mapped: bool) -> pb.FileInfo:
    # The doctor opens tables itself: not while this package is imported.
    from engram_server.doctor.storage import device_text, find_device, find_mount

    path = Path(file.path)
    mount = find_mount(path)
    device = None
    with suppress(OSError):  # gone by its name; it is still open
        device = find_device(path, mount)
    return pb.FileInfo(
        bytes=file.size_bytes,
        # However it was opened, what is mapped comes through the page cache.
        direct=file.direct and not mapped,
        alignment_bytes=1 if mapped else file.alignment_bytes,
        reason="mapped, by the backend mmap" if mapped else file.reason,
        file_system=mount.type if mount is not None else "",
        device=device_text(device) if device is not None else "",
    )
