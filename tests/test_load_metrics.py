"""engram-load against a server whose /metrics are read before and after: both tell the same story."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faulty_fs import faulty_fs
from support.serving import ServerProcess, serving, until
from test_load import arrivals, report
from test_metrics import Scrape

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "README.md"
COUNTS = {
    "rows": "engram_rows_total",
    "distinct": "engram_distinct_rows_total",
    "cached": "engram_cached_rows_total",
    "joined": "engram_joined_rows_total",
    "reads": "engram_row_reads_total",
    "read_bytes": "engram_row_read_bytes_total",
    "groups": "engram_row_groups_total",
}
HISTOGRAM_STEP = 1.001
"""Of the tester's histogram: a latency in it is right to a thousandth."""


@pytest.fixture(scope="module")
def server(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("serve")
    with serving(
        fp4_checkpoint, folder, uds=folder / "socket", metrics="127.0.0.1:0", cache_bytes=4 << 20
    ) as process:
        yield process


class Grown:
    """What counters grew by, from now on; those that are not there yet are 0."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._before = self._values()

    def _values(self) -> dict[tuple[str, ...], float]:
        return {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for sample in Scrape(self._server).samples
        }

    def by(self, name: str, *labels: str) -> float:
        """Over all samples with these values of labels."""
        return sum(
            value - self._before.get(key, 0)
            for key, value in self._values().items()
            if key[0] == name and set(labels) <= set(key)
        )


@pytest.mark.parametrize("transport", ["tcp", "uds", "shm"])
@pytest.mark.parametrize(
    "pattern",
    [
        ["prefill", "--length", "300,900", "--chunk", 256, "--concurrency", 3, "--count", 12],
        ["decode", "--batch", 4, "--drafts", 2, "--concurrency", 2, "--count", 40],
        ["prefill", "--length", 200, "--rate", 40, "--duration", 1],
        ["mix", "--batch", 4, "--length", 300, "--count", 6],
        ["prefill", "--length", 300, "--chunk", 100, "--count", 4, "--forward", "1=1ms,14=2ms"],
    ],
)
def test_a_report_counts_what_the_server_counts(
    server: ServerProcess, tmp_path: Path, transport: str, pattern: list[Any]
) -> None:
    tcp, uds = server.targets
    target = {"tcp": tcp, "uds": uds, "shm": f"shm:{uds}"}[transport]
    grown = Grown(server)
    document = report(tmp_path, pattern[0], target, TEXT, *pattern[1:])
    (point,) = document["points"]
    counts = point["counts"]
    answered = "engram_shm_requests_total" if transport == "shm" else "engram_lookup_seconds_count"
    # A streamed lookup is over, and counted, just after its last byte was handed over.
    until(lambda: grown.by(answered) >= counts["requests"])
    assert grown.by(answered) == counts["requests"] > 0
    assert {name: grown.by(metric) for name, metric in COUNTS.items()} == {
        name: counts[name] for name in COUNTS
    }
    assert counts["reads"] > 0
    assert counts["cached"] > 0
    assert grown.by("engram_lookup_failures_total") == 0
    before, after = point["cache"]["before"], point["cache"]["after"]
    for name, metric in (
        ("hits", "hits"),
        ("misses", "misses"),
        ("joined", "joins"),
        ("evictions", "evictions"),
    ):
        assert grown.by(f"engram_cache_{metric}_total") == after[name] - before[name], name


@pytest.mark.parametrize("transport", ["tcp", "uds"])
def test_no_lookup_is_faster_than_the_server_was(
    server: ServerProcess, tmp_path: Path, transport: str
) -> None:
    grown = Grown(server)
    target = server.targets[("tcp", "uds").index(transport)]
    document = report(tmp_path, "prefill", target, TEXT, "--length", 300, "--chunk", 100, "--count", 30)
    chunks = document["points"][0]["series"]["prompt"]["latencies"]["chunk"]
    until(lambda: grown.by("engram_lookup_seconds_count", transport) >= 90)
    assert chunks["count"] == grown.by("engram_lookup_seconds_count", transport) == 90
    server_s = grown.by("engram_lookup_seconds_sum", transport)
    assert chunks["mean_ms"] / 1e3 * 90 * HISTOGRAM_STEP >= server_s > 0
    # As many of the tester's are beyond each bound as of the server's.
    bounds = {sample.labels["le"] for sample in Scrape(server).samples if "le" in sample.labels} - {"+Inf"}
    for bound in bounds:
        within = grown.by("engram_lookup_seconds_bucket", transport, bound)
        if within < 90:
            later = percentile_ms(chunks, 100 * (within + 0.5) / 90)
            assert later * HISTOGRAM_STEP >= 1e3 * float(bound), bound


def percentile_ms(latencies: dict[str, Any], percent: float) -> float:
    from engram_load._measure import Latencies

    return Latencies(latencies["histogram"]).percentile_ms(percent)


def test_twice_what_a_slow_disk_can_do_shows_as_a_queue(fp4_checkpoint: Path, tmp_path: Path) -> None:
    delay_s, arriving_s = 0.001, 2.0
    mounted = tmp_path / "mnt"
    with (
        faulty_fs(fp4_checkpoint, mounted, tmp_path / "control.json") as faults,
        serving(mounted, tmp_path, metrics="127.0.0.1:0", cache_bytes=0) as server,
    ):
        until(lambda: "scales are in memory" in (tmp_path / "server.log").read_text())
        grown = Grown(server)
        faults.set("slow", delay_s=delay_s)  # one after another: 20 steps a second at most, and 40 come
        arguments = ["--batch", 1, "--rate", 40, "--duration", arriving_s, "--threads", 8]
        document = report(tmp_path, "decode", server.targets[0], TEXT, *arguments)
        faults.clear()
        reads, waited_s = grown.by("engram_reads_total"), grown.by("engram_read_seconds_sum")
    series = document["points"][0]["series"]["step"]
    assert series["jobs"] == arrivals(40, arriving_s)
    assert series["counts"]["reads"] == reads > 40 * arriving_s * 40
    assert waited_s >= reads * delay_s
    # The last of them came before the others were read, and its rows after them.
    queued_s = reads * delay_s - arriving_s
    assert queued_s > 1
    assert series["latencies"]["step"]["max_ms"] / 1e3 * HISTOGRAM_STEP >= queued_s
    assert series["latencies"]["step"]["percentiles_ms"]["99"] >= 1_000
    assert series["late"]["percentiles_ms"]["99"] >= 500, "most of it before there was a thread to send them"
