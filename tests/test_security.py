"""Who may call, with real certificates over real sockets: who is let in, and who is refused, counted and logged."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from support.certificates import YESTERDAY, Authority, Pair, files_of
from support.serving import ServerProcess, serving, until
from support.truth import Truth, same

from engram_client import (
    NO_RETRY,
    AsyncEngramClient,
    AuthenticationError,
    EngramClient,
    Retry,
    SharedMemory,
    Timeouts,
    Tls,
    Token,
    UnavailableError,
)
from engram_client._credentials import Bearer
from engram_client._errors import from_rpc
from engram_client._proto import engram_pb2 as pb
from engram_client.adapters._settings import Settings
from engram_server.admin import AdminServer, ask
from engram_server.bearer import Tokens
from engram_server.certificates import Certificates
from engram_server.cli import main
from engram_server.clients import client_name, peer_address, site_of
from engram_server.refusals import Refusals
from engram_server.security import Security, SecurityOptions
from engram_server.shared_memory import SharedMemoryOptions
from engram_server.sockets import ServeError

ALICE, BOB = "a" * 32, "b" * 32
TOKENS = f"# who may call\nalice {ALICE}\n\nbob {BOB}  # the other one\n"


@pytest.fixture(scope="module")
def truth(fp4_checkpoint: Path) -> Truth:
    return Truth(fp4_checkpoint, "fp4")


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return written(tmp_path / "tokens", TOKENS)


def written(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def right(truth: Truth, client: EngramClient, token: int = 5) -> bool:
    return same(client.lookup([token]).values, truth.values(truth.ids([token]), "bf16"))


def client_of(target: str, **options: Any) -> EngramClient:
    return EngramClient(target, retry=NO_RETRY, shared_memory="off", **options)


def metrics_address(server: ServerProcess) -> str:
    found = re.search(r"metrics at http://(\S+)/metrics", server.ready_line)
    assert found is not None, server.ready_line
    return found[1]


def http(server: ServerProcess, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{metrics_address(server)}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def refusals(server: ServerProcess) -> dict[str, int]:
    """All that are not zero."""
    families = text_string_to_metric_families(http(server, "/metrics")[1])
    samples = [sample for family in families for sample in family.samples]
    counts = {
        sample.labels["reason"]: int(sample.value)
        for sample in samples
        if sample.name == "engram_refusals_total"
    }
    assert len(counts) == 5
    return {reason: count for reason, count in counts.items() if count}


# ---------------------------------------------------------------------------------------------- certificates


def test_over_tls_rows_are_exact_and_the_unix_socket_stays_plain(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth, ca: Authority
) -> None:
    security = SecurityOptions(tls=files_of(ca.server()))
    with serving(fp4_checkpoint, tmp_path, uds=tmp_path / "socket", security=security) as server:
        assert "; TLS over TCP" in server.ready_line
        tcp, uds = server.targets
        with client_of(tcp, tls=ca.tls()) as client, client.stream() as stream:
            assert right(truth, client)
            assert same(stream.lookup([7]).result().values, truth.values(truth.ids([7]), "bf16"))
        with client_of(uds) as client:
            assert right(truth, client)
        with client_of([tcp, uds][1], tls=ca.tls()) as client:  # TLS is for TCP
            assert right(truth, client)

        async def by_asyncio() -> Any:
            async with AsyncEngramClient(tcp, tls=ca.tls()) as client, client.stream() as stream:
                return (await client.lookup([5])).values, (await stream.lookup([5])).values

        for values in asyncio.run(by_asyncio()):
            assert same(values, truth.values(truth.ids([5]), "bf16"))


@pytest.mark.parametrize("what", ["no TLS", "another CA", "the CAs of gRPC"])
def test_a_client_that_does_not_trust_the_server_gets_no_rows(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth, ca: Authority, what: str
) -> None:
    tls = {"no TLS": None, "another CA": Authority(tmp_path, "other").tls(), "the CAs of gRPC": Tls()}[what]
    with serving(fp4_checkpoint, tmp_path, security=SecurityOptions(tls=files_of(ca.server()))) as server:
        with client_of(server.targets[0], tls=tls) as client, pytest.raises(UnavailableError):
            client.describe()
        with client_of(server.targets[0], tls=ca.tls()) as client:
            assert right(truth, client)


def test_an_expired_certificate_of_a_server_is_refused_by_its_clients(
    fp4_checkpoint: Path, tmp_path: Path, ca: Authority
) -> None:
    files = files_of(ca.server(until=YESTERDAY))
    with (
        serving(fp4_checkpoint, tmp_path, security=SecurityOptions(tls=files)) as server,
        client_of(server.targets[0], tls=ca.tls()) as client,
        pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.describe()


def handshake(target: str, ca: Authority, client: Pair | None) -> None:
    """As a TLS client by Python's ssl, which is not gRPC's: up to the first bytes that the server sends, if any."""
    context = ssl.create_default_context(cafile=str(ca.file))
    context.set_alpn_protocols(["h2"])
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    host, _, port = target.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        if not connection.recv(1):
            raise ConnectionResetError


def test_clients_without_the_right_certificate_are_refused_counted_and_logged(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth, ca: Authority
) -> None:
    good, late = ca.issue("engine-1"), ca.issue("engine-2", until=YESTERDAY)
    stranger = Authority(tmp_path, "other").issue("engine-1")
    security = SecurityOptions(tls=files_of(ca.server(), ca.file))
    with serving(fp4_checkpoint, tmp_path, security=security, metrics="127.0.0.1:0") as server:
        assert "; TLS with certificates of clients over TCP" in server.ready_line
        target = server.targets[0]
        with client_of(target, tls=ca.tls(good)) as client:
            for _ in range(10):
                assert right(truth, client)
        for client_pair in (None, late, stranger):
            with (
                client_of(target, tls=ca.tls(client_pair)) as client,
                pytest.raises(UnavailableError, match="does it want TLS, or a certificate of this client"),
            ):
                client.describe()
        until(lambda: "handshake" in refusals(server))
        assert "refused (handshake) somebody: connections with TLS brought no call" in server.log.read_text()
        with client_of(target, tls=ca.tls(good)) as client:
            assert right(truth, client)


@pytest.mark.parametrize(
    ("says", "is_guess"),
    [
        ("Socket closed", True),
        ("Failed to connect to remote host: Timeout occurred: FD Shutdown", True),
        ("connection attempt timed out before receiving SETTINGS frame", True),
        ("Handshake read failed", True),
        ("Failed to connect to remote host: connect: Connection refused (111)", False),
        ("unix:/nowhere: connect: No such file or directory (2)", False),
    ],
)
def test_a_handshake_that_failed_is_guessed_at_however_grpc_puts_it(says: str, is_guess: bool) -> None:
    details = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:50051: {says}"
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, details)
    assert ("does it want TLS" in str(from_rpc(error, "127.0.0.1:50051"))) is is_guess


def test_each_failed_handshake_is_counted_and_no_other(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth, ca: Authority
) -> None:
    good, stranger = ca.issue("engine-1"), Authority(tmp_path, "other").issue("engine-1")
    security = SecurityOptions(tls=files_of(ca.server(), ca.file))
    with serving(fp4_checkpoint, tmp_path, security=security, metrics="127.0.0.1:0") as server:
        for _ in range(7):
            with client_of(server.targets[0], tls=ca.tls(good)) as client:
                assert right(truth, client)
        for client_pair in (None, stranger, stranger):
            with pytest.raises(OSError):
                handshake(server.targets[0], ca, client_pair)
        host, _, port = server.targets[0].rpartition(":")
        socket.create_connection((host, int(port))).close()
        until(lambda: refusals(server).get("handshake", 0) >= 4)
        for _ in range(7):
            with client_of(server.targets[0], tls=ca.tls(good)) as client:
                assert right(truth, client)
        assert refusals(server) == {"handshake": 4}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda pair, other: pair.key.unlink(), "key cannot be read: No such file or directory"),
        (lambda pair, other: pair.cert.write_bytes(other.cert.read_bytes()), "is not the key of the certif"),
        (lambda pair, other: pair.cert.write_text("no PEM"), "are no certificate and key in PEM"),
        (
            lambda pair, other: pair.key.write_bytes(pair.cert.read_bytes()),
            "are no certificate and key in PEM",
        ),
        (lambda pair, other: pair.key.write_bytes(encrypted()), "is encrypted: give one without a password"),
    ],
    ids=["no key", "another key", "no certificate", "a key that is none", "an encrypted key"],
)
def test_certificates_that_cannot_serve_are_refused_and_those_there_stay(
    ca: Authority, spoil: Callable[[Pair, Pair], None], says: str
) -> None:
    pair = ca.server()
    security = Security(SecurityOptions(tls=files_of(pair)), Refusals())
    assert asyncio.run(security.reload()) == "certificates"
    spoil(pair, ca.server("another"))
    with pytest.raises(ServeError, match=says):
        asyncio.run(security.reload())
    with pytest.raises(ServeError, match=says):
        Certificates(files_of(pair))


def test_files_are_taken_together_or_not_at_all(ca: Authority, tokens: Path) -> None:
    pair = ca.server()
    security = Security(SecurityOptions(files_of(pair), tokens), Refusals())
    assert security.certificates is not None
    before = security.certificates._current, security.tokens
    ca.server()  # in place of the one there is
    written(tokens, "alice short")
    with pytest.raises(ServeError, match="can be guessed"):
        asyncio.run(security.reload())
    assert (security.certificates._current, security.tokens) == before
    written(tokens, f"alice {ALICE}")
    assert asyncio.run(security.reload()) == "certificates and 1 token"
    assert security.certificates._current is not before[0]


def test_a_file_without_cas_of_clients_is_refused(ca: Authority, tmp_path: Path) -> None:
    for text in ("", "nothing", "# Autorité\n"):
        empty = written(tmp_path / "empty.pem", text)
        with pytest.raises(ServeError, match=r"empty\.pem holds no certificates of CAs"):
            Certificates(files_of(ca.server(), empty))


def test_cas_of_clients_may_be_commented_in_any_language(ca: Authority, tmp_path: Path) -> None:
    commented = written(tmp_path / "commented.pem", "# Autorité\n" + ca.file.read_text())
    Certificates(files_of(ca.server(), commented))


def encrypted() -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


def test_certificates_are_replaced_under_load_and_no_request_fails(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth, ca: Authority
) -> None:
    pair, engine = ca.server(), ca.issue("engine-1")
    admin = tmp_path / "admin"
    security = SecurityOptions(tls=files_of(pair, ca.file))
    expected = {token: truth.values(truth.ids([token]), "bf16") for token in range(50)}
    with serving(fp4_checkpoint, tmp_path, security=security, admin=admin) as server:
        load = Load(server.targets[0], ca.tls(engine), expected)
        with load:
            seen = [served(server.targets[0], ca, engine)]
            for round in range(6):
                load.goes_on()
                renewed = ca.server(f"server-{round}")
                pair.cert.write_bytes(renewed.cert.read_bytes())
                with pytest.raises(ServeError, match="is not the key of the certificate"):
                    raise_refused(ask(admin, "POST", "/reload"))
                assert served(server.targets[0], ca, engine) == seen[-1]
                pair.key.write_bytes(renewed.key.read_bytes())
                if round % 2:
                    status, said = ask(admin, "POST", "/reload")
                    assert status == 200
                    assert (
                        said == "certificates\nthe tables, whose files are the same, go on with their cache"
                    )
                else:
                    server.process.send_signal(signal.SIGHUP)
                until(lambda: served(server.targets[0], ca, engine) != seen[-1])
                seen.append(served(server.targets[0], ca, engine))
                load.goes_on()
        assert len(set(seen)) == 7
        assert load.failures == []
        assert min(load.done) >= 12


def raise_refused(answer: tuple[int, str]) -> None:
    assert answer[0] == 409
    raise ServeError(answer[1])


def served(target: str, ca: Authority, client: Pair) -> bytes | None:
    """The certificate that a new connection sees."""
    context = ssl.create_default_context(cafile=str(ca.file))
    context.load_cert_chain(client.cert, client.key)
    host, _, port = target.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return connection.getpeercert(binary_form=True)


class Load:
    """Lookups without a pause: on one connection, on a stream, and on a connection for each."""

    def __init__(self, target: str, tls: Tls, expected: dict[int, Any]) -> None:
        self._target, self._tls, self._expected = target, tls, expected
        self._over = threading.Event()
        self.done = [0, 0, 0]
        self.failures: list[str] = []
        ways = (self._one_connection, self._one_stream, self._new_connections)
        self._threads = [threading.Thread(target=self._run, args=(way, at)) for at, way in enumerate(ways)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def goes_on(self) -> None:
        """Until each way has got two more answers: one of them was asked for after this call."""
        before = list(self.done)
        until(
            lambda: self.failures or all(now >= was + 2 for now, was in zip(self.done, before, strict=True))
        )

    def _run(self, way: Callable[[], Iterator[Callable[[list[int]], Any]]], at: int) -> None:
        try:
            for lookup in way():
                token = self.done[at] % len(self._expected)
                if not same(lookup([token]), self._expected[token]):
                    self.failures.append(f"{way.__name__}: wrong rows")
                self.done[at] += 1
                if self._over.is_set():
                    return
        except Exception as error:
            self.failures.append(f"{way.__name__}: {error!r}")

    def _one_connection(self) -> Iterator[Callable[[list[int]], Any]]:
        with client_of(self._target, tls=self._tls) as client:
            while True:
                yield lambda tokens: client.lookup(tokens).values

    def _one_stream(self) -> Iterator[Callable[[list[int]], Any]]:
        with client_of(self._target, tls=self._tls) as client, client.stream() as stream:
            while True:
                yield lambda tokens: stream.lookup(tokens).result().values

    def _new_connections(self) -> Iterator[Callable[[list[int]], Any]]:
        while True:
            with client_of(self._target, tls=self._tls) as client:
                yield lambda tokens: client.lookup(tokens).values


# ---------------------------------------------------------------------------------------------------- tokens


@pytest.fixture
def guarded(fp4_checkpoint: Path, tmp_path: Path, tokens: Path) -> Iterator[ServerProcess]:
    with serving(
        fp4_checkpoint,
        tmp_path,
        uds=tmp_path / "socket",
        metrics="127.0.0.1:0",
        admin=tmp_path / "admin",
        security=SecurityOptions(tokens=tokens),
    ) as server:
        yield server
        log = server.log.read_text()
        assert "fault of the server" not in log
        assert "Traceback" not in log
        assert ALICE not in log
        assert BOB not in log


def test_calls_over_tcp_need_a_token_and_those_over_the_unix_socket_none(
    guarded: ServerProcess, truth: Truth
) -> None:
    assert "; 2 tokens over TCP" in guarded.ready_line
    tcp, uds = guarded.targets
    for target, token in ((tcp, ALICE), (tcp, Token(BOB)), (uds, None), (uds, ALICE)):
        with client_of(target, token=token) as client, client.stream() as stream:
            assert right(truth, client)
            assert same(stream.lookup([7]).result().values, truth.values(truth.ids([7]), "bf16"))
            assert client.prefetch([1, 2, 3]).rows == 3 * 48
    assert refusals(guarded) == {}


def test_calls_without_the_right_token_are_refused_counted_and_logged(guarded: ServerProcess) -> None:
    target, wrong = guarded.targets[0], "c" * 32
    patient = Retry(attempts=10, wait_for_server_s=60.0)
    for _ in range(3):
        with EngramClient(target, retry=patient) as client:
            with pytest.raises(AuthenticationError, match="this server wants a token") as refused:
                client.lookup([1])
            assert refused.value.code == "UNAUTHENTICATED"
    assert refusals(guarded) == {"no_token": 3}, "refused once each: trying again would not help"
    with EngramClient(target, token=wrong) as client:
        for call in (
            client.describe,
            client.stream,
            lambda: client.lookup([1]),
            lambda: client.prefetch([1]),
        ):
            with pytest.raises(AuthenticationError, match="not one that this server knows") as refused:
                call()
            assert wrong not in str(refused.value)
    assert refusals(guarded) == {"no_token": 3, "wrong_token": 4}
    log = guarded.log.read_text()
    assert log.count("refused (no_token) 127.0.0.1: this server wants a token") == 1, "once a minute"
    assert log.count("refused (wrong_token) 127.0.0.1: the token is not one") == 1
    assert wrong not in log


def test_asyncio_clients_bring_a_token_too(guarded: ServerProcess, truth: Truth) -> None:
    async def ask_twice() -> Any:
        async with AsyncEngramClient(guarded.targets[0]) as client:
            with pytest.raises(AuthenticationError):
                await client.lookup([1])
        async with AsyncEngramClient(guarded.targets[0], token=BOB) as client, client.stream() as stream:
            return [(await client.lookup([5])).values, (await stream.lookup([5])).values]

    for values in asyncio.run(ask_twice()):
        assert same(values, truth.values(truth.ids([5]), "bf16"))


def test_probes_need_no_token_and_watchers_do(guarded: ServerProcess) -> None:
    with grpc.insecure_channel(guarded.targets[0]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as refused:
            next(health.Watch(health_pb2.HealthCheckRequest(), timeout=10))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        bearing = [("authorization", f"bearer {ALICE}")]
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=10, metadata=bearing)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        # Reflection answers from an asynchronous generator.
        from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.ServerReflectionInfo(iter([question]), timeout=10))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with grpc.insecure_channel(guarded.targets[1]) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([question]), timeout=10)
        names = {service.name for service in answer.list_services_response.service}
        assert "engram.v1.Engram" in names


def test_a_call_is_refused_before_its_request_is_received(guarded: ServerProcess) -> None:
    """Else whoever reaches the port could have the server hold as much as a message may have, for each call."""
    over = threading.Event()

    def never() -> Iterator[pb.LookupRequest]:
        over.wait(60)
        yield from ()

    with grpc.insecure_channel(guarded.targets[0]) as channel:
        lookup = channel.stream_unary(
            "/engram.v1.Engram/Lookup", pb.LookupRequest.SerializeToString, pb.LookupReply.FromString
        )
        with pytest.raises(grpc.RpcError) as refused:
            lookup(never(), timeout=30)
        over.set()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_probe_is_answered_before_its_request_is_received(guarded: ServerProcess) -> None:
    over = threading.Event()

    def never() -> Iterator[health_pb2.HealthCheckRequest]:
        over.wait(60)
        yield from ()

    with grpc.insecure_channel(guarded.targets[0]) as channel:
        check = channel.stream_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        try:
            assert check(never(), timeout=30).status == health_pb2.HealthCheckResponse.SERVING
        finally:
            over.set()
    unknown = health_pb2.HealthCheckRequest(service="unknown")
    with grpc.insecure_channel(guarded.targets[1]) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            health_pb2_grpc.HealthStub(channel).Check(unknown, timeout=30)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_call_over_the_unix_socket_without_a_request_is_an_error(guarded: ServerProcess) -> None:
    with grpc.insecure_channel(guarded.targets[1]) as channel:
        lookup = channel.stream_unary("/engram.v1.Engram/Lookup")
        with pytest.raises(grpc.RpcError) as refused:
            lookup(iter([]), timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_tokens_are_replaced_while_streams_go_on(guarded: ServerProcess, tokens: Path, truth: Truth) -> None:
    target, new = guarded.targets[0], "n" * 32
    with client_of(target, token=ALICE) as client, client.stream() as stream:
        assert right(truth, client)
        written(tokens, f"alice {new}\nbob {BOB}\n")
        assert right(truth, client), "a file counts once it is read again"
        guarded.process.send_signal(signal.SIGHUP)
        until(lambda: "reloaded: 2 tokens" in guarded.log.read_text())
        with pytest.raises(AuthenticationError):
            client.lookup([1])
        assert same(stream.lookup([7]).result().values, truth.values(truth.ids([7]), "bf16"))
    for token in (new, BOB):
        with client_of(target, token=token) as client:
            assert right(truth, client)


def test_a_file_system_that_hangs_keeps_nobody_waiting(
    guarded: ServerProcess, tokens: Path, tmp_path: Path, truth: Truth
) -> None:
    os.mkfifo(tmp_path / "fifo")  # whoever opens it to read waits for one who writes
    (tmp_path / "fifo").replace(tokens)
    guarded.process.send_signal(signal.SIGHUP)
    with tokens.open("w") as file:  # it waits: the reload has begun
        with client_of(guarded.targets[0], token=ALICE, timeouts=Timeouts(request_s=20.0)) as client:
            assert right(truth, client)
        file.write(f"alice {BOB}")
    until(lambda: "reloaded: 1 token" in guarded.log.read_text())
    with client_of(guarded.targets[0], token=BOB) as client:
        assert right(truth, client)


def test_a_file_of_tokens_that_makes_no_sense_changes_nothing(
    guarded: ServerProcess, tokens: Path, tmp_path: Path, truth: Truth, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tokens, "alice short\n")
    assert main(["reload", str(tmp_path / "admin")]) == 1
    said = capsys.readouterr().err
    assert "not reloaded, and as it was: " in said
    assert "has 5 characters and can be guessed" in said
    assert "\nreloaded: the tables, whose files are the same, " in said  # each part by itself
    guarded.process.send_signal(signal.SIGHUP)
    until(lambda: "not reloaded, and as it was: " in guarded.log.read_text())
    with client_of(guarded.targets[0], token=ALICE) as client:
        assert right(truth, client)
    written(tokens, TOKENS + f"carol {'c' * 32}")
    assert main(["reload", str(tmp_path / "admin")]) == 0
    assert capsys.readouterr().out.startswith("3 tokens\nthe tables, whose files are the same, ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no tokens, and would keep everybody out"),
        ("# nobody\n", "has no tokens, and would keep everybody out"),
        (f"alice {ALICE}\nalice {BOB}", "line 2: the name stands in an earlier line, too"),
        (f"alice {ALICE}\n\nbob {ALICE}", "line 3: the token stands in an earlier line, too"),
        (f"{ALICE}", "line 1: expected NAME TOKEN, found 1 words"),
        (f"alice {ALICE} {BOB}", "line 1: expected NAME TOKEN, found 3 words"),
        ("alice " + "a" * 15, "line 1: the token has 15 characters and can be guessed"),
        (f"{ALICE} alice", "line 1: the token has 5 characters and can be guessed"),
        (f"alice {ALICE}ä", "line 1: the token has characters that no header may carry"),
        (f"al/ice {ALICE}", "line 1: a name has 1 to 64 letters"),
        (f"uds {ALICE}", "line 1: a name has 1 to 64 letters"),
    ],
)
def test_a_file_of_tokens_is_checked_and_no_text_shows_a_token(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ServeError) as refused:
        Tokens.read(written(tmp_path / "tokens", text))
    assert says in str(refused.value)
    assert "aaaaa" not in str(refused.value)


def test_a_file_of_tokens_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="none cannot be read: No such file"):
        Tokens.read(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ServeError, match="binary is no text in UTF-8"):
        Tokens.read(tmp_path / "binary")


def test_a_file_of_tokens_for_everybody_is_worth_a_warning(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Tokens.read(tokens)
    assert caplog.text == ""
    tokens.chmod(0o644)
    Tokens.read(tokens)
    assert "everybody on this host can read the tokens in" in caplog.text


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ([("authorization", f"Bearer {ALICE}")], "alice"),
        ([("authorization", f"bearer  {BOB} ")], "bob"),
        ([("user-agent", "x"), ("authorization", f"BEARER {BOB}")], "bob"),
        ([("authorization", f"Bearer {ALICE.upper()}")], ""),
        ([("authorization", "Bearer ")], ""),
        ([("authorization", f"Basic {ALICE}")], None),
        ([("authorization", ALICE)], None),
        ([("authorization-bin", ALICE.encode())], None),
        ([], None),
    ],
)
def test_whose_token_a_call_brought(tokens: Path, metadata: list[Any], name: str | None) -> None:
    assert Tokens.read(tokens).name_of(metadata) == name


# --------------------------------------------------------------------------------------------- clients' names


@asynccontextmanager
async def naming(security: Security, uds: Path) -> AsyncIterator[tuple[str, str]]:
    """A server whose calls answer with who made them: its addresses."""

    async def unary(request: bytes, context: Any) -> bytes:
        return client_name(context).encode()

    async def stream(requests: AsyncIterator[bytes], context: Any) -> None:
        async for _ in requests:
            await context.write(client_name(context).encode())

    server = grpc.aio.server(interceptors=security.interceptors())
    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("names", handlers),))
    certificates = security.certificates
    if certificates is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", certificates.credentials())
    server.add_insecure_port(f"unix:{uds}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", f"unix:{uds}"
    finally:
        await server.stop(0)


async def names(channel: grpc.aio.Channel, token: str | None) -> set[str]:
    """What a server calls this client, by calls of both kinds."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    async with channel:
        name = await channel.unary_unary("/names/Unary")(b"", metadata=metadata)
        replies = channel.stream_stream("/names/Stream")(iter([b"", b""]), metadata=metadata)
        return {reply.decode() for reply in [name, *[reply async for reply in replies]]}


def test_a_client_is_named_by_its_token_its_certificate_its_socket_or_its_address(
    tmp_path: Path, ca: Authority, tokens: Path
) -> None:
    engine = ca.issue("engine-1")

    def over_tls(target: str) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(
            ca.file.read_bytes(), engine.key.read_bytes(), engine.cert.read_bytes()
        )
        return grpc.aio.secure_channel(target, credentials)

    async def run() -> None:
        plain = Security(SecurityOptions(), Refusals())
        async with naming(plain, tmp_path / "a") as (tcp, uds):
            assert await names(grpc.aio.insecure_channel(tcp), None) == {"127.0.0.1"}
            assert await names(grpc.aio.insecure_channel(tcp), ALICE) == {"127.0.0.1"}
            assert await names(grpc.aio.insecure_channel(uds), None) == {"uds"}
        tls = files_of(ca.server(), ca.file)
        async with naming(Security(SecurityOptions(tls), Refusals()), tmp_path / "b") as (tcp, uds):
            assert await names(over_tls(tcp), None) == {"engine-1"}
            assert await names(grpc.aio.insecure_channel(uds), None) == {"uds"}
        async with naming(Security(SecurityOptions(tls, tokens), Refusals()), tmp_path / "c") as (tcp, uds):
            assert await names(over_tls(tcp), BOB) == {"bob"}
            assert await names(grpc.aio.insecure_channel(uds), BOB) == {"bob"}
            assert await names(grpc.aio.insecure_channel(uds), None) == {"uds"}
            assert await names(over_tls(tcp), BOB) == {"bob"}, "not the name of a call before"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:40312", "10.0.0.1"),
        ("ipv6:%5B::1%5D:40312", "::1"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:40312", "10.0.0.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:40312", "fe80::1%eth0"),
        ("unix:", "uds"),
        ("unix:/run/engram.sock", "uds"),
        ("odd", "odd"),
    ],
)
def test_addresses_of_peers(peer: str, address: str) -> None:
    assert peer_address(peer) == address


class Call:
    """As far as a client's name is read from it."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


@pytest.mark.parametrize(
    ("peers", "name"),
    [
        (("ipv6:%5B2001:db8:1:2::5%5D:1", "ipv6:%5B2001:db8:1:2:ffff::%5D:2"), "2001:db8:1:2::/64"),
        (("ipv6:%5Bfe80::1%25eth0%5D:1", "ipv6:%5Bfe80::2%25eth0%5D:1"), "fe80::/64%eth0"),
        (("ipv6:%5B::1%5D:1", "ipv6:%5B::1%5D:2"), "::1"),
        (("ipv6:%5B::ffff:10.0.0.1%5D:1", "ipv4:10.0.0.1:2"), "10.0.0.1"),
        (("unix:", "unix:/run/engram.sock"), "uds"),
    ],
)
def test_who_has_a_network_of_ipv6_is_one_client_by_all_of_its_addresses(
    peers: tuple[str, str], name: str
) -> None:
    assert [client_name(cast(Any, Call(peer))) for peer in peers] == [name, name]


def test_neighbours_are_not_taken_for_one_client() -> None:
    """The next /64; another link; each machine over IPv4, also where one socket listens for both."""
    addresses = ("2001:db8::1", "2001:db8:0:1::1", "fe80::1%a", "fe80::1%b", "10.0.0.1", "10.0.0.2")
    mapped = ("::ffff:10.0.0.1", "::ffff:10.0.0.2")
    assert len({site_of(address) for address in (*addresses, *mapped)}) == 8


# ----------------------------------------------------------------------------------------------- administrator


def test_the_administrator_sees_what_is_served(
    guarded: ServerProcess, fp4_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "admin"
    assert f"; administered at {path}" in guarded.ready_line
    assert path.stat().st_mode & 0o777 == 0o600
    assert main(["status", str(path)]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["path"], status["ready"], status["security"]) == (str(fp4_checkpoint), True, "2 tokens")
    assert [table["layer"] for table in status["tables"]] == [1, 14]
    for method, what in (("GET", "/reload"), ("POST", "/status"), ("GET", "/metrics")):
        assert ask(path, method, what)[0] == 404
    lookups = next(target.removeprefix("unix:") for target in guarded.targets if target.startswith("unix:"))
    assert main(["reload", lookups]) == 1
    assert "(what listens there speaks no HTTP)" in capsys.readouterr().err
    assert guarded.stop() == 0
    assert not path.exists()
    assert main(["reload", str(path)]) == 1
    assert f"no server answers at {path}" in capsys.readouterr().err


def test_over_tcp_nobody_administers(guarded: ServerProcess) -> None:
    for path, method in (("/reload", "POST"), ("/status", "GET"), ("/reload", "GET"), ("/metrics", "POST")):
        status, text = http(guarded, path, method)
        assert (status, text) == (403, "a server is administered at the UNIX socket of --admin, not here\n")
    assert refusals(guarded) == {"admin_over_tcp": 4}
    assert guarded.log.read_text().count("refused (admin_over_tcp) 127.0.0.1: a server is administered") == 1
    assert "reloaded: " not in guarded.log.read_text()


def by_stranger(call: Callable[[], str]) -> str:
    """What a call says in a process of another user."""
    here, there = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(54322, 54322, 54322)
            os.setresuid(54321, 54321, 54321)
            os.write(there, call().encode())
        except BaseException as error:
            os.write(there, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(here, 1000).decode()
    os.close(here)
    os.close(there)
    return said


@contextmanager
def reachable(path: Path) -> Iterator[None]:
    """By every user, so that it is not the file system that decides."""
    opened = {folder: folder.stat().st_mode for folder in [path, *path.parents][:-1]}
    for folder, mode in opened.items():
        folder.chmod(mode | 0o777)
    try:
        yield
    finally:
        for folder, mode in opened.items():
            with suppress(FileNotFoundError):
                folder.chmod(mode)


def test_another_user_administers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the test is root, a process of another user asks; where it is not, the server takes itself for another."""
    root = os.geteuid() == 0
    uid = 54321 if root else os.geteuid()
    if not root:
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    reloads = []
    refused = Refusals()
    path = tmp_path / "admin"

    async def reload() -> str:
        reloads.append(1)
        return "all"

    async def run() -> list[str]:
        with closing(AdminServer(path, reload, dict, refused)), reachable(path):
            said = []
            for method, what in (("POST", "/reload"), ("GET", "/status")):
                call = lambda method=method, what=what: str(ask(path, method, what))  # noqa: E731
                said.append(await asyncio.to_thread(by_stranger if root else lambda call: call(), call))
            return said

    answer = str((403, f"uid {uid} may not administer this server"))
    assert asyncio.run(run()) == [answer, answer]
    assert reloads == []
    assert counts(refused)["wrong_uid"] == 2


if os.geteuid() == 0:  # nobody else can be somebody else

    def test_strangers_at_the_sockets_of_a_server_are_counted(fp4_checkpoint: Path, tmp_path: Path) -> None:
        admin, shm = tmp_path / "admin", tmp_path / "shm"
        with serving(
            fp4_checkpoint,
            tmp_path,
            admin=admin,
            metrics="127.0.0.1:0",
            shared_memory=SharedMemoryOptions(socket=shm),
        ) as server:
            with reachable(admin):
                assert by_stranger(lambda: ask(admin, "POST", "/reload")[1]) == (
                    "uid 54321 may not administer this server"
                )
            assert refusals(server) == {"wrong_uid": 1}
            with reachable(shm):
                assert by_stranger(lambda: attached(shm)).startswith("uid 54321 may not attach")
            assert refusals(server) == {"wrong_uid": 2}
            assert "refused (wrong_uid) uid 54321: uid 54321 may not administer" in server.log.read_text()
            until(lambda: "(uid 54321) was not let in" in server.log.read_text())
            assert ask(admin, "POST", "/reload")[0] == 200

    def test_a_group_may_connect_to_the_unix_socket_and_nobody_else(
        fp4_checkpoint: Path, tmp_path: Path, truth: Truth
    ) -> None:
        """The group of `by_stranger`; then another one."""
        for group, let_in in (("54322", True), ("54323", False)):
            folder = tmp_path / group
            folder.mkdir()
            uds = folder / "socket"
            with serving(fp4_checkpoint, folder, uds=uds, uds_group=group), reachable(folder):
                assert (uds.stat().st_mode & 0o777, uds.stat().st_gid) == (0o660, int(group))
                assert by_stranger(lambda path=uds: connected(path)) == (
                    "connected" if let_in else "[Errno 13] Permission denied"
                )
                with client_of(f"unix:{uds}") as client:
                    assert right(truth, client)

    def connected(path: Path) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
        return "connected"

    def attached(path: Path) -> str:
        from engram_kernels import _core

        return str(_core.ShmClient(str(path), 8 << 20, 5.0).alive)


# --------------------------------------------------------------------------------------------------- refusals


def counts(refused: Refusals) -> dict[str, int]:
    (family,) = refused.collect()
    return {sample.labels["reason"]: int(sample.value) for sample in family.samples}


def test_refusals_are_counted_each_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    refused = Refusals(lambda: now)
    refused.strangers = lambda: 7
    for _ in range(5):
        refused.refused("no_token", "10.0.0.1", "no token")
    refused.refused("no_token", "10.0.0.2", "no token")
    refused.refused("wrong_uid", "10.0.0.1", "who are you")
    now += 60
    refused.refused("no_token", "10.0.0.1", "no token")
    assert counts(refused) == {
        "no_token": 7,
        "wrong_token": 0,
        "handshake": 0,
        "wrong_uid": 8,
        "admin_over_tcp": 0,
    }
    assert caplog.messages == [
        "refused (no_token) 10.0.0.1: no token",
        "refused (no_token) 10.0.0.2: no token",
        "refused (wrong_uid) 10.0.0.1: who are you",
        "refused (no_token) 10.0.0.1: no token (4 more since the last such line)",
    ]


def test_many_addresses_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    refused = Refusals(lambda: now)
    for _ in range(2):
        for number in range(5000):
            refused.refused("no_token", f"fd00:0:0:{number:x}::1", "no token")
    assert counts(refused)["no_token"] == 10_000
    assert len(caplog.messages) == 1024
    now += 60
    refused.refused("no_token", "fd00:0:0:ffff::1", "no token")
    refused.refused("no_token", "fd00:0:0:3ff::1", "no token")
    assert caplog.messages[1024:] == [
        "refused (no_token) fd00:0:0:ffff::1: no token",
        "refused (no_token) fd00:0:0:3ff::1: no token (1 more of fd00:0:0:3ff::/64 since the last such line)",
    ]


def test_addresses_of_one_network_are_one_line_that_names_the_one_that_came(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    refused = Refusals(lambda: now)
    for number in range(2000):
        refused.refused("wrong_token", f"2001:db8::{number:x}", "no such token")
    refused.refused("wrong_token", "2001:db8:0:1::1", "no such token")
    now += 60
    refused.refused("wrong_token", "2001:db8::ffff", "no such token")
    assert counts(refused)["wrong_token"] == 2002
    assert caplog.messages == [
        "refused (wrong_token) 2001:db8::0: no such token",
        "refused (wrong_token) 2001:db8:0:1::1: no such token",
        "refused (wrong_token) 2001:db8::ffff: no such token (1999 more of 2001:db8::/64 since the last such line)",
    ]


# --------------------------------------------------------------------------------------------------- starting


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::1]:0", "127.0.0.1:0"])
@pytest.mark.parametrize("guard", ["nothing", "tokens", "TLS"])
def test_an_address_for_a_network_without_guard_is_worth_a_warning(
    tmp_path: Path, ca: Authority, tokens: Path, caplog: pytest.LogCaptureFixture, listen: str, guard: str
) -> None:
    options = {
        "nothing": SecurityOptions(),
        "tokens": SecurityOptions(tokens=tokens),
        "TLS": SecurityOptions(tls=files_of(ca.server())),
    }[guard]
    Security(options, Refusals()).warn_of(listen)
    expected = {
        "nothing": [f"whoever reaches {listen} can read the tables: no --tls-cert, no --tokens"],
        "tokens": [f"tokens cross the network to {listen} readable for whoever listens: no --tls-cert"],
        "TLS": [],
    }[guard]
    assert caplog.messages == (expected if listen.startswith("0.") else [])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tls-cert", "c.pem"], "give both --tls-cert and --tls-key"),
        (["--tls-key", "k.pem"], "give both --tls-cert and --tls-key"),
        (["--tls-client-ca", "ca.pem"], "which takes TLS"),
        (["--tokens", "t", "--listen", "none", "--uds", "s"], "certificates and tokens are for --listen"),
        (["--tokens", "/none/such"], "/none/such cannot be read: No such file or directory"),
        (["--tls-cert", "/none/c", "--tls-key", "/none/k"], "/none/c cannot be read: No such file"),
    ],
)
def test_what_contradicts_itself_does_not_start(
    fp4_checkpoint: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert main(["serve", str(fp4_checkpoint), "--listen", "127.0.0.1:0", *options]) == 1
    assert says in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- clients


def test_a_token_leaves_the_host_with_tls_or_by_permission_alone(ca: Authority, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the token would go to 10\.0\.0\.1:1 readable") as refused:
        EngramClient(["127.0.0.1:1", "10.0.0.1:1"], token=ALICE)
    assert ALICE not in str(refused.value)
    with pytest.raises(ValueError, match="the token would go to"):
        AsyncEngramClient("10.0.0.1:1", token=ALICE)
    with pytest.raises(ValueError, match=r"the token would go to 127\.0\.0\.1\.example:1 "):
        EngramClient("127.0.0.1.example:1", token=ALICE)
    EngramClient("10.0.0.1:1", token=Token(ALICE, plaintext=True)).close()
    EngramClient("10.0.0.1:1", token=ALICE, tls=ca.tls()).close()
    EngramClient(["127.0.0.2:1", "[::1]:1", "localhost:1", "unix:/none"], token=ALICE).close()


def test_files_of_tls_that_cannot_work_are_refused_at_once(ca: Authority, tmp_path: Path) -> None:
    good, other, nothing = ca.issue("engine-1"), ca.issue("engine-2"), written(tmp_path / "nothing", "no PEM")
    locked = tmp_path / "locked.key"
    locked.write_bytes(encrypted())
    for tls, says in (
        (Tls(nothing), "nothing holds no certificates of CAs"),
        (Tls(ca.file, nothing, good.key), "are no certificate and its key"),
        (Tls(ca.file, good.cert, other.key), "are no certificate and its key"),
        (Tls(ca.file, good.cert, locked), "is encrypted"),
    ):
        with pytest.raises(ValueError, match=says):
            EngramClient(tls=tls)
    with pytest.raises(OSError, match="No such file") as unreadable:
        EngramClient(tls=Tls(tmp_path / "none"))
    assert unreadable.value.filename == str(tmp_path / "none")
    EngramClient(tls=ca.tls(good)).close()


def test_a_token_does_not_show(tmp_path: Path) -> None:
    token = Token(ALICE)
    assert ALICE not in f"{token!r} {token} {Bearer(token)!r}"
    for text in ("two words", "", "ä" * 20, "a\nb"):
        with pytest.raises(ValueError, match="is no token") as refused:
            EngramClient(token=text)
        assert not text or text not in str(refused.value)
    with pytest.raises(ValueError, match="one of the two"):
        Token(ALICE, tmp_path / "token")
    with pytest.raises(ValueError, match="one of the two"):
        Token()
    with pytest.raises(OSError, match="none"):
        EngramClient(token=Token(file=tmp_path / "none"))
    with pytest.raises(ValueError, match="give both"):
        Tls(cert=tmp_path / "c")


def test_a_replaced_file_of_a_token_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("engram_client._credentials.time.monotonic", lambda: now)
    file = written(tmp_path / "token", f"{ALICE}\n")
    bearer = Bearer(Token(file=file))
    assert bearer.metadata() == (("authorization", f"Bearer {ALICE}"),)
    file.write_text(BOB)
    now += 6.0
    assert bearer.metadata() == (("authorization", f"Bearer {BOB}"),)
    for spoil in (lambda: file.write_text(""), file.unlink):
        spoil()
        now += 6.0
        assert bearer.metadata() == (("authorization", f"Bearer {BOB}"),)


def test_a_server_that_refuses_a_token_lives(fp4_checkpoint: Path, tmp_path: Path, tokens: Path) -> None:
    """Lookups through shared memory need no token, and ask over gRPC whether a silent server lives."""
    with (
        serving(
            fp4_checkpoint,
            tmp_path,
            security=SecurityOptions(tokens=tokens),
            shared_memory=SharedMemoryOptions(socket=tmp_path / "shm"),
        ) as server,
        EngramClient(server.targets[0], token=ALICE, shared_memory=SharedMemory("require")) as client,
    ):
        client.lookup([1])
        written(tokens, f"bob {BOB}")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "reloaded: 1 token" in server.log.read_text())
        (connection,) = client._pool._connections
        assert connection.lives(10.0)
        client.lookup([1])
        with pytest.raises(AuthenticationError):
            client.describe()


def test_engines_are_told_by_their_environment(tmp_path: Path) -> None:
    token = written(tmp_path / "token", ALICE)
    settings = Settings.from_environment(
        {
            "ENGRAM_SERVER_TARGET": "10.0.0.1:1",
            "ENGRAM_SERVER_TLS_CA": "/ca.pem",
            "ENGRAM_SERVER_TLS_CERT": "/c.pem",
            "ENGRAM_SERVER_TLS_KEY": "/k.pem",
            "ENGRAM_SERVER_TOKEN_FILE": str(token),
        }
    )
    assert settings is not None
    assert settings.tls == Tls(Path("/ca.pem"), Path("/c.pem"), Path("/k.pem"))
    assert settings.token == Token(file=token)
    assert ALICE not in repr(settings)
    plain = {"ENGRAM_SERVER_TARGET": "10.0.0.1:1", "ENGRAM_SERVER_TOKEN_FILE": str(token)}
    settings = Settings.from_environment(plain)
    assert settings is not None
    assert settings.tls is None
    with pytest.raises(ValueError, match="the token would go to"):
        settings.client()
    settings = Settings.from_environment({**plain, "ENGRAM_SERVER_TOKEN_PLAINTEXT": "1"})
    assert settings is not None
    settings.client().close()
    with pytest.raises(ValueError, match="set both"):
        Settings.from_environment({**plain, "ENGRAM_SERVER_TLS_CERT": "/c.pem"})


def test_programs_bring_certificates_and_tokens(
    fp4_checkpoint: Path,
    tmp_path: Path,
    ca: Authority,
    tokens: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from engram_load.cli import main as load

    engine, token = ca.issue("engine-1"), written(tmp_path / "token", f"{ALICE}\n")
    security = SecurityOptions(files_of(ca.server(), ca.file), tokens)
    tls = ["--tls-ca", str(ca.file), "--tls-cert", str(engine.cert), "--tls-key", str(engine.key)]
    bearing = ["--token-file", str(token)]
    with serving(fp4_checkpoint, tmp_path, security=security) as server:
        target = server.targets[0]
        asked = ["lookup", target, "--tokens", "0,3", "--json"]
        assert main([*asked, *tls, *bearing]) == 0
        over_tcp = json.loads(capsys.readouterr().out)["sha256"]
        assert main(["lookup", str(fp4_checkpoint), *asked[2:]]) == 0
        assert json.loads(capsys.readouterr().out)["sha256"] == over_tcp
        assert main([*asked, *tls]) == 1
        assert "this server wants a token" in capsys.readouterr().err
        report = tmp_path / "report.json"
        loading = ["uniform", target, "--length", "4", "--count", "5", "--quiet", "--json", str(report)]
        assert load([*loading, *tls, *bearing]) == 0
        assert ALICE not in report.read_text()
        capsys.readouterr()
        assert load([*loading, *tls]) == 1
        assert "this server wants a token" in capsys.readouterr().err
