"""What the doctor makes of the system's facts and of the figures of a sweep."""

import errno
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engram_server.doctor import examine
from engram_server.doctor.depth import DepthPoint, explain_depth, knee_of
from engram_server.doctor.finding import Finding
from engram_server.doctor.system import examine_system, explain_system


def of(findings: list[Finding], topic: str) -> Finding:
    """The one finding on a topic."""
    (finding,) = [finding for finding in findings if finding.topic == topic]
    return finding


def points(*rates: float) -> list[DepthPoint]:
    """Depths 1, 2, 4 … with these rates in every round."""
    return [DepthPoint(2**i, (rate, rate, rate)) for i, rate in enumerate(rates)]


@pytest.mark.parametrize(
    ("rates", "knee"),
    [((100, 200, 390, 400), 4), ((400, 400, 400), 1), ((100, 359, 400), 4), ((100, 361, 400, 150), 2)],
)
def test_the_knee_is_the_first_depth_near_the_best_rate(rates: tuple[float, ...], knee: int) -> None:
    assert knee_of(points(*rates)).depth == knee


def test_what_the_knee_means() -> None:
    text = of(explain_depth(points(9600, 48000, 50000), 48, 64), "knee")
    assert "2 in flight give 48,000 reads/s, 96% of the best; deeper adds latency" in text.text
    assert "1,000 tokens/s if all 48 reads" in text.text
    assert text.advice == "serve with --io-depth 2 (the default is 64)"
    text = of(explain_depth(points(9600, 24000, 48000), 96, 4), "knee")
    assert "the deepest tried, and more might give more" in text.text
    assert "500 tokens/s if all 96 reads" in text.text
    assert text.advice == "serve with --io-depth 4 (which is the default)"


def test_slow_and_unsteady_disks_are_pointed_out() -> None:
    steady = explain_depth(points(20_000, 30_000), None, 64)
    assert [finding.topic for finding in steady] == ["knee"]
    slow = explain_depth(points(190, 200), None, 64)
    assert "one read alone takes 5.3 ms" in of(slow, "latency").text
    unsteady = explain_depth([DepthPoint(1, (20_000, 9_000, 21_000))], None, 64)
    assert "from 9,000 to 21,000 reads/s" in of(unsteady, "spread").text


# ------------------------------------------------------------------------------------- the system


@pytest.mark.parametrize(
    ("facts", "cause", "advice"),
    [
        ({"ring_errno": errno.EPERM, "io_uring_disabled": 2}, "kernel.io_uring_disabled is 2", "sysctl -w"),
        (
            {"ring_errno": errno.EPERM, "io_uring_disabled": 1, "io_uring_group": 990},
            "not in group 990",
            "add the server's user",
        ),
        (
            {"ring_errno": errno.EPERM, "io_uring_disabled": 1, "seccomp_mode": 2},
            "seccomp filter",
            "io_uring_setup, io_uring_enter and io_uring_register",
        ),
        (
            {"ring_errno": errno.ENOSYS, "io_uring_disabled": 0, "seccomp_mode": 2},
            "seccomp filter",
            "engram-server.json",
        ),
        ({"ring_errno": errno.ENOSYS, "io_uring_disabled": None}, "has no io_uring", "6.1 or newer"),
        ({"ring_errno": errno.ENOMEM}, "RLIMIT_MEMLOCK", "LimitMEMLOCK="),
        ({"ring_errno": errno.EACCES, "ring_error": "some words"}, "some words", "security module"),
    ],
)
def test_a_refused_ring_gets_its_likeliest_cause(facts: dict[str, Any], cause: str, advice: str) -> None:
    system = replace(examine_system(), **({"io_uring_disabled": 0, "seccomp_mode": 0} | facts))
    found = explain_system(system)
    ring = of(found, "io_uring")
    assert ring.level == "degraded"
    assert errno.errorcode[facts["ring_errno"]] in ring.text
    assert cause in ring.text
    assert advice in ring.advice
    assert all(finding.topic != "operations" for finding in found), "nothing there to ask"


def test_facts_come_from_proc(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "self/status").write_text("Name:\tx\nCapEff:\t0000000000004000\nSeccomp:\t2\n")
    (tmp_path / "sys/kernel/io_uring_disabled").write_text("1\n")
    (tmp_path / "sys/kernel/io_uring_group").write_text("-1\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 2048 kB\n")
    system = examine_system(tmp_path, tmp_path / "no cgroup")
    assert (system.seccomp_mode, system.io_uring_disabled, system.io_uring_group) == (2, 1, -1)
    assert not system.memlock_counts, "CAP_IPC_LOCK is bit 14"
    assert system.available_bytes == 2 << 20
    found = explain_system(system)
    assert "lets a ring be set up" in of(found, "seccomp").text
    assert of(found, "sysctl").level == "note"
    assert of(found, "memory").level == "note", "less than requests in flight may take"
    silent = examine_system(tmp_path / "absent", tmp_path / "no cgroup")
    assert (silent.seccomp_mode, silent.io_uring_disabled, silent.memlock_counts) == (None, None, True)


def test_tight_limits_are_worth_a_note() -> None:
    system = replace(examine_system(), memlock_bytes=64 << 10, memlock_counts=True, open_files=256)
    found = explain_system(system)
    assert (of(found, "memlock").level, of(found, "open files").level) == ("note", "note")
    assert "RLIMIT_MEMLOCK is 64 KiB, but registered buffers take 512 KiB" in of(found, "memlock").text
    root = explain_system(replace(system, memlock_counts=False))
    assert of(root, "memlock").level == "ok"
    free = explain_system(replace(system, memlock_bytes=None, open_files=None))
    assert (of(free, "memlock").level, of(free, "open files").level) == ("ok", "ok")


def test_an_old_kernel_is_told_from_a_new_one() -> None:
    old = replace(examine_system(), ring_flags=("COOP_TASKRUN",), operations={"IORING_OP_READ_FIXED": True})
    found = explain_system(old)
    assert of(found, "io_uring").level == "note"
    assert of(found, "operations").level == "degraded"
    assert "the kernel lacks READ (" in of(found, "operations").text


def test_a_missing_liburing_package_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liburing", None)
    assert of(explain_system(examine_system()), "operations").level == "note"
    assert examine()["status"] == 0
