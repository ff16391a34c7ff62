"""What does a server do with four times the load that it can bear?

A real `engram-server serve` of the packed store, all options left alone but for the cache, and another process that
asks it for the rows of 2,048 random tokens, cold ones: first two requests at a time, which says what it can bear;
then, for a minute, four times as many arrive, at random. Rows of every answer are compared with the store's. Recovered
is a server from when, after that minute, a request is sent that it lets in and answers no later than the slowest of
those it was asked for two at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench import tables
from bench.result import Bar, Result
from bench.rss import peak_rss_bytes, server
from bench.scale import Scale
from engram_server.memory import MemoryOptions

MIB = 1 << 20
CACHE_BYTES = 256 << 20
POSITIONS = 2_048


def run(scale: Scale) -> Iterator[Result]:
    """overload_refusal_p99_ms, overload_goodput, overload_recovery_s, overload_rss_mib."""
    store = tables.packed_store(scale)
    positions, seconds = scale.pick(POSITIONS, 130), 1.0 if scale.quick else 60.0
    command = [sys.executable, "-m", "bench.overload_process"]
    with server(store, CACHE_BYTES, "--shm", "off") as (process, target):
        load = subprocess.Popen(
            [*command, target, str(store), str(positions), str(seconds)], stdout=subprocess.PIPE, text=True
        )
        try:
            idle, closed, opened, checked = (phase(load) for _ in range(4))
        finally:
            load.kill()
            load.wait()
        peak_bytes = peak_rss_bytes(process.pid)
    yield refusal_result(idle, opened)
    yield goodput_result(closed, opened, positions, checked["checked_rows"])
    yield recovery_result(closed, opened)
    yield memory_result(peak_bytes)


def phase(load: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that the load prints."""
    assert load.stdout is not None
    line = load.stdout.readline()
    if not line:
        raise RuntimeError("the load ended early: its standard error says why")
    found: dict[str, Any] = json.loads(line)
    return found


def refusal_result(idle: dict[str, Any], opened: dict[str, Any]) -> Result:
    """How soon a client knows that it has to go elsewhere."""
    refused_ms = [1e3 * seconds for seconds in opened["refused_s"]] or [0.0]
    idle_ms = [1e3 * seconds for seconds in idle["describe_s"]]
    p99, idle_p99 = float(np.percentile(refused_ms, 99)), float(np.percentile(idle_ms, 99))
    return Result(
        name="overload_refusal_p99_ms",
        what="refusals at four times the load a server can bear, p99",
        value=p99,
        unit="ms",
        reference=idle_p99,
        reference_name="a call without rows, idle, p99",
        ratio=p99 / idle_p99,
        bar=Bar("<=", 10, of="value"),
        details={
            "p50_ms": float(np.percentile(refused_ms, 50)),
            "max_ms": max(refused_ms),
            "refused": len(opened["refused_s"]),
        },
    )


def goodput_result(
    closed: dict[str, Any], opened: dict[str, Any], positions: int, checked_rows: int
) -> Result:
    """Whether the load keeps the server from its work."""
    rows = positions * 48
    bearable = rows * len(closed["accepted_s"]) / closed["seconds"]
    answered = rows * opened["accepted"] / opened["seconds"]
    return Result(
        name="overload_goodput",
        what="cold rows answered meanwhile",
        value=answered,
        unit="rows/s",
        reference=bearable,
        reference_name="two requests at a time",
        ratio=answered / bearable,
        bar=Bar(">=", 0.9),
        details={
            "answered": len(opened["accepted_s"]),
            "p50_s": float(np.median(opened["accepted_s"] or [0.0])),
            "max_s": max(opened["accepted_s"] or [0.0]),
            "two_at_a_time_p50_s": float(np.median(closed["accepted_s"])),
            "two_at_a_time_max_s": max(closed["accepted_s"]),
            "exact_rows_checked": checked_rows,
        },
    )


def recovery_result(closed: dict[str, Any], opened: dict[str, Any]) -> Result:
    """How long the load is felt after its end."""
    slowest = max(closed["accepted_s"])
    return Result(
        name="overload_recovery_s",
        what="from the end of that load until a request is let in and answered as before",
        value=opened["recovery_s"],
        unit="s",
        reference=slowest,
        reference_name="as before: the slowest of two at a time",
        ratio=opened["recovery_s"] / slowest,
        bar=Bar("<=", 1, of="value"),
    )


def memory_result(peak_bytes: int) -> Result:
    """What the process held at most, everything but its cache."""
    budget = MemoryOptions().budget_bytes
    return Result(
        name="overload_rss_mib",
        what="peak memory of that server, over its cache",
        value=(peak_bytes - CACHE_BYTES) / MIB,
        unit="MiB",
        reference=budget / MIB,
        reference_name="its budget for requests in flight",
        ratio=(peak_bytes - CACHE_BYTES) / budget,
        bar=Bar("<=", 1),
        details={"peak_rss_mib": peak_bytes / MIB, "cache_mib": CACHE_BYTES / MIB},
    )
