"""Where scales go, on made-up machines."""

from pathlib import Path

import pytest

from engram_server.tables.errors import TableError
from engram_server.tables.placement import HEADROOM_BYTES, MemoryRoom, available_memory, decide_scales

GIB = 1 << 30


def test_auto_takes_memory_up_to_the_headroom() -> None:
    fits = decide_scales("auto", 6 * GIB, 6 * GIB + HEADROOM_BYTES)
    assert (fits.mode, fits.scale_bytes, fits.available_bytes) == (
        "memory",
        6 * GIB,
        6 * GIB + HEADROOM_BYTES,
    )
    assert "6.00 GiB" in fits.reason
    over = decide_scales("auto", 6 * GIB, 6 * GIB + HEADROOM_BYTES - 1)
    assert over.mode == "disk"
    assert "do not fit" in over.reason


def test_what_was_asked_for_is_done_or_refused() -> None:
    assert decide_scales("disk", 6 * GIB, 100 * GIB).mode == "disk"
    assert decide_scales("memory", 6 * GIB, 100 * GIB).reason == "asked for"
    cramped = decide_scales("memory", 6 * GIB, 6 * GIB)
    assert cramped.mode == "memory"
    assert "less than 0.50 GiB" in cramped.reason
    with pytest.raises(TableError, match="scales can be auto, memory, disk; not 'dsik'"):
        decide_scales("dsik", 6 * GIB, 100 * GIB)  # type: ignore[arg-type]
    with pytest.raises(TableError, match=r"take 6\.00 GiB of memory, but there are 5\.99 GiB available"):
        decide_scales("memory", 6 * GIB, 6 * GIB - 8_000_000)


def test_cache_and_budget_come_before_scales_and_all_of_it_must_fit() -> None:
    claims = {"--cache-bytes": 2 * GIB, "--budget-bytes": GIB}
    enough = 9 * GIB + HEADROOM_BYTES
    assert decide_scales("auto", 6 * GIB, enough, claims).mode == "memory"
    over = decide_scales("auto", 6 * GIB, enough - 1, claims)
    assert over.mode == "disk"
    assert "beside --cache-bytes (2.00 GiB) and --budget-bytes (1.00 GiB)" in over.reason
    assert decide_scales("memory", 6 * GIB, 9 * GIB, claims).mode == "memory"
    with pytest.raises(
        TableError,
        match=r"--cache-bytes \(2\.00 GiB\) and --budget-bytes \(1\.00 GiB\) and --scales memory \(6\.00 GiB\) "
        r"take 9\.00 GiB of memory, but there are 8\.99 GiB available \(as given\): lower one, or raise",
    ):
        decide_scales("memory", 6 * GIB, 9 * GIB - 8_000_000, claims)
    for mode in ("auto", "disk"):
        with pytest.raises(TableError, match=r"take 3\.00 GiB of memory, but there are 2\.99 GiB"):
            decide_scales(mode, 6 * GIB, 3 * GIB - 8_000_000, claims)  # type: ignore[arg-type]


class Machine:
    """A /proc and a /sys/fs/cgroup of files."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()

    def meminfo(self, available_bytes: int) -> None:
        (self.proc / "meminfo").write_text(
            f"MemTotal:   99999999 kB\nMemFree:          1 kB\nMemAvailable:   {available_bytes >> 10} kB\n"
        )

    def joins(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("".join(line + "\n" for line in lines))

    def group(self, path: str, **files: object) -> None:
        group = self.cgroup / path
        group.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (group / name.replace("__", ".")).write_text(f"{value}\n")

    def room(self) -> MemoryRoom:
        return available_memory(self.proc, self.cgroup)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.meminfo(64 * GIB)
    return machine


def test_without_cgroups_it_is_mem_available(machine: Machine) -> None:
    assert machine.room().available_bytes == 64 * GIB
    assert "MemAvailable" in machine.room().source


def test_v2_limit_counts_inactive_cache_as_free(machine: Machine) -> None:
    machine.joins("0::/a/b")
    machine.group(
        "a/b",
        memory__max=8 * GIB,
        memory__current=5 * GIB,
        memory__stat=f"anon 1\nfile 9\ninactive_file {2 * GIB}\nactive_file 7",
    )
    assert machine.room() == MemoryRoom(5 * GIB, str(machine.cgroup / "a/b/memory.max"))


def test_v2_limit_of_a_parent_holds_too(machine: Machine) -> None:
    machine.joins("0::/a/b/c")
    machine.group("", cgroup__procs="")
    machine.group("a", memory__max=10 * GIB, memory__current=9 * GIB)
    machine.group("a/b", memory__max="max", memory__current=GIB)
    machine.group("a/b/c", memory__max=20 * GIB, memory__current=GIB)
    assert machine.room() == MemoryRoom(GIB, str(machine.cgroup / "a/memory.max"))


def test_v2_high_throttles_so_it_counts(machine: Machine) -> None:
    machine.joins("0::/a")
    machine.group("a", memory__max=20 * GIB, memory__high=3 * GIB, memory__current=GIB)
    assert machine.room() == MemoryRoom(2 * GIB, str(machine.cgroup / "a/memory.high"))


def test_usage_over_the_limit_leaves_nothing(machine: Machine) -> None:
    machine.joins("0::/a")
    machine.group("a", memory__max=GIB, memory__current=2 * GIB)
    assert machine.room().available_bytes == 0


@pytest.mark.parametrize("path", ["/docker/1f2e", "/../../other", "/"])
def test_in_a_container_the_mount_is_the_group(machine: Machine, path: str) -> None:
    machine.joins(f"0::{path}")
    machine.group("", memory__max=2 * GIB, memory__current=GIB)
    assert machine.room().available_bytes == GIB


def test_v1_limit(machine: Machine) -> None:
    machine.joins("9:cpu,cpuacct:/x", "4:memory:/slice/job", "0::/")
    no_limit = 9223372036854771712
    machine.group("memory", memory__limit_in_bytes=no_limit, memory__usage_in_bytes=30 * GIB)
    machine.group("memory/slice", memory__limit_in_bytes=6 * GIB, memory__usage_in_bytes=3 * GIB)
    machine.group(
        "memory/slice/job",
        memory__limit_in_bytes=4 * GIB,
        memory__usage_in_bytes=3 * GIB,
        memory__stat=f"cache 5\ninactive_file 7\ntotal_inactive_file {GIB}",
    )
    assert machine.room() == MemoryRoom(
        2 * GIB, str(machine.cgroup / "memory/slice/job/memory.limit_in_bytes")
    )


def test_v2_beside_v1_hangs_under_unified(machine: Machine) -> None:
    machine.joins("4:memory:/", "0::/svc")
    machine.group("unified/svc", memory__max=GIB, memory__current=0)
    assert machine.room() == MemoryRoom(GIB, str(machine.cgroup / "unified/svc/memory.max"))


def test_a_machine_tighter_than_its_limits(machine: Machine) -> None:
    machine.meminfo(GIB)
    machine.joins("0::/a")
    machine.group("a", memory__max=8 * GIB, memory__current=0)
    assert machine.room().available_bytes == GIB


def test_no_proc_means_no_memory_is_promised(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path).available_bytes == 0


def test_this_machine_has_some_memory() -> None:
    assert available_memory().available_bytes > 0
    assert decide_scales("auto", 1).mode in ("memory", "disk")
