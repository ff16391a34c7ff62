"""How much memory does an engine need for Engram, whatever the size of the tables?

A process with torch, measured before anything of Engram is imported, then runs prefill chunks and decode steps through
RowPrefetcher and EngramLayer, beside a server: of the benchmark's tables, and of sparse ones of the released size. Its
growth (VmRSS, less the slots of shared memory by smaps) is looked at in every layer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import tables
from bench.result import Bar, Result
from bench.rss import MIB, server
from bench.scale import Scale
from engram_server.tables.synth import synthesise

TOKENS = 2_048
RELEASED_VOCAB_SIZE = 16_000_000
CACHE_BYTES = 64 << 20


def run(scale: Scale) -> Iterator[Result]:
    """engine_rss_growth_mib."""
    ours = tables.checkpoint(scale)
    released = synthesise(scale.beside("-sparse"), RELEASED_VOCAB_SIZE, sparse=True).path
    chunks = scale.pick(8, 2)
    small, slots = grown(ours, "require", chunks)
    large, _ = grown(released, "require", chunks)
    over_grpc, _ = grown(released, "off", chunks)
    yield Result(
        name="engine_rss_growth_mib",
        what=f"memory that Engram adds to an engine beyond its slots, chunks of {TOKENS:,} tokens, full-size tables",
        value=large / MIB,
        unit="MiB",
        reference=small / MIB,
        reference_name=f"tables of {table_bytes(ours) / table_bytes(released):.1%} of their size",
        ratio=large / small,
        bar=Bar("<=", 300, of="value"),
        details={
            "slots_mib": slots / MIB,
            "over_grpc_mib": over_grpc / MIB,
            "tables_mib": table_bytes(released) / MIB,
        },
    )


def grown(source: Path, use: str, chunks: int) -> tuple[int, int]:
    """Bytes by which an engine grows beside a server of these tables, and bytes of its slots."""
    with server(source, CACHE_BYTES, "--scales", "disk") as (_, target):
        command = [sys.executable, "-m", "bench.engine_process", target, use, str(TOKENS), str(chunks)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ran.stdout)
    return found["grown"], found["slots"]


def table_bytes(source: Path) -> int:
    """Of all shards, as `ls` has them."""
    return sum(shard.stat().st_size for shard in source.glob("*.safetensors"))
