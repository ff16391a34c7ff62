"""The file system and the disks under a path: /proc/self/mountinfo and /sys/dev/block."""

from __future__ import annotations

import os
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from engram_server.doctor.finding import Finding, Level, plural, size_text

_SECTOR_BYTES = 512
"""Of every size in sysfs, whatever the disk's own block."""

_OPTIONS_WIDTH = 60

_Meaning = tuple[Level, str, str]
"""Level, what it means for random reads, what to do."""

_PLAIN: _Meaning = ("ok", "", "")
_LOCAL_COPY = "copy the tables to ext4 or xfs on a local NVMe disk"
_NETWORK: _Meaning = (
    "note",
    "a network file system: every read is a round trip to its server",
    _LOCAL_COPY,
)
_HYPERVISOR: _Meaning = (
    "note",
    "the host's file system, through the hypervisor",
    "give the virtual machine a disk of its own",
)
_IMAGE: _Meaning = ("note", "a read-only image: a read unpacks a whole block", _LOCAL_COPY)
_MEMORY: _Meaning = ("note", "memory, not a disk: the tables are in RAM already", "")
_OVERLAY: _Meaning = (
    "note",
    "a container's layers: which disk lies under them cannot be told from here",
    "mount the tables into the container (docker run -v /models:/models:ro) instead of copying them in",
)
_FUSE: _Meaning = ("note", "FUSE: a process in user space answers every read", _LOCAL_COPY)
_BTRFS: _Meaning = (
    "note",
    "direct reads need uncompressed extents; the kernel reads compressed ones through the page cache",
    "keep the tables where compression is off",
)
_ZFS: _Meaning = (
    "note",
    "a read fetches a whole record (recordsize, 128 KiB unless set) and checks it",
    "ext4 or xfs on the bare disk reads rows much faster",
)

_FILE_SYSTEMS: dict[str, _Meaning] = {
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "afs"), _NETWORK),
    **dict.fromkeys(("virtiofs", "9p", "vboxsf"), _HYPERVISOR),
    **dict.fromkeys(("squashfs", "erofs", "iso9660", "cramfs"), _IMAGE),
    **dict.fromkeys(("tmpfs", "ramfs"), _MEMORY),
    "overlay": _OVERLAY,
    "fuse": _FUSE,
    "btrfs": _BTRFS,
    "zfs": _ZFS,
}
"""File systems whose name says something about random reads; ext4, xfs and others are what they should be."""

_NETWORK_MODELS = ("Amazon Elastic Block Store", "nvme_card-pd", "MSFT NVMe Accelerator")
"""Clouds' network volumes that look like local NVMe disks."""

_KINDS = (
    (r"nvme", "NVMe disk"),
    (r"vd[a-z]", "virtio disk"),
    (r"xvd", "Xen virtual disk"),
    (r"sd[a-z]", "SCSI or SATA disk"),
    (r"dm-", "device-mapper volume"),
    (r"md", "RAID array"),
    (r"loop", "loop device"),
    (r"zram", "compressed memory"),
    (r"ram", "RAM disk"),
    (r"pmem", "persistent memory"),
    (r"mmcblk", "SD card or eMMC"),
    (r"nbd|rbd|drbd", "network block device"),
    (r"bcache", "bcache volume"),
)


@dataclass(frozen=True)
class Mount:
    """The mount that a path lies on."""

    mount_point: str
    type: str
    source: str
    options: str


@dataclass(frozen=True)
class Device:
    """A whole block device. "" and None = sysfs does not say."""

    name: str
    kind: str
    detail: str
    """What a volume is made of: its name, RAID level, backing file or transport."""
    model: str
    size_bytes: int
    rotational: bool
    hardware_queues: int | None
    scheduler: str
    queue_requests: int | None
    """Requests the block layer holds for one hardware queue (nr_requests)."""
    logical_block_bytes: int
    physical_block_bytes: int
    lower: tuple[Device, ...]
    """The disks under a volume."""
    numa_node: int | None = None
    """That it is attached to."""


def find_mount(path: Path, proc: Path = Path("/proc")) -> Mount | None:
    """The mount of an existing path; None where /proc does not tell."""
    try:
        lines = (proc / "self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    real = path.resolve()
    found = None
    for line in lines:
        # ID parent major:minor root mount-point options [optional fields] - type source super-options
        mount, _, file_system = line.partition(" - ")
        point = Path(_unescape(mount.split()[4]))
        if real.is_relative_to(point) and (
            found is None or len(point.parts) >= len(Path(found.mount_point).parts)
        ):
            # Of two at one place the later one hides the earlier.
            type_, source, super_options = [*file_system.split(), "", "", ""][:3]
            options = dict.fromkeys([*mount.split()[5].split(","), *super_options.split(",")])
            found = Mount(str(point), type_, _unescape(source), ",".join(filter(None, options)))
    return found


def find_device(path: Path, mount: Mount | None, sys: Path = Path("/sys")) -> Device | None:
    """The block device under a path, or None where there is none or it cannot be told."""
    number = path.stat().st_dev
    if os.major(number) == 0 and mount and mount.source.startswith("/dev/"):
        # btrfs and others give files a device number of their own.
        try:
            number = Path(mount.source).stat().st_rdev
        except OSError:
            return None
    return describe_device(f"{os.major(number)}:{os.minor(number)}", sys)


def describe_device(number: str, sys: Path = Path("/sys")) -> Device | None:
    """The whole device that "major:minor" is or is a partition of; None where sysfs has none."""
    try:
        node = (sys / "dev/block" / number).resolve(strict=True)
    except OSError:
        return None
    return _describe_node(node)


def _describe_node(node: Path) -> Device:
    if (node / "partition").exists():
        node = node.parent
    queue = node / "queue"
    mq = node / "mq"
    logical = _number(queue / "logical_block_size") or _SECTOR_BYTES
    slaves = node / "slaves"
    return Device(
        name=node.name,
        kind=next((kind for prefix, kind in _KINDS if re.match(prefix, node.name)), "block device"),
        detail=_detail(node),
        model=_text(node / "device/model"),
        size_bytes=(_number(node / "size") or 0) * _SECTOR_BYTES,
        rotational=_number(queue / "rotational") == 1,
        hardware_queues=len(list(mq.iterdir())) if mq.is_dir() else None,
        scheduler=_active(_text(queue / "scheduler")),
        queue_requests=_number(queue / "nr_requests"),
        logical_block_bytes=logical,
        physical_block_bytes=_number(queue / "physical_block_size") or logical,
        lower=tuple(_describe_node(slave.resolve()) for slave in sorted(slaves.iterdir()))
        if slaves.is_dir()
        else (),
        numa_node=_numa_node(node),
    )


def _numa_node(node: Path) -> int | None:
    """Of the nearest device above that has one: for a PCI drive, that of its slot. -1 in sysfs is none."""
    above = (node / "device").resolve()
    for place in (above, *above.parents):
        if (number := _number(place / "numa_node")) is not None:
            return number
    return None


def _detail(node: Path) -> str:
    if (node / "dm").is_dir():
        maker = _text(node / "dm/uuid").partition("-")[0]
        return ", ".join(filter(None, (maker, _text(node / "dm/name"))))
    transport = _text(node / "device/transport")
    return (
        _text(node / "md/level")
        or _text(node / "loop/backing_file")
        or (f"over {transport}" if transport not in ("", "pcie") else "")
    )


def explain_storage(mount: Mount | None, device: Device | None) -> list[Finding]:
    """What file system and device mean for random reads."""
    if mount is None:
        file_system = Finding("file system", "note", "unknown: /proc/self/mountinfo does not tell")
    else:
        file_system = _explain_mount(mount)
    if device is not None:
        return [file_system, *_explain_tree(device)]
    if file_system.level == "ok":
        return [file_system, Finding("device", "note", "/sys/dev/block does not list the disk")]
    return [file_system]


def _explain_mount(mount: Mount) -> Finding:
    options = textwrap.shorten(mount.options.replace(",", " "), _OPTIONS_WIDTH, placeholder=" ...")
    fact = f"{mount.type} on {mount.mount_point}, from {mount.source} ({options.replace(' ', ',')})"
    level, meaning, advice = _FILE_SYSTEMS.get(mount.type.partition(".")[0], _PLAIN)
    return Finding("file system", level, f"{fact}: {meaning}" if meaning else fact, advice)


def _explain_tree(device: Device) -> list[Finding]:
    """A finding for a device, and for each under it."""
    lower = [finding for each in device.lower for finding in _explain_tree(each)]
    return [_explain_one(device), *lower]


def _explain_one(device: Device) -> Finding:
    level, meaning, advice = _meaning(device)
    text = "; ".join(filter(None, (device_text(device), meaning)))
    return Finding("device", level, text, advice)


def device_text(device: Device) -> str:
    """Its name, kind, model, size, queues and blocks."""
    name = device.kind + (f" ({device.detail})" if device.detail else "")
    facts = [f"{device.name}: {name}" + (f" {device.model}" if device.model else "")]
    facts.append(size_text(device.size_bytes))
    if device.hardware_queues is not None:
        queues = plural(device.hardware_queues, "hardware queue")
        facts.append(queues + (f" of {device.queue_requests} requests" if device.queue_requests else ""))
    if device.numa_node is not None:
        facts.append(f"NUMA node {device.numa_node}")
    if device.scheduler:
        facts.append(f"scheduler {device.scheduler}")
    facts.append(
        f"blocks of {device.logical_block_bytes:,} B"
        + (
            f" ({device.physical_block_bytes:,} B inside)"
            if device.physical_block_bytes != device.logical_block_bytes
            else ""
        )
    )
    return ", ".join(facts)


def _meaning(device: Device) -> _Meaning:
    if device.lower:
        return _volume_meaning(device)
    if device.model.startswith(_NETWORK_MODELS):
        return (
            "note",
            "a network volume behind an NVMe face, as fast as what was paid for",
            "use the instance's local NVMe disk, or provision IOPS for the depth table below",
        )
    if device.detail.startswith("over ") or device.kind == "network block device":
        return "note", "behind a network: every read is a round trip", _LOCAL_COPY
    if device.kind == "loop device":
        return (
            "note",
            "a file on another file system: reads pass through both",
            "put the tables on that file system itself",
        )
    if device.kind in ("compressed memory", "RAM disk"):
        return "note", "memory, not a disk", ""
    if device.rotational and device.kind not in ("virtio disk", "Xen virtual disk"):
        return "note", "a spinning disk: some hundred random reads/s", _LOCAL_COPY
    if device.scheduler not in ("", "none") and device.kind in ("NVMe disk", "virtio disk"):
        return (
            "note",
            "schedulers order requests for a moving head and cost CPU; none is the usual choice here",
            f"echo none > /sys/block/{device.name}/queue/scheduler",
        )
    if device.rotational:
        return "ok", "it says rotational, as virtual disks do whatever they lie on", ""
    return _PLAIN


def _volume_meaning(device: Device) -> _Meaning:
    under = "on " + " and ".join(lower.name for lower in device.lower)
    if device.detail.startswith("CRYPT"):
        return (
            "note",
            f"{under}; encrypted: the CPU decrypts every sector read",
            "an unencrypted volume saves that CPU",
        )
    return "ok", under, ""


def _active(scheduler: str) -> str:
    """ "none" of "[none] mq-deadline kyber"."""
    match = re.search(r"\[(.+?)\]", scheduler)
    return match[1] if match else scheduler


def _unescape(field: str) -> str:
    r"""mountinfo writes blanks and backslashes as \ooo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None
