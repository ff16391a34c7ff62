"""SIGHUP: tables opened anew under clients that notice nothing, or go on as they were."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.serving import ServerProcess, serving, until
from support.truth import Truth, same
from test_metrics import Scrape, get

from engram_client import AsyncEngramClient, EngramClient, MismatchError
from engram_client._proto import engram_pb2 as pb
from engram_client._proto import engram_pb2_grpc as pb_grpc
from engram_server.admin import ask
from engram_server.cli import main
from engram_server.recorder import RecordOptions
from engram_server.tables.synth import synthesise
from engram_server.trace import Trace

PROMPT = [5, 99, 1_000, 77, 77, 31_000, 5, 99, 1_000, 12]


@pytest.fixture(scope="module")
def truth(fp4_checkpoint: Path) -> Truth:
    return Truth(fp4_checkpoint, "fp4")


@pytest.fixture
def tables(fp4_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that may be changed."""
    return Path(shutil.copytree(fp4_checkpoint, tmp_path / "tables"))


def replace_by_copies(folder: Path, source: Path) -> None:
    """Each table by another file of the same name, as `mv` does."""
    for file in source.glob("*.safetensors"):
        new = folder / "new"
        shutil.copy(file, new)
        new.replace(folder / file.name)


def hang_up(server: ServerProcess) -> None:
    server.process.send_signal(signal.SIGHUP)


def reloads(server: ServerProcess, result: str) -> float:
    return Scrape(server).sum("engram_reloads_total", result=result)


def reload(server: ServerProcess, result: str = "done") -> None:
    """SIGHUP, and wait until it is over."""
    before = reloads(server, result)
    hang_up(server)
    until(lambda: reloads(server, result) == before + 1)


def reopen(server: ServerProcess, tables: Path) -> None:
    """The same with another modification time of a file that opening reads: for the same tables."""
    os.utime(tables / "config.json")
    reload(server)


def open_files(server: ServerProcess) -> list[str]:
    """Tables that the process has open."""
    folder = Path(f"/proc/{server.process.pid}/fd")
    names = []
    for entry in folder.iterdir():
        try:
            names.append(str(entry.readlink()))
        except FileNotFoundError:
            continue
    return [name for name in names if ".safetensors" in name or ".engram" in name]


def threads(server: ServerProcess) -> list[str]:
    """Names of all threads, those of native code among them."""
    names = []
    for entry in Path(f"/proc/{server.process.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            names.append((entry / "comm").read_text().strip())
    return sorted(names)


class Load:
    """Lookups of every kind, each compared, until told to stop."""

    def __init__(self, server: ServerProcess, truth: Truth) -> None:
        self._expected = truth.values(truth.ids(PROMPT), "bf16")
        self._stop = threading.Event()
        self.done = [0] * 5
        self.failures: list[str] = []
        tcp, uds = server.targets
        kinds: list[Callable[[int], None]] = [
            lambda place: self._unary(place, tcp),
            lambda place: self._stream(place, uds),
            lambda place: self._shared(place, uds),
            lambda place: self._in_place(place, uds),
            lambda place: asyncio.run(self._async(place, tcp)),
        ]
        self._threads = [
            threading.Thread(target=self._guarded, args=(kind, place)) for place, kind in enumerate(kinds)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def more(self, lookups: int) -> None:
        """Wait until each kind has made so many more, or one has failed."""
        goal = [count + lookups for count in self.done]
        until(
            lambda: self.failures or all(a >= b for a, b in zip(self.done, goal, strict=True)), timeout_s=60
        )
        assert self.failures == []

    def _guarded(self, kind: Callable[[int], None], place: int) -> None:
        try:
            kind(place)
        except Exception as error:
            self.failures.append(f"kind {place}: {error!r}")

    def _check(self, place: int, values: Any) -> None:
        if not same(values, self._expected):
            raise AssertionError("rows are not the table's")
        self.done[place] += 1

    def _unary(self, place: int, target: str) -> None:
        with EngramClient(target, shared_memory="off") as client:
            while not self._stop.is_set():
                self._check(place, client.lookup(PROMPT).values)

    def _stream(self, place: int, target: str) -> None:
        with EngramClient(target) as client, client.stream() as stream:
            while not self._stop.is_set():
                for answer in [stream.lookup(PROMPT) for _ in range(3)]:
                    self._check(place, answer.result().values)

    def _shared(self, place: int, target: str) -> None:
        with EngramClient(target, shared_memory="require") as client:
            while not self._stop.is_set():
                self._check(place, client.lookup(PROMPT).values)

    def _in_place(self, place: int, target: str) -> None:
        with EngramClient(target, shared_memory="require") as client:
            lookups = client.in_place()
            while not self._stop.is_set():
                with lookups.lookup(PROMPT) as found:
                    self._check(place, found.values)

    async def _async(self, place: int, target: str) -> None:
        async with AsyncEngramClient(target) as client:
            while not self._stop.is_set():
                self._check(place, (await client.lookup(PROMPT)).values)


@pytest.fixture
def server(tables: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(tables, tmp_path, uds=tmp_path / "socket", metrics="127.0.0.1:0") as process:
        yield process
        assert process.stop() == 0
        log = process.log.read_text()
        assert "Traceback" not in log
        assert "fault" not in log
        assert "ERROR:asyncio" not in log


def test_tables_are_replaced_under_load_and_no_request_fails(
    server: ServerProcess, tables: Path, fp4_checkpoint: Path, truth: Truth
) -> None:
    opened = Scrape(server).sum("engram_opened_timestamp_seconds")
    with Load(server, truth) as load:
        load.more(20)
        for _ in range(4):
            replace_by_copies(tables, fp4_checkpoint)
            until(lambda: Scrape(server).sum("engram_tables_replaced") == 1)
            load.more(5)  # of what was opened
            reload(server)
            load.more(20)
        # Who was attached is: nobody fell back to gRPC, or had to attach anew.
        scrape = Scrape(server)
        assert scrape.sum("engram_shm_clients") == 2
        assert scrape.sum("engram_shm_failures_total") == 0
    assert load.failures == []
    scrape = Scrape(server)
    assert scrape.sum("engram_tables_replaced") == 0
    assert scrape.sum("engram_opened_timestamp_seconds") > opened
    assert not [sample for sample in scrape.samples if sample.name == "engram_lookup_failures_total"]
    # What was opened before is closed.
    until(lambda: open_files(server) and not any("(deleted)" in name for name in open_files(server)))
    assert server.log.read_text().count("is another file now") >= 4


def test_tables_that_are_the_same_keep_their_cache(
    server: ServerProcess, tables: Path, tmp_path: Path, truth: Truth
) -> None:
    """So that certificates can be renewed every night."""
    with EngramClient(server.targets[0], shared_memory="off") as client:
        cold = client.lookup(PROMPT)
        opened = Scrape(server).sum("engram_opened_timestamp_seconds")
        reload(server)
        warm = client.lookup(PROMPT)
        assert Scrape(server).sum("engram_opened_timestamp_seconds") == opened
        assert (cold.stats.reads > 0, warm.stats.reads) == (True, 0)
        assert "go on with their cache" in server.log.read_text()
        # Each file that opening reads counts, also one that was not there.
        for name in ("config.json", "tokenizer.json"):
            (tables / "new").write_bytes((tables / "config.json").read_bytes())
            if name == "config.json":
                (tables / "new").replace(tables / name)
                reload(server)
            else:
                (tables / "new").replace(tables / name)
                reload(server, "refused")  # it is no tokenizer
                (tables / name).unlink()
            assert same(client.lookup(PROMPT).values, truth.values(truth.ids(PROMPT), "bf16"))
        assert Scrape(server).sum("engram_opened_timestamp_seconds") > opened


def test_nothing_is_left_of_tables_that_were_opened_before(
    server: ServerProcess, tables: Path, truth: Truth
) -> None:
    def left() -> tuple[int, list[str]]:
        return len(open_files(server)), [name for name in threads(server) if name.startswith("engram")]

    expected = truth.values(truth.ids(PROMPT), "packed")
    files = len(open_files(server))
    with EngramClient(server.targets[1], shared_memory="require") as client:
        for _ in range(2):  # threads that come with the first reload stay
            assert same(client.lookup(PROMPT, format="packed").values, expected)
            reopen(server, tables)
        until(lambda: len(open_files(server)) == files)  # what was opened before is closed after the reload
        before, count = left(), len(threads(server))
        assert "engram-shm" in before[1]
        for _ in range(8):
            assert same(client.lookup(PROMPT, format="packed").values, expected)
            reopen(server, tables)
        until(lambda: left() == before)
        # Python's pool for what would block the loop may have grown a little, but nothing comes with each reload.
        until(lambda: len(threads(server)) < count + 8)


def test_signals_that_come_in_heaps_are_one_reload_or_two(
    server: ServerProcess, tables: Path, truth: Truth
) -> None:
    with Load(server, truth) as load:
        for _ in range(50):
            os.utime(tables / "config.json")
            hang_up(server)
        until(lambda: reloads(server, "done") >= 1)
        load.more(10)
    assert reloads(server, "refused") == 0
    assert reloads(server, "done") < 50


def test_other_rows_are_refused_to_those_who_rely_on_the_old_and_served_to_those_who_ask(
    server: ServerProcess, tables: Path, truth: Truth, tmp_path: Path
) -> None:
    other = synthesise(tmp_path / "other", 2000, "fp4", seed=5).path
    there = Truth(other, "fp4")
    tcp, uds = server.targets
    with (
        EngramClient(tcp, shared_memory="off") as by_grpc,
        EngramClient(uds, shared_memory="require") as shared,
    ):
        for client in (by_grpc, shared):
            assert same(client.lookup(PROMPT).values, truth.values(truth.ids(PROMPT), "bf16"))
        replace_by_copies(tables, other)
        reload(server)
        for client in (by_grpc, shared):
            with pytest.raises(MismatchError, match="serves other rows than the client expects"):
                client.lookup(PROMPT)
    for target, way in ((tcp, "off"), (uds, "require")):
        with EngramClient(target, shared_memory=way) as client:
            assert same(client.lookup(PROMPT).values, there.values(there.ids(PROMPT), "bf16"))


def test_what_cannot_be_opened_changes_nothing(
    server: ServerProcess, tables: Path, truth: Truth, fp4_checkpoint: Path
) -> None:
    with Load(server, truth) as load:
        load.more(3)
        (shard,) = tables.glob("*00048-of*")
        (tables / "new").write_bytes(shard.read_bytes()[:5000])
        (tables / "new").replace(shard)
        reload(server, "refused")
        shard.unlink()
        reload(server, "refused")
        (tables / "config.json").rename(tables / "away")
        reload(server, "refused")
        load.more(10)
        assert get(server, "/readyz") == (200, "ready\n")
        (tables / "away").rename(tables / "config.json")
        shutil.copy(fp4_checkpoint / shard.name, shard)
        reload(server)
        load.more(10)
    log = server.log.read_text()
    assert log.count("not reloaded, ") == 3
    assert shard.name in log


def test_health_comes_back_with_tables_that_are_whole(
    server: ServerProcess, tables: Path, truth: Truth
) -> None:
    (shard,) = tables.glob("*00048-of*")
    with grpc.insecure_channel(server.targets[0]) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def status() -> int:
            return int(health.Check(health_pb2.HealthCheckRequest(service="engram.v1.Engram")).status)

        serving_, not_serving = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        assert status() == serving_
        for _ in range(2):
            os.utime(shard)  # as one that was written to
            until(lambda: status() == not_serving)
            until(lambda: Scrape(server).sum("engram_ready") == 0)
            assert get(server, "/readyz")[0] == 503
            reload(server)
            until(lambda: status() == serving_)
            assert get(server, "/readyz") == (200, "ready\n")
            with EngramClient(server.targets[0]) as client:
                assert same(client.lookup(PROMPT).values, truth.values(truth.ids(PROMPT), "bf16"))


def test_a_reply_that_nobody_takes_keeps_its_tables_and_there_is_no_third(
    tables: Path, tmp_path: Path, truth: Truth, fp4_checkpoint: Path
) -> None:
    """A client that reads nothing holds one generation; a server that made more would have no bound to its memory."""
    folder = tmp_path / "server"
    folder.mkdir()
    rows = list(range(40_000))
    with serving(tables, folder, metrics="127.0.0.1:0", limits={"block_bytes": 400_000}) as server:
        with grpc.insecure_channel(server.targets[0]) as channel:
            stub: Any = pb_grpc.EngramStub(channel)
            keys = pb.RowKeys(layer=1, ids=np.asarray(rows, dtype="<i4").tobytes(), id_bytes=4)
            request = pb.LookupRequest(rows=keys, format=pb.FORMAT_FP32)
            replies = stub.LookupStream(iter([request]))
            first = next(replies)
            replace_by_copies(tables, fp4_checkpoint)
            reload(server)
            assert any("(deleted)" in name for name in open_files(server))
            os.utime(tables / "config.json")
            reload(server, "refused")  # after waiting for as long as a drain may take
            assert "there is no memory for a third" in server.log.read_text()
            # The reply goes on as it began, and then its tables go.
            payload = first.payload + b"".join(chunk.payload for chunk in replies)
            assert payload == truth.rows(1, rows, "fp32").tobytes()
            until(lambda: not any("(deleted)" in name for name in open_files(server)))
            reload(server)
        assert server.stop() == 0


@pytest.mark.parametrize("shared_memory", ["off", "require"])
def test_the_hot_set_and_the_trace_go_on(
    tables: Path, tmp_path: Path, truth: Truth, shared_memory: Any
) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    trace = tmp_path / "lookups.trace"
    with serving(
        tables, folder, metrics="127.0.0.1:0", hot_set=tmp_path / "hot.set", record=RecordOptions(trace)
    ) as server:
        with EngramClient(server.targets[0], shared_memory=shared_memory) as client:
            cold = client.lookup(PROMPT)
            until(lambda: "there is no hot set" in server.log.read_text())
            reopen(server, tables)
            until(lambda: "row groups are in the cache after" in server.log.read_text())
            warm = client.lookup(PROMPT)
        assert cold.stats.reads > 0
        assert warm.stats.reads == 0
        assert warm.stats.cached == warm.stats.distinct == cold.stats.distinct
        assert same(warm.values, truth.values(truth.ids(PROMPT), "bf16"))
        assert server.stop() == 0
    assert len([entry for entry in Trace(trace).entries() if entry.request is not None]) == 2


@pytest.mark.parametrize("shared_memory", ["off", "require"])
def test_a_trace_ends_where_other_tables_begin(tables: Path, tmp_path: Path, shared_memory: Any) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    other = synthesise(tmp_path / "other", 2000, "fp4", seed=5).path
    trace = tmp_path / "lookups.trace"
    with serving(tables, folder, metrics="127.0.0.1:0", record=RecordOptions(trace)) as server:
        for _ in range(2):
            with EngramClient(server.targets[0], shared_memory=shared_memory) as client:
                client.lookup(PROMPT)
            replace_by_copies(tables, other)
            reload(server)
        assert server.stop() == 0
        assert server.log.read_text().count("the trace ends here") == 1
    assert len([entry for entry in Trace(trace).entries() if entry.request is not None]) == 1


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_reload_while_it_ends_harms_nothing(tables: Path, tmp_path: Path, first: signal.Signals) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    for _ in range(3):
        with serving(tables, folder, uds=tmp_path / "socket") as server:
            for number in (first, signal.SIGHUP, signal.SIGTERM):
                server.process.send_signal(number)
            assert server.wait() == 0
    log = (folder / "server.log").read_text()
    assert log.count("INFO:engram_server:stopped") == 3
    assert "Traceback" not in log


START_FAILS_ONCE = """
from engram_server import generation

class Fetcher(generation.Fetcher):
    made = 0

    def __init__(self, *arguments):
        Fetcher.made += 1
        if Fetcher.made == 2:
            raise AssertionError("planted")
        super().__init__(*arguments)

generation.Fetcher = Fetcher
"""


def test_nothing_is_left_of_tables_that_were_opened_for_nobody(
    tables: Path, fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    hot, cache = tmp_path / "hot.set", 64 << 20
    with serving(
        tables, folder, metrics="127.0.0.1:0", hot_set=hot, cache_bytes=cache, before=START_FAILS_ONCE
    ) as server:
        with EngramClient(server.targets[0]) as client:
            assert same(client.lookup(PROMPT).values, truth.values(truth.ids(PROMPT), "bf16"))
            before = sorted(open_files(server))
            replace_by_copies(tables, fp4_checkpoint)
            reload(server, "refused")
            until(lambda: sorted(n.removesuffix(" (deleted)") for n in open_files(server)) == before)
            assert client.lookup(PROMPT).stats.reads == 0, "what was served goes on, with its cache"
            reload(server)
            assert same(client.lookup(PROMPT).values, truth.values(truth.ids(PROMPT), "bf16"))
            until(lambda: sorted(open_files(server)) == before)
        assert server.stop() == 0
        assert server.log.read_text().count("a reload failed by a fault of the server") == 1
    assert hot.exists()


SLOW_DRAIN = """
import asyncio
from engram_server import server
drained = server._drained

async def slow(*arguments):
    await asyncio.sleep(3)
    await drained(*arguments)

server._drained = slow
"""


def test_nothing_is_opened_anew_by_a_server_that_drains(tables: Path, tmp_path: Path) -> None:
    folder, admin = tmp_path / "server", tmp_path / "admin"
    folder.mkdir()
    with serving(tables, folder, admin=admin, before=SLOW_DRAIN) as server:
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in server.log.read_text())
        hang_up(server)
        assert ask(admin, "POST", "/reload") == (409, "nothing was reloaded: the server is shutting down")
        assert server.wait() == 0
        assert "reloaded: " not in server.log.read_text()


SLOW_CLOSE = """
import time
from engram_server import generation
close = generation.Tables.close

def slow(self):
    logging.info("closing the tables")
    time.sleep(2)
    close(self)

generation.Tables.close = slow
"""


def test_a_signal_to_reload_does_not_end_a_server_that_closes_its_tables(
    tables: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    with serving(tables, folder, before=SLOW_CLOSE) as server:
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "closing the tables" in server.log.read_text())
        hang_up(server)
        assert server.wait() == 0


def test_a_packed_store_takes_the_place_of_the_one_served(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    """`convert` replaces its output by name; its pages have another identity then."""
    store = tmp_path / "tables.engram"
    convert = ["convert", str(fp4_checkpoint), str(store), "--verify", "none"]
    assert main(convert) == 0
    with serving(store, tmp_path, uds=tmp_path / "socket", metrics="127.0.0.1:0") as server:
        with Load(server, truth) as load:
            load.more(5)
            assert main([*convert, "--force"]) == 0
            reload(server)
            load.more(20)
        assert load.failures == []
        assert server.stop() == 0
