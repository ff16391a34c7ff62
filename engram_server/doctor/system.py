"""What kernel, sandbox and limits allow this process: io_uring above all."""

from __future__ import annotations

import errno
import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

from engram_kernels import _core
from engram_server.doctor.finding import Finding, plural, size_text
from engram_server.memory import MemoryOptions
from engram_server.tables.placement import available_memory

OPERATIONS = ("IORING_OP_READ", "IORING_OP_READ_FIXED")
"""What the reader asks of io_uring: the second with registered buffers, the first without."""

_CAP_IPC_LOCK = 14
_OPEN_FILES_COMFORTABLE = 1024
_SECCOMP_FILTER = 2


@dataclass(frozen=True)
class System:
    """Facts about the machine and this process. None = the kernel or the sandbox does not say."""

    kernel: str
    machine: str
    cpus: int
    """That this process may run on."""
    io_uring_disabled: int | None
    """The sysctl: 0 allowed, 1 to one group and to CAP_SYS_ADMIN, 2 forbidden."""
    io_uring_group: int | None
    """The sysctl: a group id, -1 = no group."""
    seccomp_mode: int | None
    """0 none, 1 strict, 2 filter."""
    ring_errno: int
    """Of setting up a ring as the reader does; 0 = it works."""
    ring_error: str
    ring_flags: tuple[str, ...]
    operations: dict[str, bool] | None
    """By IORING_OP_* name, from the liburing package's probe."""
    operations_error: str
    memlock_bytes: int | None
    """RLIMIT_MEMLOCK, soft; None = unlimited."""
    memlock_counts: bool
    """False for a process with CAP_IPC_LOCK, such as root's."""
    open_files: int | None
    """RLIMIT_NOFILE, soft; None = unlimited."""
    available_bytes: int
    available_source: str


def examine_system(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> System:
    """Ask the kernel. Sets up one small ring and drops it."""
    status = _status(proc)
    ring = _core.probe_io_uring()
    operations, operations_error = _operations() if ring["ok"] else (None, "no ring can be set up")
    room = available_memory(proc, cgroup)
    return System(
        kernel=platform.release(),
        machine=platform.machine(),
        cpus=len(os.sched_getaffinity(0)),
        io_uring_disabled=_number(proc / "sys/kernel/io_uring_disabled"),
        io_uring_group=_number(proc / "sys/kernel/io_uring_group"),
        seccomp_mode=int(status["Seccomp"]) if "Seccomp" in status else None,
        ring_errno=ring["errno"],
        ring_error=ring["reason"],
        ring_flags=tuple(ring["setup_flags"]),
        operations=operations,
        operations_error=operations_error,
        memlock_bytes=_soft_limit(resource.RLIMIT_MEMLOCK),
        memlock_counts=not int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1,
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        available_bytes=room.available_bytes,
        available_source=room.source,
    )


def explain_system(system: System) -> list[Finding]:
    """The facts as an operator needs them, one finding each."""
    findings = [
        Finding("kernel", "ok", f"Linux {system.kernel}, {system.machine}, {plural(system.cpus, 'CPU')}"),
        _explain_sysctl(system),
        _explain_seccomp(system),
        _explain_ring(system),
        _explain_operations(system),
        _explain_memlock(system),
        _explain_open_files(system),
        _explain_memory(system),
    ]
    return [finding for finding in findings if finding is not None]


def _explain_sysctl(system: System) -> Finding | None:
    value = system.io_uring_disabled
    if value is None:  # before Linux 6.6, or no /proc
        return None
    if value == 0:
        return Finding("sysctl", "ok", "kernel.io_uring_disabled is 0: every process may use io_uring")
    if value == 1:
        return Finding(
            "sysctl",
            "note",
            f"kernel.io_uring_disabled is 1: io_uring is for CAP_SYS_ADMIN and group {system.io_uring_group} "
            "(kernel.io_uring_group) alone, so what this user may says nothing about another",
            "run the doctor as the server's user",
        )
    return Finding("sysctl", "note", f"kernel.io_uring_disabled is {value}: no process may use io_uring")


def _explain_seccomp(system: System) -> Finding | None:
    if system.seccomp_mode is None:
        return None
    if system.seccomp_mode != _SECCOMP_FILTER:
        return Finding("seccomp", "ok", "no filter on this process: no system call is refused")
    filtered = "a filter is on this process, as in containers"
    if system.ring_errno:
        return Finding("seccomp", "note", f"{filtered}, and no ring can be set up")
    return Finding("seccomp", "ok", f"{filtered}, but it lets a ring be set up")


def _explain_ring(system: System) -> Finding:
    if system.ring_errno:
        cause, advice = _refusal(system)
        return Finding("io_uring", "degraded", f"refused, {errno_text(system.ring_errno)}: {cause}", advice)
    if "DEFER_TASKRUN" in system.ring_flags:
        flags = " and ".join(system.ring_flags)
        return Finding(
            "io_uring", "ok", f"a ring was set up with {flags}, which costs the least CPU for a read"
        )
    return Finding(
        "io_uring",
        "note",
        f"a ring was set up with {' and '.join(system.ring_flags) or 'no flags'}: reads as fast, at more CPU",
        "Linux 6.1 and newer have DEFER_TASKRUN",
    )


def _refusal(system: System) -> tuple[str, str]:
    """The likeliest cause of a refused ring, and what to do. The kernel itself gives only an errno."""
    if system.io_uring_disabled == 2:
        return (
            "kernel.io_uring_disabled is 2",
            "sysctl -w kernel.io_uring_disabled=0, and a file in /etc/sysctl.d to keep it",
        )
    # A kernel with the sysctl has io_uring, so an ENOSYS is then the filter's as well.
    hidden = system.ring_errno == errno.ENOSYS and system.io_uring_disabled is not None
    if system.seccomp_mode == _SECCOMP_FILTER and (system.ring_errno == errno.EPERM or hidden):
        return (
            "the seccomp filter on this process forbids it, as container runtimes' default profiles do",
            "allow io_uring_setup, io_uring_enter and io_uring_register: docker or podman run --security-opt "
            "seccomp=engram-server.json, the profile in deploy/seccomp of engram-server's sources; in Kubernetes "
            "securityContext.seccompProfile, type Localhost",
        )
    if system.ring_errno == errno.EPERM and system.io_uring_disabled == 1:
        return (
            f"kernel.io_uring_disabled is 1 and this user is not in group {system.io_uring_group}",
            "add the server's user to that group, or set kernel.io_uring_disabled to 0",
        )
    if system.ring_errno == errno.ENOSYS:
        return (
            "this kernel has no io_uring: it is older than 5.1, built without CONFIG_IO_URING, or a sandbox "
            "(gVisor, or a seccomp filter) hides it",
            "run on a stock kernel, 6.1 or newer",
        )
    if system.ring_errno == errno.ENOMEM:
        return (
            "memory for the ring is short, or RLIMIT_MEMLOCK forbids it",
            "raise the limit: ulimit -l, LimitMEMLOCK= of a systemd unit, docker run --ulimit memlock=-1",
        )
    return system.ring_error, "look for a security module's refusal in the kernel log (journalctl -k)"


def _explain_operations(system: System) -> Finding | None:
    if system.ring_errno:
        return None  # nothing to ask
    if system.operations is None:
        return Finding(
            "operations",
            "note",
            f"the liburing package's probe gave no answer: {system.operations_error}; the test reads below "
            "decide",
        )
    missing = [name for name in OPERATIONS if not system.operations.get(name)]
    known = f"{sum(system.operations.values())} of {len(system.operations)} operations known to liburing"
    if not missing:
        return Finding("operations", "ok", f"READ and READ_FIXED are among the {known} that the kernel has")
    names = " and ".join(name.removeprefix("IORING_OP_") for name in missing)
    return Finding(
        "operations", "degraded", f"the kernel lacks {names} ({known} are there)", "run Linux 5.6 or newer"
    )


def _explain_memlock(system: System) -> Finding:
    depth = MemoryOptions().io_depth
    needed = depth * _core.READ_BUFFER_BYTES
    need = f"registered buffers take {size_text(needed)} at depth {depth}"
    if system.memlock_bytes is None:
        return Finding("memlock", "ok", f"RLIMIT_MEMLOCK is unlimited; {need}")
    limit = f"RLIMIT_MEMLOCK is {size_text(system.memlock_bytes)}"
    if needed <= system.memlock_bytes:
        return Finding("memlock", "ok", f"{limit}; {need}")
    if not system.memlock_counts:
        return Finding("memlock", "ok", f"{limit}, which CAP_IPC_LOCK lifts for this process; {need}")
    return Finding(
        "memlock",
        "note",
        f"{limit}, but {need}: they stay unregistered, at more CPU for a read",
        "raise it: ulimit -l, LimitMEMLOCK= of a systemd unit, docker run --ulimit memlock=-1",
    )


def _explain_open_files(system: System) -> Finding:
    use = "one each for table files, rings and client connections"
    if system.open_files is None:
        return Finding("open files", "ok", f"RLIMIT_NOFILE is unlimited; {use}")
    limit = f"RLIMIT_NOFILE is {system.open_files:,}; {use}"
    if system.open_files >= _OPEN_FILES_COMFORTABLE:
        return Finding("open files", "ok", limit)
    return Finding("open files", "note", limit, "raise it: ulimit -n, or LimitNOFILE= of a systemd unit")


def _explain_memory(system: System) -> Finding:
    budget = MemoryOptions().budget_bytes
    text = (
        f"{size_text(system.available_bytes)} available ({system.available_source}); requests in flight may "
        f"take {size_text(budget)}, scales in memory come on top"
    )
    if system.available_bytes >= budget:
        return Finding("memory", "ok", text)
    return Finding("memory", "note", text, "raise the limit, or give the server a smaller budget")


def errno_text(number: int) -> str:
    """ "EPERM (Operation not permitted)"."""
    return f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"


def _operations() -> tuple[dict[str, bool] | None, str]:
    try:
        import liburing

        return {str(name): bool(known) for name, known in liburing.probe().items()}, ""
    except ImportError as error:
        return None, str(error)
    except Exception as error:  # whatever its own ring runs into; it documents no class
        return None, f"{type(error).__name__}: {error}"


def _status(proc: Path) -> dict[str, str]:
    """Lines "Key: value" of /proc/self/status."""
    try:
        lines = (proc / "self/status").read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft
