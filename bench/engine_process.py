"""`python -m bench.engine_process TARGET USE TOKENS CHUNKS`: what bench/engine.py measures. Prints bytes as JSON.

Nothing of Engram is imported before the first look at its memory.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

HIDDEN, STREAMS = 64, 4
"""Small: the layers' weights are the backbone's, and nothing of them is to be seen here."""
SLOTS = "/memfd:engram-client"


def main(target: str, use: Any, tokens: int, chunks: int) -> dict[str, int]:
    """Bytes that Engram has added at most, and those of the slots in memory, which are not counted in."""
    torch.rand(512, 512) @ torch.rand(512, 512)
    ctypes.CDLL(None).malloc_trim(0)
    before = resident_bytes()
    grown = slots = 0
    for _ in forwards(target, use, tokens, chunks):
        slots = slot_bytes()
        grown = max(grown, resident_bytes() - slots - before)
    return {"grown": grown, "slots": slots}


def forwards(target: str, use: Any, tokens: int, chunks: int) -> Any:
    """A look at each layer: prefill chunks, and a decode step between two; the next step is always under way."""
    from engram_client import EngramClient
    from engram_client.torch import EngramLayer, RowPrefetcher

    generator = torch.Generator().manual_seed(0)
    layers = {layer: EngramLayer(HIDDEN, STREAMS).requires_grad_(False) for layer in (1, 14)}
    sizes = [size for _ in range(chunks) for size in (tokens, 64)]
    asked = [torch.randint(0, 128_000, (size,), generator=generator) for size in sizes]
    with EngramClient(target, shared_memory=use) as client, RowPrefetcher(client) as prefetcher:
        under_way = prefetcher.prefetch(asked[0])
        for step, following in zip(asked, [*asked[1:], asked[0]], strict=True):
            rows, under_way = under_way, prefetcher.prefetch(following)
            hidden = torch.zeros(len(step), STREAMS, HIDDEN, dtype=torch.bfloat16)
            for layer, add_rows in layers.items():
                hidden = add_rows(hidden, *rows.wait(layer))
                yield layer


def resident_bytes() -> int:
    """VmRSS of this process."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def slot_bytes() -> int:
    """The part of it that is memory shared with the server."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = SLOTS in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
