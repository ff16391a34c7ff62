"""Does a server hold what its configuration says, and how much more?

A real `engram-server serve` of the checkpoint in place, cache and scales in memory. Streams of random tokens, nearly
all of whose row groups are new, fill the cache more than once; then streams of real documents run side by side. The
figure is the process' peak of resident memory since its start (VmHWM), less cache and scales.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench import corpus, tables
from bench.pairs import progress
from bench.result import Bar, Result
from bench.scale import Scale
from engram_client import EngramClient
from engram_server.tables.checkpoint import open_checkpoint

MIB = 1 << 20
STREAMS = 4
FILLED = 1.25
"""Bytes of rows read, over those of the cache: also the last sets are full then."""
TEXT_VOCABULARY = 128_000
"""Ids below it are text, no special tokens."""
STOP_S = 60
LOOKUP_S = 600
"""A document of random tokens is 3 million cold rows."""


def run(scale: Scale) -> Iterator[Result]:
    """rss_over_budget_mib."""
    source = tables.checkpoint(scale)
    tokens = scale.pick(65_536, 256)
    cache_bytes = scale.pick(512 << 20, 1 << 20)
    text = corpus.load(scale, source / "tokenizer.json", tokens * (1 if scale.quick else STREAMS))
    documents = [text.document(0 if scale.quick else number, tokens) for number in range(STREAMS)]
    scale_bytes = open_checkpoint(source).scale_bytes
    # Four documents at once are a minute of reading, and none is to be refused.
    with server(source, cache_bytes, "--queue-seconds", "600") as (process, target):
        with EngramClient(target) as client:
            row_bytes = next(iter(client.describe().tables.values())).row_bytes
        filled_bytes = fill(target, int(FILLED * cache_bytes / row_bytes), tokens) * row_bytes
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda document: look_up(target, document), documents))
        rss_bytes = peak_rss_bytes(process.pid)
    configured = cache_bytes + scale_bytes
    yield Result(
        name="rss_over_budget_mib",
        what="peak memory of a server under document streams, over its cache and scales",
        value=(rss_bytes - configured) / MIB,
        unit="MiB",
        reference=configured / MIB,
        reference_name="cache and scales",
        ratio=(rss_bytes - configured) / configured,
        bar=Bar("<=", 400, of="value"),
        details={
            "peak_rss_mib": rss_bytes / MIB,
            "cache_mib": cache_bytes / MIB,
            "scales_mib": scale_bytes / MIB,
            "rows_read_mib": filled_bytes / MIB,
        },
    )


def fill(target: str, rows: int, tokens: int) -> int:
    """Look random tokens up until so many rows were read from disk; returns how many were."""
    rng = np.random.default_rng(0)
    read = 0
    asked = range(0, rows, tokens * 48)
    for _ in progress(asked, "filling the server's cache", "document"):
        read += look_up(target, rng.integers(0, TEXT_VOCABULARY, tokens, dtype=np.int32))
    while read < rows:  # a few groups repeat
        read += look_up(target, rng.integers(0, TEXT_VOCABULARY, tokens, dtype=np.int32))
    return read


def look_up(target: str, tokens: NDArray[np.int32]) -> int:
    """One document over a stream of its own; returns the distinct rows that it read."""
    with EngramClient(target) as client, client.stream() as stream:
        stats = stream.lookup(tokens, format="packed", timeout=LOOKUP_S).result().stats
        return stats.distinct - stats.cached - stats.joined


@contextmanager
def server(source: Path, cache_bytes: int, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process on a free port, its scales loaded, and its address."""
    command = [
        sys.executable, "-m", "engram_server.cli", "serve", str(source), "--listen", "127.0.0.1:0",
        "--scales", "memory", "--cache-bytes", str(cache_bytes), *options,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r" on (127\.0\.0\.1:\d+)", line)
        if found is None:
            raise RuntimeError(f"the server did not start: run `{' '.join(command[1:])}` to see why")
        yield process, found[1]
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)
    finally:
        process.kill()
        process.wait()


def peak_rss_bytes(pid: int) -> int:
    """VmHWM of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise RuntimeError("/proc shows no VmHWM: is the process gone?")
    return int(found[1]) * 1024
