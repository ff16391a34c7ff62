"""The shared-memory channel from outside: who uses it when, what clients do to it, and what it leaves behind.

That its rows are exact is in test_client.py, where it is one of the ways to ask.
"""

import logging
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
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
    DataLossError,
    DeadlineError,
    EngramClient,
    EngramError,
    InvalidRequestError,
    MismatchError,
    Retry,
    SharedMemory,
    Timeouts,
    UnavailableError,
)
from engram_client._targets import is_local
from engram_kernels import _core
from engram_server.shared_memory import SharedMemoryOptions

REQUIRED = SharedMemory("require")


@pytest.fixture(scope="module")
def truth(fp4_checkpoint: Path) -> Truth:
    return Truth(fp4_checkpoint, "fp4")


@pytest.fixture(scope="module")
def server(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    # A cache that is soon full: what grows later is not the cache.
    with serving(fp4_checkpoint, folder, uds=folder / "socket", cache_bytes=1 << 20) as process:
        yield process
        assert process.stop() == 0
        assert "fault of the server" not in process.log.read_text()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[EngramClient]:
    with EngramClient(server.targets[1], shared_memory=REQUIRED) as client:
        yield client


def socket_of(server: ServerProcess) -> Path:
    with EngramClient(server.targets[0], shared_memory="off") as client:
        facts = client.describe().shared_memory
    assert facts is not None
    return Path(facts.socket)


def assert_exact(client: EngramClient, truth: Truth, tokens: list[int]) -> None:
    assert same(client.lookup(tokens, format="packed").values, truth.values(truth.ids(tokens), "packed"))


# ------------------------------------------------------------------------------------------- who uses it


def test_a_server_says_where_it_is_and_only_its_own_user_may_connect(server: ServerProcess) -> None:
    path = socket_of(server)
    assert path == Path(server.targets[1].removeprefix("unix:") + ".shm")
    assert f"shared memory at {path}" in server.ready_line
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("target", [0, 1], ids=["TCP", "UDS"])
def test_a_client_uses_it_by_itself(server: ServerProcess, truth: Truth, target: int) -> None:
    with EngramClient(server.targets[target]) as client, client.in_place().lookup([5, 6]) as found:
        assert same(found.values, truth.values(truth.ids([5, 6]), "bf16"))
        assert client.in_place().lookup([7]).buffer is not None


def test_without_it_a_client_says_so_once_and_uses_grpc(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(fp4_checkpoint, tmp_path, shared_memory=SharedMemoryOptions(socket=None)) as server:
        assert server.ready_line.rstrip().endswith("no shared memory")
        with caplog.at_level(logging.WARNING), EngramClient(server.targets[0]) as client:
            for _ in range(3):
                assert_exact(client, truth, [5, 6])
            pending = client.in_place().lookup([7])
            assert pending.buffer is None
            assert same(pending.result().values, truth.values(truth.ids([7]), "bf16"))
        assert [record.message for record in caplog.records if "no shared memory" in record.message] == [
            f"{server.targets[0]}: no shared memory, so lookups go over gRPC: the server has none"
        ]
        with (
            EngramClient(server.targets[0], shared_memory="require") as client,
            pytest.raises(UnavailableError, match="no shared memory: the server has none"),
        ):
            client.lookup([5])


def test_a_socket_that_cannot_be_seen_means_grpc(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth, caplog: pytest.LogCaptureFixture
) -> None:
    """As from another host, or another container."""
    path = tmp_path / "shm"
    with serving(fp4_checkpoint, tmp_path, shared_memory=SharedMemoryOptions(socket=path)) as server:
        path.unlink()
        with caplog.at_level(logging.WARNING), EngramClient(server.targets[0]) as client:
            assert_exact(client, truth, [5, 6])
        assert f"{path}: No such file or directory (is the server on this host" in caplog.text


def test_a_socket_of_another_server_means_grpc(
    fp4_checkpoint: Path, fp8_checkpoint: Path, tmp_path: Path, truth: Truth, caplog: pytest.LogCaptureFixture
) -> None:
    """The same path on two hosts: the rows must be those of the server that was asked."""
    here, there = tmp_path / "here", tmp_path / "there"
    with (
        serving(fp4_checkpoint, tmp_path, shared_memory=SharedMemoryOptions(socket=here)) as server,
        serving(fp8_checkpoint, tmp_path, shared_memory=SharedMemoryOptions(socket=there)),
    ):
        there.rename(here)
        with caplog.at_level(logging.WARNING), EngramClient(server.targets[0]) as client:
            assert_exact(client, truth, [5, 6])
        assert "another server listens at" in caplog.text


def test_a_full_server_leaves_others_to_grpc(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth, caplog: pytest.LogCaptureFixture
) -> None:
    options = SharedMemoryOptions(clients=1)
    with serving(fp4_checkpoint, tmp_path, shared_memory=options) as server:
        with EngramClient(server.targets[0], shared_memory=REQUIRED) as first:
            assert_exact(first, truth, [5])
            with caplog.at_level(logging.WARNING), EngramClient(server.targets[0]) as second:
                assert_exact(second, truth, [6])
        assert "1 clients are attached, all that --shm-clients allows" in caplog.text
        until(lambda: "was not let in: 1 clients are attached" in server.log.read_text())


def test_paths_that_cannot_be_had(fp4_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    for options, sentence in {
        SharedMemoryOptions(socket=file): "exists and is not a socket",
        SharedMemoryOptions(socket=tmp_path / ("x" * 108)): "over the 107",
        SharedMemoryOptions(socket=tmp_path / "no" / "folder"): "there is no directory",
        SharedMemoryOptions(group="no such group"): "there is no group 'no such group' to let in",
        # What chown takes for no group at all, more than any group, and a digit that is no number.
        SharedMemoryOptions(group="4294967295"): "there is no group '4294967295' to let in",
        SharedMemoryOptions(group="99999999999"): "there is no group '99999999999' to let in",
        SharedMemoryOptions(group="²"): "there is no group '²' to let in",
    }.items():
        if options.group is None:
            with (
                pytest.raises(AssertionError, match=f"ServeError: .*{sentence}"),
                serving(fp4_checkpoint, tmp_path, shared_memory=options),
            ):
                pass
        else:  # where no path was asked for, the server goes without
            with serving(fp4_checkpoint, tmp_path, shared_memory=options) as server:
                assert sentence in server.log.read_text()
    assert file.read_text() == "precious"


def test_the_socket_of_a_dead_server_is_replaced(fp4_checkpoint: Path, tmp_path: Path, truth: Truth) -> None:
    path = tmp_path / "shm"
    options = SharedMemoryOptions(socket=path)
    with serving(fp4_checkpoint, tmp_path, shared_memory=options) as server:
        server.kill()
    assert path.is_socket()
    with (
        serving(fp4_checkpoint, tmp_path, shared_memory=options) as server,
        EngramClient(server.targets[0], shared_memory=REQUIRED) as client,
    ):
        assert_exact(client, truth, [5])
        assert server.stop() == 0
    assert not path.exists()


def test_a_server_that_stops_leaves_the_socket_of_another_alone(fp4_checkpoint: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "shm", tmp_path / "other"
    with (
        serving(fp4_checkpoint, tmp_path, shared_memory=SharedMemoryOptions(socket=path)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as newer,
    ):
        newer.bind(str(other))
        other.rename(path)
        assert server.stop() == 0
        assert path.is_socket()


def test_a_group_that_cannot_reach_the_socket_is_worth_a_warning(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    options = SharedMemoryOptions(socket=tmp_path / "shm", group=str(os.getegid()))
    with serving(fp4_checkpoint, tmp_path, shared_memory=options) as server:
        assert f"the group cannot reach {tmp_path / 'shm'}" in server.log.read_text()


if os.geteuid() == 0:  # nobody else can be somebody else

    @pytest.mark.parametrize(
        ("groups", "answer"),
        [([54322], "uid 54321 may not attach"), ([54323], "in"), ([*range(60_000, 60_200), 54323], "in")],
        ids=["a stranger", "a member", "a member of many"],
    )
    def test_another_user_is_let_in_as_a_member_of_the_group(
        fp4_checkpoint: Path, tmp_path: Path, groups: list[int], answer: str
    ) -> None:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "shm"
            options = SharedMemoryOptions(socket=path, group="54323")
            with serving(fp4_checkpoint, tmp_path, shared_memory=options):
                assert (path.stat().st_mode & 0o777, path.stat().st_gid) == (0o660, 54323)
                path.parent.chmod(0o755)
                path.chmod(0o777)  # so that it is not the file system that decides
                here, there = os.pipe()
                if (pid := os.fork()) == 0:
                    os.setgroups(groups)
                    os.setresgid(54322, 54322, 54322)
                    os.setresuid(54321, 54321, 54321)
                    try:
                        os.write(there, b"in" if attach(path).alive else b"out")
                    except BaseException as error:
                        os.write(there, str(error).encode())
                    os._exit(0)
                os.waitpid(pid, 0)
                assert os.read(here, 1000).decode().startswith(answer)
                os.close(here)
                os.close(there)


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("unix:/run/engram.sock", True),
        ("127.0.0.1:50051", True),
        ("127.8.8.8:1", True),
        ("[::1]:50051", True),
        ("localhost:50051", True),
        ("10.0.0.7:50051", False),
        ("tables.internal:50051", False),
        ("[fd00::1]:50051", False),
    ],
)
def test_only_a_server_on_this_host_is_expected_to_share(target: str, local: bool) -> None:
    assert is_local(target) is local


# ------------------------------------------------------------------------------------------ rows in place


def test_several_lookups_in_place_are_under_way_together(client: EngramClient, truth: Truth) -> None:
    pending = [client.in_place().lookup([n, n + 1], format="packed") for n in range(20)]
    for n, rows in reversed(list(enumerate(pending))):
        found = rows.result()
        assert same(found.values, truth.values(truth.ids([n, n + 1]), "packed"))
        buffer = rows.buffer
        assert buffer is not None
        assert np.shares_memory(found.values, buffer)
        rows.release()


def test_rows_in_place_that_fill_the_memory_are_waited_for_or_come_over_grpc(
    server: ServerProcess, truth: Truth
) -> None:
    tokens = list(range(100, 200))
    expected = truth.values(truth.ids(tokens), "packed")
    with EngramClient(server.targets[0], shared_memory=SharedMemory("require", 1 << 20)) as client:
        first = client.in_place().lookup(tokens, format="packed")
        held = first.result()
        second = client.in_place().lookup(tokens, format="packed")
        assert second.buffer is None
        assert same(second.result().values, expected)
        assert same(client.lookup(tokens, format="packed").values, expected)
        assert same(held.values, expected)
        first.release()
        assert client.in_place().lookup(tokens, format="packed").buffer is not None
        with pytest.raises(
            InvalidRequestError, match=r"the data area has 1048576: split the request, or ask"
        ):
            client.in_place().lookup(range(1000), format="packed")


def test_rows_in_place_outlive_client_and_server(fp4_checkpoint: Path, tmp_path: Path, truth: Truth) -> None:
    expected = truth.values(truth.ids([5, 6, 7]), "packed")
    found = {}
    for end in ("stopped", "killed", "closed"):
        with serving(fp4_checkpoint, tmp_path) as server:
            client = EngramClient(server.targets[0], shared_memory=REQUIRED)
            found[end] = client.in_place().lookup([5, 6, 7], format="packed").result()
            if end == "stopped":
                assert server.stop() == 0
            elif end == "killed":
                server.kill()
            client.close()
            if end == "closed":
                with EngramClient(server.targets[0], shared_memory=REQUIRED) as other:
                    assert_exact(other, truth, [8])
            assert same(found[end].values, expected), end


def test_rows_in_place_of_a_server_that_stands_still_run_out_of_time(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    """By the client's own limit, when the call gives none."""
    with (
        serving(fp4_checkpoint, tmp_path) as server,
        EngramClient(server.targets[0], shared_memory=REQUIRED, timeouts=Timeouts(request_s=0.2)) as client,
    ):
        client.lookup([5], timeout=20)
        server.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.process.pid, os.WSTOPPED)
        pending = client.in_place().lookup([5])
        with pytest.raises(DeadlineError):
            pending.result()
        server.process.send_signal(signal.SIGCONT)
        with client.in_place().lookup([5], timeout=20) as found:
            assert same(found.values, truth.values(truth.ids([5]), "bf16"))


# ---------------------------------------------------------------------------------------------- restarts


def test_lookups_in_place_begin_at_once_and_wait_for_the_server_when_they_are_wanted(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    uds = tmp_path / "socket"
    patient = Retry(wait_for_server_s=120)
    with EngramClient(f"unix:{uds}", shared_memory=REQUIRED, retry=patient) as client:
        pending = [client.in_place().lookup([5])]  # there was no server yet
        with serving(fp4_checkpoint, tmp_path, listen=None, uds=uds) as server:
            pending[0].result()
            server.kill()
        pending.append(client.in_place().lookup([5]))
        with serving(fp4_checkpoint, tmp_path, listen=None, uds=uds):
            for rows in pending:
                assert same(rows.result().values, truth.values(truth.ids([5]), "bf16"))


def test_a_client_that_never_tries_twice_finds_the_memory_of_a_new_server(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    uds = tmp_path / "socket"
    with EngramClient(f"unix:{uds}", shared_memory=REQUIRED, retry=NO_RETRY) as client:
        for _ in range(2):
            with serving(fp4_checkpoint, tmp_path, listen=None, uds=uds) as server:
                until(lambda: answers(client))
                assert_exact(client, truth, [5, 6])
                assert client.in_place().lookup([7]).buffer is not None
                server.kill()
                with pytest.raises(UnavailableError):
                    client.lookup([5])


def answers(client: EngramClient) -> bool:
    """gRPC connects anew in its own time."""
    try:
        client.lookup([5])
    except UnavailableError:
        return False
    return True


def test_clients_resume_by_themselves_when_the_server_is_restarted_under_load(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    uds = tmp_path / "socket"
    rng = random.Random(5)
    asked = [[rng.randrange(2000) for _ in range(30)] for _ in range(8)]
    expected = [truth.values(truth.ids(tokens), "packed") for tokens in asked]
    stop = threading.Event()
    answered, wrong = [0] * 4, []

    def ask(number: int, client: EngramClient) -> None:
        turn = number
        while not stop.is_set():
            turn = (turn + 1) % len(asked)
            try:
                if number % 2:
                    with client.in_place().lookup(asked[turn], format="packed") as found:
                        fine = same(found.values, expected[turn])
                else:
                    fine = same(client.lookup(asked[turn], format="packed").values, expected[turn])
            except EngramError as error:
                wrong.append(str(error))
            else:
                answered[number] += 1
                if not fine:
                    wrong.append("a wrong row")

    patient = Retry(wait_for_server_s=120)
    with EngramClient(f"unix:{uds}", shared_memory=REQUIRED, retry=patient) as client:
        askers = [threading.Thread(target=ask, args=(number, client)) for number in range(4)]
        for end in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
            with serving(fp4_checkpoint, tmp_path, listen=None, uds=uds) as server:
                before = list(answered)
                if not askers[0].ident:
                    for asker in askers:
                        asker.start()
                until(lambda before=before: all(n > b + 5 for n, b in zip(answered, before, strict=True)))
                server.process.send_signal(end)
                server.process.wait(30)
        with serving(fp4_checkpoint, tmp_path, listen=None, uds=uds):
            before = list(answered)
            until(lambda: all(n > b + 5 for n, b in zip(answered, before, strict=True)))
            stop.set()
            for asker in askers:
                asker.join()
    assert not wrong


def test_a_restart_with_another_table_is_refused(
    fp4_checkpoint: Path, fp8_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    uds = tmp_path / "socket"
    with EngramClient(f"unix:{uds}", shared_memory=REQUIRED, retry=Retry(wait_for_server_s=60)) as client:
        with serving(fp4_checkpoint, tmp_path, listen=None, uds=uds):
            assert_exact(client, truth, [5])
        with (
            serving(fp8_checkpoint, tmp_path, listen=None, uds=uds),
            pytest.raises(MismatchError, match="they serve different rows"),
        ):
            client.lookup([5])


@pytest.fixture
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was refused tries again at once."""
    monkeypatch.setattr("engram_client._shared._AGAIN_S", 0.0)


@pytest.mark.usefixtures("soon_again")
def test_a_client_without_it_notices_a_restart_that_grpc_does_not_tell(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    uds = tmp_path / "socket"
    with EngramClient(f"unix:{uds}", retry=Retry(wait_for_server_s=60)) as client:
        connection = client._pool._connections[0]
        without = SharedMemoryOptions(socket=None)
        with serving(fp4_checkpoint, tmp_path, listen=None, uds=uds, shared_memory=without) as server:
            assert_exact(client, truth, [5])
            known = connection._description
            assert server.stop() == 0
        with serving(fp4_checkpoint, tmp_path, listen=None, uds=uds):
            connection._description = known  # gRPC has reconnected
            until(lambda: client.in_place().lookup([7]).buffer is not None)
            assert_exact(client, truth, [6])


def test_a_thread_that_knows_an_older_server_does_not_detach_the_others(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    uds = tmp_path / "socket"
    with EngramClient(f"unix:{uds}", retry=Retry(wait_for_server_s=60)) as client:
        connection = client._pool._connections[0]
        with serving(fp4_checkpoint, tmp_path, listen=None, uds=uds) as server:
            assert_exact(client, truth, [5])
            known = connection._description
            assert known is not None
            assert server.stop() == 0
        with serving(fp4_checkpoint, tmp_path, listen=None, uds=uds):
            assert_exact(client, truth, [5])
            channel = connection._shared._channel
            assert channel is not None
            with client.in_place().lookup([6], format="packed") as found:
                assert connection._shared.channel(known, None) is None
                assert same(found.values, truth.values(truth.ids([6]), "packed"))
            assert channel.alive
            assert connection._shared._channel is channel


def test_a_server_that_hangs_is_left_for_the_next(fp4_checkpoint: Path, tmp_path: Path, truth: Truth) -> None:
    timeouts = Timeouts(request_s=None, keepalive_s=1.0, connect_s=1.0)
    with (
        serving(fp4_checkpoint, tmp_path) as first,
        serving(fp4_checkpoint, tmp_path) as second,
        EngramClient([*first.targets, *second.targets], timeouts=timeouts, shared_memory=REQUIRED) as client,
    ):
        assert_exact(client, truth, [5])
        first.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            client.lookup([6], timeout=0.2)
        pending = client.in_place().lookup([7], timeout=0.2)
        with pytest.raises(TimeoutError):
            pending.result()
        assert_exact(client, truth, [6])
        assert client.describe().server_id != ""


# ---------------------------------------------------------------------------------------- servers that are none


def hung(path: Path) -> list[socket.socket]:
    """A socket at which nobody ever answers, and whose line is full."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(0)
    sockets = [listener]
    while True:
        waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        sockets.append(waiting)
        try:
            waiting.connect(str(path))
        except BlockingIOError:
            return sockets


def test_nobody_waits_for_ever_at_a_door(tmp_path: Path) -> None:
    """Not where the line is full, nor in it, nor when signals come in all the while."""
    sockets = hung(tmp_path / "full")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen(8)
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        try:
            for path in (tmp_path / "full", tmp_path / "silent"):
                with pytest.raises(TimeoutError):
                    _core.ShmClient(str(path), 1 << 20, 0.2)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    for one in sockets:
        one.close()


def test_descriptors_that_nobody_asked_for_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(8)

        def welcome() -> None:
            connection, _ = listener.accept()
            with connection, (tmp_path / "file").open("w") as file:
                connection.recv(100)
                head = struct.pack("<8sIIQ", b"\x89ENGSHM\n", 1, 0, 1 << 21)
                socket.send_fds(connection, [head.ljust(512, b"\0")], [file.fileno()] * 2)

        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            server = threading.Thread(target=welcome)
            server.start()
            with pytest.raises(RuntimeError, match="sealed"):
                _core.ShmClient(str(path), 1 << 20, 30.0)
            server.join()
        assert len(list(Path("/proc/self/fd").iterdir())) == before


# --------------------------------------------------------------------------------------------- fail closed


def test_a_table_written_to_is_not_trusted_any_more(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(fp4_checkpoint, path)
    (table,) = path.glob("*00048-of*")
    with (
        serving(path, tmp_path) as server,
        grpc.insecure_channel(server.targets[0]) as channel,
        EngramClient(server.targets[0], shared_memory=REQUIRED) as client,
    ):
        assert_exact(client, truth, [5, 6])
        os.utime(table)
        with pytest.raises(
            DataLossError, match=f"{table} was written to since it was opened; its rows cannot"
        ):
            client.lookup([5, 6])
        health = health_pb2_grpc.HealthStub(channel)
        check = health_pb2.HealthCheckRequest(service="engram.v1.Engram")
        until(lambda: health.Check(check).status == health_pb2.HealthCheckResponse.NOT_SERVING)


def test_a_damaged_row_turns_health(fp4_checkpoint: Path, tmp_path: Path) -> None:
    from engram_server.cli import main

    store = tmp_path / "tables.engram"
    assert main(["convert", str(fp4_checkpoint), str(store), "--verify", "none"]) == 0
    with (
        serving(store, tmp_path, cache_bytes=0) as server,
        grpc.insecure_channel(server.targets[0]) as channel,
        EngramClient(server.targets[0], shared_memory=REQUIRED) as client,
    ):
        last = client.describe().tables[14].rows - 1
        assert client.lookup_rows(14, [last]).values.any()
        with store.open("r+b") as file:
            file.truncate(store.stat().st_size - 4096)
        with pytest.raises(DataLossError, match=f"layer 14, row {last} could not be read"):
            client.lookup_rows(14, [last])
        health = health_pb2_grpc.HealthStub(channel)
        check = health_pb2.HealthCheckRequest(service="engram.v1.Engram")
        until(lambda: health.Check(check).status == health_pb2.HealthCheckResponse.NOT_SERVING)


# ----------------------------------------------------------------------------------------- what is left behind


class Footprint:
    """What a server process holds of the system."""

    def __init__(self, pid: int) -> None:
        proc = Path(f"/proc/{pid}")
        self.fds = len(list((proc / "fd").iterdir()))
        self.threads = len(list((proc / "task").iterdir()))
        status = (proc / "status").read_text()
        self.shared_kib = int(re.search(r"^RssShmem:\s+(\d+) kB$", status, re.MULTILINE)[1])  # type: ignore[index]
        self.private_kib = int(re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)[1])  # type: ignore[index]

    def within(self, before: "Footprint") -> bool:
        return (
            self.fds <= before.fds
            and self.threads <= before.threads
            and self.shared_kib <= before.shared_kib
            and self.private_kib <= before.private_kib + 8 * 1024
        )


class Watch:
    """What a server held when it was last looked at."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.look()

    def look(self) -> None:
        """Compare with what it holds now, from now on: an allocator keeps what was freed to it, once."""
        self.before = Footprint(self.pid)

    def nothing_is_left(self) -> bool:
        return Footprint(self.pid).within(self.before)


@pytest.fixture
def watch(server: ServerProcess, truth: Truth) -> Iterator[Watch]:
    """Beside a client whose rows must be exact all along; afterwards the server must be as it was."""
    tokens = list(range(40, 60))
    expected = truth.values(truth.ids(tokens), "packed")
    stop = threading.Event()
    wrong: list[str] = []
    with EngramClient(server.targets[0], shared_memory=REQUIRED) as client:
        for _ in range(3):
            assert_exact(client, truth, tokens)
        watch = Watch(server.process.pid)

        def ask() -> None:
            while not stop.is_set():
                try:
                    if not same(client.lookup(tokens, format="packed").values, expected):
                        wrong.append("a wrong row")
                except EngramError as error:
                    wrong.append(str(error))

        asker = threading.Thread(target=ask)
        asker.start()
        try:
            yield watch
        finally:
            stop.set()
            asker.join()
        assert not wrong
        until(watch.nothing_is_left, timeout_s=60)


def attach(path: Path, data_bytes: int = 1 << 20) -> _core.ShmClient:
    return _core.ShmClient(str(path), data_bytes, 30.0)


@pytest.mark.usefixtures("watch")
def test_a_thousand_clients_come_and_go(server: ServerProcess) -> None:
    path = socket_of(server)
    for _ in range(1000):
        client = attach(path)
        ticket = client.submit(
            kind=3,
            keys=[np.arange(4, dtype="<i4"), np.asarray([1], "<u4")],
            positions=4,
            layers=1,
            id_bytes=4,
            format=_core.Format.PACKED,
            payload_bytes=4 * 136,
        )
        assert ticket is not None
        assert ticket.wait(30)


_VICTIM = """
import sys
import numpy as np
from engram_kernels import _core
client = _core.ShmClient(sys.argv[1], 16 << 20, 30.0)
ids = np.random.default_rng().integers(0, 40_000, 20_000, dtype=np.int64)
tickets = []
while True:
    ticket = client.submit(kind=3, keys=[ids, np.asarray([1], "<u4")], positions=len(ids), layers=1, id_bytes=8,
                           format=_core.Format.PACKED, payload_bytes=len(ids) * 136, wait_s=0.0)
    if ticket is None:
        tickets.pop(0).wait()
        print("under way", flush=True)
    else:
        tickets.append(ticket)
"""


def test_clients_killed_in_mid_request(server: ServerProcess, watch: Watch) -> None:
    path = socket_of(server)
    for number in range(8):
        if number == 3:
            watch.look()
        victim = subprocess.Popen([sys.executable, "-c", _VICTIM, str(path)], stdout=subprocess.PIPE)
        assert victim.stdout is not None
        with victim.stdout as out:
            assert out.readline() == b"under way\n"
            victim.kill()
            victim.wait()


@pytest.mark.usefixtures("watch")
def test_clients_that_never_look_at_their_answers(server: ServerProcess) -> None:
    path = socket_of(server)
    hoarders = [attach(path) for _ in range(4)]
    ids = [np.arange(50, dtype="<i4"), np.asarray([14], "<u4")]
    fields: dict[str, Any] = {"positions": 50, "layers": 1, "id_bytes": 4, "payload_bytes": 50 * 136}
    tickets = [
        hoarder.submit(kind=3, keys=ids, format=_core.Format.PACKED, **fields)
        for hoarder in hoarders
        for _ in range(_core.SHM_SLOTS)
    ]
    assert all(tickets)
    for hoarder in hoarders:
        assert hoarder.submit(kind=3, keys=ids, format=_core.Format.PACKED, wait_s=0.01, **fields) is None
    del tickets, hoarders


@pytest.mark.usefixtures("watch")
def test_strangers_at_the_door(server: ServerProcess) -> None:
    path = str(socket_of(server))
    for junk in (b"", b"x", b"GET / HTTP/1.1\r\n\r\n", bytes(24), bytes(5000)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(path)
            stranger.send(junk)
            stranger.settimeout(30)
            assert stranger.recv(1000) == b""
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(40)]
    for stranger in silent:
        stranger.connect(path)
    until(lambda: _answers(path))
    for stranger in silent:
        stranger.close()


def _answers(path: str) -> bool:
    try:
        return attach(Path(path)).alive
    except OSError:
        return False


def test_a_lookup_of_a_forked_child_is_refused(client: EngramClient, truth: Truth) -> None:
    assert_exact(client, truth, [5])
    native = client._pool._connections[0]._shared._channel._native  # type: ignore[union-attr]
    pid = os.fork()
    if pid == 0:
        try:
            native.submit(kind=3, keys=[], positions=0, format=_core.Format.PACKED, payload_bytes=0)
        except _core.ShmLostError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert_exact(client, truth, [6])


def test_a_forked_child_does_not_keep_its_parents_place(server: ServerProcess, watch: Watch) -> None:
    client = attach(socket_of(server))
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(there)
        os.read(here, 1)
        os._exit(0)
    os.close(here)
    del client
    until(watch.nothing_is_left)
    os.close(there)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_error_that_is_kept_keeps_no_memory(server: ServerProcess, truth: Truth) -> None:
    """Its traceback holds what the lookup had under way."""
    with EngramClient(server.targets[0], shared_memory=SharedMemory("require", 1 << 20)) as client:
        assert_exact(client, truth, [5])
        server.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError) as caught:
                client.lookup(range(100, 400), timeout=0.5)
        finally:
            server.process.send_signal(signal.SIGCONT)
        nearly_all = range(40)
        until(lambda: client.in_place().lookup(nearly_all).buffer is not None)
        assert caught.value.__traceback__ is not None
        assert_exact(client, truth, [6])


def test_lookups_past_their_time_leave_no_trace(client: EngramClient, truth: Truth) -> None:
    assert_exact(client, truth, [5, 6])
    for _ in range(50):
        with pytest.raises(TimeoutError):
            client.lookup(range(100, 4000), timeout=0.001)
    assert_exact(client, truth, [5, 6])
