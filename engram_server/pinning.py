"""Which CPUs a server runs on, and near which its memory lies: `serve --cpus`, `--numa-node`.

On a machine of several NUMA nodes a drive hangs on one of them, and what it reads into another's memory crosses the
link between them. Set before threads start, which inherit both, those of the native core as well.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from engram_server.sockets import ServeError

log = logging.getLogger("engram_server")

AUTO = "auto"

_CPUS_MAX = 65_536
"""More than any kernel has: a typing error, and not to be written out."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call, which glibc leaves to libnuma."""
_MPOL_PREFERRED = 1
_NODES_MAX = 1024


def cpu_list(text: str) -> str:
    """`text` if it is a list such as 0-3,8, for argparse."""
    try:
        parse_cpus(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def node_name(text: str) -> str:
    """`text` if it is auto or a number, for argparse."""
    if text != AUTO and not re.fullmatch(r"[0-9]{1,4}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no NUMA node: give its number, or {AUTO}")
    return text


def parse_cpus(text: str) -> set[int]:
    """The numbers of a list such as 0-3,8, as the kernel writes them. Raises ValueError."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        found = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last or last >= _CPUS_MAX:
            raise ValueError(f"{text!r} is no list of CPUs: give numbers and ranges, such as 0-3,8")
        cpus.update(range(first, last + 1))
    return cpus


def pin(cpus: str | None, node: str | None, tables: Path, sys: Path = Path("/sys")) -> None:
    """Keep this process on CPUs, and its memory near a NUMA node; None = leave that as it is.

    cpus: as cpu_list, else those of the node. node: a number; or auto, the node of the drive that `tables` is on, where
    sysfs tells one: else a line in the log says why nothing was done. Raises ServeError for what this machine has not,
    OSError for a path that is not there.
    """
    number = None if node is None else _node(node, tables, sys)
    if cpus is not None:
        _run_on(_allowed(parse_cpus(cpus), f"--cpus {cpus}"))
    elif number is not None:
        own = _cpus_of(number, sys) & os.sched_getaffinity(0)
        _run_on(_allowed(own, f"--numa-node {number}"))
    if number is not None:
        _prefer_memory_of(number)


def _node(node: str, tables: Path, sys: Path) -> int | None:
    nodes = _nodes(sys)
    if node != AUTO:
        if int(node) not in nodes:
            raise ServeError(f"there is no NUMA node {int(node)} here; there is {_listed(nodes)}")
        return int(node)
    if len(nodes) == 1:
        log.info("this machine has one NUMA node: --numa-node auto has nothing to choose")
        return None
    of_drives = set(_drive_nodes(tables, sys))
    if len(of_drives) != 1 or not of_drives <= nodes:
        said = f"on nodes {_listed(of_drives)}" if len(of_drives) > 1 else "on no node that /sys tells"
        log.warning("--numa-node auto: the drive of %s is %s; name the node by its number", tables, said)
        return None
    (number,) = of_drives
    log.info("%s is on a drive of NUMA node %d: the server runs there", tables, number)
    return number


def _nodes(sys: Path) -> set[int]:
    """Those that are on; {0} for a kernel that knows none."""
    try:
        return parse_cpus((sys / "devices/system/node/online").read_text())
    except OSError:
        return {0}


def _cpus_of(node: int, sys: Path) -> set[int]:
    """None, for a node of memory alone; those allowed, for a kernel that knows no nodes."""
    try:
        listed = (sys / f"devices/system/node/node{node}/cpulist").read_text()
    except FileNotFoundError:
        return os.sched_getaffinity(0)
    return parse_cpus(listed) if listed.strip() else set()


def _drive_nodes(tables: Path, sys: Path) -> Iterator[int]:
    """Of the disks that a path is on, each that is known."""
    # The doctor opens tables itself: not while this package is imported.
    from engram_server.doctor.storage import find_device, find_mount

    device = find_device(tables, find_mount(tables), sys)
    left = [] if device is None else [device]
    while left:
        device = left.pop()
        left.extend(device.lower)
        if device.numa_node is not None:
            yield device.numa_node


def _allowed(cpus: set[int], asked: str) -> set[int]:
    allowed = os.sched_getaffinity(0)
    if not cpus or not cpus <= allowed:
        raise ServeError(
            f"{asked}: this process may run on CPUs {_listed(allowed)}"
            + (f", not on {_listed(cpus - allowed)}" if cpus else ", none of which it has")
        )
    return cpus


def _run_on(cpus: set[int]) -> None:
    """All threads: libraries may have started some when they were imported."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cpus)


def _prefer_memory_of(node: int) -> None:
    """As `numactl --preferred`: of this thread, and those that it starts."""
    call = _SET_MEMPOLICY.get(platform.machine())
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_NODES_MAX // word_bits))()
    mask[node // word_bits] = 1 << node % word_bits
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel takes one bit less than it is told.
    if call is None or libc.syscall(call, _MPOL_PREFERRED, mask, ctypes.c_ulong(_NODES_MAX + 1)) != 0:
        reason = f"not known on {platform.machine()}" if call is None else os.strerror(ctypes.get_errno())
        log.warning(
            "memory is not kept on NUMA node %d: set_mempolicy: %s; a container needs CAP_SYS_NICE, or a seccomp "
            "profile that allows it",
            node,
            reason,
        )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
