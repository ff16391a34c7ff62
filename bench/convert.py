"""How near does a conversion come to a plain copy on the same disk?

One layer's FP4 table to a packed store, as `engram-server convert` does it by default, beside `dd` copying that layer's
shard with direct I/O and 4 MiB blocks. Both sides sync what they wrote, both count bytes read and bytes written.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import tables
from bench.pairs import interleaved, median_ratio
from bench.result import Bar, Result
from bench.scale import Scale
from engram_server.tables.checkpoint import TableRef, open_checkpoint

BLOCK_BYTES = 4 << 20
# A process' peak as `wait4` reports it begins with that of the process it was forked from: so it says itself.
CONVERT = """
import re, sys
from pathlib import Path
from engram_server.cli import main
code = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""


@dataclass(frozen=True)
class Run:
    """One side, once."""

    bytes_per_s: float
    peak_rss_bytes: int = 0


def run(scale: Scale) -> Iterator[Result]:
    """convert_vs_copy."""
    source = tables.checkpoint(scale)
    table = next(table for table in open_checkpoint(source).tables if table.layer == tables.LAYER)
    scratch = scale.beside("-scratch")
    scratch.mkdir(exist_ok=True)
    try:
        outcomes = interleaved(
            "convert",
            scale.pairs,
            {
                "ours": lambda _: converted(source, table, scratch / "converted.engram"),
                "dd": lambda _: copied(table.codes.path, scratch / "copy"),
            },
        )
    finally:
        for left in scratch.iterdir():
            left.unlink()
        scratch.rmdir()
    ours, dd = ([one.bytes_per_s for one in outcomes[side]] for side in ("ours", "dd"))
    yield Result(
        name="convert_vs_copy",
        what="FP4 checkpoint to packed store, bytes read and written",
        value=statistics.median(ours) / 1e9,
        unit="GB/s",
        reference=statistics.median(dd) / 1e9,
        reference_name="`dd`, direct I/O, 4 MiB blocks",
        ratio=median_ratio(ours, dd),
        bar=Bar(">=", 0.6),
        details={"peak_rss_mib": max(one.peak_rss_bytes for one in outcomes["ours"]) / 2**20},
    )


def converted(source: Path, table: TableRef, out: Path) -> Run:
    """The product, in a process of its own."""
    tables.drop_pages(table.codes.path)
    command = [sys.executable, "-c", CONVERT, "convert", str(source), str(out), "--layers", str(table.layer)]
    seconds, said = timed(command)
    moved = table.rows * table.row_bytes + out.stat().st_size
    out.unlink()
    return Run(moved / seconds, peak_rss_bytes=int(said.split()[-1]) * 1024)


def copied(shard: Path, out: Path) -> Run:
    """The ceiling."""
    tables.drop_pages(shard)
    seconds, _ = timed(
        ["dd", f"if={shard}", f"of={out}", f"bs={BLOCK_BYTES}", "iflag=direct", "oflag=direct", "conv=fsync"]
    )
    moved = 2 * out.stat().st_size
    out.unlink()
    return Run(moved / seconds)


def timed(command: list[str]) -> tuple[float, str]:
    """Seconds and standard output of a process. Raises RuntimeError with its own words when it fails."""
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return seconds, done.stdout
