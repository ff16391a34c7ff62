"""What does a lookup through shared memory cost, beside finding its rows in this process, and beside gRPC?

A real server and a real client, all rows in the cache. Calls come every 10 ms, as decode steps do: what sleeps between
them has to wake up. Sides take turns, so many calls each.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from bench import tables
from bench.futex import ping_pong
from bench.pairs import interleaved, median_ratio
from bench.result import Bar, Result
from bench.rss import server
from bench.scale import Scale
from engram_client import EngramClient, EngramMemory, Lookup

CADENCE_S = 0.01
DECODE_TOKENS = 64
PREFILL_TOKENS = 2_048
WARM_UPS = 5

Call = Callable[[], Any]

_ECHO = """
import sys
import grpc
from concurrent.futures import ThreadPoolExecutor
payload = bytes(int(sys.argv[1]))
echo = grpc.stream_stream_rpc_method_handler(lambda requests, _: (payload for _ in requests))
server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.max_send_message_length", -1)])
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Echo": echo}),))
server.add_insecure_port("unix:" + sys.argv[2])
server.start()
print("ready", flush=True)
sys.stdin.read()
"""


def run(scale: Scale) -> Iterator[Result]:
    """shm_decode_vs_floor, shm_decode_p99_vs_p50, shm_prefill_vs_embedded, shm_vs_grpc_throughput,
    grpc_decode_vs_echo."""
    store = tables.packed_store(scale)
    cache_bytes = scale.pick(1 << 30, 64 << 20)
    tokens = np.random.default_rng(0).integers(0, 128_000, PREFILL_TOKENS, dtype=np.int32)
    uds = scale.beside("-shm.sock")
    with ExitStack() as closing:
        # First: its process is forked, which gRPC does not like once it has threads.
        pong = closing.enter_context(ping_pong())
        closing.enter_context(server(store, cache_bytes, "--uds", str(uds)))
        memory = closing.enter_context(EngramMemory.open(store, cache_bytes=cache_bytes))
        shared = closing.enter_context(EngramClient(f"unix:{uds}", shared_memory="require"))
        plain = closing.enter_context(EngramClient(f"unix:{uds}", shared_memory="off"))
        yield from decode(scale, tokens[:DECODE_TOKENS], memory, shared, plain, pong, closing)
        yield from prefill(scale, tokens, memory, shared, plain)


def decode(
    scale: Scale,
    tokens: NDArray[np.int32],
    memory: EngramMemory,
    shared: EngramClient,
    plain: EngramClient,
    pong: Call,
    closing: ExitStack,
) -> Iterator[Result]:
    """A step of 64 tokens."""
    stream = closing.enter_context(plain.stream())
    expected = memory.lookup(tokens, format="packed").values
    echo = closing.enter_context(echo_stream(scale.beside("-echo.sock"), expected.nbytes))
    sides: dict[str, Call] = {
        "embedded": lambda: memory.lookup(tokens, format="packed"),
        "shared": lambda: shared.lookup(tokens, format="packed"),
        "in place": lambda: in_place(shared, tokens),
        "grpc": lambda: stream.lookup(tokens, format="packed").result(),
        "echo": echo,
        "futex": pong,
    }
    for name in ("shared", "grpc"):
        assert np.array_equal(sides[name]().values, expected)
    calls = scale.pick(100, 3)
    seen = interleaved(
        "decode steps", scale.pairs, {name: paced(call, calls) for name, call in sides.items()}
    )
    p50 = {name: [statistics.median(times) for times in rounds] for name, rounds in seen.items()}
    floor = [a + b for a, b in zip(p50["embedded"], p50["futex"], strict=True)]
    rpc_floor = [a + b for a, b in zip(p50["embedded"], p50["echo"], strict=True)]
    all_shared = [one for times in seen["shared"] for one in times]
    p99 = float(np.percentile(all_shared, 99))
    microseconds = {f"{name.replace(' ', '_')}_us": statistics.median(p50[name]) * 1e6 for name in sides}
    what = f"decode step of {DECODE_TOKENS} tokens, hits, packed"
    yield Result(
        name="shm_decode_vs_floor",
        what=f"{what}, shared memory, p50",
        value=statistics.median(p50["shared"]) * 1e6,
        unit="us",
        reference=statistics.median(floor) * 1e6,
        reference_name="in process, and a futex ping-pong",
        ratio=median_ratio(p50["shared"], floor),
        bar=Bar("<=", 1.5),
        details=microseconds,
    )
    yield Result(
        name="shm_decode_p99_vs_p50",
        what="the same, p99",
        value=p99 * 1e6,
        unit="us",
        reference=statistics.median(all_shared) * 1e6,
        reference_name="its p50",
        ratio=p99 / statistics.median(all_shared),
        bar=Bar("<=", 3),
        details={"calls": len(all_shared), "max_us": max(all_shared) * 1e6},
    )
    yield Result(
        name="grpc_decode_vs_echo",
        what=f"{what}, an open gRPC stream, p50",
        value=statistics.median(p50["grpc"]) * 1e6,
        unit="us",
        reference=statistics.median(rpc_floor) * 1e6,
        reference_name="in process, and an equal reply on an open stream",
        ratio=median_ratio(p50["grpc"], rpc_floor),
        bar=Bar("<=", 1.3),
    )


def prefill(
    scale: Scale, tokens: NDArray[np.int32], memory: EngramMemory, shared: EngramClient, plain: EngramClient
) -> Iterator[Result]:
    """A chunk of 2,048 tokens."""
    sides: dict[str, Call] = {
        "embedded": lambda: memory.lookup(tokens, format="packed"),
        "in place": lambda: in_place(shared, tokens),
        "shared": lambda: shared.lookup(tokens, format="packed"),
        "grpc": lambda: plain.lookup(tokens, format="packed"),
    }
    expected = memory.lookup(tokens, format="packed").values
    for name in ("shared", "grpc"):
        assert np.array_equal(sides[name]().values, expected)
    calls = scale.pick(20, 2)
    seen = interleaved(
        "prefill chunks", scale.pairs, {name: paced(call, calls) for name, call in sides.items()}
    )
    p50 = {name: [statistics.median(times) for times in rounds] for name, rounds in seen.items()}
    what = f"prefill chunk of {PREFILL_TOKENS:,} tokens, hits, packed"
    yield Result(
        name="shm_prefill_vs_embedded",
        what=f"{what}, shared memory, in place",
        value=statistics.median(p50["in place"]) * 1e3,
        unit="ms",
        reference=statistics.median(p50["embedded"]) * 1e3,
        reference_name="in process",
        ratio=median_ratio(p50["in place"], p50["embedded"]),
        bar=Bar("<=", 1.2),
        details={
            "copied_out_ms": statistics.median(p50["shared"]) * 1e3,
            "copied_out_ratio": median_ratio(p50["shared"], p50["embedded"]),
        },
    )
    rows = expected.shape[0] * expected.shape[1] * expected.shape[2]
    rates = {name: [rows / seconds for seconds in p50[name]] for name in ("in place", "grpc")}
    yield Result(
        name="shm_vs_grpc_throughput",
        what="the same, rows",
        value=statistics.median(rates["in place"]),
        unit="rows/s",
        reference=statistics.median(rates["grpc"]),
        reference_name="gRPC over a UNIX socket",
        ratio=median_ratio(rates["in place"], rates["grpc"]),
        bar=Bar(">=", 5),
        details={"copied_out_ratio": median_ratio(p50["grpc"], p50["shared"])},
    )


def in_place(client: EngramClient, tokens: NDArray[np.int32]) -> None:
    """A lookup whose rows are not copied."""
    with client.in_place().lookup(tokens, format="packed") as found:
        assert isinstance(found, Lookup)


def paced(call: Call, calls: int) -> Callable[[int], list[float]]:
    """Seconds of so many calls, one every CADENCE_S after some to warm up."""

    def run_once(_: int) -> list[float]:
        times = []
        due = time.perf_counter()
        for _ in range(WARM_UPS + calls):
            time.sleep(max(0.0, due - time.perf_counter()))
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
            due = max(due + CADENCE_S, time.perf_counter())
        return times[WARM_UPS:]

    return run_once


@contextmanager
def echo_stream(uds: Path, payload_bytes: int) -> Iterator[Call]:
    """A call that sends a small message on an open stream and waits for one of so many bytes."""
    process = subprocess.Popen(
        [sys.executable, "-c", _ECHO, str(payload_bytes), str(uds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with grpc.insecure_channel(f"unix:{uds}", [("grpc.max_receive_message_length", -1)]) as channel:
            outbox: SimpleQueue[bytes | None] = SimpleQueue()
            replies: Any = channel.stream_stream("/bench.Echo/Echo")(iter(outbox.get, None))
            request = bytes(DECODE_TOKENS * 4 + 200)  # about what a LookupRequest has

            def once() -> None:
                outbox.put(request)
                assert len(next(replies)) == payload_bytes

            yield once
            outbox.put(None)
            replies.cancel()
    finally:
        process.kill()
        process.communicate()
