"""`serve --cpus`, `--numa-node`: what the kernel says of the process afterwards, and nodes from fake /sys trees."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from test_cli import engram_server, served

from engram_server.pinning import cpu_list, node_name, parse_cpus, pin
from engram_server.sockets import ServeError

ALLOWED = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), (" 5 , 2-2\n", {2, 5}), ("1,1,0-1", {0, 1})],
)
def test_lists_of_cpus_are_read_as_the_kernel_writes_them(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus
    assert cpu_list(text) == text


@pytest.mark.parametrize("text", ["", ",", "a", "3-1", "-1", "1-", "0-70000", "1;2", "0x3", "٣"])
def test_what_is_no_list_of_cpus_is_a_sentence(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give numbers and ranges, such as 0-3,8"):
        cpu_list(text)


def test_a_node_is_a_number_or_auto() -> None:
    assert [node_name(text) for text in ("auto", "0", "12")] == ["auto", "0", "12"]
    for text in ("", "-1", "near", "99999", "1.0"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no NUMA node"):
            node_name(text)


class Machine:
    """A /sys of two nodes, in which the disk of `tables` hangs on one."""

    def __init__(self, root: Path, tables: Path, nodes: dict[int, str]) -> None:
        self.root = root
        self._tables = tables
        for node, cpus in nodes.items():
            self._write(f"devices/system/node/node{node}/cpulist", cpus)
        self._write("devices/system/node/online", ",".join(map(str, nodes)))
        (root / "dev/block").mkdir(parents=True)

    def _write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text + "\n")

    def disk(self, *nodes: int) -> None:
        """The disk of the tables, in slots of these nodes: with several, a RAID array of disks."""
        number = self._tables.stat().st_dev
        name = f"{os.major(number)}:{os.minor(number)}"
        disks = []
        for place, node in enumerate(nodes):
            slot = f"devices/pci0000:00/0000:0{place}:00.0"
            disk = self.root / slot / f"nvme/nvme{place}/nvme{place}n1"
            disk.mkdir(parents=True)
            (disk / "device").symlink_to(disk.parent)
            self._write(f"{slot}/numa_node", str(node))
            disks.append(disk)
        if len(disks) == 1:
            partition = disks[0] / "nvme0n1p1"
            partition.mkdir()
            (partition / "partition").touch()
            (self.root / "dev/block" / name).symlink_to(partition)
            return
        array = self.root / "devices/virtual/block/md0"
        (array / "slaves").mkdir(parents=True)
        for disk in disks:
            (array / "slaves" / disk.name).symlink_to(disk)
        (self.root / "dev/block" / name).symlink_to(array)


_CHILD = """
import logging, os, re, sys
from pathlib import Path
from engram_server.pinning import pin
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout, level=logging.INFO)
cpus, node, tables, sys_ = (None if one == "-" else one for one in sys.argv[1:])
pin(cpus, node, Path(tables), Path(sys_))
print("cpus", *sorted(os.sched_getaffinity(0)))
print("memory", *sorted(set(re.findall(r"^[0-9a-f]+ (prefer\\S*)", Path("/proc/self/numa_maps").read_text(), re.M))))
"""


def pinned(cpus: str, node: str, tables: Path, machine: Machine) -> list[str]:
    """What a process says that was pinned."""
    command = [sys.executable, "-c", _CHILD, cpus, node, str(tables), str(machine.root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def listed(cpus: list[int]) -> str:
    return " ".join(map(str, cpus))


def test_auto_is_the_node_of_the_drive(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "sys", tmp_path, {0: str(ALLOWED[-1]), 1: "500-501"})
    machine.disk(0)
    told, cpus, memory = pinned("-", "auto", tmp_path, machine)
    assert told == f"INFO {tmp_path} is on a drive of NUMA node 0: the server runs there"
    assert cpus == f"cpus {ALLOWED[-1]}"
    assert re.fullmatch(r"memory prefer(=\w+)?:0", memory)


def test_a_node_by_its_number_keeps_to_the_cpus_allowed(tmp_path: Path) -> None:
    machine = Machine(
        tmp_path / "sys", tmp_path, {0: "0-1023", 3: "2000", 4: ""}
    )  # the last one has memory alone
    cpus, memory = pinned("-", "0", tmp_path, machine)
    assert cpus == f"cpus {listed(ALLOWED)}"
    assert "prefer" in memory
    for node in ("3", "4"):
        with pytest.raises(
            ServeError, match=rf"--numa-node {node}: this process may run on CPUs .*, none of which it has"
        ):
            pin(None, node, tmp_path, machine.root)
    with pytest.raises(ServeError, match="there is no NUMA node 7 here; there is 0, 3"):
        pin(None, "7", tmp_path, machine.root)


def test_a_kernel_without_nodes_has_one(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "sys", tmp_path, {})
    shutil.rmtree(machine.root / "devices")
    cpus, *_ = pinned("-", "0", tmp_path, machine)
    assert cpus == f"cpus {listed(ALLOWED)}"


def test_cpus_go_before_those_of_the_node(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "sys", tmp_path, {0: "0-1023", 1: "2000"})
    cpus, memory = pinned(str(ALLOWED[0]), "0", tmp_path, machine)
    assert cpus == f"cpus {ALLOWED[0]}"
    assert "prefer" in memory
    cpus, memory = pinned(str(ALLOWED[0]), "-", tmp_path, machine)
    assert (cpus, memory) == (f"cpus {ALLOWED[0]}", "memory")


def test_cpus_that_are_not_there_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ServeError, match=rf"--cpus {ALLOWED[0]},5000: this process may run on .*, not on 5000"
    ):
        pin(f"{ALLOWED[0]},5000", None, tmp_path)
    assert sorted(os.sched_getaffinity(0)) == ALLOWED


@pytest.mark.parametrize(
    ("disks", "said"),
    [((), "on no node that /sys tells"), ((-1,), "on no node that /sys tells"), ((0, 1), "on nodes 0, 1")],
)
def test_auto_without_an_answer_says_so_and_goes_on(
    tmp_path: Path, disks: tuple[int, ...], said: str
) -> None:
    machine = Machine(tmp_path / "sys", tmp_path, {0: "0", 1: "1"})
    if disks:
        machine.disk(*disks)
    told, cpus, memory = pinned("-", "auto", tmp_path, machine)
    assert told == (
        f"WARNING --numa-node auto: the drive of {tmp_path} is {said}; name the node by its number"
    )
    assert (cpus, memory) == (f"cpus {listed(ALLOWED)}", "memory")


def test_an_array_on_one_node_is_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "sys", tmp_path, {0: str(ALLOWED[0]), 1: "1"})
    machine.disk(0, 0)
    assert pinned("-", "auto", tmp_path, machine)[1] == f"cpus {ALLOWED[0]}"


def test_one_node_leaves_auto_nothing_to_choose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = Machine(tmp_path / "one", tmp_path, {0: "0"})
    (tmp_path / "none").mkdir()
    caplog.set_level(logging.INFO)
    for root in (one.root, tmp_path / "none"):
        pin(None, "auto", tmp_path, root)
    assert caplog.messages == ["this machine has one NUMA node: --numa-node auto has nothing to choose"] * 2
    assert sorted(os.sched_getaffinity(0)) == ALLOWED


def status_of_threads(pid: int) -> dict[str, set[str]]:
    """Cpus_allowed_list of every thread, by its name without numbers."""
    seen: dict[str, set[str]] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        seen.setdefault(re.sub(r"[-\d]+$", "", status["Name"]), set()).add(status["Cpus_allowed_list"])
    return seen


def test_every_thread_of_a_server_keeps_to_its_cpus(fp4_checkpoint: Path) -> None:
    options: list[Any] = [
        "--listen",
        "127.0.0.1:0",
        "--shm",
        "off",
        "--cpus",
        ALLOWED[-1],
        "--numa-node",
        "0",
    ]
    with served(fp4_checkpoint, *options) as (ready, process):
        assert ready
        seen = status_of_threads(process.pid)
        memory = Path(f"/proc/{process.pid}/numa_maps").read_text()
        process.terminate()
        assert "Traceback" not in process.communicate(timeout=60)[1]
    assert any(name.startswith("engram-io") for name in seen), seen
    assert set().union(*seen.values()) == {str(ALLOWED[-1])}
    assert "prefer" in memory


def test_a_server_refuses_what_is_not_there(fp4_checkpoint: Path) -> None:
    for option, value, words in (
        ("--cpus", "4000", "may run on CPUs"),
        ("--numa-node", "900", "there is no NUMA node 900 here; there is 0"),
    ):
        found = engram_server("serve", fp4_checkpoint, "--listen", "127.0.0.1:0", option, value)
        assert found.returncode == 1
        assert words in textwrap.dedent(found.stderr)
    assert engram_server("serve", fp4_checkpoint, "--cpus", "a").returncode == 2
