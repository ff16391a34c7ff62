"""Which file system and which disks lie under a path, told from fake /proc and /sys trees."""

from dataclasses import replace
from pathlib import Path

import pytest

from engram_server.doctor.finding import Finding
from engram_server.doctor.storage import Device, Mount, describe_device, explain_storage, find_mount

MOUNTINFO = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
30 22 0:31 / {root}/data rw,noatime - autofs systemd-1 rw,fd=29
31 30 259:2 / {root}/data rw,noatime shared:2 master:1 - xfs /dev/nvme0n1p2 rw,noquota
32 22 259:3 / {root}/data2 ro - squashfs /dev/loop3 ro
33 31 0:44 / {root}/data/my\040models rw - nfs4 server:/models\040here rw,vers=4.2
"""


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc whose mounts are below tmp_path."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTINFO.replace("{root}", str(tmp_path)))
    return tmp_path / "proc"


@pytest.mark.parametrize(
    ("path", "point", "type_", "source"),
    [
        ("elsewhere/file", "/", "ext4", "/dev/vda1"),
        ("data/model", "data", "xfs", "/dev/nvme0n1p2"),
        ("data", "data", "xfs", "/dev/nvme0n1p2"),
        ("data2/model", "data2", "squashfs", "/dev/loop3"),
        ("data/my models/x", "data/my models", "nfs4", "server:/models here"),
        ("link/x", "data/my models", "nfs4", "server:/models here"),
    ],
)
def test_a_path_lies_on_the_innermost_latest_mount(
    proc: Path, tmp_path: Path, path: str, point: str, type_: str, source: str
) -> None:
    (tmp_path / "data/my models").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "data/my models")
    mount = find_mount(tmp_path / path, proc)
    assert mount is not None
    assert mount.mount_point == str(tmp_path / point if point != "/" else Path("/"))
    assert (mount.type, mount.source) == (type_, source)


def test_mount_options_are_those_of_mount_and_file_system(proc: Path, tmp_path: Path) -> None:
    mount = find_mount(tmp_path / "data", proc)
    assert mount == Mount(str(tmp_path / "data"), "xfs", "/dev/nvme0n1p2", "rw,noatime,noquota")


def test_without_proc_the_file_system_is_unknown(tmp_path: Path) -> None:
    assert find_mount(tmp_path, tmp_path / "no proc") is None
    assert explain_storage(None, None)[0].level == "note"


@pytest.mark.parametrize(
    ("type_", "words"),
    [
        ("nfs4", "a network file system"),
        ("ceph", "a network file system"),
        ("overlay", "a container's layers"),
        ("tmpfs", "memory, not a disk"),
        ("fuse.sshfs", "FUSE"),
        ("virtiofs", "through the hypervisor"),
        ("squashfs", "read-only image"),
        ("btrfs", "compressed"),
        ("zfs", "a whole record"),
    ],
)
def test_file_systems_that_matter_are_named_as_such(type_: str, words: str) -> None:
    (finding,) = explain_storage(Mount("/m", type_, "src", "rw"), None)
    assert finding.level == "note"
    assert finding.text.startswith(f"{type_} on /m, from src (rw): ")
    assert words in finding.text


def test_a_plain_file_system_whose_disk_is_hidden_says_so() -> None:
    file_system, device = explain_storage(Mount("/m", "xfs", "/dev/sda", "rw"), None)
    assert (file_system.level, device.level) == ("ok", "note")
    assert "/sys/dev/block" in device.text


# ------------------------------------------------------------------------------------------ devices


class Sysfs:
    """A /sys with block devices in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev/block").mkdir(parents=True)

    def add(self, number: str, name: str, files: dict[str, str], parent: str = "") -> Path:
        node = self.root / "devices" / parent / name
        node.mkdir(parents=True)
        for file, text in files.items():
            (node / file).parent.mkdir(parents=True, exist_ok=True)
            (node / file).write_text(text + "\n")
        (self.root / "dev/block" / number).symlink_to(node)
        return node

    def disk(self, number: str, name: str, queues: int = 1, **files: str) -> Path:
        """files: as attributes, with __ for /."""
        facts = {
            "size": "2097152",
            "queue/rotational": "0",
            "queue/scheduler": "[none] mq-deadline kyber",
            "queue/nr_requests": "1023",
            "queue/logical_block_size": "512",
            "queue/physical_block_size": "512",
        }
        node = self.add(number, name, facts | {key.replace("__", "/"): value for key, value in files.items()})
        for queue in range(queues):
            (node / "mq" / str(queue)).mkdir(parents=True)
        return node

    def volume(self, number: str, name: str, *lower: Path, **files: str) -> Path:
        node = self.disk(number, name, queues=0, queue__scheduler="none", **files)
        for path in lower:
            (node / "slaves").mkdir(exist_ok=True)
            (node / "slaves" / path.name).symlink_to(path)
        return node

    def describe(self, number: str) -> Device:
        device = describe_device(number, self.root)
        assert device is not None
        return device

    def explain(self, number: str) -> list[Finding]:
        """Of the device alone."""
        file_system, *devices = explain_storage(Mount("/m", "xfs", "/dev/x", "rw"), self.describe(number))
        assert file_system.level == "ok"
        return devices


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "sys")


def nvme(sysfs: Sysfs, **files: str) -> Path:
    """An NVMe disk, 259:0, with a partition, 259:1."""
    disk = sysfs.disk("259:0", "nvme0n1", queues=3, device__model="SAMSUNG MZQL21T9HCJR-00A07   ", **files)
    sysfs.add("259:1", "nvme0n1p1", {"partition": "1", "size": "1000"}, parent="nvme0n1")
    return disk


@pytest.mark.parametrize("number", ["259:0", "259:1"])
def test_a_partition_is_described_as_its_disk(sysfs: Sysfs, number: str) -> None:
    nvme(sysfs, device__transport="pcie", queue__physical_block_size="4096")
    assert sysfs.describe(number) == Device(
        name="nvme0n1",
        kind="NVMe disk",
        detail="",
        model="SAMSUNG MZQL21T9HCJR-00A07",
        size_bytes=1 << 30,
        rotational=False,
        hardware_queues=3,
        scheduler="none",
        queue_requests=1023,
        logical_block_bytes=512,
        physical_block_bytes=4096,
        lower=(),
    )
    (finding,) = sysfs.explain(number)
    assert finding.level == "ok"
    assert finding.text == (
        "nvme0n1: NVMe disk SAMSUNG MZQL21T9HCJR-00A07, 1 GiB, 3 hardware queues of 1023 requests, scheduler "
        "none, blocks of 512 B (4,096 B inside)"
    )


def test_a_disk_is_on_the_numa_node_of_its_slot(sysfs: Sysfs) -> None:
    slot = sysfs.root / "devices/pci0000:40/0000:41:00.0"
    disk = sysfs.add("259:5", "nvme0n1", {"size": "8"}, parent="pci0000:40/0000:41:00.0/nvme/nvme0")
    (disk / "device").symlink_to(disk.parent)
    for said, node in (("1", 1), ("-1", None), ("0", 0)):
        (slot / "numa_node").write_text(said + "\n")
        assert sysfs.describe("259:5").numa_node == node
        (finding,) = sysfs.explain("259:5")
        assert (f", NUMA node {node}," in finding.text) == (node is not None)


def test_a_volume_lists_the_disks_under_it(sysfs: Sysfs) -> None:
    nvme(sysfs)
    partition = sysfs.root / "devices/nvme0n1/nvme0n1p1"
    other = sysfs.disk("8:0", "sda", queue__rotational="1", device__model="ST16000NM001G")
    array = sysfs.volume("9:0", "md0", partition, other, md__level="raid0")
    sysfs.volume("253:0", "dm-0", array, dm__name="vg-models", dm__uuid="LVM-abcdef")
    volume = sysfs.describe("253:0")
    assert (volume.kind, volume.detail) == ("device-mapper volume", "LVM, vg-models")
    (raid,) = volume.lower
    assert (raid.name, raid.detail) == ("md0", "raid0")
    assert [disk.name for disk in raid.lower] == ["nvme0n1", "sda"]
    findings = sysfs.explain("253:0")
    assert [finding.text.partition(":")[0] for finding in findings] == ["dm-0", "md0", "nvme0n1", "sda"]
    assert findings[1].text.endswith("on nvme0n1 and sda")
    assert [finding.level for finding in findings] == ["ok", "ok", "ok", "note"]
    assert "spinning disk" in findings[3].text


def test_an_encrypted_volume_costs_cpu(sysfs: Sysfs) -> None:
    sysfs.volume("253:1", "dm-1", nvme(sysfs), dm__name="luks", dm__uuid="CRYPT-LUKS2-x")
    encrypted, disk = sysfs.explain("253:1")
    assert "encrypted" in encrypted.text
    assert (encrypted.level, disk.level) == ("note", "ok")


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("nvme1n1", {"device__model": "Amazon Elastic Block Store"}, "a network volume behind an NVMe face"),
        ("nvme1n1", {"device__transport": "tcp"}, "behind a network"),
        ("rbd0", {}, "behind a network"),
        ("loop3", {"loop__backing_file": "/images/models.img"}, "a file on another file system"),
        ("zram0", {}, "memory, not a disk"),
        ("sdb", {"queue__rotational": "1"}, "a spinning disk"),
        ("vdb", {"queue__scheduler": "none [mq-deadline] bfq"}, "none is the usual choice"),
    ],
)
def test_slow_and_odd_devices_are_named_as_such(
    sysfs: Sysfs, name: str, files: dict[str, str], words: str
) -> None:
    sysfs.disk("240:0", name, 1, **files)
    (finding,) = sysfs.explain("240:0")
    assert finding.level == "note"
    assert words in finding.text


def test_virtual_disks_that_say_rotational_are_not_believed(sysfs: Sysfs) -> None:
    sysfs.disk("254:0", "vda", queue__rotational="1")
    (finding,) = sysfs.explain("254:0")
    assert finding.level == "ok"
    assert finding.text.startswith("vda: virtio disk, ")
    assert "it says rotational" in finding.text


def test_the_scheduler_remedy_can_be_pasted(sysfs: Sysfs) -> None:
    nvme(sysfs, queue__scheduler="none mq-deadline [bfq]")
    (finding,) = sysfs.explain("259:1")
    assert "scheduler bfq" in finding.text
    assert finding.advice == "echo none > /sys/block/nvme0n1/queue/scheduler"


def test_a_sysfs_that_says_little_gives_what_it_has(sysfs: Sysfs) -> None:
    sysfs.add("240:0", "nvme9n1", {"size": "8"})
    device = sysfs.describe("240:0")
    assert (device.size_bytes, device.hardware_queues, device.scheduler, device.model) == (4096, None, "", "")
    assert describe_device("240:1", sysfs.root) is None
    assert replace(device, lower=()) == device
