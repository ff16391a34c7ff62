"""Do the latencies of engram-load exceed the server's own by more than the way to it?

The server's are a histogram whose buckets have bounds: a percentile is known to be at most its bucket's. What
engram-load measured beyond that bound is compared with what a call costs that only echoes as many bytes, at the same
percentile.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from bench import tables
from bench.pairs import interleaved
from bench.result import Bar, Result
from bench.rss import server
from bench.scale import Scale
from engram_load import cli
from engram_load._measure import Latencies

ROOT = Path(__file__).resolve().parent.parent
LENGTH = 256
PERCENTS = (50, 90, 99)
CACHE_BYTES = 64 << 20

_ECHO = """
import sys
import grpc
from concurrent.futures import ThreadPoolExecutor
payload = bytes(int(sys.argv[1]))
echo = grpc.unary_unary_rpc_method_handler(lambda request, _: payload)
server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.max_send_message_length", -1)])
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Echo": echo}),))
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.read()
"""


def run(scale: Scale) -> Iterator[Result]:
    """load_over_server_ms."""
    store = tables.packed_store(scale)
    count = scale.pick(100, 5)
    metrics = f"127.0.0.1:{free_port()}"
    with ExitStack() as closing:
        _, target = closing.enter_context(server(store, CACHE_BYTES, "--metrics", metrics))
        answer_bytes = load(target, 1)["series"]["prompt"]["counts"]["answer_bytes"]
        call = closing.enter_context(echo(answer_bytes))
        seen = interleaved(
            "load tests",
            scale.pairs,
            {
                "load": lambda number: beyond(metrics, target, count, 1 + number),
                "echo": lambda _: timed(call, count),
            },
        )
    over = {percent: float(np.median([found[percent] for found, _ in seen["load"]])) for percent in PERCENTS}
    echoed = {percent: float(np.percentile(np.concatenate(seen["echo"]), percent)) for percent in PERCENTS}
    worst = max(PERCENTS, key=lambda percent: over[percent] / echoed[percent])
    yield Result(
        name="load_over_server_ms",
        what=f"engram-load's p{worst} beyond the bucket of the server's own, prompts of {LENGTH} tokens",
        value=over[worst],
        unit="ms",
        reference=echoed[worst],
        reference_name=f"p{worst} of an echo of {answer_bytes:,} bytes",
        ratio=over[worst] / echoed[worst],
        bar=Bar("<=", 1),
        details={
            **{f"p{percent}_over_ms": over[percent] for percent in PERCENTS},
            **{f"p{percent}_echo_ms": echoed[percent] for percent in PERCENTS},
            "mean_over_ms": float(np.median([mean for _, mean in seen["load"]])),
            "mean_echo_ms": float(np.mean(np.concatenate(seen["echo"]))),
        },
    )


def beyond(metrics: str, target: str, count: int, seed: int) -> tuple[dict[int, float], float]:
    """Milliseconds, by percentile, that the tester saw beyond the server's bucket; and beyond its mean."""
    before = lookups(metrics)
    chunks = load(target, count, seed)["series"]["prompt"]["latencies"]["chunk"]
    after = lookups(metrics)
    grown = {bound: value - before.get(bound, 0) for bound, value in after.items()}
    assert grown["+Inf"] == count == chunks["count"], "somebody else asks, too"
    latencies = Latencies(chunks["histogram"])
    over = {
        percent: latencies.percentile_ms(percent) - bound_ms(grown, count * percent / 100)
        for percent in PERCENTS
    }
    return over, chunks["mean_ms"] - 1e3 * grown["sum"] / count


def bound_ms(buckets: dict[str, float], rank: float) -> float:
    """The upper bound of the bucket that has the lookup of this rank."""
    return min(1e3 * float(bound) for bound, within in buckets.items() if bound != "sum" and within >= rank)


def lookups(metrics: str) -> dict[str, float]:
    """Lookups answered within each bound, and the seconds of all as "sum"; over TCP."""
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        samples = [sample for family in families for sample in family.samples]
    found: dict[str, float] = {}
    for sample in samples:
        if sample.name in ("engram_lookup_seconds_bucket", "engram_lookup_seconds_sum"):
            bound = sample.labels.get("le", "sum")
            found[bound] = found.get(bound, 0) + sample.value
    return found


def load(target: str, count: int, seed: int = 0) -> Any:
    """The one point of a report."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "report.json"
        arguments = ["prefill", target, str(ROOT / "docs"), "--length", str(LENGTH), "--count", str(count)]
        arguments += ["--seed", str(seed), "--json", str(file), "--quiet"]
        if cli.main(arguments) != 0:
            raise RuntimeError("engram-load failed; its own words are above")
        return json.loads(file.read_text())["points"][0]


def timed(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of so many calls."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return times


@contextmanager
def echo(payload_bytes: int) -> Iterator[Callable[[], object]]:
    """A call over TCP that sends as much as a lookup does and is answered with so many bytes."""
    command = [sys.executable, "-c", _ECHO, str(payload_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        options = [("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            call: Any = channel.unary_unary("/bench.Echo/Echo")
            request = bytes(LENGTH * 4 + 200)
            yield lambda: call(request, wait_for_ready=True)
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
