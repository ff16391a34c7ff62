"""Rows brought into the cache ahead of need: what is promised at once, what is read later, what is refused."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import grpc
import numpy as np
import pytest
from support.serving import ServerProcess, serving, until
from support.truth import Truth, same

from engram_client import (
    AsyncEngramClient,
    EngramClient,
    EngramMemory,
    InvalidRequestError,
    OverloadedError,
    Prefetched,
    UnsupportedError,
)
from engram_client._proto import engram_pb2 as pb
from engram_client._proto import engram_pb2_grpc as pb_grpc
from engram_kernels import _core
from engram_server.lookup import Block
from engram_server.prefetch import Prefetcher

Ask = Callable[..., Any]
TOKENS = list(range(5000, 5200))


@pytest.fixture(scope="module")
def truth(fp4_checkpoint: Path) -> Truth:
    return Truth(fp4_checkpoint, "fp4")


@pytest.fixture(scope="module")
def server(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(fp4_checkpoint, tmp_path_factory.mktemp("server"), cache_bytes=64 << 20) as process:
        yield process


@contextmanager
def threads(path: Path, target: str) -> Iterator[Ask]:
    with EngramClient(target) as client:
        yield lambda method, *args, **kwargs: getattr(client, method)(*args, **kwargs)


@contextmanager
def coroutines(path: Path, target: str) -> Iterator[Ask]:
    with asyncio.Runner() as runner:
        client = AsyncEngramClient(target)
        yield lambda method, *args, **kwargs: runner.run(getattr(client, method)(*args, **kwargs))
        runner.run(client.close())


@contextmanager
def embedded(path: Path, target: str) -> Iterator[Ask]:
    with EngramMemory.open(path, cache_bytes=64 << 20) as memory:
        yield lambda method, *args, **kwargs: getattr(memory, method)(*args, **kwargs)


@pytest.fixture(params=[threads, coroutines, embedded])
def ask(request: pytest.FixtureRequest, fp4_checkpoint: Path, server: ServerProcess) -> Iterator[Ask]:
    with request.param(fp4_checkpoint, server.targets[0]) as way:
        yield way


# ------------------------------------------------------------------------------------------- what is asked


def over(ask: Ask) -> bool:
    """Whether nothing is queued any more."""
    return bool(ask("prefetch", []).queued_rows == 0)


def test_what_was_prefetched_is_looked_up_without_a_read(ask: Ask, truth: Truth) -> None:
    queued = ask("prefetch", TOKENS, history=[1, 2, 3])
    assert (queued.rows, queued.groups) == (200 * 48, 200 * 6)
    until(lambda: over(ask))
    found = ask("lookup", TOKENS, history=[1, 2, 3])
    assert same(found.values, truth.values(truth.ids(TOKENS, [1, 2, 3]), "bf16"))
    assert (found.stats.cached, found.stats.reads) == (found.stats.distinct, 0)


def test_a_range_of_columns_is_prefetched_alone(ask: Ask, truth: Truth) -> None:
    tokens = [token + 1000 for token in TOKENS]
    queued = ask("prefetch", tokens, layers=[14], columns=(6, 12))
    assert (queued.rows, queued.groups) == (200 * 6, 200 * 2)
    until(lambda: over(ask))
    ids = truth.ids(tokens)
    found = ask("lookup", tokens, layers=[14], columns=(6, 12))
    assert same(found.values, truth.values(ids[:, :, 6:12], "bf16", layers=(14,)))
    assert found.stats.reads == 0
    # The rest of the same groups is not there, and comes from the table.
    whole = ask("lookup", tokens, layers=[14])
    assert same(whole.values, truth.values(ids, "bf16", layers=(14,)))


def test_blocks_and_batches(ask: Ask, truth: Truth) -> None:
    sequences = [[7001, 7002], [7003]]
    assert ask("prefetch_batch", sequences).rows == 3 * 48
    ids = truth.ids([7100, 7101])
    blocks = {1: ids[:, 0].astype(np.int32), 14: ids[:, 1]}
    assert ask("prefetch_blocks", blocks, columns=(0, 8)) == Prefetched(2 * 2 * 8, 2 * 2, ANY)
    until(lambda: over(ask))
    assert ask("lookup_batch", sequences).stats.reads == 0
    assert ask("lookup_blocks", blocks, columns=(0, 8)).stats.reads == 0


def test_requests_that_are_refused(ask: Ask) -> None:
    for method, args, sentence in (
        ("prefetch", ([129280],), "129280"),
        ("prefetch", ([1],), "history"),
        ("prefetch_blocks", ({14: np.zeros((24, 23), int)},), r"\[24, 23\]"),
        ("prefetch_blocks", ({14: np.full((1, 24), 2**40)},), "row id 1099511627776 is outside"),
    ):
        keywords = {"history": [1, 2, 3, 4]} if sentence == "history" else {}
        with pytest.raises(InvalidRequestError, match=sentence):
            ask(method, *args, **keywords)


def test_without_a_cache_there_is_nothing_to_fetch_into(fp4_checkpoint: Path, tmp_path: Path) -> None:
    with (
        serving(fp4_checkpoint, tmp_path, cache_bytes=0) as server,
        EngramClient(server.targets[0]) as client,
        EngramMemory.open(fp4_checkpoint, cache_bytes=0) as memory,
    ):
        for source in (client, memory):
            assert source.describe().cache.capacity_bytes == 0
            with pytest.raises(UnsupportedError, match="no row cache"):
                source.prefetch(TOKENS)


def test_a_full_queue_refuses_at_once(fp4_checkpoint: Path, tmp_path: Path) -> None:
    limits = {"request_rows": 200 * 48, "prefetch_rows": 200 * 48}
    with serving(fp4_checkpoint, tmp_path, limits=limits) as server:
        with grpc.insecure_channel(server.targets[0]) as channel:
            stub = pb_grpc.EngramStub(channel)
            keys = pb.TokenKeys(sequences=[pb.Sequence(tokens=np.asarray(TOKENS, "<i4").tobytes())])
            calls = [stub.Prefetch.future(pb.LookupRequest(tokens=keys), timeout=60) for _ in range(64)]
            codes = {call.code() for call in calls}
            assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert grpc.StatusCode.OK in codes
        with EngramClient(server.targets[0]) as client:
            until(lambda: client.prefetch([]).queued_rows == 0)
            client.prefetch(TOKENS)
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


# ---------------------------------------------------------------------------- the queue, over a made-up engine


class Held:
    """A batch that ends when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.end = threading.Event()
        self.error = error

    def wait(self, timeout_s: float) -> bool:
        return self.end.wait(timeout_s)

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class HeldEngine:
    """Takes blocks and says what it was asked."""

    def __init__(self) -> None:
        self.batches: list[Held] = []
        self.terms: list[tuple[_core.Lane, float | None]] = []
        self.full = False
        self.next_error: Exception | None = None

    def submit(self, keys: object, notify: bool, **terms: Any) -> Held:
        if self.full:
            raise _core.OverloadedError("full")
        self.terms.append((terms["lane"], terms["deadline_s"]))
        self.batches.append(Held(self.next_error))
        return self.batches[-1]


def block(rows: int = 8) -> Block:
    return Block([(1, np.zeros((rows // 8, 8), dtype=np.int64))], 8, (0, 8), 1)


@pytest.fixture
def engine() -> HeldEngine:
    return HeldEngine()


@pytest.fixture
def prefetcher(engine: HeldEngine) -> Iterator[Prefetcher]:
    made = Prefetcher(engine, rows_max=100, jobs_max=3)  # type: ignore[arg-type]
    yield made
    made.close()


def test_two_blocks_at_a_time_in_the_last_lane(prefetcher: Prefetcher, engine: HeldEngine) -> None:
    prefetcher.start([block()] * 5)
    for ended in range(5):
        until(lambda ended=ended: len(engine.batches) == min(5, ended + 2))
        engine.batches[ended].end.set()
    until(lambda: prefetcher.queued_rows == 0)
    assert engine.terms == [(_core.Lane.PREFETCH, None)] * 5


def test_rows_and_jobs_are_bounded(prefetcher: Prefetcher, engine: HeldEngine) -> None:
    prefetcher.start([block(80)])
    with pytest.raises(_core.OverloadedError, match=r"1 prefetches of 80 rows are queued; 24 rows more"):
        prefetcher.start([block(24)])
    prefetcher.start([block()])
    prefetcher.start([block()])
    assert prefetcher.queued_rows == 96
    with pytest.raises(_core.OverloadedError, match="3 prefetches"):
        prefetcher.start([block()])
    for number in range(3):
        until(lambda number=number: len(engine.batches) == number + 1)
        engine.batches[number].end.set()
    until(lambda: prefetcher.queued_rows == 0)
    prefetcher.start([block(96)])


def test_after_its_deadline_a_job_makes_way(prefetcher: Prefetcher, engine: HeldEngine) -> None:
    prefetcher.start([block()] * 3, deadline=time.monotonic() - 1)
    prefetcher.start([block()], deadline=time.monotonic() + 1000)
    until(lambda: len(engine.batches) == 1)
    ((lane, left_s),) = engine.terms
    assert lane is _core.Lane.PREFETCH
    assert left_s is not None
    assert 900 < left_s <= 1000


def test_a_row_that_cannot_be_read_stops_nothing(prefetcher: Prefetcher, engine: HeldEngine) -> None:
    error = _core.RowError("layer 1, row 7: Input/output error")
    error.error = 5
    engine.next_error = error
    prefetcher.start([block()] * 3)
    prefetcher.start([block()])
    for number in range(4):
        until(lambda number=number: len(engine.batches) > number)
        engine.batches[number].end.set()
    until(lambda: prefetcher.queued_rows == 0)


def test_a_full_engine_is_waited_for(prefetcher: Prefetcher, engine: HeldEngine) -> None:
    engine.full = True
    prefetcher.start([block()])
    assert prefetcher.queued_rows == 8
    engine.full = False
    until(lambda: len(engine.batches) == 1)


@pytest.mark.parametrize("full", [False, True])
def test_closing_gives_up_what_is_queued(prefetcher: Prefetcher, engine: HeldEngine, full: bool) -> None:
    engine.full = full
    prefetcher.start([block()] * 3)
    prefetcher.start([block()])
    until(lambda: full or len(engine.batches) == 2)
    prefetcher.close()
    assert len(engine.batches) <= 2
    assert "engram-prefetch" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="closed"):
        prefetcher.start([block()])


def test_overload_is_an_error_of_the_client(fp4_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EngramMemory.open(fp4_checkpoint) as memory:
        monkeypatch.setattr(memory._prefetcher, "_rows_max", 10)
        with pytest.raises(OverloadedError, match="the limit of 256 prefetches and 10 rows"):
            memory.prefetch(TOKENS)
