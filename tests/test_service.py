"""The wire contract, spoken by hand: statuses, streams, limits, health, and what a server survives."""

import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.serving import ServerProcess, serving, until
from support.truth import Truth

from engram_client._proto import engram_pb2 as pb
from engram_client._proto import engram_pb2_grpc as pb_grpc
from engram_server.cli import main
from engram_server.tables.checkpoint import open_checkpoint
from engram_server.tables.store import open_store

Code = grpc.StatusCode
LIMITS = {
    "message_bytes": 4 << 20,
    "unary_reply_bytes": 2 << 20,
    "chunk_bytes": 100_000,
    "block_bytes": 400_000,
    "request_rows": 200_000,
    "pending_rows": 2_000_000,
}
BUDGET_BYTES = 8 << 20


@pytest.fixture(scope="module")
def truth(fp4_checkpoint: Path) -> Truth:
    return Truth(fp4_checkpoint, "fp4")


@pytest.fixture(scope="module")
def server(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    options = {
        "uds": folder / "socket",
        "limits": LIMITS,
        "budget_bytes": BUDGET_BYTES,
        "backend": "mmap",
        "cache_bytes": 256 << 10,  # too small to hold what the budget is for
    }
    with serving(fp4_checkpoint, folder, **options) as process:
        yield process
        assert process.stop() == 0
        log = process.log.read_text()
        assert "ERROR:asyncio" not in log  # a task whose failure nobody saw
        assert "fault of the server" not in log


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.targets[0]) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return pb_grpc.EngramStub(channel)


def int32(*ids: int) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def tokens(ids: Sequence[int], history: Sequence[int] = (), **fields: Any) -> pb.LookupRequest:
    sequence = pb.Sequence(tokens=int32(*ids), history=int32(*history))
    return pb.LookupRequest(tokens=pb.TokenKeys(sequences=[sequence]), **fields)


def rows(layer: int, ids: Sequence[int], **fields: Any) -> pb.LookupRequest:
    return pb.LookupRequest(rows=pb.RowKeys(layer=layer, ids=int32(*ids), id_bytes=4), **fields)


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def assert_exact(stub: Any, truth: Truth) -> None:
    reply = stub.Lookup(tokens([0, 3, 17], [5], request_id=9), timeout=60)
    assert reply.request_id == 9
    assert reply.payload == truth.values(truth.ids([0, 3, 17], [5]), "packed").tobytes()


# ------------------------------------------------------------------------------------------------ Describe


def test_describe_tells_the_machine_and_its_files(stub: Any, truth: Truth) -> None:
    machine = stub.Describe(pb.DescribeRequest()).machine
    assert machine.kernel == f"{os.uname().sysname} {os.uname().release}"
    assert machine.cpu
    assert machine.cpus == len(os.sched_getaffinity(0))
    files = open_checkpoint(truth.path).files
    assert [file.bytes for file in machine.files] == [file.stat().st_size for file in files]
    for told, file in zip(machine.files, files, strict=True):
        seen = subprocess.run(["df", "--output=fstype", file], capture_output=True, text=True, check=True)
        assert told.file_system == seen.stdout.split()[-1]
        assert not told.direct, "the backend is mmap"
        assert told.alignment_bytes == 1
        assert told.reason
        assert str(truth.path) not in str(told), "a path is nobody's business"


def test_describe(stub: Any, truth: Truth) -> None:
    reply = stub.Describe(pb.DescribeRequest(), timeout=60)
    assert reply.protocol_version == 1
    assert reply.spec.layers == [1, 14]
    assert (reply.spec.columns, reply.spec.heads, reply.spec.head_dim) == (24, 8, 256)
    assert reply.spec.token_vocab_size == 129280
    assert len(reply.digests.token_map) == 32
    assert len(reply.digests.hash) == 32
    assert [table.layer for table in reply.tables] == [1, 14]
    for table in reply.tables:
        assert table.rows == truth.oracle.rows(table.layer)
        assert (table.kind, table.row_bytes) == (pb.ROW_KIND_FP4, 136)
        assert len(table.digest) == 32
    assert reply.limits.unary_reply_bytes == LIMITS["unary_reply_bytes"]
    assert reply.limits.request_rows == LIMITS["request_rows"]
    assert reply.backend.name in ("io_uring", "pread", "mmap")
    assert reply.backend.reason
    assert reply.scales_reason
    assert reply.limits.decode_rows == 128 * 48
    assert reply.limits.prefetch_rows >= reply.limits.request_rows
    assert reply.cache.capacity_bytes > 0


def test_health_and_reflection(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "engram.v1.Engram"):
        status = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"engram.v1.Engram", "grpc.health.v1.Health"} <= set(services)


# ------------------------------------------------------------------------------------- malformed requests

BLOCK = int32(*[0] * 24)
MALFORMED: dict[str, tuple[pb.LookupRequest, grpc.StatusCode, str]] = {
    "no keys": (pb.LookupRequest(), Code.INVALID_ARGUMENT, "set tokens, blocks or rows"),
    "half a token": (
        pb.LookupRequest(tokens=pb.TokenKeys(sequences=[pb.Sequence(tokens=b"12345")])),
        Code.INVALID_ARGUMENT,
        "5 bytes are not a whole number of int32",
    ),
    "half a history": (
        pb.LookupRequest(tokens=pb.TokenKeys(sequences=[pb.Sequence(tokens=int32(1), history=b"1")])),
        Code.INVALID_ARGUMENT,
        "sequence 0, history: 1 bytes",
    ),
    "long history": (tokens([1], [1, 2, 3, 4]), Code.INVALID_ARGUMENT, "history"),
    "token too large": (tokens([1, 129280]), Code.INVALID_ARGUMENT, "129280"),
    "token negative": (tokens([-1]), Code.INVALID_ARGUMENT, "-1"),
    "history below unknown": (tokens([1], [-2]), Code.INVALID_ARGUMENT, "-2"),
    "layer without a table": (tokens([1], layers=[1, 3]), Code.INVALID_ARGUMENT, "layer 3 has no table"),
    "layer twice": (tokens([1], layers=[14, 14]), Code.INVALID_ARGUMENT, "named twice"),
    "no columns": (
        tokens([1], columns=pb.ColumnRange(begin=4, end=4)),
        Code.INVALID_ARGUMENT,
        "columns 4 to 4",
    ),
    "too many columns": (
        tokens([1], columns=pb.ColumnRange(begin=0, end=25)),
        Code.INVALID_ARGUMENT,
        "inside 0 to 24",
    ),
    "unknown format": (tokens([1], format=9), Code.INVALID_ARGUMENT, "format 9 is not one of"),
    "row too large": (rows(1, [0, 2**30]), Code.INVALID_ARGUMENT, "position 1: row id 1073741824"),
    "row negative": (rows(1, [-2]), Code.INVALID_ARGUMENT, "row id -2"),
    "rows of no layer": (rows(7, [0]), Code.INVALID_ARGUMENT, "layer 7 has no table"),
    "rows with columns": (
        rows(1, [0], columns=pb.ColumnRange(begin=0, end=1)),
        Code.INVALID_ARGUMENT,
        "a list of rows has no columns",
    ),
    "rows with layers": (rows(1, [0], layers=[1]), Code.INVALID_ARGUMENT, "names its layers itself"),
    "ids of three bytes": (
        pb.LookupRequest(rows=pb.RowKeys(layer=1, ids=b"123", id_bytes=3)),
        Code.INVALID_ARGUMENT,
        "id_bytes is 3",
    ),
    "half an id": (
        pb.LookupRequest(rows=pb.RowKeys(layer=1, ids=b"123456789012", id_bytes=8)),
        Code.INVALID_ARGUMENT,
        "12 bytes are not a whole number of 8-byte ids",
    ),
    "no blocks": (pb.LookupRequest(blocks=pb.BlockKeys()), Code.INVALID_ARGUMENT, "names no layer"),
    "part of a block": (
        pb.LookupRequest(blocks=pb.BlockKeys(layers=[pb.LayerBlock(layer=1, ids=int32(1, 2), id_bytes=4)])),
        Code.INVALID_ARGUMENT,
        "2 row ids are not a whole number of blocks of 24",
    ),
    "uneven blocks": (
        pb.LookupRequest(
            blocks=pb.BlockKeys(
                layers=[
                    pb.LayerBlock(layer=1, ids=BLOCK, id_bytes=4),
                    pb.LayerBlock(layer=14, ids=BLOCK * 2, id_bytes=4),
                ]
            )
        ),
        Code.INVALID_ARGUMENT,
        "layer 14 has 2 positions, but layer 1 has 1",
    ),
    "too many rows": (
        tokens([1] * 5000),
        Code.INVALID_ARGUMENT,
        "asks for 240000 rows, over the limit of 200000",
    ),
    "other table": (
        tokens([1], pins=pb.Pins(tables=[pb.TablePin(layer=1, digest=bytes(32))])),
        Code.FAILED_PRECONDITION,
        "table of layer 1 has digest",
    ),
    "pinned table that is not here": (
        tokens([1], pins=pb.Pins(tables=[pb.TablePin(layer=2, digest=bytes(32))])),
        Code.FAILED_PRECONDITION,
        "table of layer 2",
    ),
    "other token map": (tokens([1], pins=pb.Pins(token_map=b"x")), Code.FAILED_PRECONDITION, "token map"),
    "other hash": (tokens([1], pins=pb.Pins(hash=b"x")), Code.FAILED_PRECONDITION, "the hash"),
    "unknown lane": (tokens([1], lane=7), Code.INVALID_ARGUMENT, "lane 7 is not one of"),
    "other protocol": (tokens([1], protocol_version=2), Code.FAILED_PRECONDITION, "version 2"),
}


@pytest.mark.parametrize("case", set(MALFORMED) - {"unknown format", "unknown lane"})
def test_malformed_prefetch(stub: Any, case: str) -> None:
    """The same words; nothing of it is queued."""
    request, code, sentence = MALFORMED[case]
    found, details = refusal(lambda: stub.Prefetch(request, timeout=60))
    assert found == code
    assert sentence in details
    assert stub.Prefetch(tokens([]), timeout=60).queued_rows == 0


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_request(stub: Any, truth: Truth, case: str) -> None:
    request, code, sentence = MALFORMED[case]
    found, details = refusal(lambda: stub.Lookup(request, timeout=60))
    assert found == code
    assert sentence in details
    # In a stream the same words come as the reply to that request, and the stream goes on.
    good = tokens([5])
    request.request_id, good.request_id = 7, 8
    chunks = list(stub.LookupStream(iter([request, good]), timeout=60))
    assert [chunk.request_id for chunk in chunks] == [7, 8]
    assert chunks[0].error.code == code.value[0]
    assert chunks[0].error.message == details
    assert chunks[0].last
    assert chunks[1].payload == truth.values(truth.ids([5]), "packed").tobytes()


def test_bytes_that_are_no_message(channel: grpc.Channel, stub: Any, truth: Truth) -> None:
    for method in ("Lookup", "Prefetch"):
        raw = channel.unary_unary(f"/engram.v1.Engram/{method}")
        code, details = refusal(lambda raw=raw: raw(b"\xff" * 40, timeout=60))
        assert code == Code.INVALID_ARGUMENT
        assert "not a LookupRequest" in details
    assert_exact(stub, truth)


def test_message_over_the_limit(stub: Any, truth: Truth) -> None:
    code, _ = refusal(lambda: stub.Lookup(rows(1, range(2_000_000)), timeout=60))
    assert code == Code.RESOURCE_EXHAUSTED
    assert_exact(stub, truth)


def test_unary_reply_over_the_limit_is_refused_with_advice(stub: Any) -> None:
    request = tokens([1] * 43, format=pb.FORMAT_FP32)  # 43 * 48 * 1,024 bytes are just too many
    code, details = refusal(lambda: stub.Lookup(request, timeout=60))
    assert code == Code.INVALID_ARGUMENT
    assert details == "the answer has 2113536 bytes, over the 2097152 that Lookup may send: use LookupStream"


# ----------------------------------------------------------------------------------------------- streams


def test_replies_come_in_order_in_chunks_of_whole_rows(stub: Any, truth: Truth) -> None:
    ids = [[10 * n + i for i in range(n)] for n in (30, 0, 1, 25)]
    requests = [tokens(ids[n], request_id=n, format=pb.FORMAT_FP32) for n in range(4)]
    chunks = list(stub.LookupStream(iter(requests), timeout=120))
    assert [chunk.request_id for chunk in chunks] == sorted(chunk.request_id for chunk in chunks)
    for n in range(4):
        own = [chunk for chunk in chunks if chunk.request_id == n]
        payload = b"".join(chunk.payload for chunk in own)
        assert payload == truth.values(truth.ids(ids[n]), "fp32").tobytes()
        assert [chunk.HasField("shape") for chunk in own] == [True] + [False] * (len(own) - 1)
        assert [chunk.last for chunk in own] == [False] * (len(own) - 1) + [True]
        assert own[0].shape.payload_bytes == len(payload)
        assert own[0].mask == bytes(len(ids[n]))
        assert own[-1].stats.rows == len(ids[n]) * 48
        assert all(len(chunk.payload) % 1024 == 0 for chunk in own)
        assert all(len(chunk.payload) <= LIMITS["chunk_bytes"] for chunk in own)
    # 30 * 48 rows of 1,024 bytes do not fit one chunk, and one chunk is enough for a few rows.
    assert sum(chunk.request_id == 0 for chunk in chunks) > 10
    assert sum(chunk.request_id == 2 for chunk in chunks) == 1


def test_bulk_stream_is_exact(stub: Any, truth: Truth) -> None:
    """The most rows a request may have, fetched block by block: every position that repeats must repeat."""
    tile = list(range(500, 550))
    request = tokens(tile * 82, format=pb.FORMAT_PACKED)
    payload = b"".join(chunk.payload for chunk in stub.LookupStream(iter([request]), timeout=120))
    first = truth.values(truth.ids(tile), "packed").tobytes()
    again = truth.values(truth.ids(tile, tile[-3:]), "packed").tobytes()
    assert payload == first + again * 81


def test_abandoned_streams_leave_no_trace(stub: Any, truth: Truth) -> None:
    """Cancelled at any stage, their rows leave the budget: then one that needs most of it succeeds."""
    for stage in [*range(8)] * 4:
        requests = [tokens(range(100, 2100), request_id=n) for n in range(3)]
        call = stub.LookupStream(iter(requests), timeout=120)
        for _ in range(stage):
            next(call)
        call.cancel()
    test_bulk_stream_is_exact(stub, truth)
    assert_exact(stub, truth)


def test_a_full_server_refuses_requests_until_there_is_room(stub: Any, truth: Truth) -> None:
    # Clients that do not read their replies: each holds two blocks.
    stalled = [stub.LookupStream(iter([tokens(range(100, 2100))]), timeout=120) for _ in range(16)]

    def refused(request: pb.LookupRequest) -> str:
        try:
            stub.Lookup(request, timeout=60)
        except grpc.RpcError as error:
            return str(error.details()) if error.code() == Code.RESOURCE_EXHAUSTED else ""
        return ""

    until(lambda: "budget" in refused(tokens(range(100, 180), lane=pb.LANE_PREFILL)))
    # What is left is for steps that somebody waits for.
    assert not refused(tokens([5]))
    # Two of them fit, so what these two still lack they can get.
    for call in stalled[2:]:
        call.cancel()
    until(lambda: not refused(tokens([5])))
    assert_exact(stub, truth)
    # Those that were only slow get all of their rows.
    expected = truth.values(truth.ids(range(100, 2100)), "packed").tobytes()
    served = 0
    for call in stalled[:2]:
        chunks = list(call)
        if chunks[-1].HasField("error"):  # came when the budget was full already
            assert chunks[-1].error.code == Code.RESOURCE_EXHAUSTED.value[0]
            assert len(chunks) == 1
        else:
            assert b"".join(chunk.payload for chunk in chunks) == expected
            served += 1
    assert served


def test_a_request_of_a_stream_past_its_time_fails_alone(stub: Any, truth: Truth) -> None:
    """200,000 rows are not read and sent in a millisecond."""
    late = tokens(range(100, 4200), request_id=1, timeout_ms=1)
    others = [tokens([5], request_id=2, timeout_ms=60_000), tokens([6], request_id=3)]
    replies: dict[int, list[pb.LookupChunk]] = {1: [], 2: [], 3: []}
    for chunk in stub.LookupStream(iter([late, *others]), timeout=120):
        replies[chunk.request_id].append(chunk)
    assert replies[1][-1].error.code == Code.DEADLINE_EXCEEDED.value[0]
    assert "time" in replies[1][-1].error.message
    for number, token in ((2, 5), (3, 6)):
        payload = b"".join(chunk.payload for chunk in replies[number])
        assert payload == truth.values(truth.ids([token]), "packed").tobytes()


def test_a_deadline_gives_back_what_the_request_held(stub: Any, truth: Truth) -> None:
    """Each of these could hold two blocks of a budget that has room for few: they must not pile up."""
    for _ in range(50):
        late = tokens(range(100, 4200), timeout_ms=1)
        chunks = list(stub.LookupStream(iter([late]), timeout=120))
        assert chunks[-1].error.code == Code.DEADLINE_EXCEEDED.value[0]
    test_bulk_stream_is_exact(stub, truth)


@pytest.mark.parametrize("lane", [pb.LANE_UNSPECIFIED, pb.LANE_DECODE, pb.LANE_PREFILL, pb.LANE_PREFETCH])
def test_every_lane_is_exact(stub: Any, truth: Truth, lane: pb.Lane) -> None:
    ids = range(6000, 6100)
    (chunks,) = [list(stub.LookupStream(iter([tokens(ids, lane=lane)]), timeout=60))]
    assert b"".join(chunk.payload for chunk in chunks) == truth.values(truth.ids(ids), "packed").tobytes()


def test_two_streams_at_once(server: ServerProcess, truth: Truth) -> None:
    """Each gets its own rows, whatever the other one asks for."""
    failures: list[BaseException] = []

    def ask(target: str, start: int) -> None:
        try:
            with grpc.insecure_channel(target) as channel:
                stub = pb_grpc.EngramStub(channel)
                ids = [list(range(start + 7 * n, start + 7 * n + 9)) for n in range(20)]
                chunks = stub.LookupStream(iter([tokens(i) for i in ids]), timeout=120)
                payloads = [chunk.payload for chunk in chunks]
            expected = [truth.values(truth.ids(i), "packed").tobytes() for i in ids]
            assert payloads == expected
        except BaseException as error:
            failures.append(error)

    askers = [threading.Thread(target=ask, args=(server.targets[n % 2], 1000 * n)) for n in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert not failures


# --------------------------------------------------------------------------------------- files and sockets


def test_truncated_store_fails_closed_and_shows_in_health(fp4_checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tables.engram"
    assert main(["convert", str(fp4_checkpoint), str(copy), "--verify", "none"]) == 0
    truth = Truth(fp4_checkpoint, "fp4")
    last = truth.oracle.rows(14) - 1
    with (
        serving(copy, tmp_path, scales="disk", limits=LIMITS, cache_bytes=0) as server,
        grpc.insecure_channel(server.targets[0]) as channel,
    ):
        stub = pb_grpc.EngramStub(channel)
        assert stub.Lookup(rows(14, [last]), timeout=60).payload == truth.rows(14, [last], "packed").tobytes()
        os.truncate(copy, copy.stat().st_size // 2)

        code, details = refusal(lambda: stub.Lookup(rows(14, [last]), timeout=60))
        assert code == Code.DATA_LOSS
        assert f"row {last}" in details
        assert "layer 14" in details
        # The first of several blocks fails; the rest is given up, and the stream goes on.
        requests = [rows(14, [last] * 20_000), rows(1, [3])]
        chunks = list(stub.LookupStream(iter(requests), timeout=60))
        assert chunks[0].error.code == Code.DATA_LOSS.value[0]
        assert chunks[1].payload == truth.rows(1, [3], "packed").tobytes()
        # A later one fails: what was sent before is void.
        chunks = list(stub.LookupStream(iter([rows(14, [-1] * 20_000 + [last])]), timeout=60))
        assert len(chunks) > 20
        assert chunks[-1].error.code == Code.DATA_LOSS.value[0]
        assert chunks[-1].last

        health = health_pb2_grpc.HealthStub(channel)
        check = health_pb2.HealthCheckRequest(service="engram.v1.Engram")
        until(lambda: health.Check(check).status == health_pb2.HealthCheckResponse.NOT_SERVING)


@pytest.mark.parametrize("served", ["in place", "packed, with a replica in place"])
def test_no_row_in_place_is_trusted_while_another_table_is_copied_over_it(
    fp4_checkpoint: Path, tmp_path: Path, served: str
) -> None:
    """`cp OTHER TABLE` first cuts the file, and then it holds rows of the other table."""
    copy, store = tmp_path / "checkpoint", tmp_path / "tables.engram"
    shutil.copytree(fp4_checkpoint, copy)
    (table,) = copy.glob("*00048-of*")
    packed = served != "in place"
    if packed:
        assert main(["convert", str(fp4_checkpoint), str(store), "--verify", "none"]) == 0
    replicas = (copy,) if packed else ()
    with (
        serving(store if packed else copy, tmp_path, replicas=replicas, cache_bytes=0) as server,
        grpc.insecure_channel(server.targets[0]) as channel,
    ):
        stub = pb_grpc.EngramStub(channel)
        stub.Lookup(rows(14, [5]), timeout=60)
        size = table.stat().st_size
        table.write_bytes(random.Random(1).randbytes(size - 4096))
        code, details = refusal(lambda: stub.Lookup(rows(14, [5]), timeout=60))
        assert code == Code.DATA_LOSS
        assert f"{table} had {size} bytes when it was opened and has {size - 4096} now" in details


@pytest.mark.parametrize("packed", [False, True], ids=["in place", "packed"])
def test_a_table_written_to_is_not_trusted_any_more(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth, packed: bool
) -> None:
    """In place, no row is: nothing tells a good one. In a packed store each row's checksum does."""
    if packed:
        path = table = tmp_path / "tables.engram"
        assert main(["convert", str(fp4_checkpoint), str(path), "--verify", "none"]) == 0
        layer = next(table for table in open_store(path).tables if table.layer == 14)
        offset = layer.offset + 5 // 29 * 4096 + 5 % 29 * 140
    else:
        path = tmp_path / "checkpoint"
        shutil.copytree(fp4_checkpoint, path)
        (table,) = path.glob("*00048-of*")
        offset = open_checkpoint(path).tables[1].codes.offset + 5 * 128
    with (
        serving(path, tmp_path, cache_bytes=0) as server,
        grpc.insecure_channel(server.targets[0]) as channel,
    ):
        stub = pb_grpc.EngramStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        check = health_pb2.HealthCheckRequest(service="engram.v1.Engram")
        expected = truth.rows(14, [5, 6], "packed").tobytes()
        assert stub.Lookup(rows(14, [5, 6]), timeout=60).payload == expected
        with table.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))
        code, details = refusal(lambda: stub.Lookup(rows(14, [5]), timeout=60))
        assert code == Code.DATA_LOSS
        assert ("checksum" if packed else f"{table} was written to since it was opened") in details
        if packed:
            assert (
                stub.Lookup(rows(14, [6, 4]), timeout=60).payload
                == truth.rows(14, [6, 4], "packed").tobytes()
            )
        else:
            assert refusal(lambda: stub.Lookup(rows(1, [0]), timeout=60))[0] == Code.DATA_LOSS
        until(lambda: health.Check(check).status == health_pb2.HealthCheckResponse.NOT_SERVING)


def test_a_table_replaced_by_name_goes_on_being_served(
    fp4_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(fp4_checkpoint, path)
    (table,) = path.glob("*00048-of*")
    with (
        serving(path, tmp_path, cache_bytes=0) as server,
        grpc.insecure_channel(server.targets[0]) as channel,
    ):
        stub = pb_grpc.EngramStub(channel)
        (tmp_path / "other").write_bytes(bytes(table.stat().st_size))
        (tmp_path / "other").rename(table)
        for _ in range(3):
            assert_exact(stub, truth)
            time.sleep(0.7)  # longer than between two looks at the files
        check = health_pb2.HealthCheckRequest(service="engram.v1.Engram")
        status = health_pb2_grpc.HealthStub(channel).Check(check).status
        assert status == health_pb2.HealthCheckResponse.SERVING


def failed_start(path: Path, folder: Path, **options: Any) -> str:
    with pytest.raises(AssertionError, match="did not start") as caught, serving(path, folder, **options):
        pass
    return str(caught.value)


def test_second_server_on_an_address_is_refused(
    server: ServerProcess, fp4_checkpoint: Path, tmp_path: Path, stub: Any, truth: Truth
) -> None:
    tcp, uds = server.targets
    text = failed_start(fp4_checkpoint, tmp_path, listen=tcp)
    assert f"ServeError: cannot listen on {tcp}: address already in use" in text
    path = Path(uds.removeprefix("unix:"))
    text = failed_start(fp4_checkpoint, tmp_path, listen=None, uds=path)
    assert f"another server is listening on {path}" in text
    with grpc.insecure_channel(uds) as channel:
        assert_exact(pb_grpc.EngramStub(channel), truth)
    assert_exact(stub, truth)


def test_socket_of_a_dead_server_is_replaced(fp4_checkpoint: Path, tmp_path: Path, truth: Truth) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    with (
        serving(fp4_checkpoint, tmp_path, listen=None, uds=path) as server,
        grpc.insecure_channel(server.targets[0]) as channel,
    ):
        assert_exact(pb_grpc.EngramStub(channel), truth)
        assert server.stop() == 0
        assert not path.exists()


def test_bad_addresses_are_refused(fp4_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    assert "exists and is not a socket" in failed_start(fp4_checkpoint, tmp_path, uds=file)
    assert file.read_text() == "precious"
    assert "over the 107" in failed_start(fp4_checkpoint, tmp_path, uds=tmp_path / ("x" * 108))
    assert "there is no directory" in failed_start(fp4_checkpoint, tmp_path, uds=tmp_path / "absent" / "s")
    assert "expected HOST:PORT" in failed_start(fp4_checkpoint, tmp_path, listen="50051")
    assert "nothing to listen on" in failed_start(fp4_checkpoint, tmp_path, listen=None)


def test_shutdown_answers_what_it_took(fp4_checkpoint: Path, tmp_path: Path, truth: Truth) -> None:
    """SIGTERM in the middle of a reply: the reply is finished, an idle stream is told to go elsewhere."""
    with (
        serving(fp4_checkpoint, tmp_path, limits=LIMITS) as server,
        grpc.insecure_channel(server.targets[0]) as channel,
    ):
        stub = pb_grpc.EngramStub(channel)
        hold = threading.Event()

        def requests() -> Iterator[pb.LookupRequest]:
            yield tokens(range(100, 2100))
            hold.wait(60)

        call = stub.LookupStream(requests(), timeout=120)
        payload = next(call).payload
        server.process.terminate()
        health = health_pb2_grpc.HealthStub(channel)

        def is_draining() -> bool:
            try:
                status = health.Check(health_pb2.HealthCheckRequest(), timeout=60).status
            except grpc.RpcError as error:
                return bool(error.code() == Code.UNAVAILABLE)
            return bool(status == health_pb2.HealthCheckResponse.NOT_SERVING)

        until(is_draining)
        try:
            for chunk in call:
                payload += chunk.payload
        except grpc.RpcError:
            pass
        hold.set()
        assert payload == truth.values(truth.ids(range(100, 2100)), "packed").tobytes()
        assert (call.code(), call.details()) == (Code.UNAVAILABLE, "the server is shutting down")
        assert server.wait() == 0
