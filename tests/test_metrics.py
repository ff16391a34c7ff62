"""`/metrics` of a real server against what its clients saw, and the probes beside it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from dataclasses import fields
from http.client import HTTPException
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from support.certificates import Authority, files_of
from support.faulty_fs import faulty_fs
from support.serving import ServerProcess, serving, until

from engram_client import NO_RETRY, EngramClient, EngramError, Lookup
from engram_client._proto import engram_pb2 as pb
from engram_client._result import Stats
from engram_server.cli import main
from engram_server.fetch import Fetcher
from engram_server.limits import Limits
from engram_server.memory import Memory, MemoryOptions
from engram_server.metrics import _TOTALS, LookupMetrics, MemoryCollector, ServerMetrics
from engram_server.security import SecurityOptions
from engram_server.stream import ClientGoneError, ReplyStream

_ASKS_AND_WAITS = """
import sys
from engram_client import EngramClient
with EngramClient(sys.argv[1], shared_memory="require") as client:
    client.lookup_rows(1, list(range(8)))
"""
DOCS = Path(__file__).parent.parent / "docs" / "metrics.md"


def address(server: ServerProcess) -> str:
    found = re.search(r"metrics at http://(\S+)/metrics", server.ready_line)
    assert found is not None, server.ready_line
    return found[1]


def get(server: ServerProcess, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address(server)}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Scrape:
    """Samples by name and labels."""

    def __init__(self, server: ServerProcess) -> None:
        status, text = get(server, "/metrics")
        assert status == 200
        self.families = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def sum(self, name: str, **labels: str) -> float:
        """Over all samples of a name with these labels; there must be one."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"{name} {labels} is not shown"
        return sum(found)


@pytest.fixture
def server(fp4_checkpoint: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(
        fp4_checkpoint,
        tmp_path,
        uds=tmp_path / "socket",
        metrics="127.0.0.1:0",
        scales="disk",
        backend="pread",
    ) as process:
        yield process


def test_what_is_counted_is_what_clients_were_told(server: ServerProcess) -> None:
    tcp, uds = server.targets
    before = Scrape(server)
    rng = np.random.default_rng(0)
    told: dict[str, list[Stats]] = {"decode": [], "prefill": []}
    with (
        EngramClient(tcp, shared_memory="off") as by_tcp,
        EngramClient(uds, shared_memory="off") as by_uds,
        EngramClient(uds, shared_memory="require") as shared,
        by_tcp.stream() as stream,
    ):
        calls = [by_tcp.lookup, by_uds.lookup, shared.lookup, lambda *a, **k: stream.lookup(*a, **k).result()]
        for lane, tokens in (("decode", 20), ("prefill", 300), ("decode", 7)):
            prompt = rng.integers(0, 5_000, tokens)
            for call in calls:
                found: Lookup = call(prompt, format="packed", lane=lane)
                told[lane].append(found.stats)
        # A stream's lookup is over, and counted, just after its last byte was handed over; or cancelled, when its
        # client has gone by then.
        until(
            lambda: Scrape(server).sum("engram_lookup_seconds_count", transport="tcp", format="packed") == 6
        )
    after = Scrape(server)
    for field, what in zip(fields(Stats), _TOTALS, strict=True):
        name = f"engram_{what}_total"
        for lane, stats in told.items():
            seen = after.sum(name, lane=lane) - before.sum(name, lane=lane)
            assert seen == sum(getattr(one, field.name) for one in stats), (name, lane)
    reads = sum(one.reads for stats in told.values() for one in stats)
    assert reads > 0
    assert after.sum("engram_reads_total") - before.sum("engram_reads_total") == reads
    counted = after.sum("engram_read_seconds_count") - before.sum("engram_read_seconds_count")
    assert counted == reads
    assert after.sum("engram_queue_seconds_count") - before.sum("engram_queue_seconds_count") == reads
    asked = after.sum("engram_read_bytes_total") - before.sum("engram_read_bytes_total")
    assert asked == sum(one.read_bytes for stats in told.values() for one in stats)
    useful = after.sum("engram_read_useful_bytes_total") - before.sum("engram_read_useful_bytes_total")
    assert useful == reads / 2 * 136, "two reads a row: codes, and scales"
    assert after.sum("engram_lookup_seconds_count", transport="uds", format="packed") == 3
    assert after.sum("engram_lookup_seconds_count", transport="tcp", lane="prefill") == 2
    assert after.sum("engram_lookup_seconds_count", transport="shm", lane="decode", format="packed") == 2
    assert after.sum("engram_lookup_seconds_count", transport="shm") == 3
    assert after.sum("engram_shm_requests_total") == 3
    assert after.sum("engram_shm_failures_total") == 0
    assert after.sum("engram_reads_in_flight") == 0
    assert after.sum("engram_budget_used_bytes") == 0
    assert after.sum("engram_ready") == 1


def test_errors_are_counted_by_what_they_were(server: ServerProcess) -> None:
    with EngramClient(server.targets[0], shared_memory="off") as client, client.stream() as stream:
        for _ in range(2):
            with pytest.raises(EngramError):
                client.lookup_rows(1, [2**40])
        with pytest.raises(EngramError):
            stream.lookup_rows(1, [2**40]).result()
        with pytest.raises(EngramError):
            client.lookup([1], pin={1: b"another"})
    seen = Scrape(server)
    assert seen.sum("engram_lookup_failures_total", transport="tcp", code="invalid_argument") == 3
    assert seen.sum("engram_lookup_failures_total", transport="tcp", code="failed_precondition") == 1


def test_shared_memory_counts_latencies_and_errors_in_the_families_of_grpc(server: ServerProcess) -> None:
    tcp, uds = server.targets
    with (
        EngramClient(tcp, shared_memory="off") as by_tcp,
        EngramClient(uds, shared_memory="require") as shared,
    ):
        for client, times in ((by_tcp, 1), (shared, 3)):
            for _ in range(times):
                client.lookup([1, 2], format="fp32", lane="prefill")
                with pytest.raises(EngramError):
                    client.lookup_rows(1, [2**40])
            with pytest.raises(EngramError):
                client.lookup([1], pin={1: bytes(32)})
        seen = Scrape(server)
    for name in ("engram_lookup_seconds", "engram_lookup_failures"):
        assert len([family for family in seen.families if family.name == name]) == 1, name
    for transport, times in (("tcp", 1), ("shm", 3)):
        labels = {"transport": transport, "lane": "prefill", "format": "fp32"}
        assert seen.sum("engram_lookup_seconds_count", **labels) == times
        assert seen.sum("engram_lookup_seconds_bucket", le="+Inf", **labels) == times
        failures = {"transport": transport, "code": "invalid_argument"}
        assert seen.sum("engram_lookup_failures_total", **failures) == times
        failures["code"] = "failed_precondition"
        assert seen.sum("engram_lookup_failures_total", **failures) == 1
    assert seen.sum("engram_shm_failures_total") == 4


def test_conversion_is_counted_by_format(server: ServerProcess) -> None:
    tcp, uds = server.targets
    row_bytes = {"packed": 136, "packed-fp8": 264, "bf16": 512, "fp32": 1024}
    tokens = list(range(40))
    before = Scrape(server)
    began = time.perf_counter()
    wrote = dict.fromkeys(row_bytes, 0)
    with (
        EngramClient(tcp, shared_memory="off") as by_tcp,
        EngramClient(uds, shared_memory="require") as shared,
    ):
        for format, size in row_bytes.items():
            for _ in range(2):  # from the disk at first, then from the cache
                for client in (by_tcp, shared):
                    wrote[format] += client.lookup(tokens, format=format).stats.rows * size
            unique = by_tcp.lookup([5, 5, *tokens], format=format, unique=True).unique
            assert unique is not None
            wrote[format] += sum(rows.shape[0] for rows in unique.values()) * size
    elapsed = time.perf_counter() - began
    after = Scrape(server)
    seconds = 0.0
    for format, expected in wrote.items():
        labels = {"device": "cpu", "format": format}
        name = "engram_convert_bytes_total"
        assert after.sum(name, **labels) - before.sum(name, **labels) == expected, format
        name = "engram_convert_seconds_total"
        spent = after.sum(name, **labels) - before.sum(name, **labels)
        assert spent > 0, format
        seconds += spent
    assert seconds < elapsed, "one after another, each within its lookup"


def test_a_stall_shows_in_the_latency_of_shared_memory(fp4_checkpoint: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "mnt"
    with (
        faulty_fs(fp4_checkpoint, mounted, tmp_path / "control.json") as faults,
        serving(mounted, tmp_path, metrics="127.0.0.1:0", scales="disk", cache_bytes=0) as server,
        EngramClient(server.targets[0], shared_memory="require") as client,
    ):
        faults.set("slow", delay_s=0.06)
        for _ in range(3):
            client.lookup_rows(14, [5], lane="prefill", format="bf16")
        faults.clear()
        after = Scrape(server)
    slow = {"transport": "shm", "lane": "prefill", "format": "bf16"}
    assert after.sum("engram_lookup_seconds_bucket", le="0.05", **slow) == 0
    assert after.sum("engram_lookup_seconds_count", **slow) == 3
    assert after.sum("engram_lookup_seconds_sum", **slow) >= 3 * 0.06


def test_a_slow_or_broken_disk_shows(fp4_checkpoint: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "mnt"
    with (
        faulty_fs(fp4_checkpoint, mounted, tmp_path / "control.json") as faults,
        serving(mounted, tmp_path, metrics="127.0.0.1:0", scales="disk", cache_bytes=0) as server,
        EngramClient(server.targets[0], shared_memory="off") as client,
    ):
        before = Scrape(server)
        faults.set("slow", delay_s=0.06)
        client.lookup_rows(14, [5, 6], lane="prefill")
        faults.set("eio")
        with pytest.raises(EngramError):
            client.lookup_rows(1, [5])
        faults.set("short")
        with pytest.raises(EngramError):
            client.lookup_rows(1, [5])
        faults.clear()
        after = Scrape(server)
    slow = {"layer": "14", "lane": "prefill"}
    assert after.sum("engram_read_seconds_count", **slow) == 4
    assert after.sum("engram_read_seconds_bucket", le="0.05", **slow) == 0
    assert after.sum("engram_read_seconds_sum", **slow) >= 4 * 0.06
    for kind in ("io", "truncated"):
        counted = after.sum("engram_read_errors_total", kind=kind)
        assert counted - before.sum("engram_read_errors_total", kind=kind) == 2, kind
    assert after.sum("engram_lookup_failures_total", code="data_loss") == 2


def test_a_wrong_checksum_shows(fp4_checkpoint: Path, tmp_path: Path) -> None:
    store = tmp_path / "tables.engram"
    assert main(["convert", str(fp4_checkpoint), str(store)]) == 0
    with store.open("r+b") as file:
        file.seek(4096 + 140)
        byte = file.read(1)
        file.seek(4096 + 140)
        file.write(bytes([byte[0] ^ 1]))
    with serving(store, tmp_path, metrics="127.0.0.1:0") as server:
        assert get(server, "/readyz") == (200, "ready\n")
        with EngramClient(server.targets[0], shared_memory="off") as client, pytest.raises(EngramError):
            client.lookup_rows(1, [1])
        until(lambda: get(server, "/readyz")[0] == 503)
        assert "checksum" in get(server, "/readyz")[1]
        assert get(server, "/healthz") == (200, "alive\n"), "a restart would not help"
        seen = Scrape(server)
    assert seen.sum("engram_read_errors_total", kind="checksum") == 1
    assert seen.sum("engram_ready") == 0


def test_a_ring_that_breaks_shows_when_no_other_backend_takes_over(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    support = Path(__file__).parent
    before = (
        f"import signal, sys; sys.path.insert(0, {str(support)!r}); from support.seccomp import forbid_io_uring; "
        "signal.signal(signal.SIGUSR1, lambda *_: (forbid_io_uring(), print('forbidden', flush=True)))"
    )
    with (
        serving(
            fp4_checkpoint, tmp_path, metrics="127.0.0.1:0", backend="io_uring", cache_bytes=0, before=before
        ) as server,
        EngramClient(server.targets[0], shared_memory="off", retry=NO_RETRY) as client,
    ):
        client.lookup_rows(1, [5])
        server.process.send_signal(signal.SIGUSR1)
        assert server.process.stdout is not None
        assert server.process.stdout.readline() == b"forbidden\n"
        with pytest.raises(EngramError):
            client.lookup_rows(1, [6])
        until(lambda: get(server, "/readyz")[0] == 503)
        assert "backend io_uring: BROKEN: io_uring_enter failed" in get(server, "/readyz")[1]
        assert get(server, "/healthz")[0] == 200
        seen = Scrape(server)
    assert seen.sum("engram_ready") == 0
    assert seen.sum("engram_backend_fallback") == 0


def test_every_metric_is_documented_and_named_by_the_conventions(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    security = SecurityOptions(tls=files_of(Authority(tmp_path).server()))
    uds = tmp_path / "socket"
    with serving(fp4_checkpoint, tmp_path, uds=uds, metrics="127.0.0.1:0", security=security) as server:
        with EngramClient(f"unix:{uds}", shared_memory="off") as client:
            client.lookup([1, 2])
            with pytest.raises(EngramError):
                client.lookup_rows(1, [2**40])
        families = Scrape(server).families
    documented = set(re.findall(r"^\| `(engram_\w+)`", DOCS.read_text(), re.MULTILINE))
    shown = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if name.startswith("engram_") and not name.endswith("_created"):
            shown[name] = family
    assert documented == set(shown)
    for name, family in shown.items():
        assert family.documentation.endswith("."), name
        assert not re.search(r"_(us|ms|ns|mib|kib|percent)(_|$)", name), f"{name}: seconds and bytes"


def test_tables_that_are_gone_from_their_folder_can_be_shown(fp4_checkpoint: Path, tmp_path: Path) -> None:
    """A reload shows them when requests begin to be answered from them: it must not fail for their names."""
    folder = Path(shutil.copytree(fp4_checkpoint, tmp_path / "tables"))
    device = folder.stat().st_dev
    with Memory.open(folder, MemoryOptions(cache_bytes=1 << 20)) as memory:
        shutil.rmtree(folder)
        collector = MemoryCollector(memory, lambda: "")
        collector.reopened(memory)
        (family,) = (metric for metric in collector.collect() if metric.name == "engram_reads_in_flight")
        assert [sample.labels["device"] for sample in family.samples] == [
            f"{os.major(device)}:{os.minor(device)}"
        ]


def test_other_paths_and_odd_clients(server: ServerProcess) -> None:
    assert get(server, "/")[0] == 404
    host, _, port = address(server).rpartition(":")
    for sent, status in (
        (b"", b""),
        (b"GET /metrics HTTP/1.1\r\n", b""),
        (b"\0" * 300 + b"\r\n\r\n", b"400"),
        (b"PUT /metrics HTTP/1.1\r\n\r\n", b"501"),
    ):
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            assert status in client.makefile("rb").read()
    assert get(server, "/healthz") == (200, "alive\n")
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("where", ["9464", "127.0.0.1:99999", "host.invalid:1", ":x", "é" * 70 + ":0"])
def test_an_address_that_cannot_be_had_is_a_sentence(
    where: str, fp4_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "serve",
                str(fp4_checkpoint),
                "--listen",
                "127.0.0.1:0",
                "--cache-bytes=1MiB",
                "--metrics",
                where,
            ]
        )
        == 1
    )
    assert re.search(f"cannot show metrics at '?{re.escape(where)}'?: ", capsys.readouterr().err)


def test_who_does_not_ask_keeps_nobody_out(server: ServerProcess) -> None:
    """A server that its probes cannot reach is restarted: whoever reaches the port could have that done."""
    host, _, port = address(server).rpartition(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(16)]
    try:
        for _ in range(30):
            for connection in slow:
                with suppress(ConnectionError):
                    connection.send(b"G")
            assert get(server, "/healthz") == (200, "alive\n")
        assert get(server, "/metrics")[0] == 200
    finally:
        for connection in slow:
            connection.close()
    assert "Traceback" not in server.log.read_text()


def test_more_connections_than_there_is_room_for_are_hung_up_on(server: ServerProcess) -> None:
    host, _, port = address(server).rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=20) for _ in range(17)]
    try:
        with suppress(ConnectionError):
            assert silent[0].recv(1) == b""
        silent[16].sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert silent[16].makefile("rb").read().endswith(b"alive\n")
    finally:
        for connection in silent:
            connection.close()
    until(lambda: answers(server))


def answers(server: ServerProcess) -> bool:
    try:
        return get(server, "/healthz") == (200, "alive\n")
    except (OSError, HTTPException):
        return False


def test_a_lookup_that_is_given_up_is_counted(fp4_checkpoint: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "mnt"
    with (
        faulty_fs(fp4_checkpoint, mounted, tmp_path / "control.json") as faults,
        serving(mounted, tmp_path, metrics="127.0.0.1:0", scales="disk", cache_bytes=0) as server,
        EngramClient(server.targets[0], shared_memory="off", retry=NO_RETRY) as client,
    ):
        faults.set("slow", delay_s=0.5)
        with client.stream() as stream:
            stream.lookup_rows(1, list(range(8)))
            until(lambda: Scrape(server).sum("engram_reads_in_flight") > 0)
        name = "engram_lookup_failures_total"
        until(lambda: any(sample.name == name for sample in Scrape(server).samples))
        assert Scrape(server).sum(name, code="cancelled") == 1


def test_lookups_of_a_client_that_dies_are_cancelled_over_shared_memory_too(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    """As over gRPC: what an engine's end leaves behind is no failure of the server, and wakes nobody."""
    mounted = tmp_path / "mnt"
    with (
        faulty_fs(fp4_checkpoint, mounted, tmp_path / "control.json") as faults,
        serving(mounted, tmp_path, metrics="127.0.0.1:0", scales="disk", cache_bytes=0) as server,
    ):
        faults.set("slow", delay_s=0.5)
        client = subprocess.Popen([sys.executable, "-c", _ASKS_AND_WAITS, server.targets[0]])
        try:
            until(lambda: Scrape(server).sum("engram_reads_in_flight") > 0)
        finally:
            client.kill()
            client.wait()
        faults.clear()
        until(lambda: Scrape(server).sum("engram_shm_clients") == 0)
        after = Scrape(server)
    name = "engram_lookup_failures_total"
    assert {s.labels["code"]: s.value for s in after.samples if s.name == name} == {"cancelled": 1}


@pytest.mark.parametrize("gone", ["cancelled", "broken"])
@pytest.mark.parametrize(("after", "counted"), [(1, (1, 0, 2)), (2, (1, 1, 1)), (3, (2, 1, 0))])
def test_a_stream_counts_each_lookup_once_whenever_its_client_goes(
    fp4_checkpoint: Path, gone: str, after: int, counted: tuple[int, int, int]
) -> None:
    """What was handed over is answered: the client may have read it before its going is seen."""
    registry = CollectorRegistry()
    meter = LookupMetrics(registry).of("")

    async def drive(memory: Memory) -> None:
        taken, writing = asyncio.Event(), asyncio.Event()
        written = 0

        async def requests() -> AsyncIterator[pb.LookupRequest]:
            for row in (5, 2**40, 6):
                ids = row.to_bytes(8, "little")
                yield pb.LookupRequest(rows=pb.RowKeys(layer=1, ids=ids, id_bytes=8))
            taken.set()
            await asyncio.Event().wait()

        async def write(chunk: object) -> None:
            nonlocal written
            await taken.wait()
            written += 1
            if written == after:
                writing.set()
                if gone == "broken":
                    raise ConnectionError
                await asyncio.Event().wait()

        fetcher = Fetcher(memory, Limits(), on_damage=lambda text: None)
        stream = asyncio.create_task(ReplyStream(lambda: fetcher, Limits(), requests(), write, meter).run())
        await writing.wait()
        if gone == "cancelled":
            stream.cancel()
        await asyncio.wait({stream})
        with pytest.raises((asyncio.CancelledError, ClientGoneError)):
            stream.result()
        fetcher.close()

    with Memory.open(fp4_checkpoint, MemoryOptions(scales="disk")) as memory:
        asyncio.run(drive(memory))
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    assert counted == (
        samples.get(("engram_lookup_seconds_count", "decode", "packed", "tcp"), 0),
        samples.get(("engram_lookup_failures_total", "invalid_argument", "tcp"), 0),
        samples.get(("engram_lookup_failures_total", "cancelled", "tcp"), 0),
    )


def test_tables_whose_files_are_gone_by_name_are_shown_as_they_were_opened(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    """A file may be deleted between a reload's opening and its turning over."""
    tables = Path(shutil.copytree(fp4_checkpoint, tmp_path / "tables"))
    device = tables.stat().st_dev
    with closing(Memory.open(tables, MemoryOptions())) as memory:
        shutil.rmtree(tables)
        shown = ServerMetrics(memory, lambda: "")
        name = "engram_reads_in_flight"
        labels = {"device": f"{os.major(device)}:{os.minor(device)}"}
        assert shown.registry.get_sample_value(name, labels) == 0


def test_a_taken_port_is_a_sentence(
    server: ServerProcess, fp4_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--listen", "127.0.0.1:0", "--cache-bytes=1MiB", "--metrics", address(server)]
    assert main(["serve", str(fp4_checkpoint), *arguments]) == 1
    assert f"cannot show metrics at {address(server)}: {os.strerror(98)}" in capsys.readouterr().err
