"""What clients do to a server, and servers to clients, that nobody wants: none of it may cost others."""

import asyncio
import gc
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from support.serving import ServerProcess, serving, until
from support.truth import Truth, same

from engram_client import (
    AsyncEngramClient,
    EngramClient,
    EngramError,
    EngramMemory,
    InvalidRequestError,
    Retry,
)
from engram_client._proto import engram_pb2 as pb
from engram_client._proto import engram_pb2_grpc as pb_grpc
from engram_kernels import _core
from engram_server.fetch import Fetcher
from engram_server.limits import Limits
from engram_server.memory import Memory, MemoryOptions
from engram_server.metrics import LookupMetrics
from engram_server.stream import ReplyStream

BULK_TOKENS = 20_000


@pytest.fixture(scope="module")
def truth(fp4_checkpoint: Path) -> Truth:
    return Truth(fp4_checkpoint, "fp4")


@pytest.fixture(scope="module")
def server(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(fp4_checkpoint, tmp_path_factory.mktemp("server"), backend="mmap") as process:
        yield process


def bulk_request(request_id: int = 0) -> pb.LookupRequest:
    tokens = np.arange(BULK_TOKENS, dtype="<i4").tobytes()
    keys = pb.TokenKeys(sequences=[pb.Sequence(tokens=tokens)])
    return pb.LookupRequest(request_id=request_id, tokens=keys)


# ------------------------------------------------------------------------- requests of very many small parts


def many_parts() -> dict[str, pb.LookupRequest]:
    """A few megabytes each, and hardly a row in them."""
    sequences, blocks, pins = pb.LookupRequest(), pb.LookupRequest(), pb.LookupRequest()
    sequences.tokens.ParseFromString(b"\x0a\x00" * 500_000)
    blocks.blocks.ParseFromString(b"\x0a\x04\x08\x01\x18\x04" * 500_000)
    pins.rows.layer, pins.rows.id_bytes = 1, 4
    pins.pins.ParseFromString(b"\x0a\x02\x08\x01" * 500_000)
    return {
        "asks for 24000000 rows, over the limit": sequences,
        "500000 blocks of row ids for 2 layers": blocks,
        "pins 500000 tables, over the limit": pins,
    }


def test_a_request_of_very_many_empty_parts_is_refused(server: ServerProcess) -> None:
    """Before they are looked at one by one, which would keep everybody waiting."""
    with grpc.insecure_channel(server.targets[0]) as channel:
        stub = pb_grpc.EngramStub(channel)
        for sentence, request in many_parts().items():
            with pytest.raises(grpc.RpcError) as caught:
                stub.Lookup(request, timeout=60)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert sentence in caught.value.details()


# ------------------------------------------------------------------------------------ rows nobody waits for


@pytest.mark.parametrize("backend", ["io_uring", "pread", "mmap"])
def test_reads_of_dropped_batches_are_given_up(fp4_checkpoint: Path, backend: Any) -> None:
    options = MemoryOptions(backend=backend, scales="disk", io_depth=1)
    with Memory.open(fp4_checkpoint, options) as memory:
        before = memory.reader.counters()["reads"]
        ids = np.arange(memory.tables[1].rows, dtype=np.int64).reshape(-1, 1)
        batches = [memory.engine.submit([(1, ids)]) for _ in range(16)]
        del batches
        until(lambda: memory.engine.in_flight_bytes() == 0)
        assert memory.reader.counters()["reads"] - before < 16 * 2 * len(ids)
        # And the engine is as good as new.
        batch = memory.engine.submit([(1, ids[-2:])])
        batch.wait()
        expected = Truth(fp4_checkpoint, "fp4").rows(1, ids[-2:, 0], "packed").tobytes()
        assert batch.gather(0, 2, _core.Format.PACKED) == expected


METER = LookupMetrics(CollectorRegistry()).of("")


def leaves_nothing_in_flight(
    checkpoint: Path, cancelled: Callable[[Memory], Coroutine[Any, Any, None]]
) -> None:
    """Though no garbage is collected."""
    with Memory.open(checkpoint, MemoryOptions(scales="disk")) as memory:
        gc.collect()
        gc.disable()
        try:
            asyncio.run(cancelled(memory))
            until(lambda: memory.engine.in_flight_bytes() == 0)
        finally:
            gc.enable()


def test_a_cancelled_stream_leaves_nothing_for_the_garbage_collector(fp4_checkpoint: Path) -> None:
    """Its rows are in the budget of all: they cannot wait until a collection happens to run."""
    limits = Limits(block_bytes=400_000, chunk_bytes=100_000)

    async def requests() -> AsyncIterator[pb.LookupRequest]:
        for request_id in range(3):
            yield bulk_request(request_id)
        await asyncio.Event().wait()

    async def cancelled(memory: Memory) -> None:
        fetcher = Fetcher(memory, limits, on_damage=lambda text: None)
        stalled = asyncio.Event()

        async def write(chunk: pb.LookupChunk) -> None:
            stalled.set()
            await asyncio.Event().wait()  # a client that takes nothing

        stream = asyncio.create_task(ReplyStream(lambda: fetcher, limits, requests(), write, METER).run())
        await stalled.wait()
        assert memory.engine.in_flight_bytes() > 0
        stream.cancel()
        await asyncio.wait({stream})
        fetcher.close()

    leaves_nothing_in_flight(fp4_checkpoint, cancelled)


def test_nor_does_one_whose_error_nobody_came_to_read(fp4_checkpoint: Path) -> None:
    limits = Limits()
    taken = asyncio.Event()

    async def requests() -> AsyncIterator[pb.LookupRequest]:
        for row in (5, 6, 2**40):
            ids = row.to_bytes(8, "little")
            yield pb.LookupRequest(rows=pb.RowKeys(layer=1, ids=ids, id_bytes=8))

    async def cancelled(memory: Memory) -> None:
        fetcher = Fetcher(memory, limits, on_damage=lambda text: None)

        async def write(chunk: pb.LookupChunk) -> None:
            taken.set()
            await asyncio.Event().wait()  # a client that takes nothing

        replies = ReplyStream(lambda: fetcher, limits, requests(), write, METER)
        stream = asyncio.create_task(replies.run())
        await taken.wait()
        reader = replies._reader
        assert reader is not None
        await asyncio.wait({reader})  # so all three were taken
        assert memory.engine.in_flight_bytes() > 0
        stream.cancel()
        await asyncio.wait({stream})
        fetcher.close()

    leaves_nothing_in_flight(fp4_checkpoint, cancelled)


def test_a_server_does_not_wait_for_reads_of_clients_that_it_gave_up(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    """Minutes of them here, one at a time."""
    first = pb.LookupRequest(rows=pb.RowKeys(layer=1, ids=bytes(4), id_bytes=4))
    with (
        serving(fp4_checkpoint, tmp_path, backend="pread", io_depth=1, scales="disk") as server,
        grpc.insecure_channel(server.targets[0]) as channel,
    ):
        stub = pb_grpc.EngramStub(channel)
        calls = [stub.LookupStream(iter([first, *[bulk_request()] * 3])) for _ in range(16)]
        assert all(next(call).last for call in calls)  # so the next request of each is being read
        server.process.terminate()
        until(lambda: "draining" in server.log.read_text())
        server.process.terminate()  # the grace is over
        assert server.wait() == 0


# ------------------------------------------------------------------------------------------ closed clients


def test_a_closed_client_says_so(server: ServerProcess, fp4_checkpoint: Path) -> None:
    client = EngramClient(server.targets[0])
    stream = client.stream()
    assert stream.lookup([5]).result().stats.rows == 48
    client.close()
    calls: list[Callable[[], Any]] = [
        lambda: client.lookup([5]),
        client.describe,
        client.stream,
        lambda: stream.lookup([5]).result(),
    ]
    for call in calls:
        with pytest.raises(EngramError, match="closed"):
            call()
    stream.close()
    client.close()

    memory = EngramMemory.open(fp4_checkpoint)
    memory.close()
    with pytest.raises(EngramError, match="closed"):
        memory.lookup([5])

    async def closed() -> None:
        client = AsyncEngramClient(server.targets[0])
        stream = client.stream()
        assert (await stream.lookup([5])).stats.rows == 48
        await client.close()
        for call in (client.lookup([5]), client.describe(), stream.lookup([5])):
            with pytest.raises(EngramError, match="closed"):
                await call
        await stream.close()

    asyncio.run(closed())


def test_closing_a_stream_does_not_wait_for_a_server_that_is_gone(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    patient = Retry(wait_for_server_s=3_600.0)
    with serving(fp4_checkpoint, tmp_path) as server:
        client = EngramClient(server.targets[0], retry=patient)
        stream = client.stream()
        assert stream.lookup([5]).result().stats.rows == 48
    pending = stream.lookup([5])
    closer = threading.Thread(target=stream.close, daemon=True)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()
    with pytest.raises(EngramError, match="closed"):
        pending.result()
    client.close()


# --------------------------------------------------------------------------------------------- no messages


def test_bytes_that_are_no_message_are_an_invalid_request_and_nothing_more(
    server: ServerProcess, truth: Truth
) -> None:
    good = pb.LookupRequest(request_id=7, rows=pb.RowKeys(layer=14, ids=b"\5\0\0\0", id_bytes=4))
    with grpc.insecure_channel(server.targets[0]) as channel:
        lookup = channel.unary_unary("/engram.v1.Engram/Lookup")
        with pytest.raises(grpc.RpcError) as raised:
            lookup(b"\xff\xff\xff")
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "the message of 3 bytes is not a LookupRequest" in raised.value.details()
        stream = channel.stream_stream(
            "/engram.v1.Engram/LookupStream", response_deserializer=pb.LookupChunk.FromString
        )
        garbled, answer = stream(iter([b"\xff\xff\xff", good.SerializeToString()]))
    assert (garbled.error.code, garbled.last) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], True)
    assert (answer.request_id, answer.last) == (7, True)
    assert answer.payload == truth.rows(14, [5], "packed").tobytes()
    assert "Traceback" not in server.log.read_text()


# ---------------------------------------------------------------------------------------- wrong arguments


def test_arguments_that_no_message_can_carry_are_refused_in_words(server: ServerProcess) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"columns": (-1, 3)}, "columns -1 to 3"),
        ({"columns": (5, 3)}, "columns 5 to 3"),
        ({"columns": (0, 2**32)}, "columns 0 to 4294967296"),
        ({"columns": (1,)}, r"columns is \(1,\); expected \(begin, end\)"),
        ({"columns": (0.0, 3)}, r"expected \(begin, end\)"),
        ({"pin": {-1: b"x"}}, "layer -1 is not a layer id"),
        ({"pin": {1: "abc"}}, "the pin of layer 1 is str"),
    ]
    with EngramClient(server.targets[0]) as client:
        for keywords, sentence in wrong:
            with pytest.raises(InvalidRequestError, match=sentence):
                client.lookup([5], **keywords)
        with pytest.raises(InvalidRequestError, match="tokens of sequence 0 are no array"):
            client.lookup([[1], [2, 3]])
        with pytest.raises(InvalidRequestError, match=r"have shape \[2, 12\]; a block has 24 columns"):
            client.lookup_blocks({14: np.zeros((2, 12), np.int32)})


@pytest.mark.parametrize("timeout", [1e12, math.inf])
def test_a_far_deadline_is_no_deadline(server: ServerProcess, truth: Truth, timeout: float) -> None:
    expected = truth.values(truth.ids([5]), "bf16")
    with EngramClient(server.targets[0]) as client, client.stream() as stream:
        assert same(client.lookup([5], timeout=timeout).values, expected)
        assert same(stream.lookup([5], timeout=timeout).result().values, expected)
