"""What a server refuses when it is asked for more than it can do, and that it does the rest, exactly.

Its reads are held below it, so that a queue fills without a clock deciding anything. The estimate itself is tested on a
clock of its own, in kernels/tests/admission_test.cc.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.faulty_fs import Faults, faulty_fs
from support.serving import ServerProcess, serving, until
from support.truth import Truth
from test_metrics import Scrape
from test_service import refusal, tokens

from engram_client import NO_RETRY, EngramClient, Lookup, LookupStream, OverloadedError, Retry
from engram_client._proto import engram_pb2 as pb
from engram_client._proto import engram_pb2_grpc as pb_grpc
from engram_server.cli import main

BULK = 130
"""Tokens; 6,240 rows, more than go to the decode lane by themselves."""
IMPATIENT = {"queue_s": 0.001}
"""Whatever drive is assumed before one was measured, nobody waits for 6,240 rows of it."""
STORE = "tables.engram"
PATIENT = Retry(attempts=1, backoff_max_s=0.1, wait_for_room_s=60.0)
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
Ask = Callable[[list[int]], Lookup]


@pytest.fixture(scope="module")
def truth(fp4_checkpoint: Path) -> Truth:
    return Truth(fp4_checkpoint, "fp4")


@pytest.fixture(scope="module")
def mounted(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Faults]]:
    folder = tmp_path_factory.mktemp("held")
    (folder / "tables").mkdir()
    assert main(["convert", str(fp4_checkpoint), str(folder / "tables" / STORE), "--verify", "none"]) == 0
    with faulty_fs(folder / "tables", folder / "mnt", folder / "control.json", threads=True) as faults:
        yield folder / "mnt" / STORE, faults


@dataclass
class World:
    """A server whose reads can be held, without a cache: every row is read."""

    server: ServerProcess
    faults: Faults
    truth: Truth
    pool: ThreadPoolExecutor

    @property
    def tcp(self) -> str:
        return self.server.targets[0]

    @property
    def uds(self) -> str:
        return self.server.targets[1]

    def prompt(self, number: int) -> list[int]:
        return list(range(1000 * number, 1000 * number + BULK))

    def check(self, found: Lookup, prompt: list[int]) -> None:
        np.testing.assert_array_equal(found.values, self.truth.values(self.truth.ids(prompt), "packed"))

    @contextmanager
    def held(self, call: Ask) -> Iterator[Future[Lookup]]:
        """A bulk lookup that was let in and waits for its reads; answered, exactly, when the block ends."""
        self.faults.set("hold")
        prompt = self.prompt(0)
        before = Scrape(self.server).sum("engram_admitted_rows")
        try:
            answer = self.pool.submit(call, prompt)
            until(lambda: Scrape(self.server).sum("engram_admitted_rows") == before + 48 * BULK)
            yield answer
        finally:
            self.faults.clear()
        self.check(answer.result(60), prompt)

    def overloads(self, limit: str) -> float:
        return Scrape(self.server).sum("engram_overload_total", limit=limit)


@contextmanager
def overloaded(
    mounted: tuple[Path, Faults],
    truth: Truth,
    folder: Path,
    limits: dict[str, Any],
    drain_s: float = 60.0,
) -> Iterator[World]:
    path, faults = mounted
    with (
        serving(
            path,
            folder,
            uds=folder / "socket",
            metrics="127.0.0.1:0",
            limits=limits,
            cache_bytes=0,
            drain_s=drain_s,
            io_depth=4,  # what is held leaves threads of the file system for all else
        ) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        yield World(server, faults, truth, pool)


@pytest.fixture
def world(mounted: tuple[Path, Faults], truth: Truth, tmp_path: Path) -> Iterator[World]:
    with overloaded(mounted, truth, tmp_path, IMPATIENT) as world:
        yield world


def client(target: str, shared: bool = False, retry: Retry = NO_RETRY) -> EngramClient:
    return EngramClient(target, shared_memory="require" if shared else "off", retry=retry)


def asks(client: EngramClient) -> Ask:
    """For packed rows: a bulk lookup is one request then, also through shared memory."""
    return partial(client.lookup, format="packed")


def asks_stream(stream: LookupStream) -> Ask:
    return lambda prompt: stream.lookup(prompt, format="packed").result()


@pytest.mark.parametrize("way", ["unary", "stream", "shared memory"])
def test_a_request_that_would_wait_too_long_is_refused_at_once(world: World, way: str) -> None:
    target, shared = (world.uds, True) if way == "shared memory" else (world.tcp, False)
    with (
        client(target, shared) as first,
        client(target, shared) as second,
        client(world.uds, retry=PATIENT) as patient,
        second.stream() as stream,
    ):
        ask = asks_stream(stream) if way == "stream" else asks(second)
        with world.held(asks(first)) as held:
            with pytest.raises(
                OverloadedError, match=r"would wait about .* for others, over the 0\.00 s"
            ) as caught:
                ask(world.prompt(1))
            assert 0 < caught.value.retry_after_s <= 5
            assert not held.done()
            assert world.overloads("queue") == 1
            waiting = world.pool.submit(asks(patient), world.prompt(2))
        # Once there is room, who came back later is answered, and nobody else is refused.
        world.check(waiting.result(60), world.prompt(2))
        for number in (3, 4):
            world.check(ask(world.prompt(number)), world.prompt(number))
    assert Scrape(world.server).sum("engram_admitted_rows") == 0


def test_when_to_come_back_is_told_in_the_trailers_and_in_the_stream(world: World) -> None:
    with client(world.tcp) as first, grpc.insecure_channel(world.tcp) as channel:
        stub = pb_grpc.EngramStub(channel)
        with world.held(asks(first)):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Lookup(tokens(world.prompt(1)), timeout=60)
            assert caught.value.code() == EXHAUSTED
            trailers = dict(caught.value.trailing_metadata())
            assert 0 < int(trailers["grpc-retry-pushback-ms"]) <= 5000
            (chunk,) = stub.LookupStream(iter([tokens(world.prompt(1))]), timeout=60)
            assert (chunk.error.code, chunk.last) == (EXHAUSTED.value[0], True)
            assert 0 < chunk.error.retry_after_ms <= 5000
        limits = stub.Describe(pb.DescribeRequest()).limits
        assert (limits.queue_seconds, limits.client_rows, limits.client_rows_per_s) == (0.001, 0, 0)


def test_decode_is_let_in_whatever_waits_in_bulk(world: World) -> None:
    prompt = [5, 6, 7]
    with client(world.tcp) as first, client(world.tcp) as second:
        with world.held(asks(first)):
            answer = world.pool.submit(asks(second), prompt)
            until(lambda: Scrape(world.server).sum("engram_admitted_rows") == 48 * (BULK + len(prompt)))
        world.check(answer.result(60), prompt)
    assert world.overloads("queue") == 0


@pytest.mark.parametrize("shared", [False, True], ids=["stream", "shared memory"])
def test_who_has_requests_under_way_waits_for_his_turn(world: World, shared: bool) -> None:
    """A stream, or a client of shared memory, that sends more than one: only the first could be refused."""
    prompts = [world.prompt(number) for number in range(1, 4)]
    with client(world.uds, shared) as one, one.stream() as stream:
        several = one.in_place() if shared else stream  # sent, and not waited for
        with world.held(asks(one) if shared else asks_stream(stream)):
            others = [several.lookup(prompt, format="packed") for prompt in prompts]
        for other, prompt in zip(others, prompts, strict=True):
            world.check(other.result(), prompt)
    assert world.overloads("queue") == 0


def test_what_cannot_be_answered_in_its_time_is_refused_at_once(
    mounted: tuple[Path, Faults], truth: Truth, tmp_path: Path
) -> None:
    """96,000 rows take a tenth of a second of the drive that is assumed before one was measured."""
    large = list(range(2000))
    with (
        overloaded(mounted, truth, tmp_path, {"queue_s": 100.0}) as world,
        client(world.tcp) as first,
        grpc.insecure_channel(world.tcp) as channel,
    ):
        stub = pb_grpc.EngramStub(channel)
        with world.held(asks(first)):
            hurried = tokens(large, timeout_ms=50)
            (chunk,) = stub.LookupStream(iter([hurried]), timeout=60)
            assert chunk.error.code == EXHAUSTED.value[0]
            assert chunk.error.message.startswith("the request would take about ")
            assert world.overloads("deadline") == 1
        # With nobody before it, a request is tried whatever its time.
        (*_, last) = stub.LookupStream(iter([hurried]), timeout=60)
        assert not last.HasField("error") or last.error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


def test_a_greedy_client_is_refused_and_another_is_not(
    mounted: tuple[Path, Faults], truth: Truth, tmp_path: Path
) -> None:
    with (
        overloaded(mounted, truth, tmp_path, {"client_rows": 7_000, "queue_s": 1000.0}) as world,
        client(world.tcp) as greedy,
        client(world.tcp) as the_same,
        client(world.uds) as other,
        client(world.uds, shared=True) as attached,
    ):
        prompt = world.prompt(1)
        with world.held(asks(greedy)):
            with pytest.raises(OverloadedError, match="the client has 6240 rows being worked on; 6240 more"):
                asks(the_same)(prompt)
            answers = [world.pool.submit(asks(one), prompt) for one in (other, attached)]
            until(lambda: Scrape(world.server).sum("engram_admitted_rows") == 3 * 48 * BULK)
        for answer in answers:
            world.check(answer.result(60), prompt)
        world.check(asks(the_same)(prompt), prompt)
        assert world.overloads("client_rows") == 1
        assert the_same.describe().limits.client_rows == 7_000


def test_a_client_that_asks_too_fast_is_told_when_to_come_back(
    mounted: tuple[Path, Faults], truth: Truth, tmp_path: Path
) -> None:
    """One row a second: its first lookup has used up the minute that follows."""
    with (
        overloaded(mounted, truth, tmp_path, {"client_rows_per_s": 1.0}) as world,
        client(world.tcp) as by_tcp,
        client(world.uds, shared=True) as attached,
        client(world.uds, shared=True) as another,
        by_tcp.stream() as stream,
    ):
        world.check(asks(by_tcp)([5]), [5])
        for ask in (asks(by_tcp), asks_stream(stream)):
            with pytest.raises(
                OverloadedError, match="the 1 rows a second that one client may ask for"
            ) as caught:
                ask([5])
            assert caught.value.retry_after_s == 5.0, "longer is told to nobody"
        world.check(asks(attached)([6]), [6])
        with pytest.raises(OverloadedError, match="the 1 rows a second"):
            asks(attached)([6])
        world.check(asks(another)([6]), [6])
        assert world.overloads("client_rate") == 3


def test_limits_come_from_the_command_line(
    fp4_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("engram_server.server.serve", lambda options: started.append(options) or 0)
    flags = [
        "--queue-seconds",
        "0.25",
        "--pending-rows",
        "60000000",
        "--client-rows",
        "5",
        "--client-rows-per-s",
        "7",
    ]
    assert main(["serve", str(fp4_checkpoint), *flags, "--drain-seconds", "3"]) == 0
    (options,) = started
    limits = options.limits
    assert (
        limits.queue_s,
        limits.pending_rows,
        limits.client_rows,
        limits.client_rows_per_s,
        options.drain_s,
    ) == (
        0.25,
        60_000_000,
        5,
        7,
        3.0,
    )
    assert main(["serve", str(fp4_checkpoint), "--pending-rows", "1000"]) == 1
    assert "pending_rows (1000)" in capsys.readouterr().err


def test_refusals_leave_nothing_behind(world: World) -> None:
    """Thousands of them, and the server is as it was."""
    with client(world.tcp) as first, grpc.insecure_channel(world.tcp) as channel:
        stub = pb_grpc.EngramStub(channel)
        request = tokens(world.prompt(1))
        with world.held(asks(first)):
            barrier = threading.Barrier(4)

            def ask() -> None:
                barrier.wait()
                for _ in range(250):
                    assert refusal(lambda: stub.Lookup(request, timeout=60))[0] == EXHAUSTED

            for asker in [world.pool.submit(ask) for _ in range(4)]:
                asker.result(120)
            assert world.overloads("queue") == 1000
            assert Scrape(world.server).sum("engram_admitted_rows") == 48 * BULK
        world.check(asks(first)(world.prompt(1)), world.prompt(1))
