"""Where the scale bytes of a table are served from: memory or disk.

In place, codes and scales of a row lie far apart, so a row costs two reads; with the scale planes in memory
(6 % of an FP4 table, 5.72 GiB for both full ones) it costs one. `auto` takes memory when they fit what this
process may really use: the kernel's MemAvailable, and every limit between this process and the root of its
cgroups, since a container's limit is enforced there and MemAvailable does not know it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from engram_server.tables.errors import TableError

ScaleMode = Literal["auto", "memory", "disk"]

HEADROOM_BYTES = 512 << 20
"""What `auto` leaves free for the rest of the server: io buffers, messages, the interpreter."""

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 has no word for "no limit": it reports a number no machine has."""

_V2_FILES = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1_FILES = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True)
class ScaleDecision:
    """Where scales are served from, and why in words."""

    mode: Literal["memory", "disk"]
    reason: str
    scale_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class MemoryRoom:
    """Memory this process can still take, and the limit that says so."""

    available_bytes: int
    source: str


def decide_scales(
    mode: ScaleMode,
    scale_bytes: int,
    available_bytes: int | None = None,
    claims: Mapping[str, int] | None = None,
) -> ScaleDecision:
    """Decide where `scale_bytes` of scale planes go, once `claims` have had their share.

    `available_bytes` None asks the system. claims: what else will be taken, in bytes, by the option that asks for
    it. Raises TableError when all that was asked for cannot fit together, or for a mode that is none.
    """
    if mode not in get_args(ScaleMode):
        raise TableError(f"scales can be {', '.join(get_args(ScaleMode))}; not {mode!r}")
    room = available_memory() if available_bytes is None else MemoryRoom(available_bytes, "as given")
    wanted = dict(claims or {}) | ({"--scales memory": scale_bytes} if mode == "memory" else {})
    _refuse_what_cannot_fit(wanted, room)
    left_bytes = room.available_bytes - sum((claims or {}).values())
    size, free = _gib(scale_bytes), f"{_gib(room.available_bytes)} available ({room.source})"
    beside = f" beside {_in_words(claims)}" if claims else ""
    if mode == "disk":
        return ScaleDecision("disk", "asked for", scale_bytes, room.available_bytes)
    fits = scale_bytes + HEADROOM_BYTES <= left_bytes
    if mode == "memory":
        cramped = "" if fits else f", leaving less than {_gib(HEADROOM_BYTES)} for the rest"
        return ScaleDecision("memory", f"asked for{cramped}", scale_bytes, room.available_bytes)
    if fits:
        reason = f"auto: {size} of scales fit in {free}{beside} with {_gib(HEADROOM_BYTES)} to spare"
        return ScaleDecision("memory", reason, scale_bytes, room.available_bytes)
    reason = f"auto: {size} of scales and {_gib(HEADROOM_BYTES)} of head-room do not fit in {free}{beside}"
    return ScaleDecision("disk", reason, scale_bytes, room.available_bytes)


def _refuse_what_cannot_fit(wanted: Mapping[str, int], room: MemoryRoom) -> None:
    if sum(wanted.values()) > room.available_bytes:
        raise TableError(
            f"{_in_words(wanted)} take {_gib(sum(wanted.values()))} of memory, but there are "
            f"{_gib(room.available_bytes)} available ({room.source}): lower one, or raise the limit"
        )


def _in_words(claims: Mapping[str, int]) -> str:
    return " and ".join(f"{option} ({_gib(size)})" for option, size in claims.items() if size)


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryRoom:
    """The smallest of MemAvailable and what each cgroup limit over this process leaves.

    A limit leaves `limit - (usage - inactive page cache)`: that cache goes before anything is killed.
    """
    rooms = [_machine_room(proc), *_cgroup_rooms(proc, cgroup)]
    return min(rooms, key=lambda room: room.available_bytes)


def _cgroup_rooms(proc: Path, root: Path) -> Iterator[MemoryRoom]:
    for mount, path, files in _memory_hierarchies(proc, root):
        # Seen from inside a container the path may belong to the host's tree: then only the mount is ours.
        parts = PurePosixPath(path).parts[1:]
        if ".." in parts or not mount.joinpath(*parts).is_dir():
            parts = ()
        for depth in range(len(parts), -1, -1):
            yield from _group_rooms(mount.joinpath(*parts[:depth]), files)


def _memory_hierarchies(
    proc: Path, root: Path
) -> Iterator[tuple[Path, str, tuple[tuple[str, ...], str, str]]]:
    """Mount point, this process's path in it and file names, for cgroup v2 and v1."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            unified = root / "unified"  # where v2 hangs when v1 holds the controllers
            yield unified if unified.is_dir() else root, path, _V2_FILES
        elif "memory" in controllers.split(","):
            yield root / "memory", path, _V1_FILES


def _group_rooms(group: Path, files: tuple[tuple[str, ...], str, str]) -> Iterator[MemoryRoom]:
    limit_names, usage_name, cache_key = files
    for name in limit_names:
        try:
            text = (group / name).read_text().strip()
            usage = int((group / usage_name).read_text())
        except (OSError, ValueError):
            continue  # the root group has no such files
        if text == "max" or int(text) >= _UNLIMITED_BYTES:
            continue
        used = max(0, usage - _stat(group / "memory.stat", cache_key))
        yield MemoryRoom(max(0, int(text) - used), str(group / name))


def _stat(path: Path, key: str) -> int:
    """The number after `key` in a file of such lines; 0 when there is none."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(words[1]) for words in lines if words[:1] == [key]), 0)


def _machine_room(proc: Path) -> MemoryRoom:
    kibibytes = _stat(proc / "meminfo", "MemAvailable:")
    return MemoryRoom(kibibytes * 1024, f"MemAvailable in {proc / 'meminfo'}")


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
