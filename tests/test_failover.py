"""Servers that go away, come back, fill up or are slow: what a client does about it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.serving import ServerProcess, serving, until
from support.truth import Truth, same

from engram_client import (
    NO_RETRY,
    AsyncEngramClient,
    DeadlineError,
    EngramClient,
    EngramError,
    Limits,
    MismatchError,
    OverloadedError,
    Retry,
    Timeouts,
    UnavailableError,
)
from engram_client._proto import engram_pb2 as pb
from engram_client._proto import engram_pb2_grpc as pb_grpc

PATIENT = Retry(wait_for_server_s=60.0)


@pytest.fixture(scope="module")
def truth(fp4_checkpoint: Path) -> Truth:
    return Truth(fp4_checkpoint, "fp4")


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def later(delay_s: float, path: Path, folder: Path, target: str) -> Iterator[None]:
    """A server at `target` that is only started after a while; it is stopped at the end of the block."""
    begun, over = threading.Event(), threading.Event()

    def run() -> None:
        time.sleep(delay_s)
        with serving(path, folder, listen=target):
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert begun.is_set()


def right(truth: Truth, client: EngramClient, token: int) -> bool:
    return same(client.lookup([token]).values, truth.values(truth.ids([token]), "bf16"))


def test_next_target_takes_over(fp4_checkpoint: Path, tmp_path: Path, truth: Truth) -> None:
    with serving(fp4_checkpoint, tmp_path) as first, serving(fp4_checkpoint, tmp_path) as second:
        targets = [free_address(), *first.targets, *second.targets]  # nobody is at the first
        with EngramClient(targets, retry=NO_RETRY) as client:
            ids = {client.describe().server_id}
            assert right(truth, client, 5)
            first.kill()
            assert right(truth, client, 6)
            ids.add(client.describe().server_id)
        assert len(ids) == 2


def test_streams_move_to_the_next_target(fp4_checkpoint: Path, tmp_path: Path, truth: Truth) -> None:
    with (
        serving(fp4_checkpoint, tmp_path) as first,
        serving(fp4_checkpoint, tmp_path) as second,
        EngramClient([*first.targets, *second.targets]) as client,
        client.stream() as stream,
    ):
        pending = [stream.lookup([token]) for token in range(40)]
        assert pending[0].result().values.shape == (1, 2, 24, 256)
        first.kill()
        pending += [stream.lookup([token]) for token in range(40, 60)]
        for token, lookup in enumerate(pending):
            expected = truth.values(truth.ids([token]), "bf16")
            assert same(lookup.result().values, expected)


def test_server_that_restarts_is_waited_for(fp4_checkpoint: Path, tmp_path: Path, truth: Truth) -> None:
    target = free_address()
    with EngramClient(target, retry=PATIENT) as client:
        with serving(fp4_checkpoint, tmp_path, listen=target) as server:
            assert right(truth, client, 5)
            stream = client.stream()
            assert stream.lookup([5]).result().stats.rows == 48
            assert server.stop() == 0
        with later(0.5, fp4_checkpoint, tmp_path, target):
            assert right(truth, client, 6)
            values = stream.lookup([7]).result().values
            assert same(values, truth.values(truth.ids([7]), "bf16"))
            stream.close()


_ASKS_TWICE = """
import sys
from engram_client import EngramClient, Retry
with EngramClient(sys.argv[1], shared_memory="off", retry=Retry(wait_for_server_s=20.0)) as client:
    for _ in sys.stdin:
        print(client.lookup([5]).stats.rows, flush=True)
"""


def test_a_client_that_waits_for_a_server_does_the_connecting_itself(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    """gRPC looks after a channel that nobody calls now and then, too rarely to wait for; here it never does."""
    target = f"unix:{tmp_path / 'socket'}"
    command = [sys.executable, "-c", _ASKS_TWICE, target]
    environment = os.environ | {"GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "0"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None

        def ask() -> None:
            client.stdin.write("\n")
            client.stdin.flush()

        with serving(fp4_checkpoint, tmp_path, uds=tmp_path / "socket", drain_s=0.1) as server:
            ask()
            assert client.stdout.readline() == "48\n"
            assert server.stop() == 0
        ask()
        time.sleep(0.5)  # it tries to connect, to nobody
        with serving(fp4_checkpoint, tmp_path, uds=tmp_path / "socket"):
            assert client.stdout.readline() == "48\n"
            client.stdin.close()
            assert client.wait(30) == 0


def test_async_client_survives_a_restart(fp4_checkpoint: Path, tmp_path: Path, truth: Truth) -> None:
    target = free_address()

    async def ask(server: ServerProcess) -> None:
        async with AsyncEngramClient(target, retry=PATIENT) as client, client.stream() as stream:
            first = [stream.lookup([token]) for token in range(10)]
            assert (await first[0]).stats.rows == 48
            server.kill()
            with later(0.5, fp4_checkpoint, tmp_path, target):
                first += [stream.lookup([token]) for token in range(10, 20)]
                found = await asyncio.gather(client.lookup([20]), *first)
        for token, lookup in enumerate([*found[1:], found[0]]):
            assert same(lookup.values, truth.values(truth.ids([token]), "bf16"))

    with serving(fp4_checkpoint, tmp_path, listen=target) as server:
        asyncio.run(ask(server))


def test_another_table_is_refused(fp4_checkpoint: Path, fp8_checkpoint: Path, tmp_path: Path) -> None:
    """Behind the same address, and at the next target."""
    target = free_address()
    with EngramClient(target, retry=PATIENT) as client:
        with serving(fp4_checkpoint, tmp_path, listen=target):
            client.lookup([5])
        with (
            later(0.1, fp8_checkpoint, tmp_path, target),
            pytest.raises(MismatchError, match="different rows"),
        ):
            client.lookup([5])
    with (
        serving(fp4_checkpoint, tmp_path) as one,
        serving(fp8_checkpoint, tmp_path) as other,
        EngramClient([*one.targets, *other.targets]) as client,
    ):
        client.lookup([5])
        one.kill()
        with pytest.raises(MismatchError, match="different rows"):
            client.lookup([5])


def test_silent_restart_with_another_table_is_refused(
    fp4_checkpoint: Path, fp8_checkpoint: Path, tmp_path: Path
) -> None:
    """The channel of gRPC reconnects by itself, so the client never notices: the pins in the request do."""
    target = free_address()
    with EngramClient(target, shared_memory="off") as client:
        with serving(fp4_checkpoint, tmp_path, listen=target) as server:
            client.lookup([5])
            server.stop()
        with serving(fp8_checkpoint, tmp_path, listen=target):
            connection = client._pool._connections[0]
            known = connection._description
            with EngramClient(target) as other:
                other.lookup([5])
            connection._description = known
            with pytest.raises(MismatchError, match="relies on"):
                client.lookup([5])


def test_nobody_there() -> None:
    target = free_address()
    begin = time.monotonic()
    with EngramClient(target, retry=Retry(wait_for_server_s=0.5)) as client:
        with pytest.raises(UnavailableError) as caught:
            client.lookup([1])
        assert caught.value.target == target
        assert time.monotonic() - begin >= 0.5
        with pytest.raises(UnavailableError):
            client.stream()


def test_peer_that_accepts_and_says_nothing() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        timeouts = Timeouts(connect_s=0.3)
        client = EngramClient(target, timeouts=timeouts, retry=NO_RETRY)
        with client, pytest.raises(UnavailableError):
            client.describe()


def connect_and_say_nothing(target: str) -> None:
    """As HTTP/2 begins, and not a call; returns when the server hangs up."""
    host, _, port = target.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        while connection.recv(1024):
            pass


def test_who_makes_no_calls_is_hung_up_on_and_connects_anew_unnoticed(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    with (
        serving(fp4_checkpoint, tmp_path, idle_s=0.3) as server,
        EngramClient(server.targets[0], retry=NO_RETRY, shared_memory="off") as client,
    ):
        assert right(truth, client, 5)
        states: list[grpc.ChannelConnectivity] = []
        (connection,) = client._pool._connections
        connection._channel.subscribe(states.append)
        connect_and_say_nothing(server.targets[0])
        until(lambda: grpc.ChannelConnectivity.IDLE in states)
        assert right(truth, client, 6)
        until(lambda: states.count(grpc.ChannelConnectivity.READY) == 2)

        async def before_and_after() -> None:
            async with AsyncEngramClient(server.targets[0], retry=NO_RETRY) as client:
                for token in (5, 6):
                    values = (await client.lookup([token])).values
                    assert same(values, truth.values(truth.ids([token]), "bf16"))
                    (connection,) = client._pool._connections
                    await connection._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)

        asyncio.run(before_and_after())


def test_a_stream_is_a_call_however_little_it_asks(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    """And so is watching a server's health."""
    with (
        serving(fp4_checkpoint, tmp_path, idle_s=0.3) as server,
        EngramClient(server.targets[0], retry=NO_RETRY, shared_memory="off") as client,
        client.stream() as stream,
        grpc.insecure_channel(server.targets[0]) as channel,
    ):
        assert stream.lookup([5]).result().stats.rows == 48
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        line = stream._line
        for _ in range(2):
            connect_and_say_nothing(server.targets[0])
        assert same(stream.lookup([6]).result().values, truth.values(truth.ids([6]), "bf16"))
        assert stream._line is line
        assert watch.is_active()


def test_server_that_hangs_is_left(fp4_checkpoint: Path, tmp_path: Path, truth: Truth) -> None:
    """Its machine still answers for it, so only the keep-alive can tell."""
    timeouts = Timeouts(keepalive_s=1.0)
    with (
        serving(fp4_checkpoint, tmp_path) as first,
        serving(fp4_checkpoint, tmp_path) as second,
        EngramClient([*first.targets, *second.targets], timeouts=timeouts) as client,
        client.stream() as stream,
    ):
        assert stream.lookup([5]).result().stats.rows == 48
        first.process.send_signal(signal.SIGSTOP)
        expected = truth.values(truth.ids([6]), "bf16")
        assert same(stream.lookup([6]).result().values, expected)
        assert right(truth, client, 7)


def test_deadlines(fp4_checkpoint: Path, tmp_path: Path, truth: Truth) -> None:
    """They are kept by the client; or by a server that sees, while it gives up the one before, that it would not."""
    slow = list(range(20_000))
    late = (DeadlineError, OverloadedError)

    async def wait_async(target: str) -> None:
        async with AsyncEngramClient(target) as client, client.stream() as stream:
            for lookup in (client.lookup(slow, timeout=0.05), stream.lookup(slow, timeout=0.05)):
                with pytest.raises(late):
                    await lookup
            assert (await client.lookup([5])).stats.rows == 48

    with serving(fp4_checkpoint, tmp_path) as server:
        with EngramClient(server.targets[0]) as client, client.stream() as stream:
            with pytest.raises(DeadlineError) as caught:
                client.lookup(slow, timeout=0.05)
            assert isinstance(caught.value, TimeoutError)
            with pytest.raises(late):
                stream.lookup(slow, timeout=0.05).result()
            assert right(truth, client, 5)
        asyncio.run(wait_async(server.targets[0]))


def test_overloaded_server_is_tried_again(fp4_checkpoint: Path, tmp_path: Path, truth: Truth) -> None:
    limits = {"block_bytes": 200_000, "chunk_bytes": 50_000}
    options: dict[str, Any] = {"budget_bytes": 2 << 20, "backend": "mmap", "cache_bytes": 0}
    tokens = np.arange(5000, dtype="<i4").tobytes()
    bulk = pb.LookupRequest(tokens=pb.TokenKeys(sequences=[pb.Sequence(tokens=tokens)]))
    wanted = range(60)  # of which a first block is as large as those that find no room
    retry = Retry(attempts=1000, backoff_s=0.01, backoff_max_s=0.05)
    with (
        serving(fp4_checkpoint, tmp_path, limits=limits, **options) as server,
        grpc.insecure_channel(server.targets[0]) as channel,
        EngramClient(server.targets[0], retry=NO_RETRY) as impatient,
        EngramClient(server.targets[0], retry=retry) as client,
        client.stream() as stream,
        ThreadPoolExecutor() as pool,
    ):
        # Clients that do not read their replies fill the budget.
        stub = pb_grpc.EngramStub(channel)
        stalled = [stub.LookupStream(iter([bulk])) for _ in range(16)]
        until(lambda: fails_with(OverloadedError, lambda: impatient.lookup(wanted, lane="prefill")))
        with impatient.stream() as hasty:
            until(lambda: fails_with(OverloadedError, lambda: hasty.lookup(wanted, lane="prefill").result()))

        lookups = [pool.submit(client.lookup, wanted, lane="prefill") for _ in range(4)]
        lookups += [pool.submit(stream.lookup(wanted, lane="prefill").result) for _ in range(4)]
        for call in stalled:
            call.cancel()
        expected = truth.values(truth.ids(wanted), "bf16")
        assert all(same(lookup.result().values, expected) for lookup in lookups)


def fails_with(error: type[EngramError], call: Callable[[], object]) -> bool:
    try:
        call()
    except error:
        return True
    return False


def test_stream_has_no_more_under_way_than_allowed(fp4_checkpoint: Path, tmp_path: Path) -> None:
    slow = list(range(20_000))
    with (
        serving(fp4_checkpoint, tmp_path) as server,
        EngramClient(server.targets[0], limits=Limits(stream_requests=2)) as client,
    ):
        with client.stream() as stream:
            under_way = [stream.lookup(slow), stream.lookup(slow)]
            with pytest.raises(DeadlineError, match="2 lookups of this stream"):
                stream.lookup([1], timeout=0.05)
            assert not under_way[1].done()
        with pytest.raises(EngramError, match="closed"):
            under_way[1].result()
        with pytest.raises(EngramError, match="the stream is closed"):
            stream.lookup([1])
