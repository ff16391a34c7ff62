"""`serve --otlp`: what arrives at a receiver of OTLP, beside what clients were told."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from support.faulty_fs import faulty_fs
from support.serving import serving, until
from test_cli import engram_server

from engram_client import NO_RETRY, EngramClient, EngramError
from engram_client._proto import engram_pb2 as pb
from engram_client._proto import engram_pb2_grpc
from engram_client._result import Stats
from engram_server.spans import SpanOptions

SERVICE = "engram.v1.Engram"


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[trace_pb2.Span] = []
        self.resources: list[dict[str, Any]] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for one in request.resource_spans:
            self.resources.append(values(one.resource.attributes))
            self.spans += [span for scope in one.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0)


def told(stats: Stats) -> dict[str, int]:
    return {f"engram.{field.name}": getattr(stats, field.name) for field in fields(Stats)}


def test_each_lookup_is_a_span_with_what_its_client_was_told(fp4_checkpoint: Path, tmp_path: Path) -> None:
    with receiving() as receiver:
        began_ns = time.time_ns()
        with serving(
            fp4_checkpoint, tmp_path, spans=SpanOptions(receiver.url), backend="pread", scales="disk"
        ) as server:
            with EngramClient(server.targets[0], shared_memory="off", retry=NO_RETRY) as client:
                answered = [client.lookup([1, 2, 3], format="packed", lane="prefill").stats]
                with client.stream() as stream:
                    answered += [stream.lookup([5, 6]).result().stats for _ in range(2)]
                client.prefetch([7, 8, 9])
                with pytest.raises(EngramError):
                    client.lookup_rows(1, [2**40])
            assert server.stop() == 0, "and sends what was not sent"
        ended_ns = time.time_ns()
    unary, first, second, prefetch, refused = sorted(
        receiver.spans, key=lambda span: span.start_time_unix_nano
    )
    for span, method, format, lane, stats in (
        (unary, "Lookup", "packed", "prefill", answered[0]),
        (first, "LookupStream", "bf16", "decode", answered[1]),
        (second, "LookupStream", "bf16", "decode", answered[2]),
    ):
        seen = values(span.attributes)
        assert seen.pop("client.address").startswith("ipv4:127.0.0.1:")
        assert seen == {
            "rpc.system": "grpc",
            "rpc.service": SERVICE,
            "rpc.method": method,
            "rpc.grpc.status_code": 0,
            "engram.transport": "tcp",
            "engram.format": format,
            "engram.lane": lane,
        } | told(stats)
        assert span.name == f"{SERVICE}/{method}"
        assert span.status.code == trace_pb2.Status.STATUS_CODE_UNSET
    assert values(prefetch.attributes)["engram.rows"] == 3 * 48
    assert prefetch.name == f"{SERVICE}/Prefetch"
    assert values(refused.attributes)["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert refused.status.code == trace_pb2.Status.STATUS_CODE_UNSET, "the client's fault"
    for span in receiver.spans:
        assert span.kind == trace_pb2.Span.SPAN_KIND_SERVER
        assert span.parent_span_id == b""
        assert began_ns < span.start_time_unix_nano <= span.end_time_unix_nano < ended_ns
    assert len({span.trace_id for span in receiver.spans}) == 5
    assert receiver.resources[0]["service.name"] == "engram-server"
    assert "service.version" in receiver.resources[0]


def test_a_stall_is_as_long_as_it_was_and_a_fault_is_an_error(fp4_checkpoint: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "mnt"
    with (
        receiving() as receiver,
        faulty_fs(fp4_checkpoint, mounted, tmp_path / "control.json") as faults,
        serving(mounted, tmp_path, spans=SpanOptions(receiver.url), scales="disk", cache_bytes=0) as server,
        EngramClient(server.targets[0], shared_memory="off", retry=NO_RETRY) as client,
    ):
        faults.set("slow", delay_s=0.06)
        client.lookup_rows(14, [5])
        faults.set("eio")
        with pytest.raises(EngramError):
            client.lookup_rows(14, [5])
        faults.clear()
        assert server.stop() == 0
    slow, failed = sorted(receiver.spans, key=lambda span: span.start_time_unix_nano)
    assert slow.end_time_unix_nano - slow.start_time_unix_nano >= 0.06e9
    assert failed.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert failed.status.message == "DATA_LOSS"


def test_a_span_belongs_to_that_of_its_client_and_is_sampled_as_it_was(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    request = pb.LookupRequest(tokens=pb.TokenKeys(sequences=[pb.Sequence(tokens=(1).to_bytes(4, "little"))]))
    with (
        receiving() as receiver,
        serving(fp4_checkpoint, tmp_path, spans=SpanOptions(receiver.url, 0.0)) as server,
    ):
        with grpc.insecure_channel(server.targets[0]) as channel:
            stub = engram_pb2_grpc.EngramStub(channel)
            for header in (
                None,
                f"00-{trace}-{parent}-01",
                f"00-{trace}-{parent}-00",
                "nonsense",
                "00-" + "0" * 32 + f"-{parent}-01",
            ):
                metadata = None if header is None else (("traceparent", header), ("tracestate", "a=b"))
                assert stub.Lookup(request, metadata=metadata).stats.rows == 48
        assert server.stop() == 0
    (span,) = receiver.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, parent)
    assert span.trace_state == "a=b"


def test_a_receiver_that_is_away_harms_no_lookup_and_holds_up_no_end(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    with receiving() as receiver:
        url = receiver.url
    with (
        serving(fp4_checkpoint, tmp_path, spans=SpanOptions(url)) as server,
        EngramClient(server.targets[0], shared_memory="off") as client,
    ):
        for _ in range(5):
            assert client.lookup([1, 2]).stats.rows == 96
        until(lambda: "Failed to export" in server.log.read_text() or "retrying" in server.log.read_text())
        assert client.lookup([1, 2]).stats.rows == 96
        assert server.stop() == 0


def test_nothing_of_it_is_imported_unless_it_is_asked_for() -> None:
    code = (
        "import sys, engram_server.cli, engram_server.server, engram_server.spans; "
        "sys.exit(any(name.partition('.')[0] == 'opentelemetry' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['opentelemetry'] = None\n"
        "from engram_server.spans import SpanOptions, SpanSender\n"
        "SpanSender(SpanOptions('http://127.0.0.1:4317'))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ServeError: --otlp needs OpenTelemetry: install engram-server[otel]" in found.stderr


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:4317", "ftp://a:1", "http://", "http://a", "http://a:x", "http://[a:1"]
)
def test_an_address_that_is_none_is_a_sentence(url: str) -> None:
    with pytest.raises(ValueError, match=r"cannot send spans to .*: expected a URL such as http://"):
        SpanOptions(url)


def test_options_are_those_of_serve(fp4_checkpoint: Path) -> None:
    for ratio in ("1.5", "-1", "nan"):
        found = engram_server("serve", fp4_checkpoint, "--otlp=http://127.0.0.1:1", f"--otlp-ratio={ratio}")
        assert found.returncode == 1
        assert f"the ratio of lookups with a span is {float(ratio)}; expected 0 to 1" in found.stderr
