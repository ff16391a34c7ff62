"""A server that is told to stop: what it took it answers, what comes later goes elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.faulty_fs import Faults
from support.serving import ServerProcess, serving, until
from support.truth import Truth
from test_limits import Ask, World, asks, asks_stream, client, mounted, overloaded, truth
from test_metrics import Scrape

from engram_client import EngramClient, EngramError, UnavailableError

__all__ = ["mounted", "truth"]  # fixtures


@pytest.fixture
def world(mounted: tuple[Path, Faults], truth: Truth, tmp_path: Path) -> Iterator[World]:
    with overloaded(mounted, truth, tmp_path, {"queue_s": 1000.0}) as world:
        yield world


def says(channel: grpc.Channel) -> Any:
    """What health says, or the status of a server that takes no calls any more."""
    try:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60).status
    except grpc.RpcError as error:
        return error.code()


def test_what_was_taken_is_answered_and_what_comes_later_is_told_to_go(world: World) -> None:
    """Unary, on a stream, and through shared memory, each with a connection that is open and idle beside it."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(client(target, shared))
            for target, shared in 2 * [(world.tcp, False), (world.uds, False), (world.uds, True)]
        ]
        busy, idle = clients[:3], clients[3:]
        streams = [stack.enter_context(one.stream()) for one in (busy[1], idle[1])]
        ways: list[Ask] = [asks(busy[0]), asks_stream(streams[0]), asks(busy[2])]
        later: list[Ask] = [asks(idle[0]), asks_stream(streams[1]), asks(idle[2])]
        for ask in later:
            world.check(ask([3]), [3])
        channel = stack.enter_context(grpc.insecure_channel(world.tcp))
        assert says(channel) == health_pb2.HealthCheckResponse.SERVING
        answers: list[Future[Any]] = []
        prompts = [world.prompt(number) for number in range(1, 4)]
        with world.held(asks(client_of(stack, world.tcp))):
            answers = [world.pool.submit(ask, prompt) for ask, prompt in zip(ways, prompts, strict=True)]
            rows = 48 * sum(map(len, [world.prompt(0), *prompts]))
            until(lambda: Scrape(world.server).sum("engram_admitted_rows") == rows)
            world.server.process.terminate()
            until(lambda: says(channel) != health_pb2.HealthCheckResponse.SERVING)
            for ask in later:
                with pytest.raises(UnavailableError):
                    ask([3])
            assert not any(answer.done() for answer in answers)
        for answer, prompt in zip(answers, prompts, strict=True):
            world.check(answer.result(60), prompt)
        assert world.server.wait() == 0


def client_of(stack: ExitStack, target: str) -> EngramClient:
    return stack.enter_context(client(target))


def test_what_is_not_answered_in_time_is_given_up(
    mounted: tuple[Path, Faults], truth: Truth, tmp_path: Path
) -> None:
    with (
        overloaded(mounted, truth, tmp_path, {}, drain_s=0.2) as world,
        client(world.tcp) as first,
        client(world.uds, shared=True) as attached,
    ):
        world.check(asks(attached)([3]), [3])
        world.faults.set("hold")
        try:
            answers = [world.pool.submit(asks(one), world.prompt(1)) for one in (first, attached)]
            until(lambda: Scrape(world.server).sum("engram_admitted_rows") == 2 * 48 * len(world.prompt(1)))
            world.server.process.terminate()
            for answer in answers:
                with pytest.raises(UnavailableError):
                    answer.result(60)
        finally:
            world.faults.clear()  # reads that a device has cannot be taken back from it
        assert world.server.wait() == 0


def test_clients_with_another_target_notice_nothing(
    fp4_checkpoint: Path, truth: Truth, tmp_path: Path
) -> None:
    """Servers go, one after another, under clients that never pause."""
    folders = [tmp_path / name for name in ("a", "b")]
    expected: dict[int, bytes] = {}
    for token in range(50):
        expected[token] = truth.values(truth.ids([token, token + 1]), "packed").tobytes()
    stop, failures = threading.Event(), []
    answered = [0] * 6

    def ask(number: int, way: Ask) -> None:
        try:
            while not stop.is_set():
                token = answered[number] % len(expected)
                found = way([token, token + 1])
                if found.values.tobytes() != expected[token]:
                    raise AssertionError(f"rows of token {token} are not the table's")
                answered[number] += 1
        except (EngramError, AssertionError) as error:
            failures.append(error)

    with ExitStack() as stack:
        servers = []
        for folder in folders:
            folder.mkdir()
            servers.append(
                stack.enter_context(serving(fp4_checkpoint, folder, uds=folder / "socket", drain_s=20))
            )
        ways: list[Ask] = []
        for targets in ([server.targets[0] for server in servers], [server.targets[1] for server in servers]):
            unary = stack.enter_context(EngramClient(targets, shared_memory="off"))
            shared = stack.enter_context(EngramClient(targets))
            ways += [asks(unary), asks_stream(stack.enter_context(unary.stream())), asks(shared)]
        askers = [threading.Thread(target=ask, args=item) for item in enumerate(ways)]
        for asker in askers:
            asker.start()
        try:
            for _ in range(2):
                progress(answered, failures)
                assert servers[0].stop() == 0
                progress(answered, failures)
                # It comes back where it was, and the other one goes.
                again = stack.enter_context(restarted(servers[0], fp4_checkpoint, folders[0]))
                servers, folders = [servers[1], again], folders[::-1]
        finally:
            stop.set()
            for asker in askers:
                asker.join()
    assert not failures


def restarted(server: ServerProcess, path: Path, folder: Path) -> Any:
    """A server at the addresses of one that has ended."""
    return serving(path, folder, listen=server.targets[0], uds=folder / "socket", drain_s=20)


def progress(answered: list[int], failures: list[Exception]) -> None:
    """Wait until everybody was answered some more."""
    before = list(answered)
    until(
        lambda: bool(failures) or all(now >= then + 20 for now, then in zip(answered, before, strict=True)),
        60,
    )
    assert not failures
