"""Payloads spliced into messages, and out of them, against what protobuf makes of the same bytes."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from engram_client._payload import CHUNKS, REPLIES, Chunk, Reply
from engram_client._proto import engram_pb2 as pb

SIZES = (0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152)
"""Where the length takes another byte."""


def whole(data: bytes) -> pb.LookupChunk | None:
    """What protobuf parses; None: it refuses."""
    try:
        return pb.LookupChunk.FromString(data)
    except DecodeError:
        return None


def put_together(chunk: Chunk) -> pb.LookupChunk:
    message = pb.LookupChunk()
    message.CopyFrom(chunk.message)
    message.payload = bytes(chunk.payload)
    return message


@st.composite
def chunks(draw: st.DrawFn) -> pb.LookupChunk:
    message = pb.LookupChunk(
        request_id=draw(st.integers(0, 2**64 - 1)),
        mask=draw(st.binary(max_size=200)),
        payload=draw(st.binary(max_size=300)),
        last=draw(st.booleans()),
    )
    if draw(st.booleans()):
        message.shape.layers.extend(draw(st.lists(st.integers(0, 2**32 - 1), max_size=3)))
    if draw(st.booleans()):
        message.stats.read_bytes = draw(st.integers(0, 2**64 - 1))
    if draw(st.booleans()):
        message.error.message = draw(st.text(max_size=200))
    return message


@given(chunks())
def test_what_is_spliced_is_what_protobuf_writes_and_reads(message: pb.LookupChunk) -> None:
    assert put_together(CHUNKS.parse(message.SerializeToString())) == message
    head, payload = pb.LookupChunk(), message.payload
    head.CopyFrom(message)
    head.ClearField("payload")
    data = CHUNKS.serialize(Chunk(head, payload))
    assert whole(data) == message
    assert put_together(CHUNKS.parse(data)) == message


@pytest.mark.parametrize("size", SIZES)
def test_a_payload_of_any_length(size: int) -> None:
    payload = bytes(i % 251 for i in range(min(size, 1000))) * (size // 1000 + 1)
    payload = payload[:size]
    data = CHUNKS.serialize(Chunk(pb.LookupChunk(request_id=7, last=True), memoryview(payload)))
    assert whole(data) == pb.LookupChunk(request_id=7, last=True, payload=payload)
    assert CHUNKS.parse(data).payload == payload
    reply = REPLIES.serialize(Reply(pb.LookupReply(request_id=7), payload))
    assert pb.LookupReply.FromString(reply) == pb.LookupReply(request_id=7, payload=payload)
    assert REPLIES.parse(reply).payload == payload


def test_a_large_payload_is_not_copied() -> None:
    data = CHUNKS.serialize(Chunk(pb.LookupChunk(request_id=7), bytes(100_000)))
    payload = CHUNKS.parse(data).payload
    assert isinstance(payload, memoryview)
    assert payload.obj is data


@given(chunks(), st.data())
def test_damaged_bytes_are_read_as_protobuf_reads_them(message: pb.LookupChunk, draw: st.DataObject) -> None:
    data = bytearray(CHUNKS.serialize(Chunk(message, draw.draw(st.binary(max_size=100)))))
    for _ in range(draw.draw(st.integers(1, 3))):
        if data:
            data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    cut = bytes(data[: draw.draw(st.integers(0, len(data)))])
    expected = whole(cut)
    if expected is None:
        with pytest.raises(DecodeError):
            CHUNKS.parse(cut)
    else:
        assert put_together(CHUNKS.parse(cut)) == expected


ODD = {
    "no field": b"",
    "two payloads": b"\x22\x03abc\x22\x02de",
    "an empty one after another": b"\x22\x03abc\x22\x00",
    "an unknown field beyond 15": b"\x22\x03abc\x82\x01\x02xy",
    "an unknown fixed64": b"\x71" + bytes(8) + b"\x22\x03abc",
    "an unknown fixed32": b"\x22\x03abc\x75" + bytes(4),
    "an unknown group": b"\x73\x22\x03abc\x74",
    "a length in more bytes than it takes": b"\x22\x83\x80\x00abc",
    "a length of ten bytes": b"\x22\x83" + b"\x80" * 8 + b"\x00abc",
    "payload as a number": b"\x20\x03",
    "a length past the end": b"\x22\x7fabc",
    "a length past any end": b"\x22\xff\xff\xff\xff\x0fabc",
    "field number 0": b"\x02\x01a\x22\x03abc",
    "a tag alone": b"\x22",
    "half a length": b"\x22\x80",
}


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
def test_what_no_server_of_ours_writes_is_read_as_protobuf_reads_it(data: bytes) -> None:
    expected = whole(data)
    if expected is None:
        with pytest.raises(DecodeError):
            CHUNKS.parse(data)
    else:
        seen = put_together(CHUNKS.parse(data))
        assert seen == expected
