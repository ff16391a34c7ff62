"""A server that answers wrongly: the client believes nothing that does not add up."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from engram_client import EngramClient, InvalidRequestError, Limits, MismatchError, ProtocolError
from engram_client._proto import engram_pb2 as pb
from engram_client._proto import engram_pb2_grpc as pb_grpc

TOKENS = [3, 4]
ROW = 512
PAYLOAD = bytes(range(256)) * (2 * 2 * 24 * ROW // 256)


def description() -> pb.DescribeReply:
    tables = [pb.TableInfo(layer=n, rows=9, kind=pb.ROW_KIND_FP4, row_bytes=136) for n in (1, 14)]
    limits = pb.Limits(message_bytes=1 << 20, unary_reply_bytes=1 << 20, request_rows=1000)
    spec = pb.ModelSpec(layers=[1, 14], columns=24, head_dim=256, heads=8)
    return pb.DescribeReply(protocol_version=1, server_id="x", spec=spec, tables=tables, limits=limits)


def honest_chunks(request_id: int) -> list[pb.LookupChunk]:
    shape = pb.ReplyShape(
        tokens=2,
        layers=[1, 14],
        columns=24,
        row_bytes=ROW,
        format=pb.FORMAT_BF16,
        payload_bytes=len(PAYLOAD),
    )
    half = ROW * 48
    return [
        pb.LookupChunk(request_id=request_id, shape=shape, mask=bytes([0, 1]), payload=PAYLOAD[:half]),
        pb.LookupChunk(
            request_id=request_id, payload=PAYLOAD[half:], last=True, stats=pb.LookupStats(rows=96)
        ),
    ]


class Liar(pb_grpc.EngramServicer):
    """Says what it was told to say."""

    def __init__(self) -> None:
        self.about = description()
        self.bend: Callable[[list[pb.LookupChunk]], object] = lambda chunks: None

    def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:  # noqa: N802
        return self.about

    def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupReply:  # noqa: N802
        first, last = honest_chunks(request.request_id)
        bent = [first]
        first.payload += last.payload
        self.bend(bent)
        return pb.LookupReply(
            request_id=first.request_id,
            shape=first.shape if first.HasField("shape") else None,
            payload=first.payload,
            mask=first.mask,
            stats=last.stats,
        )

    def LookupStream(self, requests: Any, context: Any) -> Iterator[pb.LookupChunk]:  # noqa: N802
        for request in requests:
            chunks = honest_chunks(request.request_id)
            self.bend(chunks)
            yield from copy.deepcopy(chunks)


@pytest.fixture(scope="module")
def liar() -> Iterator[tuple[Liar, str]]:
    servicer = Liar()
    server = grpc.server(ThreadPoolExecutor(8))
    pb_grpc.add_EngramServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None)


def edit(index: int, **fields: Any) -> Callable[[list[pb.LookupChunk]], None]:
    def change(chunks: list[pb.LookupChunk]) -> None:
        for name, value in fields.items():
            setattr(chunks[index], name, value)

    return change


def edit_shape(**fields: Any) -> Callable[[list[pb.LookupChunk]], None]:
    def change(chunks: list[pb.LookupChunk]) -> None:
        chunks[0].shape.MergeFrom(pb.ReplyShape(**fields))

    return change


FIRST_CHUNK_LIES: dict[str, Callable[[list[pb.LookupChunk]], object]] = {
    "another request": edit(0, request_id=99),
    "no shape": lambda chunks: chunks[0].ClearField("shape"),
    "other tokens": edit_shape(tokens=3),
    "other columns": edit_shape(columns=23),
    "another row size": edit_shape(row_bytes=136),
    "another format": edit_shape(format=pb.FORMAT_FP32),
    "more layers": edit_shape(layers=[3]),
    "other layers": lambda chunks: chunks[0].shape.layers.reverse(),
    "unique rows that were not asked for": edit_shape(unique_rows=[1, 1]),
    "another length": edit_shape(payload_bytes=len(PAYLOAD) + ROW),
    "a short mask": edit(0, mask=b"\0"),
    "no mask": edit(0, mask=b""),
    "too many bytes": lambda chunks: edit(0, payload=PAYLOAD + b"\0")(chunks),
}
STREAM_LIES: dict[str, Callable[[list[pb.LookupChunk]], object]] = {
    **FIRST_CHUNK_LIES,
    "another request halfway": edit(1, request_id=99),
    "a second shape": lambda chunks: chunks[1].shape.CopyFrom(chunks[0].shape),
    "too few bytes": edit(1, payload=PAYLOAD[: ROW * 47]),
    "last too early": edit(0, last=True),
    "no end": lambda chunks: chunks.pop(),
    "chunks in the wrong order": lambda chunks: chunks.reverse(),
}


@pytest.mark.parametrize("lie", FIRST_CHUNK_LIES)
def test_unary_lies(liar: tuple[Liar, str], lie: str) -> None:
    servicer, target = liar
    servicer.bend = FIRST_CHUNK_LIES[lie]
    with EngramClient(target) as client, pytest.raises(ProtocolError):
        client.lookup(TOKENS)


@pytest.mark.parametrize("lie", STREAM_LIES)
def test_stream_lies(liar: tuple[Liar, str], lie: str) -> None:
    servicer, target = liar
    servicer.bend = STREAM_LIES[lie]
    # So small a client takes no large message, and asks for a stream.
    with EngramClient(target, limits=Limits(message_bytes=(1 << 20) + 100)) as client:
        with pytest.raises(ProtocolError):
            client.lookup(TOKENS)
        servicer.bend = lambda chunks: None
        assert client.lookup(TOKENS).values.tobytes() == PAYLOAD


@pytest.mark.parametrize("lie", sorted(STREAM_LIES.keys() - {"no end"}))
def test_lies_on_a_long_stream(liar: tuple[Liar, str], lie: str) -> None:
    servicer, target = liar
    servicer.bend = STREAM_LIES[lie]
    with EngramClient(target) as client, client.stream() as stream:
        with pytest.raises(ProtocolError):
            stream.lookup(TOKENS).result()
        # It starts over, on a new stream.
        servicer.bend = lambda chunks: None
        assert stream.lookup(TOKENS).result().values.tobytes() == PAYLOAD


def test_truth_is_believed(liar: tuple[Liar, str]) -> None:
    servicer, target = liar
    servicer.bend = lambda chunks: None
    with EngramClient(target) as client:
        found = client.lookup(TOKENS)
        assert found.values.shape == (2, 2, 24, 256)
        assert found.values.tobytes() == PAYLOAD
        assert found.mask is not None
        assert found.mask.tolist() == [False, True]
        assert found.stats.rows == 96


def test_inverse_that_points_nowhere(liar: tuple[Liar, str]) -> None:
    servicer, target = liar

    def bend(chunks: list[pb.LookupChunk], last: int) -> None:
        rows = [np.zeros(3 * ROW, np.uint8).tobytes(), np.zeros(1 * ROW, np.uint8).tobytes()]
        inverse = np.zeros(2 * 2 * 24, "<i4")
        inverse[0] = 2
        inverse[-1] = last
        chunks[0].payload = b"".join([*rows, inverse.tobytes()])
        chunks[0].shape.unique_rows.extend([3, 1])
        chunks[0].shape.payload_bytes = len(chunks[0].payload)

    with EngramClient(target) as client:
        for last in (0, -1):
            servicer.bend = partial(bend, last=last)
            assert client.lookup(TOKENS, unique=True).values.shape == (2, 2, 24, 256)
        for last in (1, -2):
            servicer.bend = partial(bend, last=last)
            with pytest.raises(ProtocolError, match="inverse of layer 14 points outside its 1 rows"):
                client.lookup(TOKENS, unique=True)


def test_another_version_is_refused(liar: tuple[Liar, str]) -> None:
    servicer, target = liar
    servicer.about = description()
    servicer.about.protocol_version = 2
    try:
        with (
            EngramClient(target) as client,
            pytest.raises(MismatchError, match=r"version 2 of engram\.proto"),
        ):
            client.lookup(TOKENS)
    finally:
        servicer.about = description()


def test_limits_of_the_client(liar: tuple[Liar, str]) -> None:
    _, target = liar
    with EngramClient(target) as usual, EngramClient(target, limits=Limits(result_bytes=1000)) as modest:
        with pytest.raises(InvalidRequestError, match=r"24576 bytes, over Limits\.result_bytes \(1000\)"):
            modest.lookup([1])
        with pytest.raises(InvalidRequestError, match=r"over the 1048576 a message may have"):
            usual.lookup_rows(1, np.zeros(300_000, np.int32))
